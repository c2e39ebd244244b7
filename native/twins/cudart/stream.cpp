// Functions of streams, events and copies between devices that have no per-thread form (forms.hpp).
#include "cudart/entry.hpp"

namespace gdrkit::twin::cudart {
namespace {

// Run `body`, a copy between two devices, with the primary contexts of the devices.
template <typename Body> Error copy_between_devices(Device to, Device from, Body&& body) {
    return run_entry_in_context([&] {
        Handle contexts[2] = {};
        for (const auto& [device, context] : {std::pair{to, &contexts[0]}, std::pair{from, &contexts[1]}}) {
            Error error = check_device(device);
            if (error == success) {
                error = get_primary_context(device, context);
            }
            if (error != success) {
                return error;
            }
        }
        return body(contexts[0], contexts[1]);
    });
}

} // namespace

GDRKIT_CUDART_ENTRY Error cudaMemcpyPeer(void* to, Device to_device, const void* from, Device from_device,
                                         std::size_t length_bytes) {
    return copy_between_devices(to_device, from_device, [&](Handle to_context, Handle from_context) {
        return call(&Driver::cuMemcpyPeer, to_address(to), to_context, to_address(from), from_context, length_bytes);
    });
}

GDRKIT_CUDART_ENTRY Error cudaMemcpyPeerAsync(void* to, Device to_device, const void* from, Device from_device,
                                              std::size_t length_bytes, Handle stream) {
    return copy_between_devices(to_device, from_device, [&](Handle to_context, Handle from_context) {
        return call(&Driver::cuMemcpyPeerAsync, to_address(to), to_context, to_address(from), from_context,
                    length_bytes, stream);
    });
}

GDRKIT_CUDART_ENTRY Error cudaStreamCreate(Handle* stream) {
    return call_in_context(&Driver::cuStreamCreate, stream, 0U);
}

GDRKIT_CUDART_ENTRY Error cudaStreamCreateWithFlags(Handle* stream, unsigned flags) {
    return call_in_context(&Driver::cuStreamCreate, stream, flags);
}

GDRKIT_CUDART_ENTRY Error cudaStreamCreateWithPriority(Handle* stream, unsigned flags, int priority) {
    return call_in_context(&Driver::cuStreamCreateWithPriority, stream, flags, priority);
}

GDRKIT_CUDART_ENTRY Error cudaStreamDestroy(Handle stream) {
    return call_in_context(&Driver::cuStreamDestroy_v2, stream);
}

GDRKIT_CUDART_ENTRY Error cudaThreadExchangeStreamCaptureMode(int* mode) {
    return call_in_context(&Driver::cuThreadExchangeStreamCaptureMode, mode);
}

GDRKIT_CUDART_ENTRY Error cudaEventCreate(Handle* event) {
    return call_in_context(&Driver::cuEventCreate, event, 0U);
}

GDRKIT_CUDART_ENTRY Error cudaEventCreateWithFlags(Handle* event, unsigned flags) {
    return call_in_context(&Driver::cuEventCreate, event, flags);
}

GDRKIT_CUDART_ENTRY Error cudaEventDestroy(Handle event) {
    return call_in_context(&Driver::cuEventDestroy_v2, event);
}

GDRKIT_CUDART_ENTRY Error cudaEventQuery(Handle event) {
    return call_in_context(&Driver::cuEventQuery, event);
}

GDRKIT_CUDART_ENTRY Error cudaEventSynchronize(Handle event) {
    return call_in_context(&Driver::cuEventSynchronize, event);
}

GDRKIT_CUDART_ENTRY Error cudaEventElapsedTime(float* milliseconds, Handle start, Handle end) {
    return call_in_context(&Driver::cuEventElapsedTime, milliseconds, start, end);
}

#if GDRKIT_CUDART_MAJOR == 12
GDRKIT_CUDART_ENTRY Error cudaEventElapsedTime_v2(float* milliseconds, Handle start, Handle end) {
    return cudaEventElapsedTime(milliseconds, start, end);
}
#endif

} // namespace gdrkit::twin::cudart
