// Guards for mapped files that another process can truncate. An access beyond the new end raises SIGBUS, which would
// end the agent. In a guarded range, the handler replaces the missing page by zeros and marks the range.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace gdrkit::usrbio::agent {

struct GuardedRange {
    std::atomic<std::uintptr_t> begin{0}; // 0: the entry is free.
    std::atomic<std::uintptr_t> end{0};
    std::atomic<bool> is_hit{false};
};

class BusGuard {
public:
    // Throws std::bad_alloc if too many ranges are guarded, std::system_error if the handler cannot be installed.
    BusGuard(void* base, std::size_t length);
    ~BusGuard();
    BusGuard(const BusGuard&) = delete;
    BusGuard& operator=(const BusGuard&) = delete;

    bool is_hit() const noexcept { return range_->is_hit.load(std::memory_order_relaxed); }

private:
    GuardedRange* range_;
};

} // namespace gdrkit::usrbio::agent
