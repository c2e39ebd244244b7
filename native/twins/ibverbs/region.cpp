#include "ibverbs/region.hpp"

#include <cerrno>
#include <cstring>
#include <mutex>

namespace gdrkit::twin::verbs {

RegionError Region::read(std::uint64_t address, Bounce* bounce, std::size_t at, std::size_t size) {
    std::shared_lock lock(mutex_);
    if (memory_ == nullptr) {
        return RegionError::refused;
    }
    return memory_->read(address - iova, bounce, at, size) == 0 ? RegionError::none : RegionError::fault;
}

RegionError Region::write(std::uint64_t address, const Bounce& bounce, std::size_t at, std::size_t size) {
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

RegionError Region::lend(std::uint64_t address, Pipe* pipe, std::size_t size) {
    std::shared_lock lock(mutex_);
    if (memory_ == nullptr) {
        return RegionError::refused;
    }
    return pipe->lend(memory_->mapped(address - iova), size) == 0 ? RegionError::none : RegionError::fault;
}

RegionError Region::take(std::uint64_t address, Pipe* pipe, std::size_t size) {
    std::shared_lock lock(mutex_);
    if (memory_ == nullptr) {
        return RegionError::refused;
    }
    const int error = pipe->take(memory_->mapped(address - iova), size);
    return error == 0 ? RegionError::none : error == EPIPE ? RegionError::lost : RegionError::fault;
}

// The lock is held, and the memory is there.
void Region::find_mapped(std::span<iovec> parts) {
    for (iovec& part : parts) {
        part.iov_base = memory_->mapped(reinterpret_cast<std::uint64_t>(part.iov_base) - iova);
    }
}

RegionError Region::lend(std::span<iovec> parts, Pipe* pipe, std::size_t* whole) {
    std::shared_lock lock(mutex_);
    *whole = 0;
    if (memory_ == nullptr) {
        return RegionError::refused;
    }
    find_mapped(parts);
    return pipe->lend(parts, whole) == 0 ? RegionError::none : RegionError::fault;
}

RegionError Region::take(std::span<iovec> parts, Pipe* pipe, std::size_t* whole) {
    std::shared_lock lock(mutex_);
    *whole = 0;
    if (memory_ == nullptr) {
        return RegionError::refused;
    }
    find_mapped(parts);
    const int error = pipe->take(parts, whole);
    return error == 0 ? RegionError::none : error == EPIPE ? RegionError::lost : RegionError::fault;
}

RegionError Region::change(std::uint64_t address, std::uint64_t* original,
                           const std::function<std::uint64_t(std::uint64_t)>& changed) {
    // One for all regions, because two of them may lie over the same memory.
    static std::mutex* const atomics = new std::mutex;
    std::lock_guard one_at_a_time(*atomics);
    // Memory that no peer sees: what is written is what was made of what was read, nothing else.
    static Bounce* bounce = nullptr;
    if (bounce == nullptr) {
        bounce = Bounce::make(sizeof *original).release();
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
