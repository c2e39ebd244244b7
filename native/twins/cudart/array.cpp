// cudaMallocArray and other functions of arrays and mipmapped arrays. The handle of an array is the driver's handle.
// Copies are in array_forms.cpp.
#include "cuda/array_abi.hpp"
#include "cudart/entry.hpp"

namespace gdrkit::twin::cudart {
namespace {

// Return the driver's format for channels of this size and kind, or 0 if the driver has none.
std::int32_t get_driver_format(int channel_bits, int channel_kind) {
    const bool is_signed = channel_kind == channel_signed;
    if (channel_kind == channel_float) {
        return channel_bits == 16 ? cuda::format_half : channel_bits == 32 ? cuda::format_float : 0;
    }
    if (!is_signed && channel_kind != channel_unsigned) {
        return 0;
    }
    switch (channel_bits) {
    case 8:
        return is_signed ? cuda::format_signed_8 : cuda::format_unsigned_8;
    case 16:
        return is_signed ? cuda::format_signed_16 : cuda::format_unsigned_16;
    case 32:
        return is_signed ? cuda::format_signed_32 : cuda::format_unsigned_32;
    default:
        return 0;
    }
}

ChannelFormat make_channel_format(const cuda::ArrayDescription& description) {
    const std::int32_t format = description.format;
    const bool is_float = format == cuda::format_half || format == cuda::format_float;
    const bool is_signed =
        format == cuda::format_signed_8 || format == cuda::format_signed_16 || format == cuda::format_signed_32;
    const bool is_wide =
        format == cuda::format_float || format == cuda::format_unsigned_32 || format == cuda::format_signed_32;
    const bool is_narrow = format == cuda::format_unsigned_8 || format == cuda::format_signed_8;
    const int bits = is_wide ? 32 : is_narrow ? 8 : 16;
    const auto get_channel_bits = [&](unsigned index) { return index < description.channels ? bits : 0; };
    return {get_channel_bits(0), get_channel_bits(1), get_channel_bits(2), get_channel_bits(3),
            is_float    ? channel_float
            : is_signed ? channel_signed
                        : channel_unsigned};
}

// Convert the size and the format of an array to the driver's description. An element has 1, 2 or 4 channels of
// the same size.
Error make_description(const ChannelFormat* format, const Extent& extent, unsigned flags,
                       cuda::ArrayDescription* description) {
    if (format == nullptr) {
        return invalid_value;
    }
    const std::int32_t channel_bits[] = {format->x, format->y, format->z, format->w};
    unsigned channel_count = 0;
    while (channel_count < 4 && channel_bits[channel_count] != 0) {
        ++channel_count;
    }
    for (unsigned index = 0; index < 4; ++index) {
        if (channel_bits[index] != (index < channel_count ? format->x : 0)) {
            return invalid_channel_descriptor;
        }
    }
    *description = {extent.width,  extent.height, extent.depth, get_driver_format(format->x, format->kind),
                    channel_count, flags};
    return description->format == 0 || channel_count == 3 ? invalid_channel_descriptor : success;
}

// Create an array by `create`, which passes the driver's description of the array to the driver.
template <typename Create>
Error create_array(const ChannelFormat* format, const Extent& extent, unsigned flags, Create&& create) {
    return run_entry_in_context([&] {
        cuda::ArrayDescription description{};
        const Error error = make_description(format, extent, flags, &description);
        return error == success ? create(static_cast<const cuda::ArrayDescription*>(&description)) : error;
    });
}

template <typename Value> void store_if_requested(Value* output, const Value& value) {
    if (output != nullptr) {
        *output = value;
    }
}

Error query_array(ChannelFormat* format, Extent* extent, unsigned* flags, Handle array) {
    cuda::ArrayDescription description{};
    const Error error = call(&Driver::cuArray3DGetDescriptor_v2, &description, array);
    if (error == success) {
        store_if_requested(format, make_channel_format(description));
        store_if_requested(extent, Extent{description.width, description.height, description.depth});
        store_if_requested(flags, unsigned{description.flags});
    }
    return error;
}

} // namespace

GDRKIT_CUDART_ENTRY Error cudaMallocArray(Handle* array, const ChannelFormat* format, std::size_t width,
                                          std::size_t height, unsigned flags) {
    return create_array(format, {width, height, 0}, flags, [&](const cuda::ArrayDescription* description) {
        return call(&Driver::cuArray3DCreate_v2, array, description);
    });
}

GDRKIT_CUDART_ENTRY Error cudaMalloc3DArray(Handle* array, const ChannelFormat* format, Extent extent, unsigned flags) {
    return create_array(format, extent, flags, [&](const cuda::ArrayDescription* description) {
        return call(&Driver::cuArray3DCreate_v2, array, description);
    });
}

GDRKIT_CUDART_ENTRY Error cudaMallocMipmappedArray(Handle* mipmap, const ChannelFormat* format, Extent extent,
                                                   unsigned level_count, unsigned flags) {
    return create_array(format, extent, flags, [&](const cuda::ArrayDescription* description) {
        return call(&Driver::cuMipmappedArrayCreate, mipmap, description, level_count);
    });
}

GDRKIT_CUDART_ENTRY Error cudaFreeArray(Handle array) {
    return run_entry_in_context([&] { return array == 0 ? success : call(&Driver::cuArrayDestroy, array); });
}

GDRKIT_CUDART_ENTRY Error cudaFreeMipmappedArray(Handle mipmap) {
    return run_entry_in_context([&] { return mipmap == 0 ? success : call(&Driver::cuMipmappedArrayDestroy, mipmap); });
}

GDRKIT_CUDART_ENTRY Error cudaGetMipmappedArrayLevel(Handle* array, Handle mipmap, unsigned level) {
    return call_in_context(&Driver::cuMipmappedArrayGetLevel, array, mipmap, level);
}

GDRKIT_CUDART_ENTRY Error cudaArrayGetInfo(ChannelFormat* format, Extent* extent, unsigned* flags, Handle array) {
    return run_entry_in_context([&] { return query_array(format, extent, flags, array); });
}

GDRKIT_CUDART_ENTRY Error cudaGetChannelDesc(ChannelFormat* format, Handle array) {
    return run_entry_in_context(
        [&] { return format == nullptr ? invalid_value : query_array(format, nullptr, nullptr, array); });
}

} // namespace gdrkit::twin::cudart
