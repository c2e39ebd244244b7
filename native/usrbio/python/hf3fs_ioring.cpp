#include "hf3fs_ioring.hpp"

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

// How long one call of the library waits at most, so that signals are seen.
constexpr std::chrono::milliseconds step{100};
constexpr int completions_max = 1024;

// The library's deadlines are of the clock that can be set; ours are not, and are only handed over in short steps.
std::timespec from_now(std::chrono::nanoseconds wait) {
    std::timespec at{};
    clock_gettime(CLOCK_REALTIME, &at);
    const auto nanoseconds = at.tv_nsec + wait.count();
    at.tv_sec += nanoseconds / 1'000'000'000;
    at.tv_nsec = nanoseconds % 1'000'000'000;
    return at;
}

} // namespace

Ring::Ring(const std::string& mount, int entries, bool for_read, int io_depth, std::optional<int> priority,
           std::optional<int> timeout, int numa, std::uint64_t flags) {
    if (priority.value_or(0) != 0 && flags != 0) {
        raise_refused("a ring has a priority or flags: the interface of hf3fs takes both in no call", "bad_argument");
    }
    const bool with_priority = priority.value_or(0) != 0;
    auto create3 = with_priority ? GDRKIT_REQUIRE(hf3fs_iorcreate3) : nullptr;
    auto create4 = with_priority ? nullptr : GDRKIT_REQUIRE(hf3fs_iorcreate4);
    GDRKIT_REQUIRE(hf3fs_iordestroy);
    GDRKIT_REQUIRE(hf3fs_io_entries);
    int code = 0;
    {
        nb::gil_scoped_release unlocked;
        code = with_priority
                   ? create3(&raw_, mount.c_str(), entries, for_read, io_depth, *priority, timeout.value_or(0), numa)
                   : create4(&raw_, mount.c_str(), entries, for_read, io_depth, timeout.value_or(0), numa, flags);
    }
    if (code < 0) {
        nb::dict arguments;
        arguments["hf3fs_mount_point"] = mount;
        arguments["entries"] = entries;
        arguments["timeout_ms"] = timeout.value_or(0);
        raise_failed(with_priority ? "hf3fs_iorcreate3" : "hf3fs_iorcreate4", -code, arguments);
    }
    open_ = true;
    // Before anything is under way, so that keeping an operation cannot fail.
    slots_.reserve(static_cast<std::size_t>(std::max(functions().hf3fs_io_entries(&raw_), 0)) + 1);
}

Ring::~Ring() {
    if (!open_) {
        return;
    }
    nb::error_scope keep;
    give_back();
    if (outstanding_ != 0) {
        abandon();
        if (PyErr_WarnEx(PyExc_ResourceWarning,
                         "an ioring was forgotten with operations outstanding; their memory stays", 1) != 0) {
            PyErr_WriteUnraisable(nullptr);
        }
    }
}

void Ring::check_open() const {
    if (!open_) {
        raise_refused("the ioring is destroyed", "closed");
    }
}

void Ring::prepare(nb::handle given, bool read, int fd, std::size_t offset, nb::object userdata) {
    check_open();
    auto prep_io = GDRKIT_REQUIRE(hf3fs_prep_io);
    nb::object object = nb::borrow(given);
    Iovec* iovec = nb::cast<Iovec*>(object);
    iovec->memory->check_open();
    if (iovec->prepared) {
        // Two results need two places.
        Iovec second = iovec->slice(0, iovec->length);
        object = nb::cast(std::move(second));
        iovec = nb::cast<Iovec*>(object);
    }
    const std::uint64_t ticket = ++tickets_;
    const int index = prep_io(&raw_, &iovec->memory->raw(), read, iovec->begin(), fd, offset, iovec->length,
                              reinterpret_cast<const void*>(ticket));
    if (index < 0) {
        nb::dict arguments;
        arguments["read"] = read;
        arguments["fd"] = fd;
        arguments["file_offset_bytes"] = offset;
        arguments["iov_offset_bytes"] = iovec->offset;
        arguments["length_bytes"] = iovec->length;
        raise_failed("hf3fs_prep_io", -index, arguments);
    }
    iovec->prepared = true;
    ++iovec->memory->outstanding;
    slots_.emplace(ticket, Slot{std::move(object), std::move(userdata), index});
    ++outstanding_;
    unsubmitted_ = true;
}

