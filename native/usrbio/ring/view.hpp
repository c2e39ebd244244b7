// Pointers to the parts of a ring in memory. Both sides derive them from the size alone, so both get the same.
#pragma once

#include "usrbio/ring/layout.hpp"

#include <cerrno>
#include <cstdint>

namespace gdrkit::usrbio {

// A ring of that many entries has 1.5 GiB. A larger request is a mistake or an attack.
inline constexpr std::size_t ring_entries_max = std::size_t{1} << 24;

// Returns the number of entries of a ring of `bytes`; 0: no ring has that size.
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
    std::uint32_t slots = 0; // entries + 1, so that an empty queue and a full one differ.

    // Returns 0, or -EINVAL: `memory` is null or not aligned to a cache line (the extension needs that), or no ring has
    // that size.
    static int bind(void* memory, std::size_t bytes, RingView& view) noexcept {
        const std::size_t entries = ring_entries(bytes);
        if (memory == nullptr || reinterpret_cast<std::uintptr_t>(memory) % alignof(SideState) != 0 || entries == 0) {
            return -EINVAL;
        }
        auto* base = static_cast<std::byte*>(memory);
        view.slots = static_cast<std::uint32_t>(entries + 1);
        view.indices = reinterpret_cast<Indices*>(base);
        view.arguments = reinterpret_cast<Arguments*>(base + sizeof(Indices));
        view.completions = reinterpret_cast<Completion*>(view.arguments + view.slots);
        view.submissions = reinterpret_cast<Submission*>(view.completions + view.slots);
        view.completion_semaphore = reinterpret_cast<Semaphore*>(view.submissions + view.slots);
        view.extension = reinterpret_cast<Extension*>(base + extension_offset(entries));
        return 0;
    }

    bool is_valid(std::int32_t index) const noexcept { return static_cast<std::uint32_t>(index) < slots; }
    std::uint32_t next(std::uint32_t index) const noexcept { return index + 1 == slots ? 0 : index + 1; }
    // Returns the number of steps forward from `from` to `to`.
    std::uint32_t distance(std::uint32_t from, std::uint32_t to) const noexcept {
        return to >= from ? to - from : to + slots - from;
    }
};

} // namespace gdrkit::usrbio
