// The Python class ioring: a ring of hf3fs (hf3fs_ior), by which the agent executes reads or writes.
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

// Every method requires the GIL, and releases the GIL while the library waits.
class Ioring {
public:
    using Timeout = std::optional<std::chrono::microseconds>;

    Ioring(const std::string& mount, int entries, bool for_read, int io_depth, std::optional<int> priority,
           std::optional<int> timeout_ms, int numa, std::uint64_t flags);
    Ioring(const Ioring&) = delete;
    Ioring& operator=(const Ioring&) = delete;
    ~Ioring();

    // Prepares one read (`read` true) or write between `iovec` and the file `fd`, from the byte `offset` of the file
    // on. The agent executes the operation after submit().
    void prepare(nb::handle iovec, bool read, int fd, std::size_t offset, nb::object userdata);
    void submit();
    // Waits until `results_min` operations have completed or `timeout` has passed. Returns the iovecs of completed
    // operations in the order of completion, at most the larger one of `results_max` and `results_min`, and at most
    // one if both are 0.
    nb::list wait(int results_max, int results_min, Timeout timeout);
    // Waits for the outstanding operations, then destroys the ring. If operations do not complete within `timeout`,
    // raises an error. Their memory is then never freed, because the agent may still access it.
    void destroy(Timeout timeout);

    int entries() const;
    std::size_t outstanding() const noexcept { return outstanding_count_; }
    bool is_open() const noexcept { return is_open_; }
    // Python's garbage collector calls these functions: traverse() visits the objects that this ring refers to, and
    // clear() drops the references that may be part of a cycle.
    int traverse(visitproc visit, void* argument) const noexcept;
    void clear() noexcept;

private:
    using Clock = std::chrono::steady_clock;

    struct Operation {
        nb::object iovec;
        nb::object userdata;
        int index; // Index of the operation in the library.
    };

    void check_open() const; // Raises an error if the ring is destroyed.
    // Calls hf3fs_wait_for_ios once, moves up to `results_max` completions to completed_iovecs_ and returns their
    // number. If `results_min` is above 0, the call waits until `deadline`, at most 100 ms.
    std::size_t reap(int results_max, int results_min, std::optional<Clock::time_point> deadline);
    // Stores the result of an operation in its iovec, and moves this iovec to completed_iovecs_.
    void complete(const Cqe& cqe);
    // Destroys the ring in the library, without waiting for operations.
    void close_ring();
    void leak_operations() noexcept;

    Ior ior_{};
    bool is_open_ = false;
    bool has_unsubmitted_operations_ = false; // True if an operation was prepared after the last submit().
    int waiter_count_ = 0;              // Number of threads that wait in the library for completions of this ring.
    std::size_t outstanding_count_ = 0; // Number of prepared or submitted operations that have not completed.
    std::uint64_t last_ticket_ = 0;     // Ticket of the last prepared operation; see operations_.
    // Outstanding operations by ticket: a unique number that prepare() passes to the library as userdata. The library's
    // index does not identify an operation. After the library has returned a completion, another thread may prepare an
    // operation with the same index before the thread that waited gets the GIL.
    std::unordered_map<std::uint64_t, Operation> operations_;
    std::deque<nb::object> completed_iovecs_; // Iovecs of completed operations that wait() has not returned yet.
};

void bind_ioring(nb::module_& module);

} // namespace gdrkit::usrbio
