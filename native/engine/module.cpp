// gdrkit.gds._engine: jobs of the copy engine for Python. Every function that may block releases the GIL, and native
// objects never hold Python objects.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <string>
#include <vector>

#include "engine/engine.hpp"
#include "engine/place.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace gdrkit::engine {

namespace {

// The form that gdrkit.gds._native converts to exceptions: (api, operation, number, name).
nb::tuple plain(const Failure& failure) {
    return nb::make_tuple(failure.api == Api::cuda ? "cuda" : "kernel", failure.operation, failure.number,
                          failure.name);
}

PyObject* engine_error = nullptr;

[[noreturn]] void raise(const Failure& failure) {
    PyErr_SetObject(engine_error, plain(failure).ptr());
    throw nb::python_error();
}

// Runs a function without the GIL.
template <typename Function> auto unlocked(const Function& function) {
    Failure failure;
    {
        const nb::gil_scoped_release release;
        try {
            return function();
        } catch (const Error& error) {
            failure = error.failure();
        }
    }
    raise(failure);
}

// The memory of an object with the buffer protocol. The object cannot be resized or freed until release().
struct Bytes {
    explicit Bytes(nb::handle object, int flags = PyBUF_SIMPLE) {
        if (PyObject_GetBuffer(object.ptr(), &view, flags) != 0) {
            throw nb::python_error();
        }
    }
    Bytes(const Bytes&) = delete;
    Bytes& operator=(const Bytes&) = delete;
    ~Bytes() { release(); }
    void release() {
        if (view.obj != nullptr) {
            PyBuffer_Release(&view);
        }
    }
    Py_buffer view{};
};

// The rows are packed (file, offset, address, length) of 8 bytes each, so that thousands of ranges need no Python
// objects.
std::vector<Extent> extents_of(nb::handle packed, std::size_t files_count) {
    struct Row {
        std::uint64_t file;
        std::uint64_t offset;
        std::uint64_t address;
        std::uint64_t length;
    };
    static_assert(sizeof(Row) == 32);
    const Bytes bytes(packed);
    const auto size = static_cast<std::size_t>(bytes.view.len);
    if (size % sizeof(Row) != 0 || size / sizeof(Row) > UINT32_MAX) {
        raise({.api = Api::kernel, .operation = "extents", .number = EINVAL, .name = {}});
    }
    std::vector<Extent> extents(size / sizeof(Row));
    for (std::size_t index = 0; index < extents.size(); ++index) {
        Row row{};
        std::memcpy(&row, static_cast<const std::byte*>(bytes.view.buf) + index * sizeof(Row), sizeof(Row));
        const bool whole = row.offset <= INT64_MAX && row.length <= INT64_MAX - row.offset;
        if (row.file >= files_count || !whole || row.address + row.length < row.address) {
            raise({.api = Api::kernel, .operation = "extents", .number = EINVAL, .name = {}});
        }
        extents[index].file = static_cast<std::uint32_t>(row.file);
        extents[index].offset = row.offset;
        extents[index].address = row.address;
        extents[index].length = row.length;
    }
    return extents;
}

// Each file is a path, which the job opens and closes, or an OpenFile.
std::vector<std::shared_ptr<File>> files_of(const nb::list& files, int flags, unsigned mode) {
    std::vector<std::shared_ptr<File>> found;
    found.reserve(nb::len(files));
    for (const nb::handle each : files) {
        if (nb::isinstance<File>(each)) {
            found.push_back(nb::cast<std::shared_ptr<File>>(each));
        } else {
            const auto path = nb::cast<nb::bytes>(each);
            found.push_back(std::make_shared<File>(std::string(path.c_str(), path.size()), flags, mode));
        }
    }
    return found;
}

nb::dict dict_of(const Progress& progress) {
    nb::dict found;
    found["bytes"] = progress.bytes;
    found["direct_bytes"] = progress.direct_bytes;
    found["cancelled"] = progress.cancelled;
    found["direct_refusal"] = progress.direct_refusal;
    found["failed_extent"] = progress.failed_extent;
    if (progress.failure) {
        found["failure"] = plain(*progress.failure);
    } else {
        found["failure"] = nb::none();
    }
    return found;
}

void bind_jobs(nb::module_& module) {
    nb::class_<File>(module, "OpenFile", "An open descriptor, borrowed, and one with O_DIRECT beside it, owned.")
        .def(
            "__init__", [](File* self, int fd) { new (self) File(fd); }, "fd"_a)
        .def("direct", [](File& self) { return unlocked([&] { return self.direct() >= 0; }); })
        .def_prop_ro("direct_refusal", &File::direct_refusal)
        .def_prop_ro("alignment_bytes", &File::alignment_bytes)
        .def(
            "residency",
            [](File& self, std::uint64_t offset, std::uint64_t length) {
                return unlocked([&] {
                    const Residency found = self.residency_of(offset, length);
                    return std::pair(found.cached_pages, found.pages);
                });
            },
            "offset"_a, "length"_a, "How many pages of a range are cached, and how many there are.");
    nb::class_<Job>(module, "Job", "Ranges on their way.")
        .def(
            "wait",
            [](Job& self, std::int64_t timeout_us) {
                const nb::gil_scoped_release release;
                return self.wait(timeout_us);
            },
            "timeout_us"_a = -1)
        .def("is_over", &Job::is_over)
        .def("cancel", &Job::cancel, nb::call_guard<nb::gil_scoped_release>())
        .def("progress", [](Job& self) { return dict_of(self.progress()); })
        .def("arrived", &Job::arrived, "How many bytes of each extent arrived, from its beginning without a gap.");
}

void bind_engine(nb::module_& module) {
    nb::class_<Engine>(module, "Engine", "Threads and pinned memory near one place.")
        .def(
            "__init__",
            [](Engine* self, int node, std::size_t workers, std::size_t slots, std::uint64_t piece_bytes,
               std::uint64_t first_bytes, std::uint64_t haul_bytes, std::size_t hauls, std::uint64_t load_bytes,
               bool sleeps_until_asked, std::size_t direct_readers, std::uint64_t direct_read_bytes,
               std::size_t direct_writers, std::uint64_t direct_write_bytes, std::size_t buffered_writers) {
                Tuning tuning;
                tuning.workers_count = workers;
                tuning.slots_count = slots;
                tuning.piece_bytes = piece_bytes;
                tuning.first_bytes = first_bytes;
                tuning.haul_bytes = haul_bytes;
                tuning.hauls_count = hauls;
                tuning.load_bytes = load_bytes;
                tuning.sleeps_until_asked = sleeps_until_asked;
                tuning.direct_readers_count = direct_readers;
                tuning.direct_read_bytes = direct_read_bytes;
                tuning.direct_writers_count = direct_writers;
                tuning.direct_write_bytes = direct_write_bytes;
                tuning.buffered_writers_count = buffered_writers;
                unlocked([&] { return new (self) Engine(tuning, node); });
            },
            nb::kw_only(), "node"_a, "workers_count"_a, "slots_count"_a, "piece_bytes"_a, "first_bytes"_a,
            "haul_bytes"_a, "hauls_count"_a, "load_bytes"_a, "sleeps_until_asked"_a, "direct_readers_count"_a,
            "direct_read_bytes"_a, "direct_writers_count"_a, "direct_write_bytes"_a, "buffered_writers_count"_a)
        .def(
            "submit",
            [](Engine& self, bool write, int access, int device, const nb::list& files, nb::handle packed, int flags,
               unsigned mode, bool durable) {
                std::vector<Extent> extents = extents_of(packed, nb::len(files));
                auto job = std::make_shared<Job>(write ? Direction::write : Direction::read,
                                                 static_cast<Access>(access), device, files_of(files, flags, mode),
                                                 std::move(extents), self.tuning(), write && durable);
                unlocked([&] { self.submit(job); });
                return job;
            },
            nb::kw_only(), "write"_a, "access"_a, "device"_a, "files"_a, "extents"_a, "flags"_a = 0, "mode"_a = 0,
            "durable"_a = false)
        .def(
            "transfer_small",
            [](Engine& self, bool write, File& file, std::uint64_t offset, std::uint64_t address, std::uint64_t length,
               int device) {
                if (length > Engine::small_bytes_max || offset > INT64_MAX - length) {
                    raise({.api = Api::kernel, .operation = "transfer_small", .number = EINVAL, .name = {}});
                }
                const Moved moved = unlocked([&] {
                    return self.transfer_small(write ? Direction::write : Direction::read, file, offset, address,
                                               length, device);
                });
                return nb::make_tuple(moved.bytes, moved.failure ? nb::object(plain(*moved.failure)) : nb::none());
            },
            "write"_a, "file"_a, "offset"_a, "address"_a, "length"_a, "device"_a)
        .def("close", &Engine::close, nb::call_guard<nb::gil_scoped_release>());
    nb::class_<Bytes>(module, "HostMemory", "The bytes of a contiguous host buffer, held until release().")
        .def(
            "__init__",
            [](Bytes* self, nb::handle object, bool writable) {
                new (self) Bytes(object, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE);
            },
            "object"_a, nb::kw_only(), "writable"_a)
        .def_prop_ro("address", [](const Bytes& self) { return reinterpret_cast<std::uintptr_t>(self.view.buf); })
        .def_prop_ro("length_bytes", [](const Bytes& self) { return self.view.len; })
        .def("release", &Bytes::release);
    module.attr("SMALL_BYTES_MAX") = Engine::small_bytes_max;
    module.attr("HOST") = host_memory;
}

} // namespace

} // namespace gdrkit::engine

NB_MODULE(_engine, module) {
    namespace ge = gdrkit::engine;
    module.doc() = "The copy engine between files and memory of the host or of devices.";
    ge::engine_error = PyErr_NewException("gdrkit.gds._engine.EngineError", PyExc_Exception, nullptr);
    if (ge::engine_error == nullptr) {
        throw nb::python_error();
    }
    module.attr("EngineError") = nb::handle(ge::engine_error);
    module.def(
        "residency",
        [](int fd, std::uint64_t offset, std::uint64_t length) {
            const ge::Residency found = ge::residency(fd, offset, length);
            return std::pair(found.cached_pages, found.pages);
        },
        "fd"_a, "offset"_a, "length"_a, "How many pages of a range are cached, and how many there are.");
    // For a child of fork: the resources of the object belong to the parent, so the child must never destroy it.
    module.def(
        "keep_forever",
        [](nb::handle object) {
            nb::set_leak_warnings(false);
            object.inc_ref();
        },
        "object"_a);
    module.def("node_of", &ge::node_of, "bus_id"_a, "sysfs"_a = "/sys");
    ge::bind_jobs(module);
    ge::bind_engine(module);
}
