// Implements cuArrayCreate, cuMipmappedArrayCreate, and the copies that take a byte offset in an array, such as
// cuMemcpyHtoA.
#include "cuda/array.hpp"

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>

#include "cuda/capture.hpp"
#include "cuda/copy.hpp"
#include "cuda/entry.hpp"
#include "cuda/registry.hpp"
#include "cuda/stream.hpp"

namespace gdrkit::twin::cuda {
namespace {

// These are the limits of an H200. Widths, heights and sizes are in elements. `size_3d_max` limits each side of a
// three-dimensional array, and `layers_max` limits the number of layers.
constexpr std::size_t width_max = 131072, height_max = 65536, size_3d_max = 16384, layers_max = 2048;

struct Mipmap {
    std::vector<Handle> level_handles;
    Handle context = 0;
};

struct Arrays {
    Registry<Array> standalone_arrays{"cuda_array"};
    Registry<Mipmap> mipmaps{"cuda_mipmapped_array"};
    std::mutex mutex;
    std::map<Handle, ArrayRef> mipmap_levels; // guarded by `mutex`; a level is destroyed with its mipmapped array
};

Arrays& arrays() {
    static auto* const instance = new Arrays;
    return *instance;
}

std::uint64_t count_channel_bytes(std::int32_t format) {
    switch (format) {
    case format_unsigned_8:
    case format_signed_8:
        return 1;
    case format_unsigned_16:
    case format_signed_16:
    case format_half:
        return 2;
    case format_unsigned_32:
    case format_signed_32:
    case format_float:
        return 4;
    default:
        return 0;
    }
}

// Return whether an H200 allows an array of this size. A cubemap is square and has 6 faces; a layered cubemap has 6
// faces per layer. The depth of a cubemap is its number of faces, in all layers.
bool has_valid_size(const ArrayDescription& description) {
    const auto& [width, height, depth, format, channels, flags] = description;
    if ((flags & array_cubemap) != 0) {
        const bool has_valid_face_count = (flags & array_layered) != 0 ? depth % 6 == 0 : depth == 6;
        return width == height && depth != 0 && has_valid_face_count && width <= height_max;
    }
    if ((flags & array_layered) != 0) {
        return depth != 0 && depth <= layers_max && width <= width_max && height <= height_max;
    }
    if (depth != 0) {
        return height != 0 && width <= size_3d_max && height <= size_3d_max && depth <= size_3d_max;
    }
    return width <= width_max && height <= height_max;
}

Result check_description(const ArrayDescription* description) {
    if (description == nullptr || count_element_bytes(description->format, description->channels) == 0) {
        return invalid_value;
    }
    if ((description->flags & ~array_flags_mask) != 0) {
        return invalid_value;
    }
    // The twin does not implement the other flags of CUDA.
    if ((description->flags & ~(array_layered | array_surface | array_cubemap | array_gather)) != 0) {
        return not_supported;
    }
    return description->width != 0 && has_valid_size(*description) ? success : invalid_value;
}

Result make_array(const ContextRef& context, const ArrayDescription& description, ArrayRef* new_array) {
    if (const Result result = check_captures_permit_call(); result != success) {
        return result;
    }
    auto array = std::make_shared<Array>();
    array->description = description;
    array->context = context->owning_context_handle;
    array->element_bytes = count_element_bytes(description.format, description.channels);
    array->row_bytes = description.width * array->element_bytes;
    array->row_count = std::max<std::size_t>(description.height, 1);
    array->slice_count = std::max<std::size_t>(description.depth, 1);
    const Result result = allocate(MemoryKind::device, context->device,
                                   array->row_bytes * array->row_count * array->slice_count, &array->range);
    if (result == success) {
        array->range->context = context->owning_context_handle;
        add_range(array->range);
        *new_array = std::move(array);
    }
    return result;
}

Result create_array(const ContextRef& context, Handle* handle, const ArrayDescription* description) {
    ArrayRef array;
    Result result = handle == nullptr ? invalid_value : check_description(description);
    if (result == success) {
        result = make_array(context, *description, &array);
    }
    if (result == success) {
        *handle = make_handle();
        arrays().standalone_arrays.add(*handle, std::move(array));
    }
    return result;
}

// Wait for the work that may use an array, and free its memory.
void free_array_memory(const Array& array) {
    ContextRef context;
    RangeRef range;
    if (find_context(array.context, &context) == success) {
        synchronise(context);
    }
    if (find_range_by_base(array.range->base) == array.range &&
        remove_range(array.range->base, {MemoryKind::device}, &range) == success) {
        free_address_slot(range->slot);
    }
}

// Remove a level of a mipmapped array from `mipmap_levels` and return it; null if another call has removed it.
ArrayRef take_level(Handle handle) {
    std::lock_guard lock(arrays().mutex);
    const auto level = arrays().mipmap_levels.extract(handle);
    return level.empty() ? nullptr : level.mapped();
}

void free_levels(const Mipmap& mipmap) {
    for (const Handle handle : mipmap.level_handles) {
        if (const ArrayRef level = take_level(handle)) {
            free_array_memory(*level);
        }
    }
}

Result create_mipmap(const ContextRef& context, Handle* handle, const ArrayDescription* description,
                     unsigned level_count) {
    if (const Result result = check_description(description);
        handle == nullptr || level_count == 0 || result != success) {
        return result == success ? invalid_value : result;
    }
    // The depth of such an array is its number of layers or faces. Each level has the same number, so it is not halved.
    const bool has_layers = (description->flags & (array_layered | array_cubemap)) != 0;
    const std::size_t longest_side =
        std::max({description->width, description->height, has_layers ? 0 : description->depth});
    auto mipmap = std::make_shared<Mipmap>();
    mipmap->context = context->owning_context_handle;
    ArrayDescription level_description = *description;
    // In the last possible level, the longest side has one element.
    const unsigned actual_level_count =
        std::min<unsigned>(level_count, static_cast<unsigned>(std::bit_width(longest_side)));
    for (unsigned level = 0; level < actual_level_count; ++level) {
        ArrayRef array;
        if (const Result result = make_array(context, level_description, &array); result != success) {
            free_levels(*mipmap);
            return result;
        }
        const Handle level_handle = make_handle();
        {
            std::lock_guard lock(arrays().mutex);
            arrays().mipmap_levels.emplace(level_handle, std::move(array));
        }
        mipmap->level_handles.push_back(level_handle);
        const auto halve = [](std::size_t* size) { *size = *size == 0 ? 0 : std::max<std::size_t>(*size / 2, 1); };
        halve(&level_description.width);
        halve(&level_description.height);
        if (!has_layers) {
            halve(&level_description.depth);
        }
    }
    *handle = make_handle();
    arrays().mipmaps.add(*handle, std::move(mipmap));
    return success;
}

// Find the address of a part of an array. The offset counts bytes from the first element, across rows.
Result find_array_part(Handle handle, std::uint64_t offset_bytes, std::uint64_t length_bytes, std::uint64_t* address) {
    const ArrayRef array = find_array(handle);
    if (!array) {
        return invalid_handle;
    }
    if (offset_bytes > array->range->length_bytes || length_bytes > array->range->length_bytes - offset_bytes) {
        return invalid_value;
    }
    *address = array->range->base + offset_bytes;
    return success;
}

std::uint64_t to_address(const void* pointer) {
    return reinterpret_cast<std::uint64_t>(pointer);
}

// Find the address of a part of an array, and call `copy` with it. `copy` copies to or from the part.
template <typename Copy>
Result copy_part(std::string_view symbol, Handle array, std::uint64_t offset_bytes, std::uint64_t length_bytes,
                 Copy&& copy) {
    return run_entry_in_context(symbol, [&](const ContextRef& context) {
        std::uint64_t address = 0;
        const Result result = find_array_part(array, offset_bytes, length_bytes, &address);
        return result == success ? copy(context, address) : result;
    });
}

Result query_description(Handle handle, ArrayDescription* description) {
    const ArrayRef array = find_array(handle);
    if (description == nullptr || !array) {
        return array ? invalid_value : invalid_handle;
    }
    *description = array->description;
    return success;
}

} // namespace

ArrayRef find_array(Handle handle) {
    if (ArrayRef array = arrays().standalone_arrays.find(handle)) {
        return array;
    }
    std::lock_guard lock(arrays().mutex);
    const auto level = arrays().mipmap_levels.find(handle);
    return level == arrays().mipmap_levels.end() ? nullptr : level->second;
}

bool mipmap_exists(Handle handle) {
    return arrays().mipmaps.find(handle) != nullptr;
}

std::uint64_t count_element_bytes(int format, std::uint32_t channels) {
    return channels == 1 || channels == 2 || channels == 4 ? count_channel_bytes(format) * channels : 0;
}

void destroy_context_arrays(Handle context) {
    for (const auto& array :
         arrays().standalone_arrays.take_if([=](const Array& candidate) { return candidate.context == context; })) {
        free_array_memory(*array);
    }
    for (const auto& mipmap :
         arrays().mipmaps.take_if([=](const Mipmap& candidate) { return candidate.context == context; })) {
        free_levels(*mipmap);
    }
}

GDRKIT_CUDA_ENTRY Result cuArrayCreate_v2(Handle* array, const PlaneDescription* plane) {
    return run_entry_in_context("cuArrayCreate_v2", [&](const ContextRef& context) {
        if (plane == nullptr) {
            return invalid_value;
        }
        const ArrayDescription description{plane->width, plane->height, 0, plane->format, plane->channels, 0};
        return create_array(context, array, &description);
    });
}

GDRKIT_CUDA_ENTRY Result cuArray3DCreate_v2(Handle* array, const ArrayDescription* description) {
    return run_entry_in_context("cuArray3DCreate_v2",
                                [&](const ContextRef& context) { return create_array(context, array, description); });
}

GDRKIT_CUDA_ENTRY Result cuArrayGetDescriptor_v2(PlaneDescription* plane, Handle array) {
    return run_entry_in_context("cuArrayGetDescriptor_v2", [&](const ContextRef&) {
        ArrayDescription description{};
        const Result result = plane == nullptr ? invalid_value : query_description(array, &description);
        if (result == success) {
            *plane = {description.width, description.height, description.format, description.channels};
        }
        return result;
    });
}

GDRKIT_CUDA_ENTRY Result cuArray3DGetDescriptor_v2(ArrayDescription* description, Handle array) {
    return run_entry_in_context("cuArray3DGetDescriptor_v2",
                                [&](const ContextRef&) { return query_description(array, description); });
}

GDRKIT_CUDA_ENTRY Result cuArrayDestroy(Handle handle) {
    return run_entry_in_context("cuArrayDestroy", [&](const ContextRef&) {
        const ArrayRef array = arrays().standalone_arrays.take(handle);
        if (!array) {
            return invalid_handle;
        }
        free_array_memory(*array);
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuMipmappedArrayCreate(Handle* mipmap, const ArrayDescription* description, unsigned levels) {
    return run_entry_in_context("cuMipmappedArrayCreate", [&](const ContextRef& context) {
        return create_mipmap(context, mipmap, description, levels);
    });
}

GDRKIT_CUDA_ENTRY Result cuMipmappedArrayGetLevel(Handle* array, Handle mipmap_handle, unsigned level) {
    return run_entry_in_context("cuMipmappedArrayGetLevel", [&](const ContextRef&) {
        const auto mipmap = arrays().mipmaps.find(mipmap_handle);
        if (!mipmap) {
            return invalid_handle;
        }
        if (array == nullptr || level >= mipmap->level_handles.size()) {
            return invalid_value;
        }
        *array = mipmap->level_handles[level];
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuMipmappedArrayDestroy(Handle handle) {
    return run_entry_in_context("cuMipmappedArrayDestroy", [&](const ContextRef&) {
        const auto mipmap = arrays().mipmaps.take(handle);
        if (!mipmap) {
            return invalid_handle;
        }
        free_levels(*mipmap);
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyHtoA_v2(Handle array, std::size_t offset_bytes, const void* from,
                                         std::size_t length_bytes) {
    return copy_part("cuMemcpyHtoA_v2", array, offset_bytes, length_bytes,
                     [&](const ContextRef& context, std::uint64_t part_address) {
                         return copy_synchronous(context,
                                                 make_contiguous_copy(part_address, to_address(from), length_bytes));
                     });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyAtoH_v2(void* to, Handle array, std::size_t offset_bytes, std::size_t length_bytes) {
    return copy_part("cuMemcpyAtoH_v2", array, offset_bytes, length_bytes,
                     [&](const ContextRef& context, std::uint64_t part_address) {
                         return copy_synchronous(context,
                                                 make_contiguous_copy(to_address(to), part_address, length_bytes));
                     });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyDtoA_v2(Handle array, std::size_t offset_bytes, DevicePointer from,
                                         std::size_t length_bytes) {
    return copy_part("cuMemcpyDtoA_v2", array, offset_bytes, length_bytes,
                     [&](const ContextRef& context, std::uint64_t part_address) {
                         return copy_synchronous(context, make_contiguous_copy(part_address, from, length_bytes,
                                                                               AllowedMemory::device_only,
                                                                               AllowedMemory::device_only));
                     });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyAtoD_v2(DevicePointer to, Handle array, std::size_t offset_bytes,
                                         std::size_t length_bytes) {
    return copy_part("cuMemcpyAtoD_v2", array, offset_bytes, length_bytes,
                     [&](const ContextRef& context, std::uint64_t part_address) {
                         return copy_synchronous(context, make_contiguous_copy(to, part_address, length_bytes,
                                                                               AllowedMemory::device_only,
                                                                               AllowedMemory::device_only));
                     });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyAtoA_v2(Handle to, std::size_t to_offset_bytes, Handle from,
                                         std::size_t from_offset_bytes, std::size_t length_bytes) {
    return copy_part("cuMemcpyAtoA_v2", to, to_offset_bytes, length_bytes,
                     [&](const ContextRef& context, std::uint64_t part_address) {
                         std::uint64_t source_address = 0;
                         const Result result = find_array_part(from, from_offset_bytes, length_bytes, &source_address);
                         return result == success
                                    ? copy_synchronous(context,
                                                       make_contiguous_copy(part_address, source_address, length_bytes))
                                    : result;
                     });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyHtoAAsync_v2(Handle array, std::size_t offset_bytes, const void* from,
                                              std::size_t length_bytes, Handle stream) {
    return copy_part("cuMemcpyHtoAAsync_v2", array, offset_bytes, length_bytes,
                     [&](const ContextRef& context, std::uint64_t part_address) {
                         return enqueue_copy(
                             context, make_contiguous_copy(part_address, to_address(from), length_bytes), stream);
                     });
}

GDRKIT_CUDA_ENTRY Result cuMemcpyAtoHAsync_v2(void* to, Handle array, std::size_t offset_bytes,
                                              std::size_t length_bytes, Handle stream) {
    return copy_part("cuMemcpyAtoHAsync_v2", array, offset_bytes, length_bytes,
                     [&](const ContextRef& context, std::uint64_t part_address) {
                         return enqueue_copy(context, make_contiguous_copy(to_address(to), part_address, length_bytes),
                                             stream);
                     });
}

} // namespace gdrkit::twin::cuda
