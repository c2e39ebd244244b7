// Mapping and pinning of the staging memory of the copy engine.
#include "engine/staging.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>

#include "engine/cuda_driver.hpp"
#include "engine/numa.hpp"

namespace gdrkit::engine {
namespace {

constexpr std::size_t huge_page_bytes = 2U << 20U;

std::size_t round_up_to_huge_page(std::size_t value) {
    return (value + huge_page_bytes - 1) & ~(huge_page_bytes - 1);
}

} // namespace

Staging::Staging(std::size_t length, int numa_node) : length_(round_up_to_huge_page(length)) {
    // The mapping has one more huge page, so that the memory can begin at the boundary of a huge page.
    const std::size_t mapped_bytes = length_ + huge_page_bytes;
    void* const mapping = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) {
        throw make_kernel_error("mmap", errno);
    }
    auto* const begin = static_cast<std::byte*>(mapping);
    data_ = begin +
            (round_up_to_huge_page(reinterpret_cast<std::uintptr_t>(begin)) - reinterpret_cast<std::uintptr_t>(begin));
    if (data_ != begin) {
        munmap(begin, static_cast<std::size_t>(data_ - begin));
    }
    const std::size_t tail_bytes = mapped_bytes - length_ - static_cast<std::size_t>(data_ - begin);
    if (tail_bytes != 0) {
        munmap(data_ + length_, tail_bytes);
    }
    // A child of fork does not need this memory, and copy-on-write must not replace pages that a device uses.
    madvise(data_, length_, MADV_DONTFORK);
    madvise(data_, length_, MADV_HUGEPAGE);
    prefer_node(data_, length_, numa_node);
}

Staging::~Staging() {
    munmap(data_, length_);
}

void Staging::pin() {
    const std::lock_guard lock(pin_mutex_);
    if (!is_pinned_) {
        cuda::check("cuMemHostRegister", cuda::driver().host_register(data_, length_, cuda::host_register_portable));
        is_pinned_ = true;
    }
}

void Staging::unpin() noexcept {
    const std::lock_guard lock(pin_mutex_);
    if (is_pinned_) {
        cuda::driver().host_unregister(data_);
        is_pinned_ = false;
    }
}

} // namespace gdrkit::engine
