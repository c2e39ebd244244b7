// Test of the software twins of libcudart (the CUDA runtime): compares the declarations of cudart_abi.hpp with the real
// cuda_runtime_api.h at compile time, if that header is installed. It may be the header of CUDA 12 or 13.
#include <cuda_runtime_api.h>

#undef GDRKIT_CUDART_MAJOR
#define GDRKIT_CUDART_MAJOR (CUDART_VERSION / 1000)
#include "cuda/array_abi.hpp"
#include "cuda/cuda_abi.hpp"
#include "cuda/graph_abi.hpp"
#include "cudart/cudart_abi.hpp"

namespace twin = gdrkit::twin::cudart;

#define CHECK_VALUE(twin_name, real_name)                                                                              \
    static_assert(static_cast<long long>(twin::twin_name) == static_cast<long long>(real_name))
#define CHECK_SIZE(twin_name, real_name) static_assert(sizeof(twin::twin_name) == sizeof(real_name))
#define CHECK_OFFSET(twin_name, member, real_name, real_member)                                                        \
    static_assert(offsetof(twin::twin_name, member) == offsetof(real_name, real_member))
#define CHECK_PROPERTY(member, real_member) CHECK_OFFSET(DeviceProperties, member, cudaDeviceProp, real_member)

CHECK_VALUE(invalid_value, cudaErrorInvalidValue);
CHECK_VALUE(memory_allocation, cudaErrorMemoryAllocation);
CHECK_VALUE(invalid_pitch_value, cudaErrorInvalidPitchValue);
CHECK_VALUE(invalid_memcpy_direction, cudaErrorInvalidMemcpyDirection);
CHECK_VALUE(insufficient_driver, cudaErrorInsufficientDriver);
CHECK_VALUE(call_requires_newer_driver, cudaErrorCallRequiresNewerDriver);
CHECK_VALUE(missing_configuration, cudaErrorMissingConfiguration);
CHECK_VALUE(invalid_device_function, cudaErrorInvalidDeviceFunction);
CHECK_VALUE(no_device, cudaErrorNoDevice);
CHECK_VALUE(invalid_device, cudaErrorInvalidDevice);
CHECK_VALUE(not_supported, cudaErrorNotSupported);
CHECK_VALUE(unknown_error, cudaErrorUnknown);
CHECK_VALUE(host_to_host, cudaMemcpyHostToHost);
CHECK_VALUE(host_to_device, cudaMemcpyHostToDevice);
CHECK_VALUE(device_to_host, cudaMemcpyDeviceToHost);
CHECK_VALUE(device_to_device, cudaMemcpyDeviceToDevice);
CHECK_VALUE(memcpy_default, cudaMemcpyDefault);
CHECK_VALUE(memory_managed, cudaMemoryTypeManaged);
CHECK_VALUE(init_device_flags_are_valid, cudaInitDeviceFlagsAreValid);
CHECK_VALUE(entry_point_default, cudaEnableDefault);
CHECK_VALUE(entry_point_per_thread_stream, cudaEnablePerThreadDefaultStream);

// The twin passes these values and structures to the driver.
static_assert(int{cudaMemoryTypeHost} == int{gdrkit::twin::cuda::memory_host} &&
              int{cudaMemoryTypeDevice} == int{gdrkit::twin::cuda::memory_device});
static_assert(cudaEventInterprocess == unsigned{gdrkit::twin::cuda::event_interprocess});
static_assert(cudaHostRegisterReadOnly == unsigned{gdrkit::twin::cuda::host_register_read_only});
static_assert(int{cudaMemPoolAttrUsedMemHigh} == int{gdrkit::twin::cuda::pool_used_high});
static_assert(sizeof(cudaMemPoolProps) == sizeof(gdrkit::twin::cuda::PoolProperties));
static_assert(sizeof(cudaMemAccessDesc) == sizeof(gdrkit::twin::cuda::AccessDescription));
static_assert(sizeof(cudaMemcpyAttributes) == sizeof(gdrkit::twin::cuda::CopyAttributes));
static_assert(sizeof(cudaIpcEventHandle_t) == sizeof(gdrkit::twin::cuda::IpcHandle));
static_assert(int{cudaDevAttrMemoryPoolsSupported} == int{gdrkit::twin::cuda::device_memory_pools_supported});
static_assert(int{cudaDevAttrIpcEventSupport} == int{gdrkit::twin::cuda::device_ipc_event_supported});

