// What the whole path is measured beside: what the kernel does with the same cached file. io_uring by its system calls,
// since its library is nowhere near everywhere.
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

[[noreturn]] inline void give_up(const char* what) {
    std::perror(what);
    std::exit(1);
}

// Reads of one size at one depth. Its memory is as small as what is in flight, as that of the path is.
class UringReads {
public:
    UringReads(int file, unsigned depth, std::size_t bytes) : file_(file), depth_(depth), bytes_(bytes) {
        void* const taken = std::aligned_alloc(4096, depth * bytes);
        if (taken == nullptr) {
            give_up("aligned_alloc");
        }
        memory_ = static_cast<std::uint8_t*>(taken);
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
        for (unsigned slot = 0; slot < depth; ++slot) {
            free_.push_back(slot);
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

    // Not every kernel, and not every container, lets a process have one.
    bool is_there() const { return fd_ >= 0; }

    // As many as fit; next() says where the next one reads. What ended is counted.
    template <typename Next> unsigned step(unsigned least, Next next) {
        unsigned fresh = 0;
        for (; !free_.empty(); ++fresh) {
            add(free_.back(), next());
            free_.pop_back();
        }
        return wait(fresh, least);
    }
    unsigned drain() {
        const auto left = static_cast<unsigned>(depth_ - free_.size());
        return left == 0 ? 0 : wait(0, left);
    }

private:
    std::uint8_t* map(std::size_t size, std::uint64_t offset) const {
        void* const memory =
            mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, static_cast<off_t>(offset));
        if (memory == MAP_FAILED) {
            give_up("mmap of io_uring");
        }
        return static_cast<std::uint8_t*>(memory);
    }
    void add(unsigned slot, std::uint64_t offset) {
        const unsigned tail = sq_tail_->load(std::memory_order_relaxed);
        io_uring_sqe& entry = entries_[tail & sq_mask_];
        entry = {};
        entry.opcode = IORING_OP_READ;
        entry.fd = file_;
        entry.addr = reinterpret_cast<std::uint64_t>(memory_ + slot * bytes_);
        entry.len = static_cast<unsigned>(bytes_);
        entry.off = offset;
        entry.user_data = slot;
        sq_array_[tail & sq_mask_] = tail & sq_mask_;
        sq_tail_->store(tail + 1, std::memory_order_release);
    }
    unsigned wait(unsigned fresh, unsigned least) {
        if (syscall(SYS_io_uring_enter, fd_, fresh, least, IORING_ENTER_GETEVENTS, nullptr, 0) < 0) {
            give_up("io_uring_enter");
        }
        unsigned done = 0;
        unsigned head = cq_head_->load(std::memory_order_relaxed);
        for (; head != cq_tail_->load(std::memory_order_acquire); ++head, ++done) {
            const io_uring_cqe& entry = cqes_[head & cq_mask_];
            if (entry.res != static_cast<int>(bytes_)) {
                std::fprintf(stderr, "io_uring: a read answered %d\n", entry.res);
                std::exit(1);
            }
            free_.push_back(static_cast<unsigned>(entry.user_data));
        }
        cq_head_->store(head, std::memory_order_release);
        return done;
    }

    const int file_;
    const unsigned depth_;
    const std::size_t bytes_;
    std::uint8_t* memory_ = nullptr;
    std::vector<unsigned> free_;
    int fd_ = -1;
    io_uring_sqe* entries_ = nullptr;
    std::atomic<unsigned>*sq_tail_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
    unsigned sq_mask_ = 0, cq_mask_ = 0;
    unsigned* sq_array_ = nullptr;
    io_uring_cqe* cqes_ = nullptr;
};

} // namespace gdrkit::usrbio::bench
