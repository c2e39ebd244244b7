// A reference for the benchmark of the I/O path (path_bench.cpp): reads of the same cached file by io_uring. The code
// makes the system calls itself, because many systems do not have liburing.
#pragma once

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace gdrkit::usrbio::bench {

// Prints the failed call with the text of errno, and exits.
[[noreturn]] inline void exit_with_errno(const char* call) {
    std::perror(call);
    std::exit(1);
}

// Reads of a file by io_uring: `depth` reads of `read_bytes` each are in flight at a time. Each read in flight has one
// buffer, and a later read uses the buffer again. The usrbio reads (path_reads.hpp) have buffers of the same total
// size.
class UringReads {
public:
    UringReads(int file_fd, unsigned depth, std::size_t read_bytes)
        : file_fd_(file_fd), depth_(depth), read_bytes_(read_bytes) {
        buffers_ = static_cast<std::uint8_t*>(std::aligned_alloc(4096, depth * read_bytes));
        if (buffers_ == nullptr) {
            exit_with_errno("aligned_alloc");
        }
        io_uring_params parameters{};
        ring_fd_ = static_cast<int>(syscall(SYS_io_uring_setup, depth, &parameters));
        if (ring_fd_ < 0) { // is_available() returns false.
            return;
        }
        auto* const sq_ring =
            map_ring_area(parameters.sq_off.array + parameters.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING);
        auto* const cq_ring =
            map_ring_area(parameters.cq_off.cqes + parameters.cq_entries * sizeof(io_uring_cqe), IORING_OFF_CQ_RING);
        sqes_ = reinterpret_cast<io_uring_sqe*>(
            map_ring_area(parameters.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES));
        sq_tail_ = reinterpret_cast<std::atomic<unsigned>*>(sq_ring + parameters.sq_off.tail);
        sq_mask_ = *reinterpret_cast<unsigned*>(sq_ring + parameters.sq_off.ring_mask);
        sq_array_ = reinterpret_cast<unsigned*>(sq_ring + parameters.sq_off.array);
        cq_head_ = reinterpret_cast<std::atomic<unsigned>*>(cq_ring + parameters.cq_off.head);
        cq_tail_ = reinterpret_cast<std::atomic<unsigned>*>(cq_ring + parameters.cq_off.tail);
        cq_mask_ = *reinterpret_cast<unsigned*>(cq_ring + parameters.cq_off.ring_mask);
        cqes_ = reinterpret_cast<io_uring_cqe*>(cq_ring + parameters.cq_off.cqes);
        for (unsigned buffer_index = 0; buffer_index < depth; ++buffer_index) {
            free_buffer_indices_.push_back(buffer_index);
        }
    }
    ~UringReads() {
        if (ring_fd_ >= 0) {
            ::close(ring_fd_);
        }
        std::free(buffers_);
    }
    UringReads(const UringReads&) = delete;
    UringReads& operator=(const UringReads&) = delete;

    // Returns whether io_uring can be used. Some kernels and containers do not allow it.
    bool is_available() const { return ring_fd_ >= 0; }

    // Submits reads until `depth` are in flight, each at the offset that next_offset() returns. Then waits for at least
    // `completions_min` completions and returns the number of completions.
    template <typename NextOffset> unsigned run_step(unsigned completions_min, NextOffset next_offset) {
        unsigned submit_count = 0;
        for (; !free_buffer_indices_.empty(); ++submit_count) {
            add_read(free_buffer_indices_.back(), next_offset());
            free_buffer_indices_.pop_back();
        }
        return submit_and_wait(submit_count, completions_min);
    }
    // Waits for all reads in flight and returns their number.
    unsigned drain() {
        const auto in_flight_count = static_cast<unsigned>(depth_ - free_buffer_indices_.size());
        return in_flight_count == 0 ? 0 : submit_and_wait(0, in_flight_count);
    }

private:
    // Maps one of the three memory areas of the io_uring. `area_offset`: IORING_OFF_SQ_RING, IORING_OFF_CQ_RING or
    // IORING_OFF_SQES.
    std::uint8_t* map_ring_area(std::size_t size_bytes, std::uint64_t area_offset) const {
        void* const memory = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring_fd_,
                                  static_cast<off_t>(area_offset));
        if (memory == MAP_FAILED) {
            exit_with_errno("mmap of io_uring");
        }
        return static_cast<std::uint8_t*>(memory);
    }
    void add_read(unsigned buffer_index, std::uint64_t file_offset) {
        const unsigned tail = sq_tail_->load(std::memory_order_relaxed);
        io_uring_sqe& sqe = sqes_[tail & sq_mask_];
        sqe = {};
        sqe.opcode = IORING_OP_READ;
        sqe.fd = file_fd_;
        sqe.addr = reinterpret_cast<std::uint64_t>(buffers_ + buffer_index * read_bytes_);
        sqe.len = static_cast<unsigned>(read_bytes_);
        sqe.off = file_offset;
        sqe.user_data = buffer_index;
        sq_array_[tail & sq_mask_] = tail & sq_mask_;
        sq_tail_->store(tail + 1, std::memory_order_release);
    }
    // Calls io_uring_enter, which submits `submit_count` reads and waits for at least `completions_min` completions.
    // Returns the number of completions.
    unsigned submit_and_wait(unsigned submit_count, unsigned completions_min) {
        if (syscall(SYS_io_uring_enter, ring_fd_, submit_count, completions_min, IORING_ENTER_GETEVENTS, nullptr, 0) <
            0) {
            exit_with_errno("io_uring_enter");
        }
        unsigned completed_count = 0;
        unsigned head = cq_head_->load(std::memory_order_relaxed);
        for (; head != cq_tail_->load(std::memory_order_acquire); ++head, ++completed_count) {
            const io_uring_cqe& cqe = cqes_[head & cq_mask_];
            if (cqe.res != static_cast<int>(read_bytes_)) {
                std::fprintf(stderr, "io_uring: a read failed or was short: result %d\n", cqe.res);
                std::exit(1);
            }
            free_buffer_indices_.push_back(static_cast<unsigned>(cqe.user_data));
        }
        cq_head_->store(head, std::memory_order_release);
        return completed_count;
    }

    const int file_fd_;
    const unsigned depth_;
    const std::size_t read_bytes_;
    std::uint8_t* buffers_ = nullptr;
    std::vector<unsigned> free_buffer_indices_;
    int ring_fd_ = -1;
    // The prefix sq_ means the submission queue of io_uring, and cq_ its completion queue.
    io_uring_sqe* sqes_ = nullptr;
    std::atomic<unsigned>*sq_tail_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
    unsigned sq_mask_ = 0, cq_mask_ = 0;
    unsigned* sq_array_ = nullptr;
    io_uring_cqe* cqes_ = nullptr;
};

} // namespace gdrkit::usrbio::bench
