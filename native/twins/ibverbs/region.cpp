// Implements access to memory regions. A shared lock during each access makes deregistration wait for it.

#include "ibverbs/region.hpp"

#include <cerrno>
#include <cstring>
#include <mutex>

namespace gdrkit::twin::verbs {

RegionError Region::read(std::uint64_t address, BounceBuffer* bounce, std::size_t at, std::size_t size) {
    std::shared_lock lock(mutex_);
    if (memory_ == nullptr) {
        return RegionError::refused;
    }
    return memory_->read(address - iova, bounce, at, size) == 0 ? RegionError::none : RegionError::fault;
}

RegionError Region::write(std::uint64_t address, const BounceBuffer& bounce, std::size_t at, std::size_t size) {
    std::shared_lock lock(mutex_);
    if (memory_ == nullptr) {
        return RegionError::refused;
    }
    return memory_->write(address - iova, bounce, at, size) == 0 ? RegionError::none : RegionError::fault;
}

bool Region::mapped() {
    std::shared_lock lock(mutex_);
    return memory_ != nullptr && memory_->mapped(0) != nullptr;
}

RegionError Region::splice_to(std::uint64_t address, Pipe* pipe, std::size_t size) {
    std::shared_lock lock(mutex_);
    if (memory_ == nullptr) {
        return RegionError::refused;
    }
    return pipe->splice_in(memory_->mapped(address - iova), size) == 0 ? RegionError::none : RegionError::fault;
}

RegionError Region::read_from(std::uint64_t address, Pipe* pipe, std::size_t size) {
    std::shared_lock lock(mutex_);
    if (memory_ == nullptr) {
        return RegionError::refused;
    }
    const int error = pipe->read(memory_->mapped(address - iova), size);
    return error == 0 ? RegionError::none : error == EPIPE ? RegionError::lost : RegionError::fault;
}

// Replace region addresses by mapped addresses. The caller holds the lock and has checked memory_.
void Region::find_mapped(std::span<iovec> parts) {
    for (iovec& part : parts) {
        part.iov_base = memory_->mapped(reinterpret_cast<std::uint64_t>(part.iov_base) - iova);
    }
}

RegionError Region::splice_to(std::span<iovec> parts, Pipe* pipe, std::size_t* succeeded) {
    std::shared_lock lock(mutex_);
    *succeeded = 0;
    if (memory_ == nullptr) {
        return RegionError::refused;
    }
    find_mapped(parts);
    return pipe->splice_in(parts, succeeded) == 0 ? RegionError::none : RegionError::fault;
}

RegionError Region::read_from(std::span<iovec> parts, Pipe* pipe, std::size_t* succeeded) {
    std::shared_lock lock(mutex_);
    *succeeded = 0;
    if (memory_ == nullptr) {
        return RegionError::refused;
    }
    find_mapped(parts);
    const int error = pipe->read(parts, succeeded);
    return error == 0 ? RegionError::none : error == EPIPE ? RegionError::lost : RegionError::fault;
}

RegionError Region::atomic_update(std::uint64_t address, std::uint64_t* original,
                                  const std::function<std::uint64_t(std::uint64_t)>& changed) {
    // One mutex for all regions, because two regions may cover the same memory.
    static std::mutex* const atomics = new std::mutex;
    std::lock_guard one_at_a_time(*atomics);
    // A private buffer, so that no peer can change the value between the read and the write.
    static BounceBuffer* bounce = nullptr;
    if (bounce == nullptr) {
        bounce = BounceBuffer::make(sizeof *original).release();
    }
    if (bounce == nullptr) {
        return RegionError::fault;
    }
    if (const RegionError error = read(address, bounce, 0, sizeof *original); error != RegionError::none) {
        return error;
    }
    std::memcpy(original, bounce->at(0), sizeof *original);
    const std::uint64_t value = changed(*original);
    std::memcpy(bounce->at(0), &value, sizeof value);
    return write(address, *bounce, 0, sizeof value);
}

void Region::revoke() {
    revoked_ = true;
    std::unique_lock lock(mutex_);
    memory_.reset();
}

} // namespace gdrkit::twin::verbs
