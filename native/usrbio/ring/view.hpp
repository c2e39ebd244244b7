// Pointers to the parts of a ring in memory. Each side computes them from the size of the memory alone, so both sides
// find the parts at the same offsets.
#pragma once

#include "usrbio/ring/layout.hpp"

#include <cerrno>
#include <cstdint>

namespace gdrkit::usrbio {

// Largest number of entries. Such a ring has 1.5 GiB, so a larger request is a mistake or an attack.
inline constexpr std::size_t ring_entries_max = std::size_t{1} << 24;

// Returns the number of entries of the largest ring that fits into `bytes` bytes; 0: not even one entry fits, or more
// than ring_entries_max entries fit.
constexpr std::size_t ring_entries(std::size_t bytes) noexcept {
    if (bytes < ring_bytes(1)) {
        return 0;
    }
    const std::size_t entries = (bytes - ring_bytes(0)) / (ring_bytes(1) - ring_bytes(0));
    return entries > ring_entries_max ? 0 : entries;
}
static_assert(ring_entries(ring_bytes(1)) == 1 && ring_entries(ring_bytes(1023) - 1) == 1022 &&
              ring_entries(ring_bytes(1023)) == 1023);

struct RingView {
    Indices* indices = nullptr;
    Arguments* arguments = nullptr;
    Completion* completions = nullptr;
    Submission* submissions = nullptr;
    Semaphore* completion_semaphore = nullptr;
    Extension* extension = nullptr;
    std::uint32_t slot_count = 0; // entries + 1, so that the indices of an empty queue and of a full one differ.

    // Sets `view` to the ring at `memory`. Returns 0, or -EINVAL: `memory` is null, `memory` is not aligned to a cache
    // line as the extension requires, or `bytes` is too small or too large for a ring.
    static int bind(void* memory, std::size_t bytes, RingView& view) noexcept {
        const std::size_t entries = ring_entries(bytes);
        if (memory == nullptr || reinterpret_cast<std::uintptr_t>(memory) % alignof(SideState) != 0 || entries == 0) {
            return -EINVAL;
        }
        auto* base = static_cast<std::byte*>(memory);
        view.slot_count = static_cast<std::uint32_t>(entries + 1);
        view.indices = reinterpret_cast<Indices*>(base);
        view.arguments = reinterpret_cast<Arguments*>(base + sizeof(Indices));
        view.completions = reinterpret_cast<Completion*>(view.arguments + view.slot_count);
        view.submissions = reinterpret_cast<Submission*>(view.completions + view.slot_count);
        view.completion_semaphore = reinterpret_cast<Semaphore*>(view.submissions + view.slot_count);
        view.extension = reinterpret_cast<Extension*>(base + extension_offset(entries));
        return 0;
    }

    // Returns whether `index` is in range; the other functions take only valid indices.
    bool is_valid(std::int32_t index) const noexcept { return static_cast<std::uint32_t>(index) < slot_count; }
    // Returns the index that follows `index` in the circular queue.
    std::uint32_t next(std::uint32_t index) const noexcept { return index + 1 == slot_count ? 0 : index + 1; }
    // Returns how many positions `to` is after `from`.
    std::uint32_t distance(std::uint32_t from, std::uint32_t to) const noexcept {
        return to >= from ? to - from : to + slot_count - from;
    }
};

} // namespace gdrkit::usrbio
