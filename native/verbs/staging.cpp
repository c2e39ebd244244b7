#include "verbs/staging.hpp"

#include <sys/mman.h>

#include "verbs/error.hpp"

namespace gdrkit::verbs {

namespace {

constexpr std::size_t huge_page_bytes = 2UL << 20;

constexpr std::size_t round_up(std::size_t size) noexcept {
    return (size + huge_page_bytes - 1) / huge_page_bytes * huge_page_bytes;
}

// Maps anonymous memory that begins at a huge page. Huge pages are only requested. With them, a pin of the memory
// counts and maps one page instead of 512.
std::byte* map_aligned(std::size_t size) {
    const std::size_t whole = size + huge_page_bytes;
    void* const mapped = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) {
        throw Error("mmap", last_errno());
    }
    auto* const begin = static_cast<std::byte*>(mapped);
    const std::size_t before =
        round_up(reinterpret_cast<std::uintptr_t>(begin)) - reinterpret_cast<std::uintptr_t>(begin);
    if (before != 0) {
        munmap(begin, before);
    }
    munmap(begin + before + size, huge_page_bytes - before);
    madvise(begin + before, size, MADV_HUGEPAGE);
    return begin + before;
}

} // namespace

Staging::Staging(std::span<Device* const> devices, const Layout& layout)
    : layout_(layout),
      size_(round_up(layout.small_bytes * layout.small_count + layout.large_bytes * layout.large_count)),
      memory_(map_aligned(size_)) {
    for (Device* const device : devices) {
        // No peer ever accesses this memory, because only this side starts transfers.
        regions_.emplace_back(ibv_reg_mr(device->domain(), memory_, size_, IBV_ACCESS_LOCAL_WRITE));
        if (!regions_.back()) {
            const int number = last_errno();
            regions_.clear();
            munmap(memory_, size_);
            throw Error("ibv_reg_mr", number, device->name());
        }
    }
    for (std::uint32_t index = 0; index < layout_.small_count; ++index) {
        small_.push_back(index);
    }
    for (std::uint32_t index = 0; index < layout_.large_count; ++index) {
        large_.push_back(static_cast<std::uint32_t>(layout_.small_count) + index);
    }
}

Staging::~Staging() {
    regions_.clear();
    munmap(memory_, size_);
}

Staging::Buffer Staging::take(std::size_t size_bytes) {
    if (size_bytes <= layout_.small_bytes) {
        if (small_.empty()) {
            return {};
        }
        const std::uint32_t number = small_.back();
        small_.pop_back();
        return {memory_ + number * layout_.small_bytes, layout_.small_bytes, number};
    }
    if (size_bytes > layout_.large_bytes || large_.empty()) {
        return {};
    }
    const std::uint32_t number = large_.back();
    large_.pop_back();
    const std::size_t index = number - layout_.small_count;
    return {memory_ + layout_.small_bytes * layout_.small_count + index * layout_.large_bytes, layout_.large_bytes,
            number};
}

void Staging::release(const Buffer& buffer) {
    (buffer.number < layout_.small_count ? small_ : large_).push_back(buffer.number);
}

} // namespace gdrkit::verbs
