// gdrkit.gds._engine, the Python module of the copy engine. Every function that may block releases the GIL. Native
// objects never hold Python objects, because the thread that drops the last reference would have to wait for the GIL.
// So std::make_shared creates the objects that native code shares: otherwise nanobind would make a shared_ptr that
// holds the Python object.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "common/gil.hpp"
#include "engine/engine.hpp"
#include "engine/numa.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace gdrkit::engine {

namespace {

// Returns the failure as (api, operation, number, name), which gdrkit.gds._native converts to exceptions.
nb::tuple make_failure_tuple(const Failure& failure) {
    return nb::make_tuple(failure.api == Api::cuda ? "cuda" : "kernel", failure.operation, failure.number,
                          failure.name);
}

// The exception classes EngineError and FileClosed.
PyObject* engine_error_class = nullptr;
PyObject* file_closed_class = nullptr;
// Two dicts of transfers (gdrkit.gds.transfer) by their tokens: all transfers in progress, and the transfers among them
// whose job is over.
PyObject* transfers_in_progress = nullptr;
PyObject* transfers_ended = nullptr;
// The names of the attributes in which a transfer has its job and its token.
PyObject* job_attribute = nullptr;
PyObject* token_attribute = nullptr;
// The queue to which each job of a transfer adds its token at its end.
const auto ended_jobs = std::make_shared<CompletionQueue>(false);
// While the main thread waits, it runs Python's signal handlers once in this interval, so that Ctrl-C ends the wait.
// Python runs signal handlers only on the main thread.
constexpr std::chrono::milliseconds signal_check_interval{50};

[[noreturn]] void raise(const Failure& failure) {
    PyErr_SetObject(engine_error_class, make_failure_tuple(failure).ptr());
    throw nb::python_error();
}

// Raises FileClosed for the file with this index in the arguments of a call.
[[noreturn]] void raise_closed(std::size_t index) {
    PyErr_SetObject(file_closed_class, nb::make_tuple(index).ptr());
    throw nb::python_error();
}

// An entry for the calling thread in File::python_threads, which lasts as long as the thread uses or closes the file.
// If a signal handler or a finalizer closes the file during such a use, the close finds the entry and fails. It must
// not wait, because the use by its own thread would never end.
class PythonThreadEntry {
public:
    explicit PythonThreadEntry(std::shared_ptr<File> file)
        : file_(std::move(file)), thread_id_(PyThread_get_thread_ident()) {
        file_->python_threads.push_back(thread_id_);
    }
    PythonThreadEntry(PythonThreadEntry&&) = default;
    PythonThreadEntry& operator=(PythonThreadEntry&&) = delete;
    ~PythonThreadEntry() { end(); }
    void end() noexcept {
        if (const std::shared_ptr<File> file = std::move(file_)) {
            file->python_threads.erase(std::ranges::find(file->python_threads, thread_id_));
        }
    }
    // Returns whether the calling thread has an entry for the file.
    static bool is_using(const File& file) {
        return std::ranges::find(file.python_threads, PyThread_get_thread_ident()) != file.python_threads.end();
    }

private:
    std::shared_ptr<File> file_;
    unsigned long thread_id_;
};

// A use of a file by Python code. Raises FileClosed if the file is closed. `index` is the index of the file in the
// arguments of the call.
class PythonFileUse {
public:
    explicit PythonFileUse(const std::shared_ptr<File>& file, std::size_t index = 0) : thread_entry_(file), use_(file) {
        if (!use_.file()) {
            raise_closed(index);
        }
    }
    const std::shared_ptr<File>& file() const noexcept { return use_.file(); }
    void end() noexcept {
        thread_entry_.end();
        use_.end();
    }

private:
    PythonThreadEntry thread_entry_;
    FileUse use_;
};

// Runs a function without the GIL and returns its result. Raises EngineError if the function throws Error.
template <typename Function> auto without_gil(const Function& function) {
    Failure failure;
    {
        const GilRelease release;
        try {
            return function();
        } catch (const Error& error) {
            failure = error.failure();
        }
    }
    raise(failure);
}

// Calls `wait` without the GIL until it returns true, or until `timeout` has passed. The argument of `wait` is the
// longest time that the call may wait. Raises the exception of a signal handler. Returns false in a child process that
// a signal handler has forked, because the awaited threads exist only in the parent.
template <typename Wait> bool wait_interruptibly(std::chrono::nanoseconds timeout, const Wait& wait) {
    const auto deadline = std::chrono::steady_clock::now() + std::min(timeout, no_limit);
    for (std::chrono::nanoseconds remaining = timeout, check_interval = signal_check_interval;;) {
        const std::chrono::nanoseconds wait_time = std::clamp(remaining, std::chrono::nanoseconds(0), check_interval);
        if (without_gil([&] { return wait(wait_time); })) {
            return true; // Most waits end here, before the system calls below.
        }
        const pid_t process_id = getpid();
        if (PyErr_CheckSignals() != 0) {
            throw nb::python_error();
        }
        if (remaining <= wait_time || getpid() != process_id) {
            return false;
        }
        if (process_id != syscall(SYS_gettid)) {
            check_interval = no_limit; // This is not the main thread, so it runs no signal handlers.
        }
        remaining = deadline - std::chrono::steady_clock::now();
    }
}

// Stores the job in its transfer, and the transfer in `transfers_in_progress`. Returns the token of the transfer.
//
// The caller then starts the job in the same call of native code, so that no signal handler of Python can run in
// between. So a transfer has a job, and is kept alive, if and only if its job was started.
std::uint64_t begin_transfer(nb::handle transfer, nb::handle job) {
    const nb::object token = nb::steal(PyObject_GetAttr(transfer.ptr(), token_attribute));
    if (!token.is_valid() || PyObject_SetAttr(transfer.ptr(), job_attribute, job.ptr()) != 0 ||
        PyDict_SetItem(transfers_in_progress, token.ptr(), transfer.ptr()) != 0) {
        throw nb::python_error();
    }
    return nb::cast<std::uint64_t>(token);
}

// Adds the transfers in progress whose job is over to `transfers_ended`. Returns whether `transfers_ended` is not
// empty.
bool collect_ended() {
    for (const std::uint64_t token : ended_jobs->take()) {
        const nb::object key = nb::cast(token);
        PyObject* const transfer = PyDict_GetItemWithError(transfers_in_progress, key.ptr());
        if (transfer == nullptr ? PyErr_Occurred() != nullptr
                                : PyDict_SetItem(transfers_ended, key.ptr(), transfer) != 0) {
            throw nb::python_error();
        }
    }
    return PyDict_Size(transfers_ended) != 0;
}

// Deletes a File. Releases the GIL if the calling thread has it, because the close of the descriptor may block. Any
// thread may drop the last reference.
struct FileDeleter {
    void operator()(File* file) const noexcept {
        std::optional<GilRelease> release;
        if (file->fd_if_open() >= 0 && GilRelease::has_gil()) {
            release.emplace();
        }
        delete file;
    }
};

std::shared_ptr<File> make_file(Descriptor descriptor) {
    return {new File(std::move(descriptor)), FileDeleter()};
}

// Opens a file. If a signal interrupts open(2), runs the signal handlers of Python and tries again.
std::shared_ptr<File> open_file(const nb::bytes& path, int flags, int mode, int folder_fd) {
    if (std::strlen(path.c_str()) != path.size()) {
        throw nb::value_error("embedded null byte");
    }
    for (;;) {
        int error_number = 0;
        Descriptor descriptor(without_gil([&] {
            const int fd = openat(folder_fd, path.c_str(), flags | O_CLOEXEC, mode);
            error_number = errno;
            return fd;
        }));
        if (descriptor) {
            return make_file(std::move(descriptor));
        }
        if (error_number != EINTR) {
            raise({.api = Api::kernel, .operation = "open", .number = error_number, .name = {}});
        }
        if (PyErr_CheckSignals() != 0) {
            throw nb::python_error();
        }
    }
}

// Waits at most `timeout_us`, or without limit if it is negative. Returns whether the job is over.
bool wait_for(Completion& completion, std::int64_t timeout_us) {
    if (timeout_us == 0 || completion.is_over()) {
        return completion.is_over();
    }
    return wait_interruptibly(timeout_us < 0 ? no_limit : std::chrono::microseconds(timeout_us),
                              [&](std::chrono::nanoseconds wait_time) { return completion.wait(wait_time); });
}

// Calls a function of a job and returns its result. Releases the GIL while the job runs, because the function may wait
// for a worker that holds the job's lock during a system call. A FUSE thread of this process may serve that call, and
// may need the GIL.
template <typename Function> auto query_job(Job& job, const Function& function) {
    return job.is_over() ? function() : without_gil(function);
}

// The engine object of Python. Its destructor releases the GIL and closes the engine, because the worker threads may
// wait for a thread that needs the GIL.
struct ClosingEngine {
    ClosingEngine(const Tuning& tuning, int numa_node) : engine(tuning, numa_node) {}
    ClosingEngine(const ClosingEngine&) = delete;
    ClosingEngine& operator=(const ClosingEngine&) = delete;
    ~ClosingEngine() {
        const GilRelease release;
        engine.close();
    }
    Engine engine;
};

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
    // Releases the memory once, even if code of the exporter calls this function again meanwhile.
    void release() {
        Py_buffer released_view = view;
        view.obj = nullptr;
        PyBuffer_Release(&released_view);
    }
    Py_buffer view{};
};

