// Memory that another process may cut short: who owns the file behind a mapping can truncate it, and then the next
// access here is a SIGBUS, which would end the agent. A guarded range gets zeros in that place instead and is marked.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace gdrkit::usrbio::agent {

struct GuardSlot {
    std::atomic<std::uintptr_t> begin{0}; // 0: free.
    std::atomic<std::uintptr_t> end{0};
    std::atomic<bool> hit{false};
};

class BusGuard {
public:
    // Throws std::bad_alloc when too many ranges are guarded, std::system_error when the handler cannot be installed.
    BusGuard(void* base, std::size_t length);
    ~BusGuard();
    BusGuard(const BusGuard&) = delete;
    BusGuard& operator=(const BusGuard&) = delete;

    bool hit() const noexcept { return slot_->hit.load(std::memory_order_relaxed); }

private:
    GuardSlot* slot_;
};

} // namespace gdrkit::usrbio::agent
