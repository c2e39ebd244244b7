// Device memory as a dma-buf, by the rules of the kernel driver (export_dmabuf_from_addr of memory.c).
#include <fcntl.h>

#include "hlthunk/device.hpp"
#include "hlthunk/entry.hpp"
#include "model/trace.hpp"

namespace gdrkit::twin::gaudi {
namespace {

struct Wanted {
    std::uint64_t address, size, offset;
};

bool is_aligned(const Wanted& wanted) {
    return wanted.address % host_page_bytes == 0 && wanted.size != 0 && wanted.size % host_page_bytes == 0 &&
           wanted.offset % host_page_bytes == 0;
}

bool is_inside(std::uint64_t begin, std::uint64_t length_bytes, std::uint64_t first, std::uint64_t end) {
    return begin >= first && begin <= end && length_bytes <= end - begin;
}

bool in_bar(std::uint64_t physical, std::uint64_t length_bytes) {
    return is_inside(physical, length_bytes, properties().dram_base, properties().dram_base + properties().bar_bytes());
}

// Gaudi1: by physical address. The driver knows no allocations, so that nothing but the bounds is checked.
int export_physical(Device* device, const Wanted& wanted) {
    const Properties& ours = properties();
    if (wanted.offset != 0 || !is_aligned(wanted) ||
        !is_inside(wanted.address, wanted.size, ours.dram_user_base, ours.dram_end()) ||
        !in_bar(wanted.address, wanted.size)) {
        return -EINVAL;
    }
    if (!device->dram) {
        device->dram = Fd(make_device_memory(ours.dram_bytes));
    }
    const Extent extent{device->dram.get(), wanted.address - ours.dram_base, wanted.size};
    std::uint64_t id = 0;
    const int fd = device->dram ? export_tracked_dmabuf({&extent, 1}, &id) : -ENOMEM;
    if (fd >= 0) {
        device->physical_exports.push_back(id);
    }
    return fd;
}

// Later ones: the address must be exactly one that was mapped, of device memory, and every page of it in the BAR.
int export_mapped(Device* device, const Wanted& wanted) {
    const auto found = device->mappings.find(wanted.address);
    if (found == device->mappings.end() || !found->second.allocation || !is_aligned(wanted)) {
        return -EINVAL;
    }
    const Allocation& memory = *found->second.allocation;
    if (!is_inside(wanted.offset, wanted.size, 0, memory.total_bytes) || !in_bar(memory.physical, memory.total_bytes)) {
        return -EINVAL;
    }
    const Extent extent{memory.memory.get(), wanted.offset, wanted.size};
    std::uint64_t id = 0;
    const int fd = export_tracked_dmabuf({&extent, 1}, &id);
    if (fd >= 0) {
        found->second.exports.push_back(id);
    }
    return fd;
}

int export_dmabuf_fd(int device_fd, const Wanted& wanted) {
    int error = 0;
    const DeviceRef device = find_device(device_fd, &error);
    if (!device) {
        return -error;
    }
    std::lock_guard lock(device->mutex);
    if (!device->operational) {
        return -EBUSY;
    }
    return properties().has_virtual_memory ? export_mapped(device.get(), wanted)
                                           : export_physical(device.get(), wanted);
}

} // namespace

GDRKIT_HLTHUNK_ENTRY int hlthunk_device_memory_export_dmabuf_fd(int fd, std::uint64_t address, std::uint64_t size,
                                                                std::uint32_t flags) {
    // The library itself chooses the flags.
    const int made = descriptor_entry("hlthunk_device_memory_export_dmabuf_fd", [&] {
        return export_dmabuf_fd(fd, {address, size, 0});
    });
    trace("hlthunk_device_memory_export_dmabuf_fd fd=%d addr=%#llx size=%llu flags=%#x -> %d", fd,
          static_cast<unsigned long long>(address), static_cast<unsigned long long>(size), flags, made);
    return made;
}

GDRKIT_HLTHUNK_ENTRY int hlthunk_device_mapped_memory_export_dmabuf_fd(int fd, std::uint64_t address,
                                                                       std::uint64_t size, std::uint64_t offset,
                                                                       std::uint32_t flags) {
    const int made = descriptor_entry("hlthunk_device_mapped_memory_export_dmabuf_fd", [&] {
        return flags != (O_RDWR | O_CLOEXEC) ? -EINVAL : export_dmabuf_fd(fd, {address, size, offset});
    });
    trace("hlthunk_device_mapped_memory_export_dmabuf_fd fd=%d addr=%#llx size=%llu offset=%llu flags=%#x -> %d", fd,
          static_cast<unsigned long long>(address), static_cast<unsigned long long>(size),
          static_cast<unsigned long long>(offset), flags, made);
    return made;
}

} // namespace gdrkit::twin::gaudi
