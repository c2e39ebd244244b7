// The Python class ioring: prepares, submits and awaits operations, and keeps their memory alive until they complete.
#include "hf3fs_ioring.hpp"

#include "common/gil.hpp"
#include "hf3fs_errors.hpp"

#include <nanobind/stl/chrono.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <cerrno>

namespace gdrkit::usrbio {

using namespace nb::literals;

namespace {

// Longest wait in one call of hf3fs_wait_for_ios. Between two calls, Python handles signals (KeyboardInterrupt).
constexpr std::chrono::milliseconds wait_step_max{100};
// Largest number of completions that one call of hf3fs_wait_for_ios returns.
constexpr int completions_per_call_max = 1024;

// Returns a deadline of CLOCK_REALTIME, as hf3fs_wait_for_ios requires. CLOCK_REALTIME can be set during a wait, so all
// other deadlines in this file use a steady clock, and only waits of at most `wait_step_max` are converted.
std::timespec make_realtime_deadline(std::chrono::nanoseconds wait_duration) {
    std::timespec deadline{};
    clock_gettime(CLOCK_REALTIME, &deadline);
    const auto nanoseconds = deadline.tv_nsec + wait_duration.count();
    deadline.tv_sec += nanoseconds / 1'000'000'000;
    deadline.tv_nsec = nanoseconds % 1'000'000'000;
    return deadline;
}

} // namespace

Ioring::Ioring(const std::string& mount, int entries, bool for_read, int io_depth, std::optional<int> priority,
               std::optional<int> timeout_ms, int numa, std::uint64_t flags) {
    if (priority.value_or(0) != 0 && flags != 0) {
        raise_misuse_error(
            "a ring cannot have both a priority and flags, because no function of hf3fs takes both: omit one of them",
            "bad_argument");
    }
    const bool has_priority = priority.value_or(0) != 0;
    auto iorcreate3 = has_priority ? GDRKIT_REQUIRE(hf3fs_iorcreate3) : nullptr;
    auto iorcreate4 = has_priority ? nullptr : GDRKIT_REQUIRE(hf3fs_iorcreate4);
    GDRKIT_REQUIRE(hf3fs_iordestroy);
    GDRKIT_REQUIRE(hf3fs_io_entries);
    int status = 0;
    {
        const GilRelease release;
        status =
            has_priority
                ? iorcreate3(&ior_, mount.c_str(), entries, for_read, io_depth, *priority, timeout_ms.value_or(0), numa)
                : iorcreate4(&ior_, mount.c_str(), entries, for_read, io_depth, timeout_ms.value_or(0), numa, flags);
    }
    if (status < 0) {
        nb::dict error_arguments;
        error_arguments["hf3fs_mount_point"] = mount;
        error_arguments["entries"] = entries;
        error_arguments["timeout_ms"] = timeout_ms.value_or(0);
        raise_call_error(has_priority ? "hf3fs_iorcreate3" : "hf3fs_iorcreate4", -status, error_arguments);
    }
    is_open_ = true;
    // Reserve memory now, so that prepare() cannot fail after it has prepared an operation.
    operations_.reserve(static_cast<std::size_t>(std::max(functions().hf3fs_io_entries(&ior_), 0)) + 1);
}

Ioring::~Ioring() {
    if (!is_open_) {
        return;
    }
    nb::error_scope saved_error;
    close_ring();
    if (outstanding_count_ != 0) {
        leak_operations();
        const auto warn = [] {
            return PyErr_WarnEx(
                PyExc_ResourceWarning,
                "an ioring was deleted with outstanding operations; their memory is not freed. Call destroy() first",
                1);
        };
        if (sleep_if_interpreter_ends(warn) != 0) {
            PyErr_WriteUnraisable(nullptr);
        }
    }
}

void Ioring::check_open() const {
    if (!is_open_) {
        raise_misuse_error("the ioring is destroyed", "closed");
    }
}

void Ioring::prepare(nb::handle iov, bool read, int fd, std::size_t offset, nb::object userdata) {
    check_open();
    auto prep_io = GDRKIT_REQUIRE(hf3fs_prep_io);
    nb::object iovec_object = nb::borrow(iov);
    Iovec* iovec = nb::cast<Iovec*>(iovec_object);
    iovec->memory->check_open();
    if (iovec->is_outstanding) {
        // An iovec stores the result of one operation, so this second operation needs another iovec of the same memory.
        Iovec duplicate = iovec->slice(0, iovec->length);
        iovec_object = nb::cast(std::move(duplicate));
        iovec = nb::cast<Iovec*>(iovec_object);
    }
    iovec->memory->begin_use(IovecMemory::Use::operation); // complete() ends the use.
    const std::uint64_t ticket = ++last_ticket_;
    const int index = prep_io(&ior_, &iovec->memory->iov(), read, iovec->begin(), fd, offset, iovec->length,
                              reinterpret_cast<const void*>(ticket));
    if (index < 0) {
        iovec->memory->end_use(IovecMemory::Use::operation);
        nb::dict error_arguments;
        error_arguments["read"] = read;
        error_arguments["fd"] = fd;
        error_arguments["file_offset_bytes"] = offset;
        error_arguments["iov_offset_bytes"] = iovec->offset;
        error_arguments["length_bytes"] = iovec->length;
        raise_call_error("hf3fs_prep_io", -index, error_arguments);
    }
    iovec->is_outstanding = true;
    operations_.emplace(ticket, Operation{std::move(iovec_object), std::move(userdata), index});
    ++outstanding_count_;
    has_unsubmitted_operations_ = true;
}

void Ioring::submit() {
    check_open();
    auto submit_ios = GDRKIT_REQUIRE(hf3fs_submit_ios);
    const int status = submit_ios(&ior_);
    if (status < 0) {
        raise_call_error("hf3fs_submit_ios", -status);
    }
    has_unsubmitted_operations_ = false;
}

void Ioring::complete(const Cqe& cqe) {
    const auto operation_entry = operations_.find(reinterpret_cast<std::uint64_t>(cqe.userdata));
    if (operation_entry == operations_.end() || operation_entry->second.index != cqe.index) {
        // The completion belongs to no outstanding operation, or is a duplicate.
        nb::dict error_arguments;
        error_arguments["index"] = cqe.index;
        raise_call_error("hf3fs_wait_for_ios", EPROTO, error_arguments);
    }
    Operation operation = std::move(operation_entry->second);
    operations_.erase(operation_entry);
    Iovec* iovec = nb::cast<Iovec*>(operation.iovec);
    iovec->result = cqe.result;
    iovec->userdata = std::move(operation.userdata);
    iovec->is_outstanding = false;
    iovec->memory->end_use(IovecMemory::Use::operation);
    --outstanding_count_;
    completed_iovecs_.push_back(std::move(operation.iovec));
}

std::size_t Ioring::reap(int results_max, int results_min, std::optional<Clock::time_point> deadline) {
    auto wait_for_ios = GDRKIT_REQUIRE(hf3fs_wait_for_ios);
    std::array<Cqe, completions_per_call_max> cqes;
    const int completions_max = std::min(results_max, completions_per_call_max);
    const int completions_min = std::clamp(results_min, 0, completions_max);
    std::chrono::nanoseconds wait_duration =
        completions_min > 0 ? std::chrono::nanoseconds{wait_step_max} : std::chrono::nanoseconds{0};
    if (deadline) {
        wait_duration =
            std::clamp(std::chrono::nanoseconds{*deadline - Clock::now()}, std::chrono::nanoseconds{0}, wait_duration);
    }
    const std::timespec realtime_deadline = make_realtime_deadline(wait_duration);
    int completion_count = 0;
    ++waiter_count_;
    {
        const GilRelease release;
        completion_count = wait_for_ios(&ior_, cqes.data(), completions_max, completions_min, &realtime_deadline);
    }
    --waiter_count_;
    if (completion_count < 0) {
        raise_call_error("hf3fs_wait_for_ios", -completion_count);
    }
    for (int index = 0; index < completion_count; ++index) {
        complete(cqes[static_cast<std::size_t>(index)]);
    }
    return static_cast<std::size_t>(completion_count);
}

nb::list Ioring::wait(int results_max, int results_min, Timeout timeout) {
    check_open();
    if (results_max < 0 || results_min < 0) {
        raise_misuse_error("max_results and min_results must be 0 or more", "bad_argument");
    }
    const auto count_min = static_cast<std::size_t>(results_min);
    const auto count_max = static_cast<std::size_t>(std::max({results_max, results_min, 1}));
    std::optional<Clock::time_point> deadline;
    if (timeout) {
        deadline = Clock::now() + std::max(*timeout, std::chrono::microseconds{0});
    }
    while (completed_iovecs_.size() < count_max) {
        const int missing_count = static_cast<int>(count_min - std::min(count_min, completed_iovecs_.size()));
        std::size_t reaped_count = 0;
        try {
            reaped_count = reap(static_cast<int>(count_max - completed_iovecs_.size()), missing_count, deadline);
        } catch (nb::python_error&) {
            // First return the completions that were reaped before. The next call fails again and raises the error.
            if (completed_iovecs_.empty()) {
                throw;
            }
            break;
        }
        if (PyErr_CheckSignals() != 0) {
            throw nb::python_error(); // The next call returns the completions that were reaped.
        }
        if (reaped_count == 0 && (missing_count == 0 || (deadline && Clock::now() >= *deadline))) {
            break;
        }
    }
    nb::list results;
    while (results.size() < count_max && !completed_iovecs_.empty()) {
        results.append(std::move(completed_iovecs_.front()));
        completed_iovecs_.pop_front();
    }
    return results;
}

void Ioring::destroy(Timeout timeout) {
    if (!is_open_) {
        return;
    }
    if (waiter_count_ != 0) {
        raise_misuse_error(
            "another thread waits for completions of the ioring: call destroy() after that wait returned", "busy");
    }
    // Without a timeout, wait for a year, because the maximum of microseconds would overflow the sum.
    const auto deadline = Clock::now() + timeout.value_or(std::chrono::hours{24 * 365});
    if (has_unsubmitted_operations_) {
        // With some client libraries, the agent sees an operation before submit(). So submit these operations, and wait
        // for their completions below.
        submit();
    }
    while (outstanding_count_ != 0 && Clock::now() < deadline) {
        reap(completions_per_call_max, 1, deadline);
        if (PyErr_CheckSignals() != 0) {
            throw nb::python_error();
        }
    }
    close_ring();
    completed_iovecs_.clear();
    if (outstanding_count_ != 0) {
        nb::dict error_arguments;
        error_arguments["outstanding"] = outstanding_count_;
        leak_operations();
        raise_call_error("hf3fs_iordestroy", ETIMEDOUT, error_arguments);
    }
}

void Ioring::close_ring() {
    is_open_ = false;
    const GilRelease release; // The call below waits for the agent.
    functions().hf3fs_iordestroy(&ior_);
}

// Drops the outstanding operations without freeing their memory. The agent may still write to this memory at any time,
// so leaking it is safer than reusing it.
void Ioring::leak_operations() noexcept {
    for (auto& [ticket, operation] : operations_) {
        operation.iovec.release();
        operation.userdata.release();
    }
    outstanding_count_ = 0;
}

int Ioring::entries() const {
    check_open();
    return functions().hf3fs_io_entries(&ior_);
}

int Ioring::traverse(visitproc visit, void* arg) const noexcept {
    for (const auto& [ticket, operation] : operations_) {
        Py_VISIT(operation.userdata.ptr());
    }
    for (const nb::object& iovec : completed_iovecs_) {
        Py_VISIT(iovec.ptr());
    }
    return 0;
}

void Ioring::clear() noexcept {
    for (auto& [ticket, operation] : operations_) {
        operation.userdata.reset();
    }
    // Empty completed_iovecs_ before the iovecs are destroyed, because their destruction may call Python code.
    std::deque<nb::object> removed_iovecs;
    removed_iovecs.swap(completed_iovecs_);
}

namespace {

int traverse(PyObject* self, visitproc visit, void* arg) noexcept {
    Py_VISIT(Py_TYPE(self));
    return nb::inst_ready(self) ? nb::inst_ptr<Ioring>(self)->traverse(visit, arg) : 0;
}

int clear(PyObject* self) noexcept {
    if (nb::inst_ready(self)) {
        nb::inst_ptr<Ioring>(self)->clear();
    }
    return 0;
}

PyType_Slot ioring_type_slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {0, nullptr},
};

} // namespace

