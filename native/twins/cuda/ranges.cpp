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
    std::map<std::uint64_t, RangeRef> ranges;     // key: base; ranges never overlap
    std::set<std::uint64_t> removed_with_context; // bases of ranges that were destroyed with their context
};

AddressSpace& address_space() {
    static auto* const instance = new AddressSpace;
    return *instance;
}

RangeRef find_locked(const AddressSpace& state, std::uint64_t address) {
    const auto next_range = state.ranges.upper_bound(address);
    if (next_range == state.ranges.begin()) {
        return nullptr;
    }
    const RangeRef& range = std::prev(next_range)->second;
    return address - range->base < range->length_bytes ? range : nullptr;
}

std::vector<RangeRef> find_overlapping_locked(const AddressSpace& state, std::uint64_t base,
                                              std::uint64_t length_bytes) {
    std::vector<RangeRef> overlapping;
    if (RangeRef first = find_locked(state, base); first && first->base < base) {
        overlapping.push_back(std::move(first));
    }
    for (auto at = state.ranges.lower_bound(base); at != state.ranges.end() && at->first - base < length_bytes; ++at) {
        overlapping.push_back(at->second);
    }
    return overlapping;
}

void add_locked(AddressSpace* state, const RangeRef& range) {
    state->removed_with_context.erase(range->base);
    ledger_add(get_ledger_kind(range->kind), range->base);
    state->ranges.emplace(range->base, range);
}

} // namespace

std::uint64_t make_buffer_id() {
    static std::atomic<std::uint64_t> last{0};
    return ++last;
}

RangeRef find_range(std::uint64_t address) {
    AddressSpace& state = address_space();
    std::lock_guard lock(state.mutex);
    return find_locked(state, address);
}

RangeRef find_range_by_base(std::uint64_t base) {
    const RangeRef range = find_range(base);
    return range && range->base == base ? range : nullptr;
}

std::vector<RangeRef> list_ranges(std::uint64_t base, std::uint64_t length_bytes) {
    AddressSpace& state = address_space();
    std::lock_guard lock(state.mutex);
    return find_overlapping_locked(state, base, length_bytes);
}

bool add_range_unless_overlapping(const RangeRef& range) {
    AddressSpace& state = address_space();
    std::lock_guard lock(state.mutex);
    if (!find_overlapping_locked(state, range->base, range->length_bytes).empty()) {
        return false;
    }
    add_locked(&state, range);
    return true;
}

void add_range(const RangeRef& range) {
    AddressSpace& state = address_space();
    std::lock_guard lock(state.mutex);
    add_locked(&state, range);
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

Result remove_range(std::uint64_t address, std::initializer_list<MemoryKind> kinds, RangeRef* removed_ranges) {
    AddressSpace& state = address_space();
    std::unique_lock lock(state.mutex);
    if (const auto entry = state.ranges.find(address); entry != state.ranges.end()) {
        if (std::ranges::find(kinds, entry->second->kind) == kinds.end()) {
            return invalid_value;
        }
        RangeRef range = entry->second;
        if (!ledger_remove(get_ledger_kind(range->kind), address)) {
            return invalid_value;
        }
        state.ranges.erase(entry);
        *removed_ranges = std::move(range);
        return success;
    }
    if (!state.removed_with_context.contains(address)) {
        for (const MemoryKind kind : kinds) {
            // No range begins at this address. If a freed range began there, this is a double free, and ledger_remove
            // ends the process.
            if (ledger_remove(get_ledger_kind(kind), address)) {
                break;
            }
        }
    }
    return invalid_value;
}

void destroy_context_memory(Handle context) {
    std::vector<RangeRef> removed_ranges;
    {
        AddressSpace& state = address_space();
        std::lock_guard lock(state.mutex);
        for (auto at = state.ranges.begin(); at != state.ranges.end();) {
            const RangeRef& range = at->second;
            if (range->context == context && ledger_remove(get_ledger_kind(range->kind), range->base)) {
                state.removed_with_context.insert(range->base);
                removed_ranges.push_back(range);
                at = state.ranges.erase(at);
            } else {
                ++at;
            }
        }
    }
    for (const RangeRef& range : removed_ranges) {
        if (range->slot.base != 0) {
            free_slot(range->slot);
        }
    }
}

} // namespace gdrkit::twin::cuda
