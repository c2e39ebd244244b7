// gdrkit.gds._engine: jobs of the copy engine for Python. Every function that may block releases the GIL, and native
// objects never hold Python objects: the types that other native objects share are created by std::make_shared, because
// otherwise nanobind makes a shared_ptr that holds the Python object, and the last owner would wait for the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.hpp"
#include "engine/numa.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace gdrkit::engine {

namespace {

// Returns the failure as (api, operation, number, name), which gdrkit.gds._native converts to exceptions.
nb::tuple failure_tuple(const Failure& failure) {
    return nb::make_tuple(failure.api == Api::cuda ? "cuda" : "kernel", failure.operation, failure.number,
                          failure.name);
}

PyObject* engine_error = nullptr;
// The queue that submit() passes to each job.
const auto ended_jobs = std::make_shared<CompletionQueue>(false);

[[noreturn]] void raise(const Failure& failure) {
    PyErr_SetObject(engine_error, failure_tuple(failure).ptr());
    throw nb::python_error();
}

// Runs a function without the GIL and returns its result. Raises EngineError if it throws Error.
template <typename Function> auto without_gil(const Function& function) {
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
struct HostMemory {
    explicit HostMemory(nb::handle object, int flags = PyBUF_SIMPLE) {
        if (PyObject_GetBuffer(object.ptr(), &view, flags) != 0) {
            throw nb::python_error();
        }
    }
    HostMemory(const HostMemory&) = delete;
    HostMemory& operator=(const HostMemory&) = delete;
    ~HostMemory() { release(); }
    // Releases the memory once, also if the exporter runs code that calls this function again.
    void release() {
        Py_buffer released = view;
        view.obj = nullptr;
        PyBuffer_Release(&released);
    }
    Py_buffer view{};
};

// Unpacks extents from rows of four numbers: (file index, offset, address, length). Python passes them as a flat list
// of int, or as a buffer of numbers of 8 bytes, so that thousands of ranges need no Python objects.
std::vector<Extent> extents_of(nb::handle flat, std::size_t files_count) {
    struct Row {
        std::uint64_t file_index;
        std::uint64_t offset;
        std::uint64_t address;
        std::uint64_t length;
    };
    static_assert(sizeof(Row) == 32);
    const bool is_list = nb::isinstance<nb::list>(flat);
    std::optional<HostMemory> bytes;
    if (!is_list) {
        bytes.emplace(flat);
    }
    const std::size_t size = is_list ? nb::len(flat) * 8 : static_cast<std::size_t>(bytes->view.len);
    if (size % sizeof(Row) != 0 || size / sizeof(Row) > UINT32_MAX) {
        raise({.api = Api::kernel, .operation = "extents", .number = EINVAL, .name = {}});
    }
    std::vector<Extent> extents(size / sizeof(Row));
    for (std::size_t index = 0; index < extents.size(); ++index) {
        Row row{};
        if (is_list) {
            const nb::list list = nb::borrow<nb::list>(flat);
            const auto number = [&](std::size_t column) { return nb::cast<std::uint64_t>(list[4 * index + column]); };
            row = {number(0), number(1), number(2), number(3)};
        } else {
            std::memcpy(&row, static_cast<const std::byte*>(bytes->view.buf) + index * sizeof(Row), sizeof(Row));
        }
        const bool fits_in_file = row.offset <= INT64_MAX && row.length <= INT64_MAX - row.offset;
        if (row.file_index >= files_count || !fits_in_file || row.address + row.length < row.address) {
            raise({.api = Api::kernel, .operation = "extents", .number = EINVAL, .name = {}});
        }
        extents[index].file_index = static_cast<std::uint32_t>(row.file_index);
        extents[index].offset = row.offset;
        extents[index].address = row.address;
        extents[index].length = row.length;
    }
    return extents;
}

// Converts a list of files. Each is a path (bytes), which the job opens and closes, or an OpenFile.
std::vector<std::shared_ptr<File>> files_of(const nb::list& files, int flags) {
    std::vector<std::shared_ptr<File>> native_files;
    native_files.reserve(nb::len(files));
    for (const nb::handle item : files) {
        if (nb::isinstance<File>(item)) {
            native_files.push_back(nb::cast<std::shared_ptr<File>>(item));
        } else {
            const auto path = nb::cast<nb::bytes>(item);
            native_files.push_back(std::make_shared<File>(std::string(path.c_str(), path.size()), flags, 0));
        }
    }
    return native_files;
}

nb::dict dict_of(const Progress& progress) {
    nb::dict data;
    data["bytes"] = progress.bytes;
    data["direct_bytes"] = progress.direct_bytes;
    data["cancelled"] = progress.is_cancelled;
    data["duration_s"] = std::chrono::duration<double>(progress.duration).count();
    data["direct_refusal"] = progress.direct_refusal;
    data["failed_extent"] = progress.failed_extent;
    if (progress.failure) {
        data["failure"] = failure_tuple(*progress.failure);
    } else {
        data["failure"] = nb::none();
    }
    return data;
}

void bind_jobs(nb::module_& module) {
    nb::class_<File>(module, "OpenFile",
                     "A descriptor of the caller, and a second one with O_DIRECT, which this object owns.")
        .def(nb::new_([](int fd) { return std::make_shared<File>(fd); }), "fd"_a)
        .def("begin_use", &File::begin_use,
             "Count a use of the descriptor, for which begin_close() waits. Return False if the file is being closed.")
        .def("end_use", &File::end_use)
        .def("begin_close", &File::begin_close, nb::call_guard<nb::gil_scoped_release>(),
             "Refuse further uses, and wait until there are none.")
        .def("end_close", &File::end_close, "is_closed"_a,
             "Close the descriptor with O_DIRECT, or allow uses again if the file was not closed.")
        .def("direct", [](File& self) { return without_gil([&] { return self.direct_fd() >= 0; }); })
        .def_prop_ro("direct_refusal", &File::direct_refusal)
        .def_prop_ro("alignment_bytes", &File::alignment_bytes)
        .def(
            "residency",
            [](File& self, std::uint64_t offset, std::uint64_t length) {
                return without_gil([&] {
                    const Residency residency = self.residency_of(offset, length);
                    return std::pair(residency.cached_pages, residency.pages);
                });
            },
            "offset"_a, "length"_a, "Return the number of cached pages of a range, and the number of its pages.");
    nb::class_<CompletionQueue>(module, "CompletionQueue",
                                "The tokens of ended jobs, which worker threads add and Python takes in batches.")
        .def(nb::new_([](bool has_event) {
                 return without_gil([&] { return std::make_shared<CompletionQueue>(has_event); });
             }),
             nb::kw_only(), "has_event"_a)
        .def(
            "push",
            [](CompletionQueue& self, std::uint64_t token) {
                self.push(
                    std::make_unique<CompletionQueue::Entry>(CompletionQueue::Entry{.token = token, .next = nullptr}));
            },
            "token"_a)
        .def("take", &CompletionQueue::take)
        .def("fileno", &CompletionQueue::event_fd);
    nb::class_<Job>(module, "Job", "The transfer of the ranges of one call.")
        .def(
            "wait",
            [](Job& self, std::int64_t timeout_us) {
                const nb::gil_scoped_release release;
                return self.wait(timeout_us);
            },
            "timeout_us"_a = -1)
        .def("is_over", &Job::is_over)
        .def("cancel", &Job::cancel, nb::call_guard<nb::gil_scoped_release>())
        .def("notify", &Job::notify, "queue"_a, "token"_a,
             "Add the token to the queue when the job is over; at once if it is over already.")
        .def("progress", [](Job& self) { return dict_of(self.progress()); })
        .def("arrived", &Job::arrived_bytes,
             "Return for each extent the number of bytes that arrived from its beginning without a gap.");
}

void bind_engine(nb::module_& module) {
    nb::class_<Engine>(module, "Engine", "Threads and pinned memory of one NUMA node.")
        .def(
            "__init__",
            [](Engine* self, int node, std::size_t workers, std::size_t buffers, std::uint64_t chunk_bytes,
               std::uint64_t first_chunk_bytes, std::uint64_t coalesced_bytes, std::size_t coalesced_count,
               std::uint64_t slice_bytes, bool polls_device, std::size_t direct_readers,
               std::uint64_t direct_read_bytes, std::size_t direct_writers, std::uint64_t direct_write_bytes,
               std::size_t buffered_writers) {
                Tuning tuning;
                tuning.workers_count = workers;
                tuning.buffers_count = buffers;
                tuning.chunk_bytes = chunk_bytes;
                tuning.first_chunk_bytes = first_chunk_bytes;
                tuning.coalesced_bytes = coalesced_bytes;
                tuning.coalesced_count = coalesced_count;
                tuning.slice_bytes = slice_bytes;
                tuning.polls_device = polls_device;
                tuning.direct_readers_count = direct_readers;
                tuning.direct_read_bytes = direct_read_bytes;
                tuning.direct_writers_count = direct_writers;
                tuning.direct_write_bytes = direct_write_bytes;
                tuning.buffered_writers_count = buffered_writers;
                without_gil([&] { return new (self) Engine(tuning, node); });
            },
            nb::kw_only(), "node"_a, "workers_count"_a, "buffers_count"_a, "chunk_bytes"_a, "first_chunk_bytes"_a,
            "coalesced_bytes"_a, "coalesced_count"_a, "slice_bytes"_a, "polls_device"_a, "direct_readers_count"_a,
            "direct_read_bytes"_a, "direct_writers_count"_a, "direct_write_bytes"_a, "buffered_writers_count"_a)
        .def(
            "submit",
            [](Engine& self, bool write, int access, int device, const nb::list& files, nb::handle flat_extents,
               int flags, bool durable, std::uint64_t token) {
                std::vector<Extent> extents = extents_of(flat_extents, nb::len(files));
                auto job = std::make_shared<Job>(write ? Direction::write : Direction::read,
                                                 static_cast<Access>(access), device, files_of(files, flags),
                                                 std::move(extents), self.tuning(), write && durable);
                without_gil([&] {
                    try {
                        job->notify(ended_jobs, token);
                        self.submit(job);
                    } catch (...) {
                        job->cancel(); // Otherwise the close of its files would wait for the job.
                        throw;
                    }
                });
                return job;
            },
            "write"_a, "access"_a, "device"_a, "files"_a, "extents"_a, "flags"_a, "durable"_a, "token"_a,
            "Queue a job and return it. At its end, `token` is added to `ended_jobs`.")
        .def(
            "transfer_small",
            [](Engine& self, bool write, File& file, std::uint64_t offset, std::uint64_t address, std::uint64_t length,
               int device) {
                const bool fits = device == host_memory || length <= Engine::small_bytes_max;
                if (!fits || length > INT64_MAX || offset > INT64_MAX - length) {
                    raise({.api = Api::kernel, .operation = "transfer_small", .number = EINVAL, .name = {}});
                }
                const IoResult result = without_gil([&] {
                    return self.transfer_small(write ? Direction::write : Direction::read, file, offset, address,
                                               length, device);
                });
                return nb::make_tuple(result.bytes,
                                      result.failure ? nb::object(failure_tuple(*result.failure)) : nb::none());
            },
            "write"_a, "file"_a, "offset"_a, "address"_a, "length"_a, "device"_a)
        .def("close", &Engine::close, nb::call_guard<nb::gil_scoped_release>());
    nb::class_<HostMemory>(module, "HostMemory", "A contiguous host buffer, which stays exported until release().")
        .def(
            "__init__",
            [](HostMemory* self, nb::handle object, bool writable) {
                new (self) HostMemory(object, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE);
            },
            "object"_a, nb::kw_only(), "writable"_a)
        .def_prop_ro("address", [](const HostMemory& self) { return reinterpret_cast<std::uintptr_t>(self.view.buf); })
        .def_prop_ro("length_bytes", [](const HostMemory& self) { return self.view.len; })
        .def("release", &HostMemory::release);
    module.attr("SMALL_BYTES_MAX") = Engine::small_bytes_max;
    module.attr("SMALL_HOST_WRITE_BYTES_MAX") = Engine::small_host_write_bytes_max;
    module.attr("HOST") = host_memory;
}

} // namespace

} // namespace gdrkit::engine