void Ring::submit() {
    check_open();
    auto submit_ios = GDRKIT_REQUIRE(hf3fs_submit_ios);
    const int code = submit_ios(&raw_);
    if (code < 0) {
        raise_failed("hf3fs_submit_ios", -code);
    }
    unsubmitted_ = false;
}

void Ring::finish(const Cqe& cqe) {
    const auto found = slots_.find(reinterpret_cast<std::uint64_t>(cqe.userdata));
    if (found == slots_.end() || found->second.index != cqe.index) {
        // A completion of nothing, or one that comes twice.
        nb::dict arguments;
        arguments["index"] = cqe.index;
        raise_failed("hf3fs_wait_for_ios", EPROTO, arguments);
    }
    Slot slot = std::move(found->second);
    slots_.erase(found);
    Iovec* iovec = nb::cast<Iovec*>(slot.iovec);
    iovec->result = cqe.result;
    iovec->userdata = std::move(slot.userdata);
    iovec->prepared = false;
    --iovec->memory->outstanding;
    --outstanding_;
    finished_.push_back(std::move(slot.iovec));
}

std::size_t Ring::reap(int results_max, int results_min, std::optional<Clock::time_point> deadline) {
    auto wait_for_ios = GDRKIT_REQUIRE(hf3fs_wait_for_ios);
    std::array<Cqe, completions_max> cqes;
    const int room = std::min(results_max, completions_max);
    const int wanted = std::clamp(results_min, 0, room);
    std::chrono::nanoseconds wait = wanted > 0 ? std::chrono::nanoseconds{step} : std::chrono::nanoseconds{0};
    if (deadline) {
        wait = std::clamp(std::chrono::nanoseconds{*deadline - Clock::now()}, std::chrono::nanoseconds{0}, wait);
    }
    const std::timespec until = from_now(wait);
    int count = 0;
    ++waiting_;
    {
        nb::gil_scoped_release unlocked;
        count = wait_for_ios(&raw_, cqes.data(), room, wanted, &until);
    }
    --waiting_;
    if (count < 0) {
        raise_failed("hf3fs_wait_for_ios", -count);
    }
    for (int at = 0; at < count; ++at) {
        finish(cqes[static_cast<std::size_t>(at)]);
    }
    return static_cast<std::size_t>(count);
}

nb::list Ring::wait(int results_max, int results_min, Timeout timeout) {
    check_open();
    if (results_max < 0 || results_min < 0) {
        raise_refused("max_results and min_results are 0 or more", "bad_argument");
    }
    const auto least = static_cast<std::size_t>(results_min);
    const auto most = static_cast<std::size_t>(std::max({results_max, results_min, 1}));
    std::optional<Clock::time_point> deadline;
    if (timeout) {
        deadline = Clock::now() + std::max(*timeout, std::chrono::microseconds{0});
    }
    while (finished_.size() < most) {
        const int missing = static_cast<int>(least - std::min(least, finished_.size()));
        std::size_t count = 0;
        try {
            count = reap(static_cast<int>(most - finished_.size()), missing, deadline);
        } catch (nb::python_error&) {
            // What was fetched before goes to the caller first; the error comes again.
            if (finished_.empty()) {
                throw;
            }
            break;
        }
        if (PyErr_CheckSignals() != 0) {
            throw nb::python_error(); // What was fetched waits for the next call.
        }
        if (count == 0 && (missing == 0 || (deadline && Clock::now() >= *deadline))) {
            break;
        }
    }
    nb::list results;
    for (std::size_t at = 0; at < most && !finished_.empty(); ++at) {
        results.append(std::move(finished_.front()));
        finished_.pop_front();
    }
    return results;
}

