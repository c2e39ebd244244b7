// Maps and registers staging memory for RDMA, and hands out its buffers.
#include "verbs/staging.hpp"

#include <sys/mman.h>

#include "verbs/error.hpp"

namespace gdrkit::verbs {

namespace {

constexpr std::size_t huge_page_bytes = 2UL << 20;

constexpr std::size_t round_up_to_huge_page(std::size_t size_bytes) noexcept {
    return (size_bytes + huge_page_bytes - 1) / huge_page_bytes * huge_page_bytes;
}

// Maps anonymous memory that begins at a multiple of the huge page size, and asks the kernel for huge pages. The
// registration of a huge page pins one page instead of 512.
std::byte* map_aligned(std::size_t size_bytes) {
    // Map one huge page more than needed, and then unmap the bytes before the aligned address and after the end.
    const std::size_t mapped_bytes = size_bytes + huge_page_bytes;
    void* const mapped = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) {
        throw Error("mmap", last_errno());
    }
    auto* const begin = static_cast<std::byte*>(mapped);
    const std::size_t leading_bytes =
        round_up_to_huge_page(reinterpret_cast<std::uintptr_t>(begin)) - reinterpret_cast<std::uintptr_t>(begin);
    if (leading_bytes != 0) {
        munmap(begin, leading_bytes);
    }
    munmap(begin + leading_bytes + size_bytes, huge_page_bytes - leading_bytes);
    madvise(begin + leading_bytes, size_bytes, MADV_HUGEPAGE);
    return begin + leading_bytes;
}

} // namespace

Staging::Staging(std::span<Device* const> devices, const Layout& layout)
    : layout_(layout), size_bytes_(round_up_to_huge_page(layout.small_bytes * layout.small_count +
                                                         layout.large_bytes * layout.large_count)),
      memory_(map_aligned(size_bytes_)) {
    for (Device* const device : devices) {
        // The region has no remote access, because only this side starts transfers.
        regions_.emplace_back(ibv_reg_mr(device->domain(), memory_, size_bytes_, IBV_ACCESS_LOCAL_WRITE));
        if (!regions_.back()) {
            const int error_number = last_errno();
            regions_.clear();
            munmap(memory_, size_bytes_);
            throw Error("ibv_reg_mr", error_number, device->name());
        }
    }
    for (std::uint32_t index = 0; index < layout_.small_count; ++index) {
        free_small_indices_.push_back(index);
    }
    for (std::uint32_t index = 0; index < layout_.large_count; ++index) {
        free_large_indices_.push_back(static_cast<std::uint32_t>(layout_.small_count) + index);
    }
}

Staging::~Staging() {
    regions_.clear();
    munmap(memory_, size_bytes_);
}

Staging::Buffer Staging::take(std::size_t size_bytes) {
    if (size_bytes <= layout_.small_bytes) {
        if (free_small_indices_.empty()) {
            return {};
        }
        const std::uint32_t index = free_small_indices_.back();
        free_small_indices_.pop_back();
        return {memory_ + index * layout_.small_bytes, layout_.small_bytes, index};
    }
    if (size_bytes > layout_.large_bytes || free_large_indices_.empty()) {
        return {};
    }
    const std::uint32_t index = free_large_indices_.back();
    free_large_indices_.pop_back();
    // The large buffers follow the small ones, in memory and in the numbering.
    const std::size_t large_index = index - layout_.small_count;
    return {memory_ + layout_.small_bytes * layout_.small_count + large_index * layout_.large_bytes,
            layout_.large_bytes, index};
}

void Staging::release(const Buffer& buffer) {
    (buffer.index < layout_.small_count ? free_small_indices_ : free_large_indices_).push_back(buffer.index);
}

} // namespace gdrkit::verbs
