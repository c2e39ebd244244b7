// Exports the memory of a Gaudi as dma-bufs, by the rules of the kernel driver (export_dmabuf_from_addr in memory.c).
#include <fcntl.h>

#include "hlthunk/device.hpp"
#include "hlthunk/entry.hpp"
#include "model/trace.hpp"

namespace gdrkit::twin::gaudi {
namespace {

// Arguments of an export. `offset_bytes` is counted from the start of the mapping at `address`.
struct ExportRequest {
    std::uint64_t address, size_bytes, offset_bytes;
};

// Return whether the request covers whole host pages, at least one.
bool covers_whole_pages(const ExportRequest& request) {
    return request.address % host_page_bytes == 0 && request.size_bytes != 0 &&
           request.size_bytes % host_page_bytes == 0 && request.offset_bytes % host_page_bytes == 0;
}

// Return whether [begin, begin + length_bytes) lies in [outer_begin, outer_end).
bool is_inside(std::uint64_t begin, std::uint64_t length_bytes, std::uint64_t outer_begin, std::uint64_t outer_end) {
    return begin >= outer_begin && begin <= outer_end && length_bytes <= outer_end - begin;
}

bool is_in_bar(std::uint64_t physical_address, std::uint64_t length_bytes) {
    return is_inside(physical_address, length_bytes, generation_properties().dram_base,
                     generation_properties().dram_base + generation_properties().bar_bytes());
}

// Export by physical address, as programs do on the first Gaudi. Its driver keeps no record of allocations, so only the
// bounds are checked.
int export_physical(Device* device, const ExportRequest& request) {
    const Properties& device_properties = generation_properties();
    if (request.offset_bytes != 0 || !covers_whole_pages(request) ||
        !is_inside(request.address, request.size_bytes, device_properties.dram_user_base,
                   device_properties.dram_end()) ||
        !is_in_bar(request.address, request.size_bytes)) {
        return -EINVAL;
    }
    if (!device->dram_memfd) {
        device->dram_memfd = Fd(make_device_memory(device_properties.dram_bytes));
    }
    const Extent extent{device->dram_memfd.get(), request.address - device_properties.dram_base, request.size_bytes};
    std::uint64_t dmabuf_id = 0;
    const int fd = device->dram_memfd ? export_tracked_dmabuf({&extent, 1}, &dmabuf_id) : -ENOMEM;
    if (fd >= 0) {
        device->physical_dmabuf_ids.push_back(dmabuf_id);
    }
    return fd;
}

// Export by mapped address, as programs do on later generations. The address must be the start of a mapping of device
// memory, and all pages of that memory must be in the BAR.
int export_mapped(Device* device, const ExportRequest& request) {
    const auto mapping_entry = device->mappings.find(request.address);
    if (mapping_entry == device->mappings.end() || !mapping_entry->second.allocation || !covers_whole_pages(request)) {
        return -EINVAL;
    }
    const Allocation& allocation = *mapping_entry->second.allocation;
    if (!is_inside(request.offset_bytes, request.size_bytes, 0, allocation.total_bytes) ||
        !is_in_bar(allocation.physical_address, allocation.total_bytes)) {
        return -EINVAL;
    }
    const Extent extent{allocation.memfd.get(), request.offset_bytes, request.size_bytes};
    std::uint64_t dmabuf_id = 0;
    const int fd = export_tracked_dmabuf({&extent, 1}, &dmabuf_id);
    if (fd >= 0) {
        mapping_entry->second.dmabuf_ids.push_back(dmabuf_id);
    }
    return fd;
}

int export_dmabuf_fd(int device_fd, const ExportRequest& request) {
    int error = 0;
    const DeviceRef device = find_device(device_fd, &error);
    if (!device) {
        return -error;
    }
    std::lock_guard lock(device->mutex);
    if (!device->is_operational) {
        return -EBUSY;
    }
    return generation_properties().has_virtual_memory ? export_mapped(device.get(), request)
                                                      : export_physical(device.get(), request);
}

} // namespace

GDRKIT_HLTHUNK_ENTRY int hlthunk_device_memory_export_dmabuf_fd(int fd, std::uint64_t address, std::uint64_t size_bytes,
                                                                std::uint32_t flags) {
    // The real library ignores `flags` in this function and passes fixed flags to the driver.
    const int dmabuf_fd = run_value_or_error_entry("hlthunk_device_memory_export_dmabuf_fd", [&] {
        return export_dmabuf_fd(fd, {address, size_bytes, 0});
    });
    trace("hlthunk_device_memory_export_dmabuf_fd fd=%d addr=%#llx size=%llu flags=%#x -> %d", fd,
          static_cast<unsigned long long>(address), static_cast<unsigned long long>(size_bytes), flags, dmabuf_fd);
    return dmabuf_fd;
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_device_mapped_memory_export_dmabuf_fd(int fd, std::uint64_t address,
                                                                       std::uint64_t size_bytes, std::uint64_t offset,
                                                                       std::uint32_t flags) {
    const int dmabuf_fd = run_value_or_error_entry("hlthunk_device_mapped_memory_export_dmabuf_fd", [&] {
        return flags != (O_RDWR | O_CLOEXEC) ? -EINVAL : export_dmabuf_fd(fd, {address, size_bytes, offset});
    });
    trace("hlthunk_device_mapped_memory_export_dmabuf_fd fd=%d addr=%#llx size=%llu offset=%llu flags=%#x -> %d", fd,
          static_cast<unsigned long long>(address), static_cast<unsigned long long>(size_bytes),
          static_cast<unsigned long long>(offset), flags, dmabuf_fd);
    return dmabuf_fd;
}

} // namespace gdrkit::twin::gaudi
