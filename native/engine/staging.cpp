#include "engine/staging.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>

#include "engine/cuda_driver.hpp"
#include "engine/place.hpp"

namespace gdrkit::engine {
namespace {

constexpr std::size_t huge_page_bytes = 2U << 20U;

std::size_t up(std::size_t value) {
    return (value + huge_page_bytes - 1) & ~(huge_page_bytes - 1);
}

} // namespace

Staging::Staging(std::size_t length, int node) : length_(up(length)) {
    // The mapping has one more huge page, so that the memory can begin at a huge page.
    const std::size_t mapped = length_ + huge_page_bytes;
    void* const found = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) {
        throw kernel_error("mmap", errno);
    }
    auto* const begin = static_cast<std::byte*>(found);
    at_ = begin + (up(reinterpret_cast<std::uintptr_t>(begin)) - reinterpret_cast<std::uintptr_t>(begin));
    if (at_ != begin) {
        munmap(begin, static_cast<std::size_t>(at_ - begin));
    }
    if (const std::size_t rest = mapped - length_ - static_cast<std::size_t>(at_ - begin); rest != 0) {
        munmap(at_ + length_, rest);
    }
    // A child of fork does not need this memory, and copy-on-write must not replace pages that a device uses.
    madvise(at_, length_, MADV_DONTFORK);
    madvise(at_, length_, MADV_HUGEPAGE);
    prefer_node(at_, length_, node);
}

Staging::~Staging() {
    munmap(at_, length_);
}

void Staging::pin() {
    const std::lock_guard lock(pinning_);
    if (!pinned_) {
        cuda::check("cuMemHostRegister", cuda::driver().host_register(at_, length_, cuda::host_register_portable));
        pinned_ = true;
    }
}

void Staging::unpin() noexcept {
    const std::lock_guard lock(pinning_);
    if (pinned_) {
        cuda::driver().host_unregister(at_);
        pinned_ = false;
    }
}

} // namespace gdrkit::engine
