// Staging memory of the copy engine: host memory that devices copy from and to. The engine maps it once, and pins it
// when a device is first used.
#pragma once

#include <cstddef>
#include <mutex>

namespace gdrkit::engine {

// One mapping of host memory.
class Staging {
public:
    // `numa_node` is the NUMA node of the pages, -1 for any. Throws Error (ENOMEM).
    Staging(std::size_t length, int numa_node);
    ~Staging();
    Staging(const Staging&) = delete;
    Staging& operator=(const Staging&) = delete;

    std::byte* data() const noexcept { return data_; }
    std::size_t length() const noexcept { return length_; }
    // Registers the memory with the driver for all devices. A context must be current. Throws Error.
    void pin();
    // Unregisters the memory. A context must be current, and no copy may be in progress.
    void unpin() noexcept;

private:
    std::byte* data_ = nullptr;
    std::size_t length_ = 0;
    std::mutex pin_mutex_;
    bool is_pinned_ = false;
};

} // namespace gdrkit::engine
