// Finds the memory of one side of a copy, checks that the context may access it, and copies the bytes.
#include "cuda/operand.hpp"

#include <algorithm>
#include <cstring>

#include "cuda/memory.hpp"
#include "model/usage.hpp"

namespace gdrkit::twin::cuda {
namespace {

bool has_access(const Range& range, const Context& context, Access access) {
    if (range.kind == MemoryKind::host_registered) {
        return access == Access::read || (range.host_flags & host_register_read_only) == 0;
    }
    const int needed_flags = access == Access::read ? access_read : access_read_write;
    return (get_access(range, context.device) & needed_flags) == needed_flags;
}

// Add bytes of a range to an operand. If the GPU has a view of the memory, reads use the view. Writes go to the memory,
// and copy_spans() then updates the view.
void add_span(const Range& range, std::uint64_t address, std::uint64_t length_bytes, Access access, Operand* operand) {
    const std::span<std::byte> bytes(range.bytes(address), length_bytes);
    std::byte* const view = range.memory ? range.memory->find_view(bytes.data()) : nullptr;
    if (view != nullptr && access == Access::write) {
        operand->viewed_bytes.push_back({bytes, view});
    }
    operand->spans.push_back(view != nullptr && access == Access::read ? std::span(view, length_bytes) : bytes);
}

// Resolve an address range to spans. The address range must lie in one allocation, or in adjacent VMM mappings.
Result resolve_ranges(std::uint64_t address, std::uint64_t length_bytes, const Context& context, Access access,
                      Operand* operand) {
    const std::uint64_t end = address + length_bytes;
    for (std::uint64_t next_address = address; next_address < end;) {
        const RangeRef range = find_range(next_address);
        if (!range || !has_access(*range, context, access) ||
            (next_address != address && range->kind != MemoryKind::vmm)) {
            return invalid_value;
        }
        const std::uint64_t chunk_end = std::min(end, range->base + range->length_bytes);
        if (chunk_end < end && range->kind != MemoryKind::vmm) {
            return invalid_value;
        }
        add_span(*range, next_address, chunk_end - next_address, access, operand);
        operand->owners.push_back(range);
        operand->is_host |= range->is_host();
        operand->has_sync_memops |= range->sync_memops.load();
        next_address = chunk_end;
    }
    return success;
}

// Resolve one row, which is a contiguous range.
Result resolve_row(std::uint64_t address, std::uint64_t length_bytes, const Context& context,
                   AllowedMemory allowed_memory, Access access, Operand* operand) {
    if (address == 0 || address + length_bytes < address) {
        return invalid_value;
    }
    if (find_range(address)) {
        return resolve_ranges(address, length_bytes, context, access, operand);
    }
    // No allocation or registration contains the address, so only unregistered host memory is valid here. Fail if the
    // address is reserved for device memory, or if an allocation or registration begins in the later bytes.
    if (allowed_memory == AllowedMemory::device_only || is_device_address(address) ||
        !list_ranges(address, length_bytes).empty()) {
        return invalid_value;
    }
    operand->spans.emplace_back(reinterpret_cast<std::byte*>(address), length_bytes);
    operand->is_pageable = operand->is_host = true;
    return success;
}

// Compute the number of bytes from the first byte to the end of the last row. The layout must have at least one row.
// Return false if the number overflows.
bool compute_extent(const Layout& layout, std::uint64_t* length_bytes) {
    std::uint64_t rows_bytes = 0, slices_bytes = 0;
    return !__builtin_mul_overflow(layout.height - 1, layout.pitch_bytes, &rows_bytes) &&
           !__builtin_mul_overflow(layout.depth - 1, layout.slice_bytes, &slices_bytes) &&
           !__builtin_add_overflow(rows_bytes, slices_bytes, length_bytes) &&
           !__builtin_add_overflow(*length_bytes, layout.width_bytes, length_bytes);
}

} // namespace

Result check_layout(const Layout& layout, const Context& context, AllowedMemory allowed_memory, Access access) {
    // All rows must be in one allocation or in adjacent VMM mappings, so check the bytes from the first to the last row
    // as one long row.
    std::uint64_t length_bytes = 0;
    Operand whole_extent;
    return compute_extent(layout, &length_bytes)
               ? resolve_row(layout.address, length_bytes, context, allowed_memory, access, &whole_extent)
               : invalid_value;
}

Result resolve_layout(const Layout& layout, const Context& context, AllowedMemory allowed_memory, Access access,
                      Operand* operand) {
    Result result = check_layout(layout, context, allowed_memory, access);
    for (std::uint64_t slice = 0; result == success && slice < layout.depth; ++slice) {
        std::uint64_t address = layout.address + slice * layout.slice_bytes;
        for (std::uint64_t row = 0; result == success && row < layout.height; ++row, address += layout.pitch_bytes) {
            result = resolve_row(address, layout.width_bytes, context, allowed_memory, access, operand);
        }
    }
    return result;
}

void copy_spans(const Operand& to, const Operand& from) {
    const auto lock = lock_views();
    // The spans of the two operands may have different lengths, so copy the part that is in one span of each.
    std::size_t source_index = 0, source_offset = 0;
    for (const std::span<std::byte> target : to.spans) {
        record_bytes(target.size());
        for (std::size_t target_offset = 0; target_offset < target.size();) {
            const std::span<std::byte> source = from.spans[source_index];
            const std::size_t chunk_bytes = std::min(target.size() - target_offset, source.size() - source_offset);
            std::memmove(target.data() + target_offset, source.data() + source_offset, chunk_bytes);
            target_offset += chunk_bytes;
            source_offset += chunk_bytes;
            if (source_offset == source.size()) {
                ++source_index;
                source_offset = 0;
            }
        }
    }
    std::ranges::for_each(to.viewed_bytes, update_view);
}

void stage_pageable_source(Operand* operand) {
    std::size_t length_bytes = 0;
    for (const auto& span : operand->spans) {
        length_bytes += span.size();
    }
    auto staging_buffer = std::make_shared<std::vector<std::byte>>();
    staging_buffer->reserve(length_bytes);
    for (const auto& span : operand->spans) {
        staging_buffer->insert(staging_buffer->end(), span.begin(), span.end());
    }
    operand->spans.assign(1, std::span(*staging_buffer));
    operand->owners.assign(1, std::move(staging_buffer));
}

} // namespace gdrkit::twin::cuda