NB_MODULE(_engine, module) {
    namespace ge = gdrkit::engine;
    module.doc() = "The copy engine between files and memory of the host or of devices.";
    const auto error_name = nb::cast<std::string>(module.attr("__name__")) + ".EngineError";
    ge::engine_error = PyErr_NewException(error_name.c_str(), PyExc_Exception, nullptr);
    if (ge::engine_error == nullptr) {
        throw nb::python_error();
    }
    module.attr("EngineError") = nb::handle(ge::engine_error);
    module.def(
        "residency",
        [](int fd, std::uint64_t offset, std::uint64_t length) {
            const ge::Residency residency = ge::query_residency(fd, offset, length);
            return std::pair(residency.cached_pages, residency.pages);
        },
        "fd"_a, "offset"_a, "length"_a, "Return the number of cached pages of a range, and the number of its pages.");
    // Adds a reference that is never dropped. A child of fork calls this for an object whose resources belong to the
    // parent, so that the child never destroys the object.
    module.def(
        "keep_forever",
        [](nb::handle object) {
            nb::set_leak_warnings(false);
            object.inc_ref();
        },
        "object"_a);
    module.def(
        "totals", [] { return std::pair(ge::totals.transfers_count.load(), ge::totals.arrived_bytes.load()); },
        "Return the number of transfers of this process that are over, and the number of bytes that they moved.");
    module.def("node_of_device", &ge::node_of_device, "bus_id"_a, "sysfs"_a = "/sys");
    ge::bind_jobs(module);
    ge::bind_engine(module);
    module.attr("ended_jobs") = nb::cast(ge::ended_jobs);
}
