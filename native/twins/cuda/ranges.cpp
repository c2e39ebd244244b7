// The address space of the process: finds the range that contains an address, and adds and removes ranges.
#include <algorithm>
#include <mutex>
#include <set>

#include "cuda/memory.hpp"
#include "cuda/pool.hpp"
#include "model/ledger.hpp"

namespace gdrkit::twin::cuda {
namespace {

struct AddressSpace {
    std::mutex mutex;
    std::map<std::uint64_t, RangeRef> ranges; // key: base; ranges never overlap
    // Bases of ranges that were destroyed with their context. A later free of such a base is an error, not a double
    // free.
    std::set<std::uint64_t> removed_with_context;
};

AddressSpace& address_space() {
    static auto* const instance = new AddressSpace;
    return *instance;
}

RangeRef find_range_locked(const AddressSpace& space, std::uint64_t address) {
    const auto next_range = space.ranges.upper_bound(address);
    if (next_range == space.ranges.begin()) {
        return nullptr;
    }
    const RangeRef& range = std::prev(next_range)->second;
    return address - range->base < range->length_bytes ? range : nullptr;
}

std::vector<RangeRef> find_overlapping_locked(const AddressSpace& space, std::uint64_t base,
                                              std::uint64_t length_bytes) {
    std::vector<RangeRef> overlapping;
    if (RangeRef range_with_base = find_range_locked(space, base); range_with_base && range_with_base->base < base) {
        overlapping.push_back(std::move(range_with_base));
    }
    for (auto entry = space.ranges.lower_bound(base); entry != space.ranges.end() && entry->first - base < length_bytes;
         ++entry) {
        overlapping.push_back(entry->second);
    }
    return overlapping;
}

void add_range_locked(AddressSpace* space, const RangeRef& range) {
    space->removed_with_context.erase(range->base);
    record_open_handle(get_ledger_kind(range->kind), range->base);
    space->ranges.emplace(range->base, range);
}

} // namespace

std::uint64_t make_buffer_id() {
    static std::atomic<std::uint64_t> last_id{0};
    return ++last_id;
}

RangeRef find_range(std::uint64_t address) {
    AddressSpace& space = address_space();
    std::lock_guard lock(space.mutex);
    return find_range_locked(space, address);
}

RangeRef find_range_by_base(std::uint64_t base) {
    const RangeRef range = find_range(base);
    return range && range->base == base ? range : nullptr;
}

std::vector<RangeRef> list_ranges(std::uint64_t base, std::uint64_t length_bytes) {
    AddressSpace& space = address_space();
    std::lock_guard lock(space.mutex);
    return find_overlapping_locked(space, base, length_bytes);
}

bool add_range_unless_overlapping(const RangeRef& range) {
    AddressSpace& space = address_space();
    std::lock_guard lock(space.mutex);
    if (!find_overlapping_locked(space, range->base, range->length_bytes).empty()) {
        return false;
    }
    add_range_locked(&space, range);
    return true;
}

void add_range(const RangeRef& range) {
    AddressSpace& space = address_space();
    std::lock_guard lock(space.mutex);
    add_range_locked(&space, range);
}

int get_access(const Range& range, Device device) {
    if (range.kind == MemoryKind::pool) {
        return get_pool_access(range, device);
    }
    if (range.kind != MemoryKind::vmm) {
        return access_read_write;
    }
    std::lock_guard lock(address_space().mutex);
    const auto entry = range.access.find(device);
    return entry == range.access.end() ? access_none : entry->second;
}

void set_access(const RangeRef& range, Device device, int flags) {
    std::lock_guard lock(address_space().mutex);
    range->access[device] = flags;
}

std::string_view get_ledger_kind(MemoryKind kind) {
    switch (kind) {
    case MemoryKind::device:
    case MemoryKind::pool:
    case MemoryKind::managed:
        return "cuda_memory";
    case MemoryKind::host_alloc:
        return "cuda_host_memory";
    case MemoryKind::host_registered:
        return "cuda_host_registration";
    case MemoryKind::ipc:
        return "cuda_ipc_mapping";
    case MemoryKind::vmm:
        return "cuda_vmm_mapping";
    }
    return "";
}

Result remove_range(std::uint64_t address, std::initializer_list<MemoryKind> kinds, RangeRef* removed_range) {
    AddressSpace& space = address_space();
    std::unique_lock lock(space.mutex);
    if (const auto entry = space.ranges.find(address); entry != space.ranges.end()) {
        if (std::ranges::find(kinds, entry->second->kind) == kinds.end()) {
            return invalid_value;
        }
        RangeRef range = entry->second;
        if (!record_closed_handle(get_ledger_kind(range->kind), address)) {
            return invalid_value;
        }
        space.ranges.erase(entry);
        *removed_range = std::move(range);
        return success;
    }
    if (!space.removed_with_context.contains(address)) {
        for (const MemoryKind kind : kinds) {
            // No range begins at this address. If a freed range began there, this is a double free, and
            // record_closed_handle ends the process.
            if (record_closed_handle(get_ledger_kind(kind), address)) {
                break;
            }
        }
    }
    return invalid_value;
}

void destroy_context_memory(Handle context) {
    std::vector<RangeRef> removed_ranges;
    {
        AddressSpace& space = address_space();
        std::lock_guard lock(space.mutex);
        for (auto entry = space.ranges.begin(); entry != space.ranges.end();) {
            const RangeRef& range = entry->second;
            if (range->context == context && record_closed_handle(get_ledger_kind(range->kind), range->base)) {
                space.removed_with_context.insert(range->base);
                removed_ranges.push_back(range);
                entry = space.ranges.erase(entry);
            } else {
                ++entry;
            }
        }
    }
    for (const RangeRef& range : removed_ranges) {
        if (range->slot.base != 0) {
            free_address_slot(range->slot);
        }
    }
}

} // namespace gdrkit::twin::cuda