void Ring::destroy(Timeout timeout) {
    if (!open_) {
        return;
    }
    if (waiting_ != 0) {
        raise_refused("another thread waits for the ioring", "busy");
    }
    const auto deadline = Clock::now() + timeout.value_or(std::chrono::hours{24 * 365});
    if (unsubmitted_) {
        submit(); // What is prepared may be under way already; only its completion says that it is not.
    }
    while (outstanding_ != 0 && Clock::now() < deadline) {
        reap(completions_max, 1, deadline);
        if (PyErr_CheckSignals() != 0) {
            throw nb::python_error();
        }
    }
    give_back();
    finished_.clear();
    if (outstanding_ != 0) {
        nb::dict arguments;
        arguments["outstanding"] = outstanding_;
        abandon();
        raise_failed("hf3fs_iordestroy", ETIMEDOUT, arguments);
    }
}

void Ring::give_back() {
    open_ = false;
    nb::gil_scoped_release unlocked; // It talks with the agent.
    functions().hf3fs_iordestroy(&raw_);
}

// Nobody can say when the other side is done with this memory: it is better lost than somebody else's.
void Ring::abandon() noexcept {
    for (auto& [ticket, slot] : slots_) {
        slot.iovec.release();
        slot.userdata.release();
    }
    outstanding_ = 0;
}

int Ring::entries() const {
    check_open();
    return functions().hf3fs_io_entries(&raw_);
}

int Ring::traverse(visitproc visit, void* arg) const noexcept {
    for (const auto& [ticket, slot] : slots_) {
        Py_VISIT(slot.userdata.ptr());
    }
    for (const nb::object& iovec : finished_) {
        Py_VISIT(iovec.ptr());
    }
    return 0;
}

void Ring::clear() noexcept {
    for (auto& [ticket, slot] : slots_) {
        slot.userdata.reset();
    }
    std::deque<nb::object> dropped;
    dropped.swap(finished_);
}

namespace {

int traverse(PyObject* self, visitproc visit, void* arg) noexcept {
    Py_VISIT(Py_TYPE(self));
    return nb::inst_ready(self) ? nb::inst_ptr<Ring>(self)->traverse(visit, arg) : 0;
}

int clear(PyObject* self) noexcept {
    if (nb::inst_ready(self)) {
        nb::inst_ptr<Ring>(self)->clear();
    }
    return 0;
}

PyType_Slot slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {0, nullptr},
};

} // namespace

void bind_ioring(nb::module_& module) {
    nb::class_<Ring>(module, "ioring", nb::type_slots(slots))
        .def(nb::init<const std::string&, int, bool, int, std::optional<int>, std::optional<int>, int, std::uint64_t>(),
             "hf3fs_mount_point"_a, "entries"_a, "for_read"_a = true, "io_depth"_a = 0, "priority"_a = nb::none(),
             "timeout"_a = nb::none(), "numa"_a = -1, "flags"_a = 0)
        .def_static(
            "size_for_entries", [](int entries) { return GDRKIT_REQUIRE(hf3fs_ior_size)(entries); }, "entries"_a)
        .def_prop_ro("entries", &Ring::entries)
        .def_prop_ro("outstanding", &Ring::outstanding)
        .def_prop_ro("closed", [](const Ring& self) { return !self.is_open(); })
        .def(
            "prepare",
            [](nb::object self, nb::handle iov, bool read, int fd, std::size_t off, nb::object userdata) {
                nb::cast<Ring&>(self).prepare(iov, read, fd, off, std::move(userdata));
                return self;
            },
            "iov"_a, "read"_a, "fd"_a, "off"_a, "userdata"_a = nb::none())
        .def("submit",
             [](nb::object self) {
                 nb::cast<Ring&>(self).submit();
                 return self;
             })
        .def("wait", &Ring::wait, nb::kw_only(), "max_results"_a = 0, "min_results"_a = 0, "timeout"_a = nb::none())
        .def("destroy", &Ring::destroy, nb::kw_only(),
             "timeout"_a = std::chrono::microseconds{std::chrono::seconds{10}})
        .def("__enter__", [](nb::object self) { return self; })
        .def(
            "__exit__",
            [](Ring& self, nb::handle, nb::handle, nb::handle) {
                self.destroy(std::chrono::microseconds{std::chrono::seconds{10}});
            },
            "kind"_a.none(), "error"_a.none(), "trace"_a.none());
}

} // namespace gdrkit::usrbio
