// The address space of the process: which range holds an address.
#include <algorithm>
#include <mutex>
#include <set>

#include "cuda/memory.hpp"
#include "model/ledger.hpp"

namespace gdrkit::twin::cuda {
namespace {

struct Space {
    std::mutex mutex;
    std::map<std::uint64_t, RangeRef> ranges; // by base; they never overlap
    std::set<std::uint64_t> ended;            // bases that went away with their context
};

Space& space() {
    static auto* const the_space = new Space;
    return *the_space;
}

RangeRef find_locked(const Space& all, std::uint64_t address) {
    const auto after = all.ranges.upper_bound(address);
    if (after == all.ranges.begin()) {
        return nullptr;
    }
    const RangeRef& range = std::prev(after)->second;
    return address - range->base < range->length_bytes ? range : nullptr;
}

std::vector<RangeRef> in_locked(const Space& all, std::uint64_t base, std::uint64_t length_bytes) {
    std::vector<RangeRef> found;
    if (RangeRef first = find_locked(all, base); first && first->base < base) {
        found.push_back(std::move(first));
    }
    for (auto at = all.ranges.lower_bound(base); at != all.ranges.end() && at->first - base < length_bytes; ++at) {
        found.push_back(at->second);
    }
    return found;
}

void add_locked(Space* all, const RangeRef& range) {
    all->ended.erase(range->base);
    ledger_add(ledger_kind_of(range->kind), range->base);
    all->ranges.emplace(range->base, range);
}

} // namespace

std::uint64_t new_buffer_id() {
    static std::atomic<std::uint64_t> last{0};
    return ++last;
}

RangeRef find_range(std::uint64_t address) {
    Space& all = space();
    std::lock_guard lock(all.mutex);
    return find_locked(all, address);
}

RangeRef range_at(std::uint64_t base) {
    const RangeRef range = find_range(base);
    return range && range->base == base ? range : nullptr;
}

std::vector<RangeRef> ranges_in(std::uint64_t base, std::uint64_t length_bytes) {
    Space& all = space();
    std::lock_guard lock(all.mutex);
    return in_locked(all, base, length_bytes);
}

bool add_range_unless_overlapping(const RangeRef& range) {
    Space& all = space();
    std::lock_guard lock(all.mutex);
    if (!in_locked(all, range->base, range->length_bytes).empty()) {
        return false;
    }
    add_locked(&all, range);
    return true;
}

void add_range(const RangeRef& range) {
    Space& all = space();
    std::lock_guard lock(all.mutex);
    add_locked(&all, range);
}

int access_of(const Range& range, Device device) {
    if (range.kind != Kind::vmm) {
        return access_read_write;
    }
    std::lock_guard lock(space().mutex);
    const auto found = range.access.find(device);
    return found == range.access.end() ? access_none : found->second;
}

void set_access(const RangeRef& range, Device device, int flags) {
    std::lock_guard lock(space().mutex);
    range->access[device] = flags;
}

std::string_view ledger_kind_of(Kind kind) {
    switch (kind) {
    case Kind::device:
    case Kind::pool:
    case Kind::managed:
        return "cuda_memory";
    case Kind::host_alloc:
        return "cuda_host_memory";
    case Kind::host_registered:
        return "cuda_host_registration";
    case Kind::ipc:
        return "cuda_ipc_mapping";
    case Kind::vmm:
        return "cuda_vmm_mapping";
    }
    return "";
}

Result take_allocation(std::uint64_t address, std::initializer_list<Kind> kinds, RangeRef* taken) {
    Space& all = space();
    std::unique_lock lock(all.mutex);
    if (const auto found = all.ranges.find(address); found != all.ranges.end()) {
        if (std::ranges::find(kinds, found->second->kind) == kinds.end()) {
            return invalid_value;
        }
        RangeRef range = found->second;
        if (!ledger_remove(ledger_kind_of(range->kind), address)) {
            return invalid_value;
        }
        all.ranges.erase(found);
        *taken = std::move(range);
        return success;
    }
    if (!all.ended.contains(address)) {
        for (const Kind kind : kinds) {
            // No range begins here. If one did, and was freed, this is a second free: the ledger ends the process.
            if (ledger_remove(ledger_kind_of(kind), address)) {
                break;
            }
        }
    }
    return invalid_value;
}

void release_memory_of(Handle context) {
    std::vector<RangeRef> gone;
    {
        Space& all = space();
        std::lock_guard lock(all.mutex);
        for (auto at = all.ranges.begin(); at != all.ranges.end();) {
            const RangeRef& range = at->second;
            if (range->context == context && ledger_remove(ledger_kind_of(range->kind), range->base)) {
                all.ended.insert(range->base);
                gone.push_back(range);
                at = all.ranges.erase(at);
            } else {
                ++at;
            }
        }
    }
    for (const RangeRef& range : gone) {
        if (range->slot.base != 0) {
            give_slot(range->slot);
        }
    }
}

} // namespace gdrkit::twin::cuda
