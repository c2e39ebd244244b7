// The Python class iovec and the functions that create, open, wrap and import iovecs in host and device memory.
#include "hf3fs_iovec.hpp"

#include "common/gil.hpp"
#include "hf3fs_errors.hpp"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace gdrkit::usrbio {

using namespace nb::literals;

IovecMemory::~IovecMemory() {
    if (is_open_) {
        // No operation can use the memory, because a ring holds references to the iovecs of its operations.
        nb::error_scope saved_error; // The Python error that is being handled, if any, is restored at the end.
        try {
            call_before_close();
        } catch (nb::python_error& error) {
            error.discard_as_unraisable("the deletion of an open iovec");
        }
        release();
    }
    release_buffer();
}

const Py_buffer& IovecMemory::acquire_buffer() {
    if (PyObject_GetBuffer(owner_.ptr(), &buffer_, PyBUF_SIMPLE | PyBUF_WRITABLE) != 0) {
        throw nb::python_error();
    }
    has_buffer_ = true;
    return buffer_;
}

void IovecMemory::release_buffer() noexcept {
    if (std::exchange(has_buffer_, false)) {
        PyBuffer_Release(&buffer_);
    }
}

void IovecMemory::begin_use(Use use) {
    check_open();
    const bool is_first_use = operation_count_ + buffer_count_ == 0;
    if (is_first_use && kind_ == Kind::wrapped_buffer) {
        const Py_buffer& buffer = acquire_buffer();
        if (buffer.buf != iov_.base || static_cast<std::size_t>(buffer.len) != iov_.size) {
            release_buffer();
            raise_misuse_error("the wrapped buffer has moved or has another size: wrap it again", "closed");
        }
    }
    ++(use == Use::operation ? operation_count_ : buffer_count_);
}

void IovecMemory::end_use(Use use) noexcept {
    --(use == Use::operation ? operation_count_ : buffer_count_);
    if (operation_count_ + buffer_count_ == 0) {
        release_buffer();
    }
}

void IovecMemory::check_open() const {
    if (!is_open_) {
        raise_misuse_error("the iovec is closed", "closed");
    }
}

void IovecMemory::close() {
    if (!is_open_) {
        return;
    }
    if (operation_count_ != 0) {
        raise_misuse_error("the iovec has outstanding operations: wait for their completions first", "busy");
    }
    if (buffer_count_ != 0) {
        raise_misuse_error("the memory of the iovec is still in use (by a memoryview or an array): release it first",
                           "busy");
    }
    call_before_close();
    before_close.reset();
    release();
    owner_.reset();
}

void IovecMemory::call_before_close() {
    if (const nb::object function = before_close; function.is_valid() && !function.is_none()) {
        if (!nb::steal(call_python(function.ptr())).is_valid()) {
            throw nb::python_error();
        }
    }
}

void IovecMemory::release() {
    is_open_ = false;
    // In a library without hf3fs_iovdestroy_gpu, hf3fs_iovdestroy also destroys iovs in device memory.
    auto destroy = functions().hf3fs_iovdestroy;
    if (is_device() && functions().hf3fs_iovdestroy_gpu != nullptr) {
        destroy = functions().hf3fs_iovdestroy_gpu;
    }
    if (destroy != nullptr) {
        const GilRelease release; // The call below waits for the agent.
        destroy(&iov_);
    }
}

int IovecMemory::traverse(visitproc visit, void* arg) const noexcept {
    Py_VISIT(owner_.ptr());
    Py_VISIT(before_close.ptr());
    return 0;
}

Iovec Iovec::slice(std::size_t begin_offset, std::size_t slice_bytes) const {
    Iovec slice;
    slice.memory = memory;
    slice.offset = offset + begin_offset;
    slice.length = slice_bytes;
    slice.is_slice = true;
    return slice;
}

