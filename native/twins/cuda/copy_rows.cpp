// cuMemcpy2D* and cuMemcpy3D*: copies of rows and slices between pitched memory and arrays. The rows of an array
// have no gaps.
#include <utility>

#include "cuda/array.hpp"
#include "cuda/copy.hpp"
#include "cuda/device.hpp"
#include "cuda/entry.hpp"

namespace gdrkit::twin::cuda {
namespace {

// The size of a copy: the numbers of bytes in a row, of rows in a slice, and of slices.
struct CopyExtent {
    std::uint64_t width_bytes, height, depth;
};

// Return whether the range [first, first + count) ends at or before `end`.
bool fits(std::uint64_t first, std::uint64_t count, std::uint64_t end) {
    return first <= end && count <= end - first;
}

// Find the address of one side of a copy, and the memory to which the address may refer.
Result find_side_address(const CopySide3d& side, std::uint64_t* address, AllowedMemory* allowed_memory) {
    switch (side.memory_type) {
    case memory_host:
        *address = reinterpret_cast<std::uint64_t>(side.host);
        *allowed_memory = AllowedMemory::any;
        return success;
    case memory_device:
        *address = side.device;
        *allowed_memory = AllowedMemory::device_only;
        return success;
    case memory_unified:
        *address = side.device;
        *allowed_memory = AllowedMemory::any;
        return success;
    default:
        return invalid_value;
    }
}

// Replace an array by the device memory that holds its elements, and check that the copy is within the array.
Result replace_array(const CopyExtent& extent, CopySide3d* side) {
    const ArrayRef array = find_array(reinterpret_cast<Handle>(side->array));
    if (!array) {
        return invalid_value;
    }
    side->memory_type = memory_device;
    side->device = array->range->base;
    side->pitch_bytes = array->row_bytes;
    side->height = array->row_count;
    return fits(side->x_bytes, extent.width_bytes, array->row_bytes) &&
                   fits(side->y, extent.height, array->row_count) && fits(side->z, extent.depth, array->slice_count)
               ? success
               : invalid_value;
}

// Compute the layout of one side of a copy, and the memory to which its address may refer. The pitch matters only if
// the copy uses a row other than row 0, and the height only if the copy uses a slice other than slice 0.
Result compute_layout(const CopySide3d& requested_side, const CopyExtent& extent, Layout* layout,
                      AllowedMemory* allowed_memory) {
    CopySide3d side = requested_side;
    if (requested_side.memory_type == memory_array) {
        if (const Result result = replace_array(extent, &side); result != success) {
            return result;
        }
    }
    std::uint64_t address = 0, pitch_bytes = 0, slice_bytes = 0;
    if (const Result result = find_side_address(side, &address, allowed_memory); result != success) {
        return result;
    }
    if (side.lod != 0) {
        return invalid_value;
    }
    const bool has_slices = side.z != 0 || extent.depth > 1;
    if (has_slices || side.y != 0 || extent.height > 1) {
        pitch_bytes = side.pitch_bytes;
        if (pitch_bytes > max_pitch_bytes || !fits(side.x_bytes, extent.width_bytes, pitch_bytes)) {
            return invalid_value;
        }
    }
    if (has_slices &&
        (!fits(side.y, extent.height, side.height) || __builtin_mul_overflow(pitch_bytes, side.height, &slice_bytes))) {
        return invalid_value;
    }
    // The copy begins at address + x_bytes + y * pitch_bytes + z * slice_bytes. Fail if this sum overflows.
    const std::pair<std::uint64_t, std::uint64_t> offsets[] = {
        {1, side.x_bytes}, {side.y, pitch_bytes}, {side.z, slice_bytes}};
    for (const auto& [step_count, step_bytes] : offsets) {
        std::uint64_t offset_bytes = 0;
        if (__builtin_mul_overflow(step_count, step_bytes, &offset_bytes) ||
            __builtin_add_overflow(address, offset_bytes, &address)) {
            return invalid_value;
        }
    }
    *layout = {address, extent.width_bytes, extent.height, extent.depth, pitch_bytes, slice_bytes};
    return success;
}

} // namespace

Result make_copy_request(const Copy3d* copy, CopyRequest* request) {
    if (copy == nullptr) {
        return invalid_value;
    }
    const CopyExtent extent{copy->width_bytes, copy->height, copy->depth};
    const Result result = compute_layout(copy->from, extent, &request->from, &request->from_memory);
    return result != success ? result : compute_layout(copy->to, extent, &request->to, &request->to_memory);
}

namespace {

// In the result, z, lod, context and height are 0.
CopySide3d make_copy_side(const CopySide2d& side) {
    return {side.x_bytes, side.y,           0, 0, side.memory_type, side.host, side.device, side.array,
            Handle{0},    side.pitch_bytes, 0};
}

// A 2D copy is a 3D copy of one slice.
Result make_copy_request(const Copy2d* copy, CopyRequest* request) {
    if (copy == nullptr) {
        return invalid_value;
    }
    const Copy3d volume{make_copy_side(copy->from), make_copy_side(copy->to), copy->width_bytes, copy->height, 1};
    return make_copy_request(&volume, request);
}

template <typename Copy> Result copy_rows(std::string_view symbol, const Copy* copy) {
    return run_entry_in_context(symbol, [&](const ContextRef& context) {
        CopyRequest request;
        const Result result = make_copy_request(copy, &request);
        return result != success ? result : copy_synchronous(context, request);
    });
}

template <typename Copy> Result enqueue_rows(std::string_view symbol, const Copy* copy, Handle stream) {
    return run_entry_in_context(symbol, [&](const ContextRef& context) {
        CopyRequest request;
        const Result result = make_copy_request(copy, &request);
        return result != success ? result : enqueue_copy(context, request, stream);
    });
}

} // namespace

GDRKIT_CUDA_ENTRY Result cuMemcpy2D_v2(const Copy2d* copy) {
    return copy_rows("cuMemcpy2D_v2", copy);
}

GDRKIT_CUDA_ENTRY Result cuMemcpy2DUnaligned_v2(const Copy2d* copy) {
    return copy_rows("cuMemcpy2DUnaligned_v2", copy);
}

GDRKIT_CUDA_ENTRY Result cuMemcpy2DAsync_v2(const Copy2d* copy, Handle stream) {
    return enqueue_rows("cuMemcpy2DAsync_v2", copy, stream);
}

GDRKIT_CUDA_ENTRY Result cuMemcpy3D_v2(const Copy3d* copy) {
    return copy_rows("cuMemcpy3D_v2", copy);
}

GDRKIT_CUDA_ENTRY Result cuMemcpy3DAsync_v2(const Copy3d* copy, Handle stream) {
    return enqueue_rows("cuMemcpy3DAsync_v2", copy, stream);
}

GDRKIT_CUDA_ENTRY Result cuMemcpy3DPeer(const Copy3d* copy) {
    return run_entry_in_context("cuMemcpy3DPeer", [&](const ContextRef& context) {
        CopyRequest request;
        const Result result = make_copy_request(copy, &request);
        return result != success ? result : copy_peer(context, request, copy->to.context, copy->from.context);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpy3DPeerAsync(const Copy3d* copy, Handle stream) {
    return run_entry_in_context("cuMemcpy3DPeerAsync", [&](const ContextRef& context) {
        CopyRequest request;
        const Result result = make_copy_request(copy, &request);
        return result != success ? result
                                 : enqueue_copy_peer(context, request, copy->to.context, copy->from.context, stream);
    });
}

} // namespace gdrkit::twin::cuda
