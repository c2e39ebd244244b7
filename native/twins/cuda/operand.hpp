// One side of a copy, or the target of a memset: which bytes it uses, and where this process can access them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cuda/context.hpp"
#include "cuda/cuda_abi.hpp"
#include "cuda/gpu_view.hpp"

namespace gdrkit::twin::cuda {

// The memory that an address may refer to. `device_only` excludes only host memory that CUDA has neither allocated nor
// registered, because a device cannot access this memory.
enum class AllowedMemory { any, device_only };
enum class Access { read, write };

// The bytes of one side: slices of rows. A contiguous range is one row.
struct Layout {
    std::uint64_t address = 0; // address of the first byte
    std::uint64_t width_bytes = 0;
    std::uint64_t height = 1;      // the number of rows in a slice
    std::uint64_t depth = 1;       // the number of slices
    std::uint64_t pitch_bytes = 0; // from the first byte of a row to the first byte of the next row
    std::uint64_t slice_bytes = 0; // from the first byte of a slice to the first byte of the next slice
};

// A layout that was checked: where this process can access its bytes, in order, and the objects that keep this memory
// alive.
struct Operand {
    std::vector<std::span<std::byte>> spans;
    std::vector<ViewedBytes> viewed_bytes; // for a destination: the bytes of which the GPU has a view
    std::vector<std::shared_ptr<void>> owners;
    bool is_pageable = false; // the memory is unregistered host memory, which a driver copies through a staging buffer
    bool is_host = false;     // a part is host memory, registered or not
    bool has_sync_memops = false; // a part is in a range with CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
};

// Find the memory of a layout. Fail with invalid_value if the memory is not allocated, not accessible or not allowed.
Result resolve_layout(const Layout& layout, const Context& context, AllowedMemory allowed_memory, Access access,
                      Operand* operand);

// Check a layout as resolve_layout() does, at a cost that does not depend on the number of rows.
Result check_layout(const Layout& layout, const Context& context, AllowedMemory allowed_memory, Access access);

// Copy the bytes of an operand to another one of the same size.
void copy_spans(const Operand& to, const Operand& from);

// Copy a pageable source to a staging buffer, which the operand then refers to. The real driver, too, reads a pageable
// source before the call returns.
void stage_pageable_source(Operand* operand);

} // namespace gdrkit::twin::cuda
