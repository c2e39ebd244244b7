// Test of the software twin of libcuda. At compile time, it compares the constants and structures of cuda_abi.hpp,
// array_abi.hpp and graph_abi.hpp with the real cuda.h. CMake builds this test only if that header is installed.
#include <cuda.h>

#include "cuda/array_abi.hpp"
#include "cuda/cuda_abi.hpp"
#include "cuda/graph_abi.hpp"

namespace twin = gdrkit::twin::cuda;

#define CHECK_VALUE(twin_name, real_name)                                                                              \
    static_assert(static_cast<long long>(twin::twin_name) == static_cast<long long>(real_name))
#define CHECK_SIZE(twin_name, real_name)                                                                               \
    static_assert(sizeof(twin::twin_name) == sizeof(real_name) && alignof(twin::twin_name) <= 8)
#define CHECK_OFFSET(twin_name, member, real_name, real_member)                                                        \
    static_assert(offsetof(twin::twin_name, member) == offsetof(real_name, real_member))

CHECK_VALUE(success, CUDA_SUCCESS);
CHECK_VALUE(invalid_value, CUDA_ERROR_INVALID_VALUE);
CHECK_VALUE(out_of_memory, CUDA_ERROR_OUT_OF_MEMORY);
CHECK_VALUE(not_initialized, CUDA_ERROR_NOT_INITIALIZED);
CHECK_VALUE(no_device, CUDA_ERROR_NO_DEVICE);
CHECK_VALUE(invalid_device, CUDA_ERROR_INVALID_DEVICE);
CHECK_VALUE(invalid_context, CUDA_ERROR_INVALID_CONTEXT);
CHECK_VALUE(map_failed, CUDA_ERROR_MAP_FAILED);
CHECK_VALUE(unsupported_limit, CUDA_ERROR_UNSUPPORTED_LIMIT);
CHECK_VALUE(peer_access_unsupported, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
CHECK_VALUE(operating_system_error, CUDA_ERROR_OPERATING_SYSTEM);
CHECK_VALUE(invalid_handle, CUDA_ERROR_INVALID_HANDLE);
CHECK_VALUE(not_found, CUDA_ERROR_NOT_FOUND);
CHECK_VALUE(not_ready, CUDA_ERROR_NOT_READY);
CHECK_VALUE(peer_access_already_enabled, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
CHECK_VALUE(peer_access_not_enabled, CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
CHECK_VALUE(primary_context_active, CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE);
CHECK_VALUE(context_is_destroyed, CUDA_ERROR_CONTEXT_IS_DESTROYED);
CHECK_VALUE(host_memory_already_registered, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
CHECK_VALUE(host_memory_not_registered, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
CHECK_VALUE(not_permitted, CUDA_ERROR_NOT_PERMITTED);
CHECK_VALUE(not_supported, CUDA_ERROR_NOT_SUPPORTED);
CHECK_VALUE(unknown_error, CUDA_ERROR_UNKNOWN);

CHECK_VALUE(cpu_device, CU_DEVICE_CPU);
CHECK_VALUE(invalid_device_ordinal, CU_DEVICE_INVALID);
CHECK_VALUE(memory_host, CU_MEMORYTYPE_HOST);
CHECK_VALUE(memory_array, CU_MEMORYTYPE_ARRAY);
CHECK_VALUE(memory_unified, CU_MEMORYTYPE_UNIFIED);
CHECK_VALUE(capture_mode_global, CU_STREAM_CAPTURE_MODE_GLOBAL);
CHECK_VALUE(capture_mode_relaxed, CU_STREAM_CAPTURE_MODE_RELAXED);
CHECK_VALUE(memory_device, CU_MEMORYTYPE_DEVICE);
CHECK_VALUE(context_sched_mask, CU_CTX_SCHED_MASK);
CHECK_VALUE(context_map_host, CU_CTX_MAP_HOST);
CHECK_VALUE(context_sync_memops, CU_CTX_SYNC_MEMOPS);
CHECK_VALUE(context_flags_mask, CU_CTX_FLAGS_MASK);
CHECK_VALUE(stream_non_blocking, CU_STREAM_NON_BLOCKING);
CHECK_VALUE(wait_geq, CU_STREAM_WAIT_VALUE_GEQ);
CHECK_VALUE(wait_eq, CU_STREAM_WAIT_VALUE_EQ);
CHECK_VALUE(wait_and, CU_STREAM_WAIT_VALUE_AND);
CHECK_VALUE(wait_nor, CU_STREAM_WAIT_VALUE_NOR);
CHECK_VALUE(wait_flush, CU_STREAM_WAIT_VALUE_FLUSH);
CHECK_VALUE(flush_option_host, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST);
CHECK_VALUE(flush_option_memops, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_MEMOPS);
CHECK_VALUE(event_blocking_sync, CU_EVENT_BLOCKING_SYNC);
CHECK_VALUE(event_disable_timing, CU_EVENT_DISABLE_TIMING);
CHECK_VALUE(event_interprocess, CU_EVENT_INTERPROCESS);
CHECK_VALUE(event_record_external, CU_EVENT_RECORD_EXTERNAL);
CHECK_VALUE(host_alloc_portable, CU_MEMHOSTALLOC_PORTABLE);
CHECK_VALUE(host_alloc_devicemap, CU_MEMHOSTALLOC_DEVICEMAP);
CHECK_VALUE(host_alloc_write_combined, CU_MEMHOSTALLOC_WRITECOMBINED);
CHECK_VALUE(host_register_portable, CU_MEMHOSTREGISTER_PORTABLE);
CHECK_VALUE(host_register_devicemap, CU_MEMHOSTREGISTER_DEVICEMAP);
CHECK_VALUE(host_register_iomemory, CU_MEMHOSTREGISTER_IOMEMORY);
CHECK_VALUE(host_register_read_only, CU_MEMHOSTREGISTER_READ_ONLY);
CHECK_VALUE(attach_global, CU_MEM_ATTACH_GLOBAL);
CHECK_VALUE(attach_host, CU_MEM_ATTACH_HOST);
CHECK_VALUE(attach_single, CU_MEM_ATTACH_SINGLE);
CHECK_VALUE(advise_set_read_mostly, CU_MEM_ADVISE_SET_READ_MOSTLY);
CHECK_VALUE(advise_unset_accessed_by, CU_MEM_ADVISE_UNSET_ACCESSED_BY);
CHECK_VALUE(range_read_mostly, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY);
CHECK_VALUE(range_last_prefetch_location_id, CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID);
CHECK_VALUE(location_none, CU_MEM_LOCATION_TYPE_NONE);
CHECK_VALUE(location_host_numa_current, CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT);
CHECK_VALUE(ipc_lazy_enable_peer_access, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
CHECK_VALUE(range_handle_dmabuf, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD);

CHECK_VALUE(pointer_context, CU_POINTER_ATTRIBUTE_CONTEXT);
CHECK_VALUE(pointer_memory_type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
CHECK_VALUE(pointer_device_pointer, CU_POINTER_ATTRIBUTE_DEVICE_POINTER);
CHECK_VALUE(pointer_host_pointer, CU_POINTER_ATTRIBUTE_HOST_POINTER);
CHECK_VALUE(pointer_p2p_tokens, CU_POINTER_ATTRIBUTE_P2P_TOKENS);
CHECK_VALUE(pointer_sync_memops, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS);
CHECK_VALUE(pointer_buffer_id, CU_POINTER_ATTRIBUTE_BUFFER_ID);
CHECK_VALUE(pointer_is_managed, CU_POINTER_ATTRIBUTE_IS_MANAGED);
CHECK_VALUE(pointer_device_ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
CHECK_VALUE(pointer_is_legacy_ipc_capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE);
CHECK_VALUE(pointer_range_start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR);
CHECK_VALUE(pointer_range_size, CU_POINTER_ATTRIBUTE_RANGE_SIZE);
CHECK_VALUE(pointer_mapped, CU_POINTER_ATTRIBUTE_MAPPED);
CHECK_VALUE(pointer_allowed_handle_types, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES);
CHECK_VALUE(pointer_is_gpu_direct_rdma_capable, CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE);
CHECK_VALUE(pointer_access_flags, CU_POINTER_ATTRIBUTE_ACCESS_FLAGS);
CHECK_VALUE(pointer_mempool_handle, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE);

CHECK_VALUE(device_max_threads_per_block, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
CHECK_VALUE(device_warp_size, CU_DEVICE_ATTRIBUTE_WARP_SIZE);
CHECK_VALUE(device_max_pitch, CU_DEVICE_ATTRIBUTE_MAX_PITCH);
CHECK_VALUE(device_multiprocessor_count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
CHECK_VALUE(device_integrated, CU_DEVICE_ATTRIBUTE_INTEGRATED);
CHECK_VALUE(device_can_map_host_memory, CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY);
CHECK_VALUE(device_pci_bus_id, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID);
CHECK_VALUE(device_pci_device_id, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID);
CHECK_VALUE(device_async_engine_count, CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT);
CHECK_VALUE(device_unified_addressing, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING);
CHECK_VALUE(device_pci_domain_id, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID);
CHECK_VALUE(device_compute_capability_major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
CHECK_VALUE(device_compute_capability_minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
CHECK_VALUE(device_stream_priorities_supported, CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED);
CHECK_VALUE(device_managed_memory, CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY);
CHECK_VALUE(device_concurrent_managed_access, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS);
CHECK_VALUE(device_can_use_host_pointer_for_registered_memory,
            CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
CHECK_VALUE(device_host_register_supported, CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED);
CHECK_VALUE(device_vmm_supported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
CHECK_VALUE(device_posix_fd_handles_supported, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
CHECK_VALUE(device_gpu_direct_rdma_with_vmm_supported, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
CHECK_VALUE(device_read_only_host_register_supported, CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED);
CHECK_VALUE(device_memory_pools_supported, CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED);
CHECK_VALUE(device_gpu_direct_rdma_supported, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED);
CHECK_VALUE(device_flush_writes_options, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS);
CHECK_VALUE(device_writes_ordering, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING);
CHECK_VALUE(device_mempool_handle_types, CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES);
CHECK_VALUE(device_dmabuf_supported, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED);
CHECK_VALUE(device_host_memory_pools_supported, CU_DEVICE_ATTRIBUTE_HOST_MEMORY_POOLS_SUPPORTED);
CHECK_VALUE(device_host_numa_memory_pools_supported, CU_DEVICE_ATTRIBUTE_HOST_NUMA_MEMORY_POOLS_SUPPORTED);
CHECK_VALUE(device_tensor_map_access_supported, CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED);
CHECK_VALUE(device_ipc_event_supported, CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED);
CHECK_VALUE(device_numa_id, CU_DEVICE_ATTRIBUTE_NUMA_ID);
CHECK_VALUE(device_multicast_supported, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED);
CHECK_VALUE(device_host_numa_id, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID);

CHECK_VALUE(p2p_performance_rank, CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK);
CHECK_VALUE(p2p_access_supported, CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED);
CHECK_VALUE(p2p_native_atomic_supported, CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED);
CHECK_VALUE(p2p_array_access_supported, CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED);
CHECK_VALUE(flush_current_context, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX);
CHECK_VALUE(flush_to_owner, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER);
CHECK_VALUE(flush_to_all_devices, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES);
CHECK_VALUE(allocation_pinned, CU_MEM_ALLOCATION_TYPE_PINNED);
CHECK_VALUE(handle_none, CU_MEM_HANDLE_TYPE_NONE);
CHECK_VALUE(handle_posix_fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
CHECK_VALUE(location_device, CU_MEM_LOCATION_TYPE_DEVICE);
CHECK_VALUE(access_none, CU_MEM_ACCESS_FLAGS_PROT_NONE);
CHECK_VALUE(access_read, CU_MEM_ACCESS_FLAGS_PROT_READ);
CHECK_VALUE(access_read_write, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
CHECK_VALUE(granularity_minimum, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
CHECK_VALUE(granularity_recommended, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
CHECK_VALUE(pool_reuse_follow_event_dependencies, CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES);
CHECK_VALUE(pool_reuse_allow_opportunistic, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC);
CHECK_VALUE(pool_reuse_allow_internal_dependencies, CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES);
CHECK_VALUE(pool_release_threshold, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD);
CHECK_VALUE(pool_reserved_current, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
CHECK_VALUE(pool_reserved_high, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH);
CHECK_VALUE(pool_used_current, CU_MEMPOOL_ATTR_USED_MEM_CURRENT);
CHECK_VALUE(pool_used_high, CU_MEMPOOL_ATTR_USED_MEM_HIGH);
CHECK_VALUE(proc_legacy_stream, CU_GET_PROC_ADDRESS_LEGACY_STREAM);
CHECK_VALUE(proc_per_thread_stream, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM);
CHECK_VALUE(proc_symbol_not_found, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
CHECK_VALUE(proc_version_not_sufficient, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);

CHECK_SIZE(Device, CUdevice);
CHECK_SIZE(DevicePointer, CUdeviceptr);
CHECK_SIZE(Handle, CUcontext);
CHECK_SIZE(Handle, CUmemGenericAllocationHandle);
CHECK_SIZE(Uuid, CUuuid);
CHECK_SIZE(IpcHandle, CUipcMemHandle);
CHECK_SIZE(IpcHandle, CUipcEventHandle);
CHECK_SIZE(Copy2d, CUDA_MEMCPY2D);
CHECK_OFFSET(Copy2d, from.device, CUDA_MEMCPY2D, srcDevice);
CHECK_OFFSET(Copy2d, to.host, CUDA_MEMCPY2D, dstHost);
CHECK_OFFSET(Copy2d, to.pitch_bytes, CUDA_MEMCPY2D, dstPitch);
CHECK_OFFSET(Copy2d, height, CUDA_MEMCPY2D, Height);
CHECK_SIZE(Copy3d, CUDA_MEMCPY3D);
CHECK_OFFSET(Copy3d, from.lod, CUDA_MEMCPY3D, srcLOD);
CHECK_OFFSET(Copy3d, from.height, CUDA_MEMCPY3D, srcHeight);
CHECK_OFFSET(Copy3d, to.device, CUDA_MEMCPY3D, dstDevice);
CHECK_OFFSET(Copy3d, depth, CUDA_MEMCPY3D, Depth);
CHECK_SIZE(Copy3d, CUDA_MEMCPY3D_PEER);
CHECK_OFFSET(Copy3d, from.context, CUDA_MEMCPY3D_PEER, srcContext);
CHECK_OFFSET(Copy3d, to.context, CUDA_MEMCPY3D_PEER, dstContext);
CHECK_SIZE(DeviceProperties, CUdevprop);
CHECK_OFFSET(DeviceProperties, simd_width, CUdevprop, SIMDWidth);
CHECK_OFFSET(DeviceProperties, texture_alignment, CUdevprop, textureAlign);
CHECK_SIZE(Location, CUmemLocation);
CHECK_SIZE(AllocationProperties, CUmemAllocationProp);
CHECK_OFFSET(AllocationProperties, location, CUmemAllocationProp, location);
CHECK_OFFSET(AllocationProperties, gpu_direct_rdma_capable, CUmemAllocationProp, allocFlags.gpuDirectRDMACapable);
CHECK_OFFSET(AllocationProperties, usage, CUmemAllocationProp, allocFlags.usage);
CHECK_SIZE(AccessDescription, CUmemAccessDesc);
CHECK_OFFSET(AccessDescription, flags, CUmemAccessDesc, flags);
CHECK_SIZE(PoolProperties, CUmemPoolProps);
CHECK_OFFSET(PoolProperties, location, CUmemPoolProps, location);

// Headers before CUDA 13.0 lack some of these names.
#if CUDA_VERSION >= 13000
CHECK_VALUE(driver_version, 13000);
CHECK_VALUE(location_host, CU_MEM_LOCATION_TYPE_HOST);
CHECK_VALUE(handle_fabric, CU_MEM_HANDLE_TYPE_FABRIC);
CHECK_VALUE(range_flag_dmabuf_pcie, CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE);
CHECK_VALUE(pointer_mapping_size, CU_POINTER_ATTRIBUTE_MAPPING_SIZE);
CHECK_VALUE(pointer_mapping_base, CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR);
CHECK_VALUE(pointer_memory_block_id, CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID);
CHECK_VALUE(pointer_is_hw_decompress_capable, CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE);
CHECK_VALUE(device_fabric_handles_supported, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED);
CHECK_VALUE(p2p_only_partial_native_atomic_supported, CU_DEVICE_P2P_ATTRIBUTE_ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED);
CHECK_OFFSET(PoolProperties, size_max_bytes, CUmemPoolProps, maxSize);
CHECK_OFFSET(PoolProperties, usage, CUmemPoolProps, usage);
CHECK_SIZE(ContextParameters, CUctxCreateParams);
CHECK_OFFSET(ContextParameters, cig, CUctxCreateParams, cigParams);
#endif
// Other versions of CUDA have other numbers of limits and attributes.
#if CUDA_VERSION == 13000
CHECK_VALUE(limit_count, CU_LIMIT_MAX);
CHECK_VALUE(device_attribute_last, CU_DEVICE_ATTRIBUTE_MAX - 1);
#endif

CHECK_VALUE(stream_capture_unsupported, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
CHECK_VALUE(stream_capture_wrong_thread, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
CHECK_VALUE(captured_event, CUDA_ERROR_CAPTURED_EVENT);
CHECK_VALUE(graph_update_failure, CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
CHECK_VALUE(node_copy, CU_GRAPH_NODE_TYPE_MEMCPY);
CHECK_VALUE(node_record_event, CU_GRAPH_NODE_TYPE_EVENT_RECORD);
CHECK_VALUE(node_free, CU_GRAPH_NODE_TYPE_MEM_FREE);
CHECK_VALUE(capture_invalidated, CU_STREAM_CAPTURE_STATUS_INVALIDATED);
CHECK_VALUE(capture_set_dependencies, CU_STREAM_SET_CAPTURE_DEPENDENCIES);
CHECK_VALUE(instantiate_auto_free, CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH);
CHECK_VALUE(instantiate_node_priority, CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY);
CHECK_VALUE(instantiate_invalid_structure, CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE);
CHECK_VALUE(update_parameters_changed, CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED);
CHECK_VALUE(format_signed_32, CU_AD_FORMAT_SIGNED_INT32);
CHECK_VALUE(format_float, CU_AD_FORMAT_FLOAT);
CHECK_VALUE(array_gather, CUDA_ARRAY3D_TEXTURE_GATHER);

static_assert(sizeof(twin::FillParameters) == sizeof(CUDA_MEMSET_NODE_PARAMS));
static_assert(sizeof(twin::HostParameters) == sizeof(CUDA_HOST_NODE_PARAMS));
static_assert(sizeof(twin::AllocateParameters) == sizeof(CUDA_MEM_ALLOC_NODE_PARAMS));
static_assert(offsetof(twin::AllocateParameters, pointer) == offsetof(CUDA_MEM_ALLOC_NODE_PARAMS, dptr));
static_assert(sizeof(twin::EdgeData) == sizeof(CUgraphEdgeData));
static_assert(sizeof(twin::NodeParameterUnion) == sizeof(CUgraphNodeParams));
static_assert(offsetof(twin::NodeParameterUnion, copy.copy) == offsetof(CUgraphNodeParams, memcpy.copyParams));
static_assert(offsetof(twin::NodeParameterUnion, fill.context) == offsetof(CUgraphNodeParams, memset.ctx));
static_assert(sizeof(twin::InstantiateParameters) == sizeof(CUDA_GRAPH_INSTANTIATE_PARAMS));
static_assert(sizeof(twin::UpdateInformation) == sizeof(CUgraphExecUpdateResultInfo));
static_assert(sizeof(twin::PlaneDescription) == sizeof(CUDA_ARRAY_DESCRIPTOR));
static_assert(sizeof(twin::ArrayDescription) == sizeof(CUDA_ARRAY3D_DESCRIPTOR));
static_assert(offsetof(twin::ArrayDescription, flags) == offsetof(CUDA_ARRAY3D_DESCRIPTOR, Flags));

int main() {}
