#include "ibverbs/region.hpp"

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

RegionError Region::change(std::uint64_t address, Bounce* bounce, std::uint64_t* original,
                           const std::function<std::uint64_t(std::uint64_t)>& changed) {
    // One for all regions, because two of them may lie over the same memory.
    static std::mutex* const atomics = new std::mutex;
    std::lock_guard one_at_a_time(*atomics);
    if (const RegionError error = read(address, bounce, 0, sizeof *original); error != RegionError::none) {
        return error;
    }
    std::memcpy(original, bounce->at(0), sizeof *original);
    const std::uint64_t value = changed(*original);
    std::memcpy(bounce->at(0), &value, sizeof value);
    return write(address, *bounce, 0, sizeof value);
}

void Region::revoke() {
    std::unique_lock lock(mutex_);
    memory_.reset();
}

} // namespace gdrkit::twin::verbs
