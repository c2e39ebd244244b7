// Guards for mapped files that another process can truncate.
//
// An access to a mapped page beyond the new end of the file raises SIGBUS, which would end the agent. BusGuard installs
// a SIGBUS handler. If the address is in a guarded range, the handler maps a page of zeros in place of the missing page
// and sets `has_bus_error` of the range.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace gdrkit::usrbio::agent {

// An entry of the table of all guarded ranges, which the handler searches.
struct GuardedRange {
    std::atomic<std::uintptr_t> begin{0}; // 0: the entry is free.
    std::atomic<std::uintptr_t> end{0};
    std::atomic<bool> has_bus_error{false}; // An access in the range raised SIGBUS.
};

// Guards the range [base, base + length) while this object exists.
class BusGuard {
public:
    // Buffers may use only half of the table of guarded ranges, so that a client cannot use up the entries that the
    // rings of other clients need.
    enum class Purpose : std::uint8_t { ring, buffer };

    // Throws std::bad_alloc if too many ranges are guarded, and std::system_error if the handler cannot be installed.
    BusGuard(void* base, std::size_t length, Purpose purpose = Purpose::ring);
    ~BusGuard();
    BusGuard(const BusGuard&) = delete;
    BusGuard& operator=(const BusGuard&) = delete;

    bool has_bus_error() const noexcept { return range_->has_bus_error.load(std::memory_order_relaxed); }

private:
    GuardedRange* range_;
};

} // namespace gdrkit::usrbio::agent