CHECK_SIZE(Dimensions, dim3);
CHECK_SIZE(PointerAttributes, cudaPointerAttributes);
CHECK_OFFSET(PointerAttributes, host_pointer, cudaPointerAttributes, hostPointer);
CHECK_SIZE(PitchedPointer, cudaPitchedPtr);
CHECK_OFFSET(PitchedPointer, y_size, cudaPitchedPtr, ysize);
CHECK_SIZE(Extent, cudaExtent);
CHECK_SIZE(Copy3d, cudaMemcpy3DParms);
CHECK_OFFSET(Copy3d, to, cudaMemcpy3DParms, dstPtr);
CHECK_OFFSET(Copy3d, kind, cudaMemcpy3DParms, kind);
CHECK_SIZE(PeerCopy3d, cudaMemcpy3DPeerParms);
CHECK_OFFSET(PeerCopy3d, to_device, cudaMemcpy3DPeerParms, dstDevice);
CHECK_SIZE(ChannelFormat, cudaChannelFormatDesc);
CHECK_VALUE(channel_float, cudaChannelFormatKindFloat);
CHECK_VALUE(invalid_channel_descriptor, cudaErrorInvalidChannelDescriptor);
static_assert(sizeof(cudaGraphNodeParams) == sizeof(gdrkit::twin::cuda::NodeParameterUnion));
static_assert(sizeof(cudaMemsetParams) == sizeof(gdrkit::twin::cuda::FillParameters));
static_assert(sizeof(cudaMemAllocNodeParams) == sizeof(gdrkit::twin::cuda::AllocateParameters));
static_assert(sizeof(cudaHostNodeParams) == sizeof(gdrkit::twin::cuda::HostParameters));
static_assert(sizeof(cudaGraphExecUpdateResultInfo) == sizeof(gdrkit::twin::cuda::UpdateInformation));
static_assert(sizeof(cudaGraphInstantiateParams) == sizeof(gdrkit::twin::cuda::InstantiateParameters));
static_assert(sizeof(cudaMemcpyNodeParams) == 16 + sizeof(twin::Copy3d));
static_assert(offsetof(cudaGraphNodeParams, memcpy) == 16 && offsetof(cudaMemcpyNodeParams, copyParams) == 16);
static_assert(int{cudaGraphNodeTypeMemFree} == int{gdrkit::twin::cuda::node_free});
static_assert(int{cudaMemAdviseUnsetAccessedBy} == int{gdrkit::twin::cuda::advise_unset_accessed_by});
static_assert(int{cudaMemLocationTypeHostNumaCurrent} == int{gdrkit::twin::cuda::location_host_numa_current});
static_assert(cudaArrayTextureGather == unsigned{gdrkit::twin::cuda::array_gather});

CHECK_SIZE(DeviceProperties, cudaDeviceProp);
CHECK_PROPERTY(uuid, uuid);
CHECK_PROPERTY(total_global_bytes, totalGlobalMem);
CHECK_PROPERTY(threads_dimensions_max, maxThreadsDim);
CHECK_PROPERTY(grid_size_max, maxGridSize);
CHECK_PROPERTY(total_constant_bytes, totalConstMem);
CHECK_PROPERTY(major, major);
CHECK_PROPERTY(multiprocessor_count, multiProcessorCount);
CHECK_PROPERTY(can_map_host_memory, canMapHostMemory);
CHECK_PROPERTY(texture_2d_linear_max, maxTexture2DLinear);
CHECK_PROPERTY(surface_cubemap_layered_max, maxSurfaceCubemapLayered);
CHECK_PROPERTY(pci_bus_id, pciBusID);
CHECK_PROPERTY(unified_addressing, unifiedAddressing);
CHECK_PROPERTY(memory_bus_bits, memoryBusWidth);
CHECK_PROPERTY(shared_bytes_per_multiprocessor, sharedMemPerMultiprocessor);
CHECK_PROPERTY(pageable_memory_access, pageableMemoryAccess);
CHECK_PROPERTY(shared_bytes_per_block_optin, sharedMemPerBlockOptin);
CHECK_PROPERTY(reserved_shared_bytes_per_block, reservedSharedMemPerBlock);
CHECK_PROPERTY(host_register_supported, hostRegisterSupported);
CHECK_PROPERTY(gpu_direct_rdma_writes_ordering, gpuDirectRDMAWritesOrdering);
CHECK_PROPERTY(unified_function_pointers, unifiedFunctionPointers);
#if CUDART_VERSION >= 13000
CHECK_PROPERTY(host_numa_id, hostNumaId);
CHECK_PROPERTY(host_numa_multinode_ipc_supported, hostNumaMultinodeIpcSupported);
#else
CHECK_PROPERTY(clock_khz, clockRate);
CHECK_PROPERTY(cooperative_multi_device_launch, cooperativeMultiDeviceLaunch);
#endif

int main() {}
