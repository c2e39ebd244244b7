#include "hf3fs_iovec.hpp"

#include "hf3fs_errors.hpp"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cerrno>
#include <cstring>

namespace gdrkit::usrbio {

using namespace nb::literals;

Memory::~Memory() {
    if (open_) {
        // Nobody can have an operation on it: a ring keeps what it uses.
        nb::error_scope keep;
        try {
            if (before_close.is_valid() && !before_close.is_none()) {
                before_close();
            }
        } catch (nb::python_error& error) {
            error.discard_as_unraisable("closing an iovec that was forgotten");
        }
        release();
    }
    if (has_buffer_) {
        PyBuffer_Release(&buffer_);
    }
}

void Memory::hold_buffer(nb::handle base) {
    if (PyObject_GetBuffer(base.ptr(), &buffer_, PyBUF_SIMPLE | PyBUF_WRITABLE) != 0) {
        throw nb::python_error();
    }
    has_buffer_ = true;
}

void Memory::check_open() const {
    if (!open_) {
        raise_refused("the iovec is closed", "closed");
    }
}

void Memory::close() {
    if (!open_) {
        return;
    }
    if (outstanding != 0) {
        raise_refused("the iovec has operations outstanding: wait for them first", "busy");
    }
    if (exported != 0) {
        raise_refused("something still uses the memory of the iovec (a memoryview, an array): release it first",
                      "busy");
    }
    if (before_close.is_valid() && !before_close.is_none()) {
        nb::object action = before_close;
        action();
        before_close.reset();
    }
    release();
    if (has_buffer_) {
        has_buffer_ = false;
        PyBuffer_Release(&buffer_);
    }
    owner_.reset();
}

void Memory::release() {
    open_ = false;
    // A library of the third generation tells device memory by itself.
    auto destroy = functions().hf3fs_iovdestroy;
    if (is_device() && functions().hf3fs_iovdestroy_gpu != nullptr) {
        destroy = functions().hf3fs_iovdestroy_gpu;
    }
    if (destroy != nullptr) {
        nb::gil_scoped_release unlocked; // It talks with the agent.
        destroy(&raw_);
    }
}

int Memory::traverse(visitproc visit, void* arg) const noexcept {
    Py_VISIT(owner_.ptr());
    Py_VISIT(before_close.ptr());
    return 0;
}

Iovec Iovec::slice(std::size_t from, std::size_t bytes) const {
    Iovec part;
    part.memory = memory;
    part.offset = offset + from;
    part.length = bytes;
    part.is_slice = true;
    return part;
}

Identity parse_identity(const std::string& text) {
    Identity identity{};
    std::size_t digits = 0;
    for (std::size_t at = 0; at < text.size(); ++at) {
        const char letter = text[at];
        const bool may_be_hyphen = at == 8 || at == 13 || at == 18 || at == 23;
        if (letter == '-' && text.size() == 36 && may_be_hyphen) {
            continue;
        }
        const int value = letter >= '0' && letter <= '9'   ? letter - '0'
                          : letter >= 'a' && letter <= 'f' ? letter - 'a' + 10
                          : letter >= 'A' && letter <= 'F' ? letter - 'A' + 10
                                                           : -1;
        if (value < 0 || digits == 32) {
            raise_refused("the id is not a UUID", "malformed");
        }
        identity.bytes[digits / 2] = static_cast<std::uint8_t>(identity.bytes[digits / 2] << 4 | value);
        ++digits;
    }
    if (digits != 32) {
        raise_refused("the id is not a UUID", "malformed");
    }
    return identity;
}

namespace {

std::string written(const char id[16]) {
    static constexpr char digits[] = "0123456789abcdef";
    std::string text;
    for (int at = 0; at < 16; ++at) {
        if (at == 4 || at == 6 || at == 8 || at == 10) {
            text += '-';
        }
        text += digits[static_cast<std::uint8_t>(id[at]) >> 4];
        text += digits[static_cast<std::uint8_t>(id[at]) & 15];
    }
    return text;
}

nb::dict described(const std::string& mount, std::size_t size, std::size_t block_size) {
    nb::dict arguments;
    arguments["hf3fs_mount_point"] = mount;
    arguments["length_bytes"] = size;
    arguments["block_size_bytes"] = block_size;
    return arguments;
}

// Calls the library without Python's lock, since it talks with the agent, and makes an iovec of what it filled in.
template <typename Call>
Iovec made(const char* operation, std::shared_ptr<Memory> memory, nb::dict arguments, Call&& call) {
    int code = 0;
    {
        nb::gil_scoped_release unlocked;
        code = call(memory->raw());
    }
    if (code < 0) {
        raise_failed(operation, -code, arguments);
    }
    memory->opened();
    Iovec whole;
    whole.length = memory->raw().size;
    whole.memory = std::move(memory);
    return whole;
}

Iovec wrap(nb::object base, const std::string& id, const std::string& mount, std::size_t block_size, int numa) {
    auto call = GDRKIT_REQUIRE(hf3fs_iovwrap);
    const Identity identity = parse_identity(id);
    auto memory = std::make_shared<Memory>(Memory::Kind::host, base);
    memory->hold_buffer(base);
    void* begin = memory->buffer().buf;
    const auto size = static_cast<std::size_t>(memory->buffer().len);
    return made("hf3fs_iovwrap", memory, described(mount, size, block_size),
                [&](Iov& raw) { return call(&raw, begin, identity.bytes, mount.c_str(), size, block_size, numa); });
}

Iovec create(const std::string& mount, std::size_t size, std::size_t block_size, int numa) {
    auto call = GDRKIT_REQUIRE(hf3fs_iovcreate);
    auto memory = std::make_shared<Memory>(Memory::Kind::host, nb::none());
    return made("hf3fs_iovcreate", memory, described(mount, size, block_size),
                [&](Iov& raw) { return call(&raw, mount.c_str(), size, block_size, numa); });
}

Iovec open(const std::string& id, const std::string& mount, std::size_t size, std::size_t block_size, int numa) {
    auto call = GDRKIT_REQUIRE(hf3fs_iovopen);
    const Identity identity = parse_identity(id);
    auto memory = std::make_shared<Memory>(Memory::Kind::host, nb::none());
    return made("hf3fs_iovopen", memory, described(mount, size, block_size),
                [&](Iov& raw) { return call(&raw, identity.bytes, mount.c_str(), size, block_size, numa); });
}

// The first generation's name of a function if the library has it, else the third's.
#define GDRKIT_EITHER(first, third)                                                                                    \
    (functions().third != nullptr && functions().first == nullptr ? functions().third : GDRKIT_REQUIRE(first))
#define GDRKIT_NAME(first, third) (functions().first != nullptr ? #first : #third)

Iovec create_gpu(const std::string& mount, std::size_t size, std::size_t block_size, int device) {
    auto call = GDRKIT_EITHER(hf3fs_iovcreate_gpu, hf3fs_iovcreate_device);
    auto memory = std::make_shared<Memory>(Memory::Kind::device, nb::none());
    return made(GDRKIT_NAME(hf3fs_iovcreate_gpu, hf3fs_iovcreate_device), memory, described(mount, size, block_size),
                [&](Iov& raw) { return call(&raw, mount.c_str(), size, block_size, device); });
}

Iovec wrap_gpu(std::uintptr_t address, std::size_t size, const std::string& id, const std::string& mount,
               std::size_t block_size, int device, nb::object owner) {
    auto call = GDRKIT_EITHER(hf3fs_iovwrap_gpu, hf3fs_iovwrap_device);
    const Identity identity = parse_identity(id);
    auto memory = std::make_shared<Memory>(Memory::Kind::device, std::move(owner));
    return made(GDRKIT_NAME(hf3fs_iovwrap_gpu, hf3fs_iovwrap_device), memory, described(mount, size, block_size),
                [&](Iov& raw) {
                    return call(&raw, reinterpret_cast<void*>(address), identity.bytes, mount.c_str(), size, block_size,
                                device);
                });
}

Iovec open_gpu(const std::string& id, const std::string& mount, std::size_t size, std::size_t block_size, int device) {
    auto call = GDRKIT_EITHER(hf3fs_iovopen_gpu, hf3fs_iovopen_device);
    const Identity identity = parse_identity(id);
    auto memory = std::make_shared<Memory>(Memory::Kind::device, nb::none());
    return made(GDRKIT_NAME(hf3fs_iovopen_gpu, hf3fs_iovopen_device), memory, described(mount, size, block_size),
                [&](Iov& raw) { return call(&raw, identity.bytes, mount.c_str(), size, block_size, device); });
}

Iovec import_gpu(nb::bytes handle, const std::string& mount) {
    auto call = GDRKIT_REQUIRE(hf3fs_iov_import_gpu);
    GpuHandle given{};
    if (handle.size() != sizeof(given.data)) {
        raise_refused("a handle of device memory has 80 bytes", "malformed");
    }
    std::memcpy(given.data, handle.c_str(), sizeof(given.data));
    auto memory = std::make_shared<Memory>(Memory::Kind::device, nb::none());
    return made("hf3fs_iov_import_gpu", memory, described(mount, 0, 0),
                [&](Iov& raw) { return call(&raw, &given, mount.c_str()); });
}

nb::bytes export_gpu(const Iovec& self) {
    self.memory->check_open();
    auto call = GDRKIT_REQUIRE(hf3fs_iov_export_gpu);
    GpuHandle handle{};
    const int code = call(&self.memory->raw(), &handle);
    if (code < 0) {
        raise_failed("hf3fs_iov_export_gpu", -code);
    }
    return nb::bytes(reinterpret_cast<const char*>(handle.data), sizeof(handle.data));
}

void synchronize(const Iovec& self, int direction) {
    self.memory->check_open();
    auto call = GDRKIT_EITHER(hf3fs_iovsync_gpu, hf3fs_iovsync);
    int code = 0;
    {
        nb::gil_scoped_release unlocked;
        code = call(&self.memory->raw(), direction);
    }
    if (code < 0) {
        nb::dict arguments;
        arguments["direction"] = direction;
        raise_failed(GDRKIT_NAME(hf3fs_iovsync_gpu, hf3fs_iovsync), -code, arguments);
    }
}

int device_of(const Iovec& self) {
    self.memory->check_open();
    if (!self.memory->is_device()) {
        return -1;
    }
    return GDRKIT_EITHER(hf3fs_iov_gpu_device, hf3fs_iov_device_id)(&self.memory->raw());
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
        throw nb::value_error("an iovec is sliced with step 1");
    }
    return self.slice(static_cast<std::size_t>(start), static_cast<std::size_t>(length));
}

Iovec slice_by(const Iovec& self, nb::handle part) {
    self.memory->check_open();
    Py_buffer view;
    if (PyObject_GetBuffer(part.ptr(), &view, PyBUF_SIMPLE | PyBUF_WRITABLE) != 0) {
        throw nb::python_error();
    }
    const auto begin = reinterpret_cast<std::uintptr_t>(view.buf);
    const auto bytes = static_cast<std::size_t>(view.len);
    PyBuffer_Release(&view);
    const auto base = reinterpret_cast<std::uintptr_t>(self.begin());
    if (self.memory->is_device() || begin < base || bytes > self.length || begin - base > self.length - bytes) {
        throw nb::index_error("the buffer does not lie inside the iovec");
    }
    return self.slice(begin - base, bytes);
}

void close(const Iovec& self) {
    if (self.is_slice) {
        raise_refused("a slice is not closed: close the iovec that it is of", "bad_argument");
    }
    self.memory->close();
}

int get_buffer(PyObject* object, Py_buffer* view, int flags) noexcept {
    view->obj = nullptr;
    const Iovec& self = *nb::inst_ptr<Iovec>(object);
    if (!self.memory || !self.memory->is_open() || self.memory->is_device()) {
        const char* why = self.memory && self.memory->is_device() ? "device memory has no buffer: copy it by its device"
                                                                  : "the iovec is closed";
        PyErr_SetString(PyExc_BufferError, why);
        return -1;
    }
    if (PyBuffer_FillInfo(view, object, self.begin(), static_cast<Py_ssize_t>(self.length), 0, flags) != 0) {
        return -1;
    }
    ++self.memory->exported;
    return 0;
}

void release_buffer(PyObject* object, Py_buffer*) noexcept {
    --nb::inst_ptr<Iovec>(object)->memory->exported;
}

int traverse(PyObject* self, visitproc visit, void* arg) noexcept {
    Py_VISIT(Py_TYPE(self));
    if (!nb::inst_ready(self)) {
        return 0;
    }
    const Iovec& iovec = *nb::inst_ptr<Iovec>(self);
    Py_VISIT(iovec.userdata.ptr());
    // What the memory holds belongs to all its slices together, so only one that is alone may count it.
    return iovec.memory && iovec.memory.use_count() == 1 ? iovec.memory->traverse(visit, arg) : 0;
}

int clear(PyObject* self) noexcept {
    nb::inst_ptr<Iovec>(self)->userdata = nb::none();
    return 0;
}

PyType_Slot slots[] = {
    {Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
    {Py_bf_releasebuffer, reinterpret_cast<void*>(release_buffer)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {0, nullptr},
};

} // namespace

void bind_iovec(nb::module_& module) {
    nb::class_<Iovec>(module, "iovec", nb::type_slots(slots))
        .def(
            "__init__",
            [](Iovec* self, nb::object base, const std::string& id, const std::string& mount, std::size_t block_size,
               int numa) { new (self) Iovec(wrap(std::move(base), id, mount, block_size, numa)); },
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
        .def_prop_ro("id", [](const Iovec& self) { return written(self.memory->raw().id); })
        .def_prop_ro("block_size", [](const Iovec& self) { return self.memory->raw().block_size; })
        .def_prop_ro("is_gpu", [](const Iovec& self) { return self.memory->is_device(); })
        .def_prop_ro("gpu_device", &device_of)
        .def_prop_ro("closed", [](const Iovec& self) { return !self.memory->is_open(); })
        .def_prop_ro("outstanding", [](const Iovec& self) { return self.memory->outstanding; })
        .def("export_gpu", &export_gpu)
        .def("sync_gpu", &synchronize, "direction"_a)
        .def("before_close", [](Iovec& self, nb::object action) { self.memory->before_close = std::move(action); })
        .def("close", &close)
        .def("__enter__", [](nb::object self) { return self; })
        .def(
            "__exit__", [](const Iovec& self, nb::handle, nb::handle, nb::handle) { close(self); }, "kind"_a.none(),
            "error"_a.none(), "trace"_a.none());
    module.def("create_iovec", &create, "hf3fs_mount_point"_a, "length_bytes"_a, "block_size"_a, "numa"_a);
    module.def("open_iovec", &open, "id"_a, "hf3fs_mount_point"_a, "length_bytes"_a, "block_size"_a, "numa"_a);
    module.def("create_gpu_iovec", &create_gpu, "hf3fs_mount_point"_a, "length_bytes"_a, "block_size"_a, "device"_a);
    module.def("wrap_gpu_iovec", &wrap_gpu, "address"_a, "length_bytes"_a, "id"_a, "hf3fs_mount_point"_a,
               "block_size"_a, "device"_a, "owner"_a);
    module.def("open_gpu_iovec", &open_gpu, "id"_a, "hf3fs_mount_point"_a, "length_bytes"_a, "block_size"_a,
               "device"_a);
    module.def("import_gpu_iovec", &import_gpu, "handle"_a, "hf3fs_mount_point"_a);
}

} // namespace gdrkit::usrbio
