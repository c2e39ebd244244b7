// Texture and surface objects. Only kernels use these objects to access memory, and the twin runs no kernels. So the
// twin checks the descriptions of the objects, stores them and returns them.
#include "cuda/texture.hpp"

#include <algorithm>

#include "cuda/array.hpp"
#include "cuda/entry.hpp"
#include "cuda/registry.hpp"

namespace gdrkit::twin::cuda {
namespace {

constexpr std::uint64_t texture_alignment_bytes = 512;
// CU_TRSF_READ_AS_INTEGER, ..._NORMALIZED_COORDINATES, ..._SRGB, ..._DISABLE_TRILINEAR_OPTIMIZATION and
// ..._SEAMLESS_CUBEMAP.
constexpr std::uint32_t known_texture_flags = 0x73;

struct Texture {
    Handle context = 0;
    ResourceDescription resource{};
    TextureDescription description{};
    ViewDescription view{};
    bool has_view = false;
};

struct Surface {
    Handle context = 0;
    ResourceDescription resource{};
};

Registry<Texture>& textures() {
    static auto* const instance = new Registry<Texture>("cuda_texture");
    return *instance;
}

Registry<Surface>& surfaces() {
    static auto* const instance = new Registry<Surface>("cuda_surface");
    return *instance;
}

// Return whether the address is aligned for textures, and its allocation contains the `length_bytes` from there on.
bool is_texture_memory(DevicePointer address, std::uint64_t length_bytes) {
    const RangeRef range = find_range(address);
    return range && address % texture_alignment_bytes == 0 && length_bytes != 0 &&
           length_bytes <= range->base + range->length_bytes - address;
}

bool is_valid_resource(const ResourceDescription& resource) {
    if (resource.flags != 0) {
        return false;
    }
    switch (resource.type) {
    case resource_array:
        return find_array(resource.array) != nullptr;
    case resource_mipmap:
        return mipmap_exists(resource.array);
    case resource_linear:
        return count_element_bytes(resource.linear.format, resource.linear.channels) != 0 &&
               is_texture_memory(resource.linear.address, resource.linear.length_bytes);
    case resource_pitch: {
        const auto& rows = resource.rows;
        std::uint64_t row_bytes = 0, length_bytes = 0;
        return count_element_bytes(rows.format, rows.channels) != 0 && rows.height != 0 &&
               !__builtin_mul_overflow(rows.width, count_element_bytes(rows.format, rows.channels), &row_bytes) &&
               row_bytes <= rows.pitch_bytes &&
               !__builtin_mul_overflow(rows.pitch_bytes, rows.height - 1, &length_bytes) &&
               !__builtin_add_overflow(length_bytes, row_bytes, &length_bytes) &&
               is_texture_memory(rows.address, length_bytes);
    }
    default:
        return false;
    }
}

bool is_valid_texture(const TextureDescription& texture, int resource_type) {
    // CUfilter_mode has the values 0 and 1, CUaddress_mode the values 0 to 3.
    const auto is_filter_mode = [](int mode) { return mode == 0 || mode == 1; };
    return std::ranges::all_of(texture.address_modes, [](int mode) { return mode >= 0 && mode <= 3; }) &&
           is_filter_mode(texture.filter_mode) && is_filter_mode(texture.mipmap_filter_mode) &&
           (texture.flags & ~known_texture_flags) == 0 &&
           (resource_type != resource_mipmap || (texture.flags & texture_normalized_coordinates) != 0);
}

Result create_texture(const ContextRef& context, Handle* handle, const ResourceDescription* resource,
                      const TextureDescription* description, const ViewDescription* view) {
    if (handle == nullptr || resource == nullptr || description == nullptr || !is_valid_resource(*resource) ||
        !is_valid_texture(*description, resource->type)) {
        return invalid_value;
    }
    const bool is_array_or_mipmap = resource->type == resource_array || resource->type == resource_mipmap;
    if (view != nullptr && !is_array_or_mipmap) {
        return invalid_value;
    }
    auto texture = std::make_shared<Texture>();
    texture->context = context->owning_context_handle;
    texture->resource = *resource;
    texture->description = *description;
    texture->has_view = view != nullptr;
    texture->view = view != nullptr ? *view : ViewDescription{};
    *handle = make_handle();
    textures().add(*handle, std::move(texture));
    return success;
}

Result create_surface(const ContextRef& context, Handle* handle, const ResourceDescription* resource) {
    if (handle == nullptr || resource == nullptr || resource->type != resource_array || resource->flags != 0) {
        return invalid_value;
    }
    const ArrayRef array = find_array(resource->array);
    if (!array || (array->description.flags & array_surface) == 0) {
        return invalid_value;
    }
    auto surface = std::make_shared<Surface>();
    surface->context = context->owning_context_handle;
    surface->resource = *resource;
    *handle = make_handle();
    surfaces().add(*handle, std::move(surface));
    return success;
}

// Run `body` with a texture or surface. The body stores its result in *description; this function only checks that
// `description` is not null.
template <typename Object, typename Description, typename Body>
Result query_object(std::string_view symbol, Registry<Object>* registry, Handle handle, Description* description,
                    Body&& body) {
    return run_entry_in_context(symbol, [&](const ContextRef&) {
        const auto object = registry->find(handle);
        return object && description != nullptr ? body(*object) : invalid_value;
    });
}

} // namespace

void destroy_context_textures(Handle context) {
    textures().take_if([=](const Texture& texture) { return texture.context == context; });
    surfaces().take_if([=](const Surface& surface) { return surface.context == context; });
}

GDRKIT_CUDA_ENTRY Result cuTexObjectCreate(Handle* handle, const ResourceDescription* resource,
                                           const TextureDescription* texture, const ViewDescription* view) {
    return run_entry_in_context("cuTexObjectCreate", [&](const ContextRef& context) {
        return create_texture(context, handle, resource, texture, view);
    });
}

GDRKIT_CUDA_ENTRY Result cuTexObjectDestroy(Handle handle) {
    return run_entry_in_context("cuTexObjectDestroy",
                                [&](const ContextRef&) { return textures().take(handle) ? success : invalid_value; });
}

GDRKIT_CUDA_ENTRY Result cuTexObjectGetResourceDesc(ResourceDescription* description, Handle handle) {
    return query_object("cuTexObjectGetResourceDesc", &textures(), handle, description, [&](const Texture& texture) {
        *description = texture.resource;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuTexObjectGetTextureDesc(TextureDescription* description, Handle handle) {
    return query_object("cuTexObjectGetTextureDesc", &textures(), handle, description, [&](const Texture& texture) {
        *description = texture.description;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuTexObjectGetResourceViewDesc(ViewDescription* description, Handle handle) {
    return query_object("cuTexObjectGetResourceViewDesc", &textures(), handle, description,
                        [&](const Texture& texture) {
                            if (!texture.has_view) {
                                return invalid_value;
                            }
                            *description = texture.view;
                            return success;
                        });
}

GDRKIT_CUDA_ENTRY Result cuSurfObjectCreate(Handle* handle, const ResourceDescription* resource) {
    return run_entry_in_context("cuSurfObjectCreate",
                                [&](const ContextRef& context) { return create_surface(context, handle, resource); });
}

GDRKIT_CUDA_ENTRY Result cuSurfObjectDestroy(Handle handle) {
    return run_entry_in_context("cuSurfObjectDestroy",
                                [&](const ContextRef&) { return surfaces().take(handle) ? success : invalid_value; });
}

GDRKIT_CUDA_ENTRY Result cuSurfObjectGetResourceDesc(ResourceDescription* description, Handle handle) {
    return query_object("cuSurfObjectGetResourceDesc", &surfaces(), handle, description, [&](const Surface& surface) {
        *description = surface.resource;
        return success;
    });
}

} // namespace gdrkit::twin::cuda
