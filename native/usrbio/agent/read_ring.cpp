// Reads by the system calls of io_uring. This code does not use liburing, because that library is not installed
// everywhere and the agent needs only a small part of it.
#include "usrbio/agent/read_ring.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

namespace gdrkit::usrbio::agent {

bool ReadRing::open() noexcept {
    ring_ = Descriptor(static_cast<int>(syscall(SYS_io_uring_setup, reads_max, &parameters_)));
    // No feature flag reports IORING_OP_READ. IORING_FEAT_RW_CUR_POS is from the same version of the kernel (5.6).
    if (!ring_ || (parameters_.features & IORING_FEAT_RW_CUR_POS) == 0)
        return false;
    const auto map = [&](Mapping& mapping, std::size_t length, std::uint64_t offset) {
        void* const address = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring_.get(),
                                   static_cast<off_t>(offset));
        if (address != MAP_FAILED)
            mapping = {address, length};
        return address != MAP_FAILED;
    };
    const io_uring_params& parameters = parameters_;
    if (!map(submission_queue_, parameters.sq_off.array + parameters.sq_entries * sizeof(std::uint32_t),
             IORING_OFF_SQ_RING) ||
        !map(completion_queue_, parameters.cq_off.cqes + parameters.cq_entries * sizeof(io_uring_cqe),
             IORING_OFF_CQ_RING) ||
        !map(submission_entries_, parameters.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES))
        return false;
    // Position i of the submission queue always refers to entry i.
    for (std::uint32_t index = 0; index < parameters.sq_entries; ++index)
        at<std::uint32_t>(submission_queue_, parameters.sq_off.array)[index] = index;
    return true;
}

void ReadRing::close() noexcept {
    for (Mapping* const mapping : {&submission_queue_, &completion_queue_, &submission_entries_})
        if (mapping->address != nullptr) {
            munmap(mapping->address, mapping->length);
            *mapping = {};
        }
    ring_ = Descriptor();
}

bool ReadRing::read(std::span<CachedRead> reads) noexcept {
    if (!has_tried_to_open_) {
        has_tried_to_open_ = true;
        if (!open())
            close();
    }
    if (!ring_)
        return false;
    const std::atomic_ref tail(*at<std::uint32_t>(submission_queue_, parameters_.sq_off.tail));
    const std::uint32_t first_position = tail.load(std::memory_order_relaxed);
    auto* const entries = at<io_uring_sqe>(submission_entries_, 0);
    const auto count = static_cast<std::uint32_t>(reads.size());
    for (std::uint32_t index = 0; index < count; ++index) {
        const CachedRead& read = reads[index];
        io_uring_sqe& entry = entries[(first_position + index) & (parameters_.sq_entries - 1)];
        entry = {};
        entry.opcode = IORING_OP_READ;
        entry.fd = read.fd;
        entry.addr = reinterpret_cast<std::uintptr_t>(read.destination.data());
        entry.len = static_cast<std::uint32_t>(read.destination.size());
        entry.off = read.offset;
        // With this flag, the kernel executes the read during the system call, or not at all.
        entry.rw_flags = RWF_NOWAIT;
        entry.user_data = index;
    }
    tail.store(first_position + count, std::memory_order_release);
    if (!submit_and_wait(count) || take_completions(reads) != count) {
        close(); // The state of the queues is not known, so they cannot be used again.
        return false;
    }
    return true;
}

// Submits `count` entries, and waits until they are complete. Returns false if the system call fails.
bool ReadRing::submit_and_wait(std::uint32_t count) noexcept {
    for (std::uint32_t submitted_count = 0; submitted_count < count;) {
        const long result = syscall(SYS_io_uring_enter, ring_.get(), count - submitted_count, count,
                                    IORING_ENTER_GETEVENTS, nullptr, 0);
        if (result < 0 && errno != EINTR)
            return false;
        submitted_count += result < 0 ? 0 : static_cast<std::uint32_t>(result);
    }
    return true;
}

// Takes all completions from the queue and sets the results of their reads. Returns the number of completions.
std::uint32_t ReadRing::take_completions(std::span<CachedRead> reads) noexcept {
    const std::atomic_ref head(*at<std::uint32_t>(completion_queue_, parameters_.cq_off.head));
    const std::atomic_ref tail(*at<std::uint32_t>(completion_queue_, parameters_.cq_off.tail));
    const auto* const entries = at<const io_uring_cqe>(completion_queue_, parameters_.cq_off.cqes);
    const std::uint32_t begin = head.load(std::memory_order_relaxed);
    const std::uint32_t end = tail.load(std::memory_order_acquire);
    for (std::uint32_t position = begin; position != end; ++position) {
        const io_uring_cqe& entry = entries[position & (parameters_.cq_entries - 1)];
        if (entry.user_data < reads.size())
            reads[entry.user_data].result = entry.res;
    }
    head.store(end, std::memory_order_release);
    return end - begin;
}

} // namespace gdrkit::usrbio::agent
