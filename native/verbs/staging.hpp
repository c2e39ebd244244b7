// Staging memory for RDMA. It is registered once with several devices, and divided into buffers of two sizes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "verbs/device.hpp"

namespace gdrkit::verbs {

class Staging {
public:
    // Size and number of the small buffers and of the large buffers.
    struct Layout {
        std::size_t small_bytes, small_count;
        std::size_t large_bytes, large_count;
    };
    // A buffer of the staging memory. `data` is null if take() found no free buffer.
    struct Buffer {
        std::byte* data = nullptr;
        std::size_t size_bytes = 0;
        std::uint32_t index = 0; // Index among all buffers, small ones first. release() needs it.
        explicit operator bool() const noexcept { return data != nullptr; }
    };

    Staging(std::span<Device* const> devices, const Layout& layout);
    Staging(const Staging&) = delete;
    Staging& operator=(const Staging&) = delete;
    ~Staging();

    // Returns a free small buffer if `size_bytes` fit into it, otherwise a free large buffer. `data` is null if
    // `size_bytes` do not fit into a large buffer, or no buffer of the chosen kind is free: a large buffer does not
    // replace a small one. The buffer that was released last is used first, because its memory is still in the
    // processor cache.
    Buffer take(std::size_t size_bytes);
    void release(const Buffer& buffer);
    std::size_t large_bytes() const noexcept { return layout_.large_bytes; }
    // Returns the lkey of the memory on the device with this index in the constructor's list.
    std::uint32_t local_key(std::size_t device_index) const { return regions_.at(device_index)->lkey; }

private:
    Layout layout_;
    std::size_t size_bytes_;
    std::byte* memory_;
    std::vector<Owned<ibv_mr>> regions_;
    std::vector<std::uint32_t> free_small_indices_, free_large_indices_;
};

} // namespace gdrkit::verbs
