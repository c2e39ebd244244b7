// Functions that take a stream, in the ordinary form and the per-thread form (forms.hpp).
#include "cudart/forms.hpp"

namespace gdrkit::twin::cudart {
namespace {

// Allocate memory in a stream by `allocate`, a call of the driver that stores an address.
template <typename Allocate> Error allocate_in_stream(void** pointer, Allocate&& allocate) {
    Address address = 0;
    const Error error = pointer == nullptr ? invalid_value : allocate(&address);
    if (error == success) {
        *pointer = reinterpret_cast<void*>(address);
    }
    return error;
}

} // namespace

GDRKIT_STREAM_FORM(cudaStreamGetPriority)(Handle stream, int* priority) {
    return call_in_context(&Driver::cuStreamGetPriority, resolve_stream(stream), priority);
}

GDRKIT_STREAM_FORM(cudaStreamGetFlags)(Handle stream, unsigned* flags) {
    return call_in_context(&Driver::cuStreamGetFlags, resolve_stream(stream), flags);
}

GDRKIT_STREAM_FORM(cudaStreamGetId)(Handle stream, std::uint64_t* id) {
    return call_in_context(&Driver::cuStreamGetId, resolve_stream(stream), id);
}

GDRKIT_STREAM_FORM(cudaStreamGetDevice)(Handle stream, Device* device) {
    return call_in_context(&Driver::cuStreamGetDevice, resolve_stream(stream), device);
}

GDRKIT_STREAM_FORM(cudaStreamSynchronize)(Handle stream) {
    return call_in_context(&Driver::cuStreamSynchronize, resolve_stream(stream));
}

GDRKIT_STREAM_FORM(cudaStreamQuery)(Handle stream) {
    return call_in_context(&Driver::cuStreamQuery, resolve_stream(stream));
}

GDRKIT_STREAM_FORM(cudaStreamWaitEvent)(Handle stream, Handle event, unsigned flags) {
    return call_in_context(&Driver::cuStreamWaitEvent, resolve_stream(stream), event, flags);
}

GDRKIT_STREAM_FORM(cudaStreamAddCallback)
(Handle stream, void (*callback)(Handle, int, void*), void* user_data, unsigned flags) {
    return call_in_context(&Driver::cuStreamAddCallback, resolve_stream(stream), callback, user_data, flags);
}

GDRKIT_STREAM_FORM(cudaLaunchHostFunc)(Handle stream, void (*function)(void*), void* user_data) {
    return call_in_context(&Driver::cuLaunchHostFunc, resolve_stream(stream), function, user_data);
}

GDRKIT_STREAM_FORM(cudaEventRecord)(Handle event, Handle stream) {
    return call_in_context(&Driver::cuEventRecord, event, resolve_stream(stream));
}

GDRKIT_STREAM_FORM(cudaEventRecordWithFlags)(Handle event, Handle stream, unsigned flags) {
    return call_in_context(&Driver::cuEventRecordWithFlags, event, resolve_stream(stream), flags);
}

GDRKIT_STREAM_FORM(cudaMallocAsync)(void** pointer, std::size_t length_bytes, Handle stream) {
    return run_entry_in_context([&] {
        return allocate_in_stream(pointer, [&](Address* address) {
            return call(&Driver::cuMemAllocAsync, address, length_bytes, resolve_stream(stream));
        });
    });
}

GDRKIT_STREAM_FORM(cudaMallocFromPoolAsync)(void** pointer, std::size_t length_bytes, Handle pool, Handle stream) {
    return run_entry_in_context([&] {
        return allocate_in_stream(pointer, [&](Address* address) {
            return call(&Driver::cuMemAllocFromPoolAsync, address, length_bytes, pool, resolve_stream(stream));
        });
    });
}

// The function whose body follows #endif has the suffix _v2 in CUDA 12.
#if GDRKIT_CUDART_MAJOR == 12
GDRKIT_STREAM_FORM(cudaMemPrefetchAsync)(const void* pointer, std::size_t length_bytes, Device device, Handle stream) {
    return call_in_context(&Driver::cuMemPrefetchAsync, to_address(pointer), length_bytes, device,
                           resolve_stream(stream));
}

GDRKIT_STREAM_FORM(cudaMemPrefetchAsync_v2)
(const void* pointer, std::size_t length_bytes, cuda::Location location, unsigned flags, Handle stream) {
#else
GDRKIT_STREAM_FORM(cudaMemPrefetchAsync)
(const void* pointer, std::size_t length_bytes, cuda::Location location, unsigned flags, Handle stream) {
#endif
    return call_in_context(&Driver::cuMemPrefetchAsync_v2, to_address(pointer), length_bytes, location, flags,
                           resolve_stream(stream));
}

GDRKIT_STREAM_FORM(cudaStreamAttachMemAsync)
(Handle stream, void* pointer, std::size_t length_bytes, unsigned flags) {
    return call_in_context(&Driver::cuStreamAttachMemAsync, resolve_stream(stream), to_address(pointer), length_bytes,
                           flags);
}

GDRKIT_STREAM_FORM(cudaFreeAsync)(void* pointer, Handle stream) {
    return call_in_context(&Driver::cuMemFreeAsync, to_address(pointer), resolve_stream(stream));
}

} // namespace gdrkit::twin::cudart
