// Functions that take a stream, in both forms (forms.hpp).
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
    return call_in_context(&Driver::cuStreamGetPriority, resolved(stream), priority);
}

GDRKIT_STREAM_FORM(cudaStreamGetFlags)(Handle stream, unsigned* flags) {
    return call_in_context(&Driver::cuStreamGetFlags, resolved(stream), flags);
}

GDRKIT_STREAM_FORM(cudaStreamGetId)(Handle stream, std::uint64_t* id) {
    return call_in_context(&Driver::cuStreamGetId, resolved(stream), id);
}

GDRKIT_STREAM_FORM(cudaStreamGetDevice)(Handle stream, Device* device) {
    return call_in_context(&Driver::cuStreamGetDevice, resolved(stream), device);
}

GDRKIT_STREAM_FORM(cudaStreamSynchronize)(Handle stream) {
    return call_in_context(&Driver::cuStreamSynchronize, resolved(stream));
}

GDRKIT_STREAM_FORM(cudaStreamQuery)(Handle stream) {
    return call_in_context(&Driver::cuStreamQuery, resolved(stream));
}

GDRKIT_STREAM_FORM(cudaStreamWaitEvent)(Handle stream, Handle event, unsigned flags) {
    return call_in_context(&Driver::cuStreamWaitEvent, resolved(stream), event, flags);
}

GDRKIT_STREAM_FORM(cudaStreamAddCallback)
(Handle stream, void (*callback)(Handle, int, void*), void* user, unsigned flags) {
    return call_in_context(&Driver::cuStreamAddCallback, resolved(stream), callback, user, flags);
}

GDRKIT_STREAM_FORM(cudaLaunchHostFunc)(Handle stream, void (*function)(void*), void* user) {
    return call_in_context(&Driver::cuLaunchHostFunc, resolved(stream), function, user);
}

GDRKIT_STREAM_FORM(cudaEventRecord)(Handle event, Handle stream) {
    return call_in_context(&Driver::cuEventRecord, event, resolved(stream));
}

GDRKIT_STREAM_FORM(cudaEventRecordWithFlags)(Handle event, Handle stream, unsigned flags) {
    return call_in_context(&Driver::cuEventRecordWithFlags, event, resolved(stream), flags);
}

GDRKIT_STREAM_FORM(cudaMallocAsync)(void** pointer, std::size_t length_bytes, Handle stream) {
    return entry_in_context([&] {
        return allocate_in_stream(pointer, [&](Address* address) {
            return call(&Driver::cuMemAllocAsync, address, length_bytes, resolved(stream));
        });
    });
}

GDRKIT_STREAM_FORM(cudaMallocFromPoolAsync)(void** pointer, std::size_t length_bytes, Handle pool, Handle stream) {
    return entry_in_context([&] {
        return allocate_in_stream(pointer, [&](Address* address) {
            return call(&Driver::cuMemAllocFromPoolAsync, address, length_bytes, pool, resolved(stream));
        });
    });
}

#if GDRKIT_CUDART_MAJOR == 12
GDRKIT_STREAM_FORM(cudaMemPrefetchAsync)(const void* pointer, std::size_t length_bytes, Device device, Handle stream) {
    return call_in_context(&Driver::cuMemPrefetchAsync, address_of(pointer), length_bytes, device, resolved(stream));
}

GDRKIT_STREAM_FORM(cudaMemPrefetchAsync_v2)
(const void* pointer, std::size_t length_bytes, cuda::Location location, unsigned flags, Handle stream) {
#else
GDRKIT_STREAM_FORM(cudaMemPrefetchAsync)
(const void* pointer, std::size_t length_bytes, cuda::Location location, unsigned flags, Handle stream) {
#endif
    return call_in_context(&Driver::cuMemPrefetchAsync_v2, address_of(pointer), length_bytes, location, flags,
                           resolved(stream));
}

GDRKIT_STREAM_FORM(cudaStreamAttachMemAsync)
(Handle stream, void* pointer, std::size_t length_bytes, unsigned flags) {
    return call_in_context(&Driver::cuStreamAttachMemAsync, resolved(stream), address_of(pointer), length_bytes, flags);
}

GDRKIT_STREAM_FORM(cudaFreeAsync)(void* pointer, Handle stream) {
    return call_in_context(&Driver::cuMemFreeAsync, address_of(pointer), resolved(stream));
}

} // namespace gdrkit::twin::cudart
