// The kernel's reads of the same cached file, with which the benchmark compares the path. io_uring is used by system
// calls, because many systems do not have its library.
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

[[noreturn]] inline void exit_failed(const char* call) {
    std::perror(call);
    std::exit(1);
}

// Reads of one size at one depth. Like the path, it uses only as much memory as is in flight.
class UringReads {
public:
    UringReads(int file, unsigned depth, std::size_t bytes) : file_(file), depth_(depth), bytes_(bytes) {
        void* const allocated = std::aligned_alloc(4096, depth * bytes);
        if (allocated == nullptr) {
            exit_failed("aligned_alloc");
        }
        memory_ = static_cast<std::uint8_t*>(allocated);
        io_uring_params params{};
        fd_ = static_cast<int>(syscall(SYS_io_uring_setup, depth, &params));
        if (fd_ < 0) {
            return;
        }
        auto* const submission = map(params.sq_off.array + params.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING);
        auto* const completion = map(params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe), IORING_OFF_CQ_RING);
        entries_ = reinterpret_cast<io_uring_sqe*>(map(params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES));
        sq_tail_ = reinterpret_cast<std::atomic<unsigned>*>(submission + params.sq_off.tail);
        sq_mask_ = *reinterpret_cast<unsigned*>(submission + params.sq_off.ring_mask);
        sq_array_ = reinterpret_cast<unsigned*>(submission + params.sq_off.array);
        cq_head_ = reinterpret_cast<std::atomic<unsigned>*>(completion + params.cq_off.head);
        cq_tail_ = reinterpret_cast<std::atomic<unsigned>*>(completion + params.cq_off.tail);
        cq_mask_ = *reinterpret_cast<unsigned*>(completion + params.cq_off.ring_mask);
        cqes_ = reinterpret_cast<io_uring_cqe*>(completion + params.cq_off.cqes);
        for (unsigned buffer = 0; buffer < depth; ++buffer) {
            free_buffers_.push_back(buffer);
        }
    }
    ~UringReads() {
        if (fd_ >= 0) {
            ::close(fd_);
        }
        std::free(memory_);
    }
    UringReads(const UringReads&) = delete;
    UringReads& operator=(const UringReads&) = delete;

    // Some kernels and containers do not allow io_uring.
    bool is_possible() const { return fd_ >= 0; }

    // Submits reads until `depth` are in flight; next() returns the offset of each. Waits for at least `count_min`
    // completions and returns their number.
    template <typename Next> unsigned step(unsigned count_min, Next next) {
        unsigned submitted = 0;
        for (; !free_buffers_.empty(); ++submitted) {
            add(free_buffers_.back(), next());
            free_buffers_.pop_back();
        }
        return wait(submitted, count_min);
    }
    unsigned drain() {
        const auto remaining = static_cast<unsigned>(depth_ - free_buffers_.size());
        return remaining == 0 ? 0 : wait(0, remaining);
    }

private:
    std::uint8_t* map(std::size_t size, std::uint64_t offset) const {
        void* const memory =
            mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, static_cast<off_t>(offset));
        if (memory == MAP_FAILED) {
            exit_failed("mmap of io_uring");
        }
        return static_cast<std::uint8_t*>(memory);
    }
    void add(unsigned buffer, std::uint64_t offset) {
        const unsigned tail = sq_tail_->load(std::memory_order_relaxed);
        io_uring_sqe& entry = entries_[tail & sq_mask_];
        entry = {};
        entry.opcode = IORING_OP_READ;
        entry.fd = file_;
        entry.addr = reinterpret_cast<std::uint64_t>(memory_ + buffer * bytes_);
        entry.len = static_cast<unsigned>(bytes_);
        entry.off = offset;
        entry.user_data = buffer;
        sq_array_[tail & sq_mask_] = tail & sq_mask_;
        sq_tail_->store(tail + 1, std::memory_order_release);
    }
    unsigned wait(unsigned submitted, unsigned count_min) {
        if (syscall(SYS_io_uring_enter, fd_, submitted, count_min, IORING_ENTER_GETEVENTS, nullptr, 0) < 0) {
            exit_failed("io_uring_enter");
        }
        unsigned completed = 0;
        unsigned head = cq_head_->load(std::memory_order_relaxed);
        for (; head != cq_tail_->load(std::memory_order_acquire); ++head, ++completed) {
            const io_uring_cqe& entry = cqes_[head & cq_mask_];
            if (entry.res != static_cast<int>(bytes_)) {
                std::fprintf(stderr, "io_uring: a read failed or was short: result %d\n", entry.res);
                std::exit(1);
            }
            free_buffers_.push_back(static_cast<unsigned>(entry.user_data));
        }
        cq_head_->store(head, std::memory_order_release);
        return completed;
    }

    const int file_;
    const unsigned depth_;
    const std::size_t bytes_;
    std::uint8_t* memory_ = nullptr;
    std::vector<unsigned> free_buffers_;
    int fd_ = -1;
    io_uring_sqe* entries_ = nullptr;
    std::atomic<unsigned>*sq_tail_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
    unsigned sq_mask_ = 0, cq_mask_ = 0;
    unsigned* sq_array_ = nullptr;
    io_uring_cqe* cqes_ = nullptr;
};

} // namespace gdrkit::usrbio::bench
