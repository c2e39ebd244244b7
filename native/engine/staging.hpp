// Host memory that devices copy from and to: mapped once, pinned at the first device, used again and again.
#pragma once

#include <cstddef>
#include <mutex>

namespace gdrkit::engine {

class Staging {
public:
    // Throws Error (ENOMEM). `node` is the NUMA node to take pages from, -1 for any.
    Staging(std::size_t length, int node);
    ~Staging();
    Staging(const Staging&) = delete;
    Staging& operator=(const Staging&) = delete;

    std::byte* at() const noexcept { return at_; }
    std::size_t length() const noexcept { return length_; }
    // Registers it with the driver for all devices; the context of one must be current. Throws Error.
    void pin();
    // Takes that back; the context must be current. Nothing may be under way.
    void unpin() noexcept;

private:
    std::byte* at_ = nullptr;
    std::size_t length_ = 0;
    std::mutex pinning_;
    bool pinned_ = false;
};

} // namespace gdrkit::engine
