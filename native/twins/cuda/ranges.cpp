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

std::vector<RangeRef> overlapping_locked(const AddressSpace& state, std::uint64_t base, std::uint64_t length_bytes) {
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
    ledger_add(ledger_kind_of(range->kind), range->base);
    state->ranges.emplace(range->base, range);
}

} // namespace

std::uint64_t new_buffer_id() {
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

std::vector<RangeRef> ranges_in(std::uint64_t base, std::uint64_t length_bytes) {
    AddressSpace& state = address_space();
    std::lock_guard lock(state.mutex);
    return overlapping_locked(state, base, length_bytes);
}

bool add_range_unless_overlapping(const RangeRef& range) {
    AddressSpace& state = address_space();
    std::lock_guard lock(state.mutex);
    if (!overlapping_locked(state, range->base, range->length_bytes).empty()) {
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

int access_of(const Range& range, Device device) {
    if (range.kind == MemoryKind::pool) {
        return pool_access_of(range, device);
    }
    if (range.kind != MemoryKind::vmm) {
        return access_read_write;
    }
    std::lock_guard lock(address_space().mutex);
    const auto found = range.access.find(device);
    return found == range.access.end() ? access_none : found->second;
}

void set_access(const RangeRef& range, Device device, int flags) {
    std::lock_guard lock(address_space().mutex);
    range->access[device] = flags;
}

std::string_view ledger_kind_of(MemoryKind kind) {
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

Result remove_range(std::uint64_t address, std::initializer_list<MemoryKind> kinds, RangeRef* removed) {
    AddressSpace& state = address_space();
    std::unique_lock lock(state.mutex);
    if (const auto found = state.ranges.find(address); found != state.ranges.end()) {
        if (std::ranges::find(kinds, found->second->kind) == kinds.end()) {
            return invalid_value;
        }
        RangeRef range = found->second;
        if (!ledger_remove(ledger_kind_of(range->kind), address)) {
            return invalid_value;
        }
        state.ranges.erase(found);
        *removed = std::move(range);
        return success;
    }
    if (!state.removed_with_context.contains(address)) {
        for (const MemoryKind kind : kinds) {
            // No range begins at this address. If a freed range began there, this is a double free, and ledger_remove
            // ends the process.
            if (ledger_remove(ledger_kind_of(kind), address)) {
                break;
            }
        }
    }
    return invalid_value;
}

void destroy_memory_of(Handle context) {
    std::vector<RangeRef> removed;
    {
        AddressSpace& state = address_space();
        std::lock_guard lock(state.mutex);
        for (auto at = state.ranges.begin(); at != state.ranges.end();) {
            const RangeRef& range = at->second;
            if (range->context == context && ledger_remove(ledger_kind_of(range->kind), range->base)) {
                state.removed_with_context.insert(range->base);
                removed.push_back(range);
                at = state.ranges.erase(at);
            } else {
                ++at;
            }
        }
    }
    for (const RangeRef& range : removed) {
        if (range->slot.base != 0) {
            free_slot(range->slot);
        }
    }
}

} // namespace gdrkit::twin::cuda