void bind_ioring(nb::module_& module) {
    nb::class_<Ioring>(module, "ioring", nb::type_slots(ioring_type_slots))
        .def(nb::init<const std::string&, int, bool, int, std::optional<int>, std::optional<int>, int, std::uint64_t>(),
             "hf3fs_mount_point"_a, "entries"_a, "for_read"_a = true, "io_depth"_a = 0, "priority"_a = nb::none(),
             "timeout"_a = nb::none(), "numa"_a = -1, "flags"_a = 0)
        .def_static(
            "size_for_entries", [](int entries) { return GDRKIT_REQUIRE(hf3fs_ior_size)(entries); }, "entries"_a)
        .def_prop_ro("entries", &Ioring::entries)
        .def_prop_ro("outstanding", &Ioring::outstanding)
        .def_prop_ro("closed", [](const Ioring& self) { return !self.is_open(); })
        .def(
            "prepare",
            [](nb::object self, nb::handle iov, bool read, int fd, std::size_t off, nb::object userdata) {
                nb::cast<Ioring&>(self).prepare(iov, read, fd, off, std::move(userdata));
                return self;
            },
            "iov"_a, "read"_a, "fd"_a, "off"_a, "userdata"_a = nb::none())
        .def("submit",
             [](nb::object self) {
                 nb::cast<Ioring&>(self).submit();
                 return self;
             })
        .def("wait", &Ioring::wait, nb::kw_only(), "max_results"_a = 0, "min_results"_a = 0, "timeout"_a = nb::none())
        .def("destroy", &Ioring::destroy, nb::kw_only(),
             "timeout"_a = std::chrono::microseconds{std::chrono::seconds{10}})
        .def("__enter__", [](nb::object self) { return self; })
        .def(
            "__exit__",
            [](Ioring& self, nb::handle, nb::handle, nb::handle) {
                self.destroy(std::chrono::microseconds{std::chrono::seconds{10}});
            },
            "kind"_a.none(), "error"_a.none(), "trace"_a.none());
}

} // namespace gdrkit::usrbio
