// Functions of managed memory: cuMemPrefetchAsync, cuMemAdvise, cuMemRangeGetAttribute and cuStreamAttachMemAsync.
#include "cuda/managed.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <span>
#include <string>

#include "cuda/device.hpp"
#include "cuda/entry.hpp"
#include "cuda/memory.hpp"
#include "cuda/stream.hpp"

namespace gdrkit::twin::cuda {
namespace {

// Return the mutex that guards the advice of all ranges.
std::mutex& advice_mutex() {
    static auto* const instance = new std::mutex;
    return *instance;
}

// The whole pages [begin, end) that contain the caller's bytes, and the managed allocation (range) to which these pages
// belong.
struct Pages {
    RangeRef range;
    std::uint64_t begin = 0, end = 0;
};

// Store the pages that contain the bytes. Fail with invalid_value unless all bytes are in one managed allocation.
Result find_pages(DevicePointer pointer, std::uint64_t length_bytes, Pages* pages) {
    const RangeRef range = find_range(pointer);
    if (!range || range->kind != MemoryKind::managed || length_bytes == 0 ||
        length_bytes > range->length_bytes - (pointer - range->base)) {
        return invalid_value;
    }
    *pages = {range, pointer / page_bytes * page_bytes, round_up(pointer + length_bytes, page_bytes)};
    return success;
}

// Split range->advice at both ends of the pages, and return the Advice of each part between these ends. An entry of the
// map applies to the pages from its address up to the next entry. The caller holds advice_mutex(). The returned span
// refers to *parts.
std::span<Advice* const> split_advice_locked(const Pages& pages, std::vector<Advice*>* parts) {
    auto& advice = pages.range->advice;
    for (const std::uint64_t boundary : {pages.begin, pages.end}) {
        const auto next = advice.upper_bound(boundary);
        advice.emplace(boundary, next == advice.begin() ? Advice{} : std::prev(next)->second);
    }
    for (auto part = advice.find(pages.begin); part->first != pages.end; ++part) {
        parts->push_back(&part->second);
    }
    return *parts;
}

bool numa_node_exists(int id) {
    return id >= 0 && access(("/sys/devices/system/node/node" + std::to_string(id)).c_str(), F_OK) == 0;
}

// Check a location. Replace location_host (with any id) and location_host_numa_current by {location_host, 0}.
Result check_location(Location* location) {
    switch (location->type) {
    case location_device:
        return device_exists(location->id) ? success : invalid_device;
    case location_host:
    case location_host_numa_current:
        *location = {location_host, 0};
        return success;
    case location_host_numa:
        return numa_node_exists(location->id) ? success : invalid_value;
    default:
        return invalid_value;
    }
}

// Convert the argument of the functions that take a device, which may be cpu_device, to a location.
Location make_location(Device device) {
    return device == cpu_device ? Location{location_host, 0} : Location{location_device, device};
}

Result prefetch(const ContextRef& context, DevicePointer pointer, std::uint64_t length_bytes, Location location,
                unsigned flags, Handle stream_handle) {
    StreamRef stream;
    Pages pages;
    Result result = find_stream(stream_handle, context, &stream);
    if (result == success) {
        result = flags == 0 ? find_pages(pointer, length_bytes, &pages) : invalid_value;
    }
    if (result == success) {
        result = check_location(&location);
    }
    if (result != success) {
        return result;
    }
    {
        std::lock_guard lock(advice_mutex());
        std::vector<Advice*> parts;
        for (Advice* const part : split_advice_locked(pages, &parts)) {
            part->prefetched_location = location;
        }
    }
    // The bytes stay where they are, so the work that the prefetch queues in the stream does nothing.
    enqueue(stream, {}, Timing::delayed);
    return success;
}

// Change the advice about some pages. `advice_type` is a CUmem_advise value.
void apply_advice(int advice_type, const Location& location, Advice* pages_advice) {
    const Device processor = location.type == location_device ? location.id : cpu_device;
    switch (advice_type) {
    case advise_set_read_mostly:
    case advise_unset_read_mostly:
        pages_advice->is_read_mostly = advice_type == advise_set_read_mostly;
        break;
    case advise_set_preferred_location:
        pages_advice->preferred_location = location;
        break;
    case advise_unset_preferred_location:
        pages_advice->preferred_location = {};
        break;
    case advise_set_accessed_by:
        pages_advice->accessed_by.insert(processor);
        break;
    default:
        pages_advice->accessed_by.erase(processor);
    }
}

Result set_advice(DevicePointer pointer, std::uint64_t length_bytes, int advice_type, Location location) {
    if (advice_type < advise_set_read_mostly || advice_type > advise_unset_accessed_by) {
        return invalid_value;
    }
    const bool is_access_advice = advice_type == advise_set_accessed_by || advice_type == advise_unset_accessed_by;
    if (is_access_advice && location.type != location_device && location.type != location_host) {
        return invalid_value;
    }
    if (is_access_advice || advice_type == advise_set_preferred_location) {
        if (check_location(&location) != success) {
            // If a device does not exist, a prefetch fails with invalid_device, but cuMemAdvise with invalid_value.
            return invalid_value;
        }
    }
    Pages pages;
    if (const Result result = find_pages(pointer, length_bytes, &pages); result != success) {
        return result;
    }
    std::lock_guard lock(advice_mutex());
    std::vector<Advice*> parts;
    for (Advice* const part : split_advice_locked(pages, &parts)) {
        apply_advice(advice_type, location, part);
    }
    return success;
}

// Return the value of `member` if all parts have the same value, else a location of type location_none.
Location find_common_location(std::span<Advice* const> parts, Location Advice::*member) {
    const Location first = parts.front()->*member;
    const bool is_common = std::ranges::all_of(parts, [&](const Advice* part) {
        return (part->*member).type == first.type && (part->*member).id == first.id;
    });
    return is_common ? first : Location{};
}

Device get_device(const Location& location) {
    switch (location.type) {
    case location_device:
        return location.id;
    case location_host:
        return cpu_device;
    default:
        return invalid_device_ordinal;
    }
}

// Return `count` entries: first the devices in accessed_by of all parts, then invalid_device_ordinal.
std::vector<std::int32_t> find_common_accessors(std::span<Advice* const> parts, std::size_t count) {
    std::vector<std::int32_t> devices;
    for (const Device device : parts.front()->accessed_by) {
        if (devices.size() < count &&
            std::ranges::all_of(parts, [=](const Advice* part) { return part->accessed_by.contains(device); })) {
            devices.push_back(device);
        }
    }
    devices.resize(count, invalid_device_ordinal);
    return devices;
}

Result query_attribute(std::span<Advice* const> parts, int attribute, void* data, std::size_t data_bytes) {
    std::vector<std::int32_t> values; // one number, except for range_accessed_by
    const Location preferred_location = find_common_location(parts, &Advice::preferred_location),
                   prefetched_location = find_common_location(parts, &Advice::prefetched_location);
    switch (attribute) {
    case range_read_mostly:
        values = {std::ranges::all_of(parts, &Advice::is_read_mostly) ? 1 : 0};
        break;
    case range_preferred_location:
        values = {get_device(preferred_location)};
        break;
    case range_accessed_by:
        values = find_common_accessors(parts, data_bytes / sizeof(std::int32_t));
        break;
    case range_last_prefetch_location:
        values = {get_device(prefetched_location)};
        break;
    case range_preferred_location_type:
        values = {preferred_location.type};
        break;
    case range_preferred_location_id:
        values = {preferred_location.id};
        break;
    case range_last_prefetch_location_type:
        values = {prefetched_location.type};
        break;
    case range_last_prefetch_location_id:
        values = {prefetched_location.id};
        break;
    default:
        return invalid_value;
    }
    if (data == nullptr || values.empty() || data_bytes != values.size() * sizeof(std::int32_t)) {
        return invalid_value;
    }
    std::memcpy(data, values.data(), data_bytes);
    return success;
}

Result query_attributes(void** data, const std::size_t* data_bytes, const int* attributes, std::size_t count,
                        DevicePointer pointer, std::uint64_t length_bytes) {
    Pages pages;
    if (data == nullptr || data_bytes == nullptr || attributes == nullptr || count == 0) {
        return invalid_value;
    }
    if (const Result result = find_pages(pointer, length_bytes, &pages); result != success) {
        return result;
    }
    std::lock_guard lock(advice_mutex());
    std::vector<Advice*> parts;
    split_advice_locked(pages, &parts);
    Result result = success;
    for (std::size_t index = 0; result == success && index < count; ++index) {
        result = query_attribute(parts, attributes[index], data[index], data_bytes[index]);
    }
    return result;
}

} // namespace

GDRKIT_CUDA_ENTRY Result cuMemPrefetchAsync(DevicePointer pointer, std::size_t length_bytes, Device device,
                                            Handle stream) {
    return run_entry_in_context("cuMemPrefetchAsync", [&](const ContextRef& context) {
        return prefetch(context, pointer, length_bytes, make_location(device), 0, stream);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemPrefetchAsync_v2(DevicePointer pointer, std::size_t length_bytes, Location location,
                                               unsigned flags, Handle stream) {
    return run_entry_in_context("cuMemPrefetchAsync_v2", [&](const ContextRef& context) {
        return prefetch(context, pointer, length_bytes, location, flags, stream);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemAdvise(DevicePointer pointer, std::size_t length_bytes, int advice, Device device) {
    return run_entry_in_context("cuMemAdvise", [&](const ContextRef&) {
        return set_advice(pointer, length_bytes, advice, make_location(device));
    });
}

GDRKIT_CUDA_ENTRY Result cuMemAdvise_v2(DevicePointer pointer, std::size_t length_bytes, int advice,
                                        Location location) {
    return run_entry_in_context("cuMemAdvise_v2",
                                [&](const ContextRef&) { return set_advice(pointer, length_bytes, advice, location); });
}

GDRKIT_CUDA_ENTRY Result cuMemRangeGetAttribute(void* data, std::size_t data_bytes, int attribute,
                                                DevicePointer pointer, std::size_t length_bytes) {
    return run_entry_in_context("cuMemRangeGetAttribute", [&](const ContextRef&) {
        return query_attributes(&data, &data_bytes, &attribute, 1, pointer, length_bytes);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemRangeGetAttributes(void** data, std::size_t* data_bytes, int* attributes,
                                                 std::size_t count, DevicePointer pointer, std::size_t length_bytes) {
    return run_entry_in_context("cuMemRangeGetAttributes", [&](const ContextRef&) {
        return query_attributes(data, data_bytes, attributes, count, pointer, length_bytes);
    });
}

// The host and all devices can access the twin's managed memory at all times, so the work that this function queues in
// the stream does nothing.
GDRKIT_CUDA_ENTRY Result cuStreamAttachMemAsync(Handle stream_handle, DevicePointer pointer, std::size_t length_bytes,
                                                unsigned flags) {
    return run_entry_in_context("cuStreamAttachMemAsync", [&](const ContextRef& context) {
        StreamRef stream;
        if (const Result result = find_stream(stream_handle, context, &stream); result != success) {
            return result;
        }
        const RangeRef range = find_range_by_base(pointer);
        // attach_single attaches memory to one stream. That stream cannot be the legacy default stream.
        const bool has_valid_flags = flags == attach_global || flags == attach_host ||
                                     (flags == attach_single && stream != get_legacy_stream(context));
        if (!range || range->kind != MemoryKind::managed || !has_valid_flags ||
            (length_bytes != 0 && length_bytes != range->length_bytes)) {
            return invalid_value;
        }
        enqueue(stream, {}, Timing::delayed);
        return success;
    });
}

} // namespace gdrkit::twin::cuda