Uuid parse_uuid(const std::string& text) {
    Uuid uuid{};
    std::size_t digit_count = 0;
    for (std::size_t index = 0; index < text.size(); ++index) {
        const char character = text[index];
        const bool may_be_hyphen = index == 8 || index == 13 || index == 18 || index == 23;
        if (character == '-' && text.size() == 36 && may_be_hyphen) {
            continue;
        }
        const int digit_value = character >= '0' && character <= '9'   ? character - '0'
                                : character >= 'a' && character <= 'f' ? character - 'a' + 10
                                : character >= 'A' && character <= 'F' ? character - 'A' + 10
                                                                       : -1;
        if (digit_value < 0 || digit_count == 32) {
            raise_misuse_error("id must be a UUID: 32 hexadecimal digits, with or without hyphens", "malformed");
        }
        uuid.bytes[digit_count / 2] = static_cast<std::uint8_t>(uuid.bytes[digit_count / 2] << 4 | digit_value);
        ++digit_count;
    }
    if (digit_count != 32) {
        raise_misuse_error("id must be a UUID: 32 hexadecimal digits, with or without hyphens", "malformed");
    }
    return uuid;
}

namespace {

std::string format_uuid(const char id[16]) {
    static constexpr char digits[] = "0123456789abcdef";
    std::string text;
    for (int index = 0; index < 16; ++index) {
        if (index == 4 || index == 6 || index == 8 || index == 10) {
            text += '-';
        }
        text += digits[static_cast<std::uint8_t>(id[index]) >> 4];
        text += digits[static_cast<std::uint8_t>(id[index]) & 15];
    }
    return text;
}

nb::dict make_error_arguments(const std::string& mount, std::size_t size, std::size_t block_size) {
    nb::dict error_arguments;
    error_arguments["hf3fs_mount_point"] = mount;
    error_arguments["length_bytes"] = size;
    error_arguments["block_size_bytes"] = block_size;
    return error_arguments;
}

// Calls `fill_iov(memory->iov())`, in which the library's function `function_name` fills in the iov. Returns an iovec
// of that memory. The call runs without the GIL, because the library waits for the agent. A raised error contains
// `error_arguments`.
template <typename FillIov>
Iovec make_iovec(const char* function_name, std::shared_ptr<IovecMemory> memory, nb::dict error_arguments,
                 FillIov&& fill_iov) {
    int status = 0;
    {
        const GilRelease release;
        status = fill_iov(memory->iov());
    }
    if (status < 0) {
        raise_call_error(function_name, -status, error_arguments);
    }
    memory->mark_open();
    Iovec iovec;
    iovec.length = memory->iov().size;
    iovec.memory = std::move(memory);
    return iovec;
}

Iovec wrap_iovec(nb::object base, const std::string& id, const std::string& mount, std::size_t block_size, int numa) {
    auto library_function = GDRKIT_REQUIRE(hf3fs_iovwrap);
    const Uuid uuid = parse_uuid(id);
    auto memory = std::make_shared<IovecMemory>(IovecMemory::Kind::wrapped_buffer, std::move(base));
    const Py_buffer& buffer = memory->acquire_buffer();
    const auto size = static_cast<std::size_t>(buffer.len);
    Iovec iovec = make_iovec("hf3fs_iovwrap", memory, make_error_arguments(mount, size, block_size), [&](Iov& iov) {
        return library_function(&iov, buffer.buf, uuid.bytes, mount.c_str(), size, block_size, numa);
    });
    memory->release_buffer();
    return iovec;
}

Iovec create_iovec(const std::string& mount, std::size_t size, std::size_t block_size, int numa) {
    auto library_function = GDRKIT_REQUIRE(hf3fs_iovcreate);
    auto memory = std::make_shared<IovecMemory>(IovecMemory::Kind::host, nb::none());
    return make_iovec("hf3fs_iovcreate", memory, make_error_arguments(mount, size, block_size),
                      [&](Iov& iov) { return library_function(&iov, mount.c_str(), size, block_size, numa); });
}

Iovec open_iovec(const std::string& id, const std::string& mount, std::size_t size, std::size_t block_size, int numa) {
    auto library_function = GDRKIT_REQUIRE(hf3fs_iovopen);
    const Uuid uuid = parse_uuid(id);
    auto memory = std::make_shared<IovecMemory>(IovecMemory::Kind::host, nb::none());
    return make_iovec("hf3fs_iovopen", memory, make_error_arguments(mount, size, block_size), [&](Iov& iov) {
        return library_function(&iov, uuid.bytes, mount.c_str(), size, block_size, numa);
    });
}

// Evaluates to `gpu_function` of the first generation of the GPU interface if the library has it, otherwise to
// `device_function` of the third generation. Raises a Python error if the library has neither.
// GDRKIT_NAME_OF_EITHER evaluates to the name of the chosen function.
#define GDRKIT_REQUIRE_EITHER(gpu_function, device_function)                                                           \
    (functions().device_function != nullptr && functions().gpu_function == nullptr ? functions().device_function       \
                                                                                   : GDRKIT_REQUIRE(gpu_function))
#define GDRKIT_NAME_OF_EITHER(gpu_function, device_function)                                                           \
    (functions().gpu_function != nullptr ? #gpu_function : #device_function)

Iovec create_gpu_iovec(const std::string& mount, std::size_t size, std::size_t block_size, int device) {
    auto library_function = GDRKIT_REQUIRE_EITHER(hf3fs_iovcreate_gpu, hf3fs_iovcreate_device);
    auto memory = std::make_shared<IovecMemory>(IovecMemory::Kind::device, nb::none());
    return make_iovec(GDRKIT_NAME_OF_EITHER(hf3fs_iovcreate_gpu, hf3fs_iovcreate_device), memory,
                      make_error_arguments(mount, size, block_size),
                      [&](Iov& iov) { return library_function(&iov, mount.c_str(), size, block_size, device); });
}

Iovec wrap_gpu_iovec(std::uintptr_t address, std::size_t size, const std::string& id, const std::string& mount,
                     std::size_t block_size, int device, nb::object owner) {
    auto library_function = GDRKIT_REQUIRE_EITHER(hf3fs_iovwrap_gpu, hf3fs_iovwrap_device);
    const Uuid uuid = parse_uuid(id);
    auto memory = std::make_shared<IovecMemory>(IovecMemory::Kind::device, std::move(owner));
    return make_iovec(GDRKIT_NAME_OF_EITHER(hf3fs_iovwrap_gpu, hf3fs_iovwrap_device), memory,
                      make_error_arguments(mount, size, block_size), [&](Iov& iov) {
                          return library_function(&iov, reinterpret_cast<void*>(address), uuid.bytes, mount.c_str(),
                                                  size, block_size, device);
                      });
}

Iovec open_gpu_iovec(const std::string& id, const std::string& mount, std::size_t size, std::size_t block_size,
                     int device) {
    auto library_function = GDRKIT_REQUIRE_EITHER(hf3fs_iovopen_gpu, hf3fs_iovopen_device);
    const Uuid uuid = parse_uuid(id);
    auto memory = std::make_shared<IovecMemory>(IovecMemory::Kind::device, nb::none());
    return make_iovec(GDRKIT_NAME_OF_EITHER(hf3fs_iovopen_gpu, hf3fs_iovopen_device), memory,
                      make_error_arguments(mount, size, block_size), [&](Iov& iov) {
                          return library_function(&iov, uuid.bytes, mount.c_str(), size, block_size, device);
                      });
}

Iovec import_gpu_iovec(nb::bytes handle, const std::string& mount) {
    auto library_function = GDRKIT_REQUIRE(hf3fs_iov_import_gpu);
    GpuHandle gpu_handle{};
    if (handle.size() != sizeof(gpu_handle.data)) {
        raise_misuse_error("handle must have the 80 bytes of a handle of device memory", "malformed");
    }
    std::memcpy(gpu_handle.data, handle.c_str(), sizeof(gpu_handle.data));
    auto memory = std::make_shared<IovecMemory>(IovecMemory::Kind::device, nb::none());
    return make_iovec("hf3fs_iov_import_gpu", memory, make_error_arguments(mount, 0, 0),
                      [&](Iov& iov) { return library_function(&iov, &gpu_handle, mount.c_str()); });
}

nb::bytes export_gpu(const Iovec& self) {
    self.memory->check_open();
    auto library_function = GDRKIT_REQUIRE(hf3fs_iov_export_gpu);
    GpuHandle handle{};
    const int status = library_function(&self.memory->iov(), &handle);
    if (status < 0) {
        raise_call_error("hf3fs_iov_export_gpu", -status);
    }
    return nb::bytes(reinterpret_cast<const char*>(handle.data), sizeof(handle.data));
}

// Pass `direction` 0 before the NIC reads what the GPU has written, 1 after the NIC has written what the GPU will read.
void synchronize(const Iovec& self, int direction) {
    self.memory->check_open();
    auto library_function = GDRKIT_REQUIRE_EITHER(hf3fs_iovsync_gpu, hf3fs_iovsync);
    int status = 0;
    {
        const GilRelease release;
        status = library_function(&self.memory->iov(), direction);
    }
    if (status < 0) {
        nb::dict error_arguments;
        error_arguments["direction"] = direction;
        raise_call_error(GDRKIT_NAME_OF_EITHER(hf3fs_iovsync_gpu, hf3fs_iovsync), -status, error_arguments);
    }
}

// Returns the number of the CUDA device of the memory, or -1 for host memory.
int device_number(const Iovec& self) {
    self.memory->check_open();
    if (!self.memory->is_device()) {
        return -1;
    }
    return GDRKIT_REQUIRE_EITHER(hf3fs_iov_gpu_device, hf3fs_iov_device_id)(&self.memory->iov());
}

Iovec slice(const Iovec& self, nb::slice range) {
    self.memory->check_open();
    Py_ssize_t start = 0;
    Py_ssize_t stop = 0;
    Py_ssize_t step = 0;
    if (PySlice_Unpack(range.ptr(), &start, &stop, &step) != 0) {
        throw nb::python_error();
    }
    const Py_ssize_t length = PySlice_AdjustIndices(static_cast<Py_ssize_t>(self.length), &start, &stop, step);
    if (step != 1) {
        throw nb::value_error("the step of a slice of an iovec must be 1");
    }
    return self.slice(static_cast<std::size_t>(start), static_cast<std::size_t>(length));
}

// Returns the slice whose memory is the memory of `buffer_object`, such as a memoryview of a part of the iovec.
Iovec slice_by(const Iovec& self, nb::handle buffer_object) {
    self.memory->check_open();
    Py_buffer view;
    if (PyObject_GetBuffer(buffer_object.ptr(), &view, PyBUF_SIMPLE | PyBUF_WRITABLE) != 0) {
        throw nb::python_error();
    }
    const auto buffer_begin = reinterpret_cast<std::uintptr_t>(view.buf);
    const auto buffer_bytes = static_cast<std::size_t>(view.len);
    PyBuffer_Release(&view);
    const auto iovec_begin = reinterpret_cast<std::uintptr_t>(self.begin());
    if (self.memory->is_device() || buffer_begin < iovec_begin || buffer_bytes > self.length ||
        buffer_begin - iovec_begin > self.length - buffer_bytes) {
        throw nb::index_error("buf must be inside the memory of the iovec");
    }
    return self.slice(buffer_begin - iovec_begin, buffer_bytes);
}

void close(const Iovec& self) {
    if (self.is_slice) {
        raise_misuse_error("a slice cannot be closed: close the iovec that was sliced", "bad_argument");
    }
    self.memory->close();
}

int get_buffer(PyObject* object, Py_buffer* view, int flags) noexcept {
    view->obj = nullptr;
    const Iovec& self = *nb::inst_ptr<Iovec>(object);
    if (!self.memory || !self.memory->is_open() || self.memory->is_device()) {
        const char* message = self.memory && self.memory->is_device()
                                  ? "device memory has no buffer: copy it with the functions of its device"
                                  : "the iovec is closed";
        PyErr_SetString(PyExc_BufferError, message);
        return -1;
    }
    try {
        self.memory->begin_use(IovecMemory::Use::buffer);
    } catch (nb::python_error& error) {
        error.restore();
        nb::chain_error(PyExc_BufferError, "the wrapped buffer was released, or has moved");
        return -1;
    }
    if (PyBuffer_FillInfo(view, object, self.begin(), static_cast<Py_ssize_t>(self.length), 0, flags) != 0) {
        self.memory->end_use(IovecMemory::Use::buffer);
        return -1;
    }
    return 0;
}

void release_buffer(PyObject* object, Py_buffer*) noexcept {
    nb::inst_ptr<Iovec>(object)->memory->end_use(IovecMemory::Use::buffer);
}

int traverse(PyObject* self, visitproc visit, void* arg) noexcept {
    Py_VISIT(Py_TYPE(self));
    if (!nb::inst_ready(self)) {
        return 0;
    }
    const Iovec& iovec = *nb::inst_ptr<Iovec>(self);
    Py_VISIT(iovec.userdata.ptr());
    // An iovec and its slices share one IovecMemory, and the garbage collector expects to see each of its references
    // once. So an iovec reports these references only if no other iovec shares the memory.
    return iovec.memory && iovec.memory.use_count() == 1 ? iovec.memory->traverse(visit, arg) : 0;
}

int clear(PyObject* self) noexcept {
    nb::inst_ptr<Iovec>(self)->userdata = nb::none();
    return 0;
}

PyType_Slot iovec_type_slots[] = {
    {Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
    {Py_bf_releasebuffer, reinterpret_cast<void*>(release_buffer)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {0, nullptr},
};

} // namespace

void bind_iovec(nb::module_& module) {
    nb::class_<Iovec>(module, "iovec", nb::type_slots(iovec_type_slots))
        .def(
            "__init__",
            [](Iovec* self, nb::object base, const std::string& id, const std::string& mount, std::size_t block_size,
               int numa) { new (self) Iovec(wrap_iovec(std::move(base), id, mount, block_size, numa)); },
            "base"_a, "id"_a, "hf3fs_mount_point"_a, "block_size"_a = 0, "numa"_a = -1)
        .def("__getitem__", &slice)
        .def("__len__", [](const Iovec& self) { return self.length; })
        .def("slice_by", &slice_by, "buf"_a)
        .def_ro("result", &Iovec::result)
        .def_ro("base_off", &Iovec::offset)
        .def_ro("userdata", &Iovec::userdata)
        .def_ro("is_slice", &Iovec::is_slice)
        .def_prop_ro("address",
                     [](const Iovec& self) {
                         self.memory->check_open();
                         return reinterpret_cast<std::uintptr_t>(self.begin());
                     })
        .def_prop_ro("id", [](const Iovec& self) { return format_uuid(self.memory->iov().id); })
        .def_prop_ro("block_size", [](const Iovec& self) { return self.memory->iov().block_size; })
        .def_prop_ro("is_gpu", [](const Iovec& self) { return self.memory->is_device(); })
        .def_prop_ro("gpu_device", &device_number)
        .def_prop_ro("closed", [](const Iovec& self) { return !self.memory->is_open(); })
        .def_prop_ro("outstanding", [](const Iovec& self) { return self.memory->operation_count(); })
        .def("export_gpu", &export_gpu)
        .def("sync_gpu", &synchronize, "direction"_a)
        .def("before_close", [](Iovec& self, nb::object action) { self.memory->before_close = std::move(action); })
        .def("close", &close)
        .def("__enter__", [](nb::object self) { return self; })
        .def(
            "__exit__", [](const Iovec& self, nb::handle, nb::handle, nb::handle) { close(self); }, "kind"_a.none(),
            "error"_a.none(), "trace"_a.none());
    module.def("create_iovec", &create_iovec, "hf3fs_mount_point"_a, "length_bytes"_a, "block_size"_a, "numa"_a);
    module.def("open_iovec", &open_iovec, "id"_a, "hf3fs_mount_point"_a, "length_bytes"_a, "block_size"_a, "numa"_a);
    module.def("create_gpu_iovec", &create_gpu_iovec, "hf3fs_mount_point"_a, "length_bytes"_a, "block_size"_a,
               "device"_a);
    module.def("wrap_gpu_iovec", &wrap_gpu_iovec, "address"_a, "length_bytes"_a, "id"_a, "hf3fs_mount_point"_a,
               "block_size"_a, "device"_a, "owner"_a);
    module.def("open_gpu_iovec", &open_gpu_iovec, "id"_a, "hf3fs_mount_point"_a, "length_bytes"_a, "block_size"_a,
               "device"_a);
    module.def("import_gpu_iovec", &import_gpu_iovec, "handle"_a, "hf3fs_mount_point"_a);
}

} // namespace gdrkit::usrbio
