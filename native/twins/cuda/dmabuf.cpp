// cuMemGetHandleForAddressRange: exports device memory as a dma-buf.
#include <algorithm>
#include <vector>

#include "cuda/entry.hpp"
#include "cuda/memory.hpp"
#include "model/dmabuf.hpp"

namespace gdrkit::twin::cuda {
namespace {

bool is_exportable(const Range& range) {
    return range.kind == MemoryKind::device || (range.kind == MemoryKind::pool && !range.is_host()) ||
           range.kind == MemoryKind::vmm;
}

// Return the first range that overlaps this page. A small allocation may begin in the middle of a page, but only whole
// pages are exported.
RangeRef find_range_of_page(std::uint64_t page_base) {
    const std::vector<RangeRef> overlapping_ranges = list_ranges(page_base, page_bytes);
    return overlapping_ranges.empty() ? nullptr : overlapping_ranges.front();
}

// Collect the extents of device memory that are mapped in the address range. `owners` keeps this memory alive.
Result collect_extents(std::uint64_t address, std::uint64_t length_bytes, std::vector<RangeRef>* owners,
                       std::vector<Extent>* extents) {
    const std::uint64_t end = address + length_bytes;
    for (std::uint64_t next_address = address; next_address < end;) {
        RangeRef range = find_range_of_page(next_address);
        if (!range || !is_exportable(*range)) {
            return invalid_value;
        }
        // The range may map only a part of the memory. `memory_base` is the address that byte 0 of the memory would
        // have if the range mapped all of it.
        const std::uint64_t memory_base = range->base - range->memory_offset;
        const std::uint64_t extent_end = std::min(end, memory_base + range->memory->length_bytes());
        if (extent_end <= next_address) {
            return invalid_value;
        }
        extents->push_back({range->memory->fd(), next_address - memory_base, extent_end - next_address});
        owners->push_back(std::move(range));
        next_address = extent_end;
    }
    return success;
}

} // namespace

GDRKIT_CUDA_ENTRY Result cuMemGetHandleForAddressRange(void* handle, DevicePointer address, std::size_t length_bytes,
                                                       int handle_type, unsigned long long flags) {
    return run_entry_in_context("cuMemGetHandleForAddressRange", [&](const ContextRef&) {
        if (handle == nullptr || handle_type != range_handle_dmabuf) {
            return invalid_value;
        }
        if (flags != 0) {
            return flags == range_flag_dmabuf_pcie ? not_supported : invalid_value;
        }
        if (length_bytes == 0 || address % page_bytes != 0 || length_bytes % page_bytes != 0 ||
            address + length_bytes < address) {
            return invalid_value;
        }
        std::vector<RangeRef> owners;
        std::vector<Extent> extents;
        if (const Result result = collect_extents(address, length_bytes, &owners, &extents); result != success) {
            return result;
        }
        const int fd = export_dmabuf(extents);
        if (fd < 0) {
            return operating_system_error;
        }
        *static_cast<int*>(handle) = fd;
        return success;
    });
}

} // namespace gdrkit::twin::cuda
