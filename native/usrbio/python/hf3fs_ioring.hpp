// ioring: a queue of reads or of writes, shared with the agent.
#pragma once

#include "hf3fs_iovec.hpp"
#include "hf3fs_library.hpp"

#include <nanobind/nanobind.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <unordered_map>

namespace gdrkit::usrbio {

namespace nb = nanobind;

// All of it is used with Python's lock held, which is given away while the library waits.
class Ring {
public:
    using Timeout = std::optional<std::chrono::microseconds>;

    Ring(const std::string& mount, int entries, bool for_read, int io_depth, std::optional<int> priority,
         std::optional<int> timeout, int numa, std::uint64_t flags);
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;
    ~Ring();

    void prepare(nb::handle iovec, bool read, int fd, std::size_t offset, nb::object userdata);
    void submit();
    // The iovecs of finished operations, in the order in which they finished.
    nb::list wait(int results_max, int results_min, Timeout timeout);
    // Waits for what is outstanding, then gives the ring back. What did not finish in time keeps its memory for ever.
    void destroy(Timeout timeout);

    int entries() const;
    std::size_t outstanding() const noexcept { return outstanding_; }
    bool is_open() const noexcept { return open_; }
    int traverse(visitproc visit, void* argument) const noexcept;
    void clear() noexcept;

private:
    using Clock = std::chrono::steady_clock;

    struct Slot {
        nb::object iovec;
        nb::object userdata;
        int index; // The library's.
    };

    void check_open() const;
    // Moves up to `results_max` completions to finished_ and says how many; waits for one until `deadline`, in short
    // steps.
    std::size_t reap(int results_max, int results_min, std::optional<Clock::time_point> deadline);
    void finish(const Cqe& cqe);
    void give_back();
    void abandon() noexcept;

    Ior raw_{};
    bool open_ = false;
    bool unsubmitted_ = false;
    int waiting_ = 0; // Threads that are inside the library with this ring.
    std::size_t outstanding_ = 0;
    std::uint64_t tickets_ = 0;
    // What is outstanding, by its ticket: the library gives an index out again as soon as it has handed over the
    // completion, which is before the thread that waited for that has Python's lock.
    std::unordered_map<std::uint64_t, Slot> slots_;
    std::deque<nb::object> finished_; // Not handed out yet.
};

void bind_ioring(nb::module_& module);

} // namespace gdrkit::usrbio