// Unpacks extents from rows of four numbers: (file index, offset, address, length). Python passes the rows as a flat
// list of int. For thousands of ranges, Python passes a buffer of 8-byte numbers, which needs no object per number.
std::vector<Extent> unpack_extents(nb::handle flat_rows, std::size_t files_count) {
    struct Row {
        std::uint64_t file_index;
        std::uint64_t offset;
        std::uint64_t address;
        std::uint64_t length;
    };
    static_assert(sizeof(Row) == 32);
    const bool is_list = nb::isinstance<nb::list>(flat_rows);
    std::optional<HostMemory> row_buffer;
    if (!is_list) {
        row_buffer.emplace(flat_rows);
    }
    const std::size_t size_bytes =
        is_list ? nb::len(flat_rows) * sizeof(std::uint64_t) : static_cast<std::size_t>(row_buffer->view.len);
    if (size_bytes % sizeof(Row) != 0 || size_bytes / sizeof(Row) > UINT32_MAX) {
        raise({.api = Api::kernel, .operation = "extents", .number = EINVAL, .name = {}});
    }
    std::vector<Extent> extents(size_bytes / sizeof(Row));
    for (std::size_t index = 0; index < extents.size(); ++index) {
        Row row{};
        if (is_list) {
            const nb::list list = nb::borrow<nb::list>(flat_rows);
            const auto value_of = [&](std::size_t column) { return nb::cast<std::uint64_t>(list[4 * index + column]); };
            row = {value_of(0), value_of(1), value_of(2), value_of(3)};
        } else {
            std::memcpy(&row, static_cast<const std::byte*>(row_buffer->view.buf) + index * sizeof(Row), sizeof(Row));
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

// Converts a list of files. Each item is a path (bytes), which the job opens and closes, or an OpenFile, for which this
// function adds a use to `uses`.
std::vector<std::shared_ptr<File>> convert_files(const nb::list& files, int flags, std::vector<PythonFileUse>& uses) {
    std::vector<std::shared_ptr<File>> native_files;
    native_files.reserve(nb::len(files));
    for (const nb::handle item : files) {
        if (nb::isinstance<File>(item)) {
            uses.emplace_back(nb::cast<std::shared_ptr<File>>(item), native_files.size());
            native_files.push_back(uses.back().file());
        } else {
            const auto path = nb::cast<nb::bytes>(item);
            native_files.push_back(std::make_shared<File>(std::string(path.c_str(), path.size()), flags, 0));
        }
    }
    return native_files;
}

nb::dict make_progress_dict(const Progress& progress) {
    nb::dict fields;
    fields["bytes"] = progress.bytes;
    fields["direct_bytes"] = progress.direct_bytes;
    fields["cancelled"] = progress.is_cancelled;
    fields["duration_s"] = std::chrono::duration<double>(progress.duration).count();
    fields["direct_open_errno"] = progress.direct_open_errno;
    fields["failed_extent"] = progress.failed_extent;
    if (progress.failure) {
        fields["failure"] = make_failure_tuple(*progress.failure);
    } else {
        fields["failure"] = nb::none();
    }
    return fields;
}

void bind_jobs(nb::module_& module) {
    nb::class_<PythonFileUse>(module, "FileUse",
                              "A use of a file, which ends with its `with` block or with this object.")
        .def("__enter__", [](PythonFileUse& self) { return self.file(); })
        .def(
            "__exit__", [](PythonFileUse& self, nb::handle, nb::handle, nb::handle) { self.end(); },
            "error_class"_a.none(), "error"_a.none(), "traceback"_a.none());
    nb::class_<File>(module, "OpenFile", "An open file, with a second descriptor for O_DIRECT.")
        .def(nb::new_([](int fd) { return make_file(Descriptor(fd)); }), "fd"_a)
        .def_static("open", &open_file, "path"_a, "flags"_a, "mode"_a, "folder"_a = AT_FDCWD)
        .def(
            "begin_use", [](const std::shared_ptr<File>& self) { return PythonFileUse(self); },
            "Return a use of the file. close() waits for its end. Raise FileClosed if the file is closed.")
        .def(
            "close",
            [](const std::shared_ptr<File>& self, nb::handle end_transfers, bool waits) {
                if (PythonThreadEntry::is_using(*self)) {
                    raise({.api = Api::kernel, .operation = "close", .number = EDEADLK, .name = {}});
                }
                const PythonThreadEntry thread_entry(self);
                const std::chrono::nanoseconds wait_limit = waits ? no_limit : std::chrono::nanoseconds(0);
                const bool has_begun_close =
                    wait_interruptibly(wait_limit, [&](auto timeout) { return self->begin_close(timeout); });
                const FileClosing closing(*self, has_begun_close);
                wait_interruptibly(wait_limit, [&](auto timeout) { return self->wait_until_unused(timeout); });
                if (!end_transfers.is_none() && !nb::steal(call_python(end_transfers.ptr())).is_valid()) {
                    throw nb::python_error();
                }
                without_gil([&] { self->close(); });
            },
            "end_transfers"_a.none() = nb::none(), "waits"_a = true,
            "Refuse further uses, wait until there are no uses, call `end_transfers`, and close the descriptors. If "
            "`waits` is not set, do not wait; the last use closes the descriptors. Raise EngineError (EDEADLK) if the "
            "calling thread uses the file.")
        .def_prop_ro("closed", &File::is_closed)
        .def("fileno", &File::fd_if_open, "Return the descriptor, which this object owns, or -1 if the file is closed.")
        .def("replace_after_fork", &File::replace_after_fork,
             "Return a file with the same descriptor, for a forked child.")
        .def(
            "size_bytes",
            [](const std::shared_ptr<File>& self) {
                const PythonFileUse use(self);
                return without_gil([&] { return self->size_bytes(); });
            },
            "Return the size of the file. Raise FileClosed if the file is closed.")
        .def(
            "direct", [](File& self) { return without_gil([&] { return self.direct_fd() >= 0; }); },
            "Return whether the file system supports O_DIRECT for the file; see direct_open_errno.")
        .def_prop_ro("direct_open_errno", &File::direct_errno)
        .def_prop_ro("alignment_bytes", &File::alignment_bytes)
        .def(
            "residency",
            [](File& self, std::uint64_t offset, std::uint64_t length) {
                return without_gil([&] {
                    const Residency residency = self.residency_of(offset, length);
                    return std::pair(residency.cached_pages_count, residency.pages_count);
                });
            },
            "offset"_a, "length"_a, "Return the number of cached pages of a range, and the number of its pages.");
    nb::class_<CompletionQueue>(module, "CompletionQueue",
                                "The tokens of ended jobs, which worker threads add and Python takes in batches.")
        .def(nb::new_([](bool has_event) {
                 return without_gil([&] { return std::make_shared<CompletionQueue>(has_event); });
             }),
             nb::kw_only(), "has_event"_a)
        .def("take", &CompletionQueue::take, "Remove the tokens from the queue and return them.")
        .def("fileno", &CompletionQueue::event_fd,
             "Return an eventfd that is readable while the queue has tokens, or -1 without `has_event`.");
    nb::class_<Completion>(module, "Completion", "A flag that is set when a job that Python code runs itself is over.")
        .def(nb::init<>())
        .def(
            "wait", [](Completion& self, std::int64_t timeout_us) { return wait_for(self, timeout_us); },
            "timeout_us"_a = -1)
        .def("is_over", &Completion::is_over)
        .def("notify", &Completion::notify, "queue"_a, "token"_a,
             "Add the token to the queue when the job is over, or at once if the job is already over.")
        .def("end", &Completion::end);
    nb::class_<Job>(module, "Job", "The transfer of the ranges of one call.")
        .def(
            "wait", [](Job& self, std::int64_t timeout_us) { return wait_for(self.completion(), timeout_us); },
            "timeout_us"_a = -1)
        .def("is_over", &Job::is_over)
        .def("cancel", &Job::cancel, nb::call_guard<GilRelease>())
        .def("notify", &Job::notify, "queue"_a, "token"_a,
             "Add the token to the queue when the job is over, or at once if the job is already over.")
        .def("progress", [](Job& self) { return make_progress_dict(query_job(self, [&] { return self.progress(); })); })
        .def(
            "arrived", [](Job& self) { return query_job(self, [&] { return self.arrived_bytes(); }); },
            "Return for each extent the number of bytes that arrived from its beginning without a gap.");
}

void bind_engine(nb::module_& module) {
    nb::class_<ClosingEngine>(module, "Engine", "A copy engine: threads and pinned memory on one NUMA node.")
        .def(
            "__init__",
            [](ClosingEngine* self, int numa_node, std::size_t workers, std::size_t buffers, std::uint64_t chunk_bytes,
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
                without_gil([&] { return new (self) ClosingEngine(tuning, numa_node); });
            },
            nb::kw_only(), "node"_a, "workers_count"_a, "buffers_count"_a, "chunk_bytes"_a, "first_chunk_bytes"_a,
            "coalesced_bytes"_a, "coalesced_count"_a, "slice_bytes"_a, "polls_device"_a, "direct_readers_count"_a,
            "direct_read_bytes"_a, "direct_writers_count"_a, "direct_write_bytes"_a, "buffered_writers_count"_a)
        .def(
            "submit",
            [](ClosingEngine& self, bool write, int access, int device, const nb::list& files, nb::handle flat_extents,
               int flags, bool durable, nb::handle transfer) {
                std::vector<Extent> extents = unpack_extents(flat_extents, nb::len(files));
                std::vector<PythonFileUse> uses; // These keep the files open until the job has its own uses.
                Engine& engine = self.engine;
                auto job = std::make_shared<Job>(write ? Direction::write : Direction::read,
                                                 static_cast<Access>(access), device, convert_files(files, flags, uses),
                                                 std::move(extents), engine.tuning(), write && durable);
                nb::object job_object = nb::cast(job);
                try {
                    if (!transfer.is_none()) {
                        job->notify(ended_jobs, begin_transfer(transfer, job_object));
                    }
                    if (!wait_interruptibly(no_limit, [&](auto timeout) { return engine.submit(job, timeout); })) {
                        raise({.api = Api::kernel, .operation = "submit", .number = ECANCELED, .name = {}});
                    }
                } catch (...) {
                    job->cancel(); // Otherwise the close of its files would wait for the job.
                    throw;
                }
                return job_object;
            },
            "write"_a, "access"_a, "device"_a, "files"_a, "extents"_a, "flags"_a, "durable"_a, "transfer"_a.none(),
            nb::sig("def submit(self, write: bool, access: int, device: int, files: list, extents: object, flags: int, "
                    "durable: bool, transfer: object) -> Job"),
            "Queue a job and return it. Store it in the attribute `job` of the transfer, and the transfer in "
            "`in_progress`.")
        .def(
            "transfer_small",
            [](ClosingEngine& self, bool write, std::shared_ptr<File> file, std::uint64_t offset, std::uint64_t address,
               std::uint64_t length, int device) {
                const bool is_length_allowed = device == host_memory || length <= Engine::small_bytes_max;
                if (!is_length_allowed || length > INT64_MAX || offset > INT64_MAX - length) {
                    raise({.api = Api::kernel, .operation = "transfer_small", .number = EINVAL, .name = {}});
                }
                // The use ends before the thread takes the GIL again, which it may never get; see GilRelease.
                const std::optional<IoResult> result = without_gil([&]() -> std::optional<IoResult> {
                    const FileUse use(std::move(file));
                    if (!use.file()) {
                        return std::nullopt;
                    }
                    return self.engine.transfer_small(write ? Direction::write : Direction::read, *use.file(), offset,
                                                      address, length, device);
                });
                if (!result) {
                    raise_closed(0);
                }
                return nb::make_tuple(result->bytes,
                                      result->failure ? nb::object(make_failure_tuple(*result->failure)) : nb::none());
            },
            "write"_a, "file"_a, "offset"_a, "address"_a, "length"_a, "device"_a)
        .def(
            "close",
            [](ClosingEngine& self) {
                const EngineClosing closing(self.engine);
                const auto wait = [&](auto timeout) { return self.engine.wait_until_idle(timeout); };
                if (!wait_interruptibly(no_limit, wait)) {
                    return false;
                }
                without_gil([&] { self.engine.close(); });
                return true;
            },
            "Refuse further jobs, wait for the queued jobs, end the threads and free the memory. In a child process "
            "that a signal handler has forked, do nothing and return False.");
    nb::class_<HostMemory>(
        module, "HostMemory",
        "The memory of a contiguous host buffer. The buffer cannot be freed or resized until release().")
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
    const auto module_name = nb::cast<std::string>(module.attr("__name__"));
    const auto add_attribute = [&](const char* name, PyObject* object) {
        if (object == nullptr) {
            throw nb::python_error();
        }
        module.attr(name) = nb::handle(object);
        return object;
    };
    const auto add_error_class = [&](const char* name) {
        return add_attribute(name, PyErr_NewException((module_name + "." + name).c_str(), PyExc_Exception, nullptr));
    };
    ge::engine_error_class = add_error_class("EngineError");
    ge::file_closed_class = add_error_class("FileClosed");
    ge::transfers_in_progress = add_attribute("in_progress", PyDict_New());
    ge::transfers_ended = add_attribute("ended", PyDict_New());
    ge::job_attribute = PyUnicode_InternFromString("job");
    ge::token_attribute = PyUnicode_InternFromString("token");
    module.def("collect_ended", &ge::collect_ended,
               "Add the transfers of `in_progress` whose job is over to `ended`. Return whether `ended` is not empty.");
    module.def(
        "start",
        [](nb::handle transfer, nb::handle job, const nb::callable& function, nb::handle argument) {
            ge::begin_transfer(transfer, job);
            function(argument);
        },
        "transfer"_a, "job"_a, "function"_a, "argument"_a,
        "Store the job in the transfer and the transfer in `in_progress`, and call the function, which starts the "
        "job.");
    module.def(
        "residency",
        [](int fd, std::uint64_t offset, std::uint64_t length) {
            const ge::Residency residency = ge::without_gil([&] { return ge::query_residency(fd, offset, length); });
            return std::pair(residency.cached_pages_count, residency.pages_count);
        },
        "fd"_a, "offset"_a, "length"_a, "Return the number of cached pages of a range, and the number of its pages.");
    // keep_forever adds a reference that is never dropped. A forked child calls it for an object whose resources belong
    // to the parent, so that the child never destroys the object.
    module.def(
        "keep_forever",
        [](nb::handle object) {
            nb::set_leak_warnings(false);
            object.inc_ref();
        },
        "object"_a);
    module.def(
        "ignore_leaks", [] { nb::set_leak_warnings(false); },
        "Do not report the objects that still exist when the interpreter ends.");
    module.def(
        "totals", [] { return std::pair(ge::totals.transfers_count.load(), ge::totals.arrived_bytes.load()); },
        "Return the number of transfers of this process that are over, and the number of bytes that they moved.");
    module.def("node_of_device", &ge::node_of_device, "bus_id"_a, "sysfs"_a = "/sys");
    ge::bind_jobs(module);
    ge::bind_engine(module);
    module.attr("ended_jobs") = nb::cast(ge::ended_jobs);
}
