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
RangeRef find_range_of_page(std::uint64_t page) {
    const std::vector<RangeRef> overlapping = list_ranges(page, page_bytes);
    return overlapping.empty() ? nullptr : overlapping.front();
}

// Collect the extents of device memory that are mapped in the address range, and the ranges that keep this memory
// alive.
Result collect_extents(std::uint64_t address, std::uint64_t length_bytes, std::vector<RangeRef>* owners,
                       std::vector<Extent>* extents) {
    const std::uint64_t end = address + length_bytes;
    for (std::uint64_t position = address; position < end;) {
        RangeRef range = find_range_of_page(position);
        if (!range || !is_exportable(*range)) {
            return invalid_value;
        }
        const std::uint64_t memory_base = range->base - range->memory_offset;
        const std::uint64_t extent_end = std::min(end, memory_base + range->memory->length_bytes());
        if (extent_end <= position) {
            return invalid_value;
        }
        extents->push_back({range->memory->fd(), position - memory_base, extent_end - position});
        owners->push_back(std::move(range));
        position = extent_end;
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
