// cudaMalloc and other functions of device memory, host memory, memory pools and interprocess handles. Functions that
// take a stream are in stream_forms.cpp.
#include "cudart/entry.hpp"

namespace gdrkit::twin::cudart {
namespace {

constexpr unsigned pitch_element_bytes = 4; // the smallest element size that cuMemAllocPitch accepts

// As in the real runtime, an allocation of 0 bytes succeeds and stores NULL.
Error allocate(void** pointer, std::size_t length_bytes) {
    if (pointer == nullptr) {
        return invalid_value;
    }
    Address address = 0;
    const Error error = length_bytes == 0 ? success : call(&Driver::cuMemAlloc_v2, &address, length_bytes);
    if (error == success) {
        *pointer = reinterpret_cast<void*>(address);
    }
    return error;
}

Error allocate_pitched(void** pointer, std::size_t* pitch_bytes, std::size_t width_bytes, std::size_t row_count) {
    if (pointer == nullptr || pitch_bytes == nullptr) {
        return invalid_value;
    }
    Address address = 0;
    if (width_bytes == 0 || row_count == 0) {
        *pointer = nullptr;
        *pitch_bytes = 0;
        return success;
    }
    const Error error =
        call(&Driver::cuMemAllocPitch_v2, &address, pitch_bytes, width_bytes, row_count, pitch_element_bytes);
    if (error == success) {
        *pointer = reinterpret_cast<void*>(address);
    }
    return error;
}

// As in the real runtime, an allocation of 0 bytes succeeds and stores NULL.
Error allocate_host(void** pointer, std::size_t length_bytes, unsigned flags) {
    if (pointer != nullptr && length_bytes == 0) {
        *pointer = nullptr;
        return success;
    }
    return call(&Driver::cuMemHostAlloc, pointer, length_bytes, flags);
}

Error query_pointer(PointerAttributes* attributes, const void* pointer) {
    if (attributes == nullptr) {
        return invalid_value;
    }
    std::uint32_t type = 0, is_managed = 0;
    PointerAttributes new_attributes{};
    const int attribute_numbers[] = {cuda::pointer_memory_type, cuda::pointer_is_managed, cuda::pointer_device_ordinal,
                                     cuda::pointer_device_pointer, cuda::pointer_host_pointer};
    void* values[] = {&type, &is_managed, &new_attributes.device, &new_attributes.device_pointer,
                      &new_attributes.host_pointer};
    const Error error =
        call(&Driver::cuPointerGetAttributes, unsigned{std::size(attribute_numbers)},
             static_cast<const int*>(attribute_numbers), static_cast<void**>(values), to_address(pointer));
    if (error == success) {
        new_attributes.type = is_managed != 0 ? memory_managed : static_cast<std::int32_t>(type);
        *attributes = new_attributes;
    }
    return error;
}

} // namespace

GDRKIT_CUDART_ENTRY Error cudaMalloc(void** pointer, std::size_t length_bytes) {
    return run_entry_in_context([&] { return allocate(pointer, length_bytes); });
}

GDRKIT_CUDART_ENTRY Error cudaFree(void* pointer) {
    return call_in_context(&Driver::cuMemFree_v2, to_address(pointer));
}

GDRKIT_CUDART_ENTRY Error cudaMallocPitch(void** pointer, std::size_t* pitch_bytes, std::size_t width_bytes,
                                          std::size_t height) {
    return run_entry_in_context([&] { return allocate_pitched(pointer, pitch_bytes, width_bytes, height); });
}

GDRKIT_CUDART_ENTRY Error cudaMalloc3D(PitchedPointer* pointer, Extent extent) {
    return run_entry_in_context([&] {
        if (pointer == nullptr) {
            return invalid_value;
        }
        std::size_t row_count = 0;
        if (__builtin_mul_overflow(extent.height, extent.depth, &row_count)) {
            return memory_allocation;
        }
        PitchedPointer allocation{nullptr, 0, extent.width, extent.height};
        const Error error = allocate_pitched(&allocation.pointer, &allocation.pitch, extent.width, row_count);
        if (error == success) {
            *pointer = allocation;
        }
        return error;
    });
}

GDRKIT_CUDART_ENTRY Error cudaMallocManaged(void** pointer, std::size_t length_bytes, unsigned flags) {
    return run_entry_in_context([&] {
        // For 0 bytes, the real runtime succeeds and allocates nothing. The driver would refuse the call.
        if (pointer != nullptr && length_bytes == 0) {
            *pointer = nullptr;
            return success;
        }
        return call(&Driver::cuMemAllocManaged, reinterpret_cast<Address*>(pointer), length_bytes, flags);
    });
}

// The function whose body follows #endif has the suffix _v2 in CUDA 12.
#if GDRKIT_CUDART_MAJOR == 12
GDRKIT_CUDART_ENTRY Error cudaMemAdvise(const void* pointer, std::size_t length_bytes, int advice, Device device) {
    return call_in_context(&Driver::cuMemAdvise, to_address(pointer), length_bytes, advice, device);
}

GDRKIT_CUDART_ENTRY Error cudaMemAdvise_v2(const void* pointer, std::size_t length_bytes, int advice,
                                           cuda::Location location) {
#else
GDRKIT_CUDART_ENTRY Error cudaMemAdvise(const void* pointer, std::size_t length_bytes, int advice,
                                        cuda::Location location) {
#endif
    return call_in_context(&Driver::cuMemAdvise_v2, to_address(pointer), length_bytes, advice, location);
}

GDRKIT_CUDART_ENTRY Error cudaMemRangeGetAttribute(void* data, std::size_t data_bytes, int attribute,
                                                   const void* pointer, std::size_t length_bytes) {
    return call_in_context(&Driver::cuMemRangeGetAttribute, data, data_bytes, attribute, to_address(pointer),
                           length_bytes);
}

GDRKIT_CUDART_ENTRY Error cudaMemRangeGetAttributes(void** data, std::size_t* data_bytes, int* attributes,
                                                    std::size_t count, const void* pointer, std::size_t length_bytes) {
    return call_in_context(&Driver::cuMemRangeGetAttributes, data, data_bytes, attributes, count, to_address(pointer),
                           length_bytes);
}

GDRKIT_CUDART_ENTRY Error cudaMallocHost(void** pointer, std::size_t length_bytes) {
    return run_entry_in_context([&] { return allocate_host(pointer, length_bytes, 0); });
}

GDRKIT_CUDART_ENTRY Error cudaHostAlloc(void** pointer, std::size_t length_bytes, unsigned flags) {
    return run_entry_in_context([&] { return allocate_host(pointer, length_bytes, flags); });
}

GDRKIT_CUDART_ENTRY Error cudaFreeHost(void* pointer) {
    return call_in_context(&Driver::cuMemFreeHost, pointer);
}

GDRKIT_CUDART_ENTRY Error cudaHostRegister(void* pointer, std::size_t length_bytes, unsigned flags) {
    return call_in_context(&Driver::cuMemHostRegister_v2, pointer, length_bytes, flags);
}

GDRKIT_CUDART_ENTRY Error cudaHostUnregister(void* pointer) {
    return call_in_context(&Driver::cuMemHostUnregister, pointer);
}

GDRKIT_CUDART_ENTRY Error cudaHostGetDevicePointer(void** pointer, void* host, unsigned flags) {
    return call_in_context(&Driver::cuMemHostGetDevicePointer_v2, reinterpret_cast<Address*>(pointer), host, flags);
}

GDRKIT_CUDART_ENTRY Error cudaHostGetFlags(unsigned* flags, void* host) {
    return call_in_context(&Driver::cuMemHostGetFlags, flags, host);
}

GDRKIT_CUDART_ENTRY Error cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total_bytes) {
    return call_in_context(&Driver::cuMemGetInfo_v2, free_bytes, total_bytes);
}

GDRKIT_CUDART_ENTRY Error cudaPointerGetAttributes(PointerAttributes* attributes, const void* pointer) {
    return run_entry_in_context([&] { return query_pointer(attributes, pointer); });
}

GDRKIT_CUDART_ENTRY Error cudaDeviceGetDefaultMemPool(Handle* pool, Device device) {
    return run_entry([&] { return call(&Driver::cuDeviceGetDefaultMemPool, pool, device); });
}

GDRKIT_CUDART_ENTRY Error cudaDeviceGetMemPool(Handle* pool, Device device) {
    return run_entry([&] { return call(&Driver::cuDeviceGetMemPool, pool, device); });
}

GDRKIT_CUDART_ENTRY Error cudaDeviceSetMemPool(Device device, Handle pool) {
    return run_entry([&] { return call(&Driver::cuDeviceSetMemPool, device, pool); });
}

// The runtime and the driver have the same structures for pools.
GDRKIT_CUDART_ENTRY Error cudaMemPoolCreate(Handle* pool, const void* properties) {
    return call_in_context(&Driver::cuMemPoolCreate, pool, properties);
}

#if GDRKIT_CUDART_MAJOR == 13
GDRKIT_CUDART_ENTRY Error cudaMemGetDefaultMemPool(Handle* pool, const cuda::Location* location, int allocation_type) {
    return call_in_context(&Driver::cuMemGetDefaultMemPool, pool, location, allocation_type);
}

GDRKIT_CUDART_ENTRY Error cudaMemGetMemPool(Handle* pool, const cuda::Location* location, int allocation_type) {
    return call_in_context(&Driver::cuMemGetMemPool, pool, location, allocation_type);
}

GDRKIT_CUDART_ENTRY Error cudaMemSetMemPool(const cuda::Location* location, int allocation_type, Handle pool) {
    return call_in_context(&Driver::cuMemSetMemPool, location, allocation_type, pool);
}
#endif

GDRKIT_CUDART_ENTRY Error cudaMemPoolDestroy(Handle pool) {
    return call_in_context(&Driver::cuMemPoolDestroy, pool);
}

GDRKIT_CUDART_ENTRY Error cudaMemPoolSetAttribute(Handle pool, int attribute, void* value) {
    return call_in_context(&Driver::cuMemPoolSetAttribute, pool, attribute, value);
}

GDRKIT_CUDART_ENTRY Error cudaMemPoolGetAttribute(Handle pool, int attribute, void* value) {
    return call_in_context(&Driver::cuMemPoolGetAttribute, pool, attribute, value);
}

GDRKIT_CUDART_ENTRY Error cudaMemPoolSetAccess(Handle pool, const void* descriptions, std::size_t count) {
    return call_in_context(&Driver::cuMemPoolSetAccess, pool, descriptions, count);
}

GDRKIT_CUDART_ENTRY Error cudaMemPoolGetAccess(int* flags, Handle pool, cuda::Location* location) {
    return call_in_context(&Driver::cuMemPoolGetAccess, flags, pool, location);
}

GDRKIT_CUDART_ENTRY Error cudaMemPoolTrimTo(Handle pool, std::size_t kept_bytes) {
    return call_in_context(&Driver::cuMemPoolTrimTo, pool, kept_bytes);
}

GDRKIT_CUDART_ENTRY Error cudaMemPoolExportToShareableHandle(void* shareable_handle, Handle pool, int handle_type,
                                                             unsigned flags) {
    return call_in_context(&Driver::cuMemPoolExportToShareableHandle, shareable_handle, pool, handle_type,
                           std::uint64_t{flags});
}

GDRKIT_CUDART_ENTRY Error cudaMemPoolImportFromShareableHandle(Handle* pool, void* shareable_handle, int handle_type,
                                                               unsigned flags) {
    return call_in_context(&Driver::cuMemPoolImportFromShareableHandle, pool, shareable_handle, handle_type,
                           std::uint64_t{flags});
}

GDRKIT_CUDART_ENTRY Error cudaMemPoolExportPointer(cuda::IpcHandle* pointer_handle, void* pointer) {
    return call_in_context(&Driver::cuMemPoolExportPointer, pointer_handle, to_address(pointer));
}

GDRKIT_CUDART_ENTRY Error cudaMemPoolImportPointer(void** pointer, Handle pool, const cuda::IpcHandle* pointer_handle) {
    return call_in_context(&Driver::cuMemPoolImportPointer, reinterpret_cast<Address*>(pointer), pool, pointer_handle);
}

GDRKIT_CUDART_ENTRY Error cudaIpcGetMemHandle(cuda::IpcHandle* handle, void* pointer) {
    return call_in_context(&Driver::cuIpcGetMemHandle, static_cast<void*>(handle), to_address(pointer));
}

GDRKIT_CUDART_ENTRY Error cudaIpcOpenMemHandle(void** pointer, cuda::IpcHandle handle, unsigned flags) {
    return call_in_context(&Driver::cuIpcOpenMemHandle_v2, reinterpret_cast<Address*>(pointer), handle, flags);
}

GDRKIT_CUDART_ENTRY Error cudaIpcCloseMemHandle(void* pointer) {
    return call_in_context(&Driver::cuIpcCloseMemHandle, to_address(pointer));
}

GDRKIT_CUDART_ENTRY Error cudaIpcGetEventHandle(cuda::IpcHandle* handle, Handle event) {
    return call_in_context(&Driver::cuIpcGetEventHandle, static_cast<void*>(handle), event);
}

GDRKIT_CUDART_ENTRY Error cudaIpcOpenEventHandle(Handle* event, cuda::IpcHandle handle) {
    return call_in_context(&Driver::cuIpcOpenEventHandle, event, handle);
}

} // namespace gdrkit::twin::cudart
