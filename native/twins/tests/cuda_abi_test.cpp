// The declarations of cuda_abi.hpp against the real cuda.h, where there is one. All of it is checked when it compiles.
#include <cuda.h>

#include "cuda/cuda_abi.hpp"

namespace twin = gdrkit::twin::cuda;

#define SAME(ours, theirs) static_assert(static_cast<long long>(twin::ours) == static_cast<long long>(theirs))
#define SAME_SIZE(ours, theirs) static_assert(sizeof(twin::ours) == sizeof(theirs) && alignof(twin::ours) <= 8)
#define SAME_PLACE(ours, member, theirs, their_member)                                                                 \
    static_assert(offsetof(twin::ours, member) == offsetof(theirs, their_member))

SAME(success, CUDA_SUCCESS);
SAME(invalid_value, CUDA_ERROR_INVALID_VALUE);
SAME(out_of_memory, CUDA_ERROR_OUT_OF_MEMORY);
SAME(not_initialized, CUDA_ERROR_NOT_INITIALIZED);
SAME(no_device, CUDA_ERROR_NO_DEVICE);
SAME(invalid_device, CUDA_ERROR_INVALID_DEVICE);
SAME(invalid_context, CUDA_ERROR_INVALID_CONTEXT);
SAME(unsupported_limit, CUDA_ERROR_UNSUPPORTED_LIMIT);
SAME(peer_access_unsupported, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
SAME(operating_system, CUDA_ERROR_OPERATING_SYSTEM);
SAME(invalid_handle, CUDA_ERROR_INVALID_HANDLE);
SAME(not_found, CUDA_ERROR_NOT_FOUND);
SAME(not_ready, CUDA_ERROR_NOT_READY);
SAME(peer_access_already_enabled, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
SAME(peer_access_not_enabled, CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
SAME(primary_context_active, CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE);
SAME(context_is_destroyed, CUDA_ERROR_CONTEXT_IS_DESTROYED);
SAME(host_memory_already_registered, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
SAME(host_memory_not_registered, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
SAME(not_permitted, CUDA_ERROR_NOT_PERMITTED);
SAME(not_supported, CUDA_ERROR_NOT_SUPPORTED);
SAME(unknown_error, CUDA_ERROR_UNKNOWN);

SAME(cpu_device, CU_DEVICE_CPU);
SAME(invalid_device_ordinal, CU_DEVICE_INVALID);
SAME(memory_host, CU_MEMORYTYPE_HOST);
SAME(memory_device, CU_MEMORYTYPE_DEVICE);
SAME(context_sched_mask, CU_CTX_SCHED_MASK);
SAME(context_map_host, CU_CTX_MAP_HOST);
SAME(context_sync_memops, CU_CTX_SYNC_MEMOPS);
SAME(context_flags_mask, CU_CTX_FLAGS_MASK);
SAME(stream_non_blocking, CU_STREAM_NON_BLOCKING);
SAME(event_blocking_sync, CU_EVENT_BLOCKING_SYNC);
SAME(event_disable_timing, CU_EVENT_DISABLE_TIMING);
SAME(event_interprocess, CU_EVENT_INTERPROCESS);
SAME(event_record_external, CU_EVENT_RECORD_EXTERNAL);
SAME(host_alloc_portable, CU_MEMHOSTALLOC_PORTABLE);
SAME(host_alloc_devicemap, CU_MEMHOSTALLOC_DEVICEMAP);
SAME(host_alloc_write_combined, CU_MEMHOSTALLOC_WRITECOMBINED);
SAME(host_register_portable, CU_MEMHOSTREGISTER_PORTABLE);
SAME(host_register_devicemap, CU_MEMHOSTREGISTER_DEVICEMAP);
SAME(host_register_iomemory, CU_MEMHOSTREGISTER_IOMEMORY);
SAME(host_register_read_only, CU_MEMHOSTREGISTER_READ_ONLY);
SAME(attach_global, CU_MEM_ATTACH_GLOBAL);
SAME(attach_host, CU_MEM_ATTACH_HOST);
SAME(ipc_lazy_enable_peer_access, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
SAME(range_handle_dmabuf, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD);

SAME(pointer_context, CU_POINTER_ATTRIBUTE_CONTEXT);
SAME(pointer_memory_type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
SAME(pointer_device_pointer, CU_POINTER_ATTRIBUTE_DEVICE_POINTER);
SAME(pointer_host_pointer, CU_POINTER_ATTRIBUTE_HOST_POINTER);
SAME(pointer_p2p_tokens, CU_POINTER_ATTRIBUTE_P2P_TOKENS);
SAME(pointer_sync_memops, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS);
SAME(pointer_buffer_id, CU_POINTER_ATTRIBUTE_BUFFER_ID);
SAME(pointer_is_managed, CU_POINTER_ATTRIBUTE_IS_MANAGED);
SAME(pointer_device_ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
SAME(pointer_is_legacy_ipc_capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE);
SAME(pointer_range_start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR);
SAME(pointer_range_size, CU_POINTER_ATTRIBUTE_RANGE_SIZE);
SAME(pointer_mapped, CU_POINTER_ATTRIBUTE_MAPPED);
SAME(pointer_allowed_handle_types, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES);
SAME(pointer_is_gpu_direct_rdma_capable, CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE);
SAME(pointer_access_flags, CU_POINTER_ATTRIBUTE_ACCESS_FLAGS);
SAME(pointer_mempool_handle, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE);

SAME(device_max_threads_per_block, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
SAME(device_warp_size, CU_DEVICE_ATTRIBUTE_WARP_SIZE);
SAME(device_max_pitch, CU_DEVICE_ATTRIBUTE_MAX_PITCH);
SAME(device_multiprocessor_count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME(device_integrated, CU_DEVICE_ATTRIBUTE_INTEGRATED);
SAME(device_can_map_host_memory, CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY);
SAME(device_pci_bus_id, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID);
SAME(device_pci_device_id, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID);
SAME(device_async_engine_count, CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT);
SAME(device_unified_addressing, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING);
SAME(device_pci_domain_id, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID);
SAME(device_compute_capability_major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(device_compute_capability_minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME(device_stream_priorities_supported, CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED);
SAME(device_managed_memory, CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY);
SAME(device_concurrent_managed_access, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS);
SAME(device_can_use_host_pointer_for_registered_memory, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
SAME(device_host_register_supported, CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED);
SAME(device_vmm_supported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
SAME(device_posix_fd_handles_supported, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
SAME(device_gpu_direct_rdma_with_vmm_supported, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
SAME(device_read_only_host_register_supported, CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED);
SAME(device_memory_pools_supported, CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED);
SAME(device_gpu_direct_rdma_supported, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED);
SAME(device_flush_writes_options, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS);
SAME(device_writes_ordering, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING);
SAME(device_mempool_handle_types, CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES);
SAME(device_dmabuf_supported, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED);
SAME(device_ipc_event_supported, CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED);
SAME(device_numa_id, CU_DEVICE_ATTRIBUTE_NUMA_ID);
SAME(device_multicast_supported, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED);
SAME(device_host_numa_id, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID);

SAME(p2p_performance_rank, CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK);
SAME(p2p_access_supported, CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED);
SAME(p2p_native_atomic_supported, CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED);
SAME(p2p_array_access_supported, CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED);
SAME(flush_current_context, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX);
SAME(flush_to_owner, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER);
SAME(flush_to_all_devices, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES);
SAME(allocation_pinned, CU_MEM_ALLOCATION_TYPE_PINNED);
SAME(handle_none, CU_MEM_HANDLE_TYPE_NONE);
SAME(handle_posix_fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
SAME(location_device, CU_MEM_LOCATION_TYPE_DEVICE);
SAME(access_none, CU_MEM_ACCESS_FLAGS_PROT_NONE);
SAME(access_read, CU_MEM_ACCESS_FLAGS_PROT_READ);
SAME(access_read_write, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
SAME(granularity_minimum, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
SAME(granularity_recommended, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
SAME(pool_reuse_follow_event_dependencies, CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES);
SAME(pool_reuse_allow_opportunistic, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC);
SAME(pool_reuse_allow_internal_dependencies, CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES);
SAME(pool_release_threshold, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD);
SAME(pool_reserved_current, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
SAME(pool_reserved_high, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH);
SAME(pool_used_current, CU_MEMPOOL_ATTR_USED_MEM_CURRENT);
SAME(pool_used_high, CU_MEMPOOL_ATTR_USED_MEM_HIGH);
SAME(proc_legacy_stream, CU_GET_PROC_ADDRESS_LEGACY_STREAM);
SAME(proc_per_thread_stream, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM);
SAME(proc_symbol_not_found, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
SAME(proc_version_not_sufficient, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);

SAME_SIZE(Device, CUdevice);
SAME_SIZE(DevicePointer, CUdeviceptr);
SAME_SIZE(Handle, CUcontext);
SAME_SIZE(Handle, CUmemGenericAllocationHandle);
SAME_SIZE(Uuid, CUuuid);
SAME_SIZE(IpcMemHandle, CUipcMemHandle);
SAME_SIZE(DeviceProperties, CUdevprop);
SAME_PLACE(DeviceProperties, simd_width, CUdevprop, SIMDWidth);
SAME_PLACE(DeviceProperties, texture_alignment, CUdevprop, textureAlign);
SAME_SIZE(Location, CUmemLocation);
SAME_SIZE(AllocationProperties, CUmemAllocationProp);
SAME_PLACE(AllocationProperties, location, CUmemAllocationProp, location);
SAME_PLACE(AllocationProperties, gpu_direct_rdma_capable, CUmemAllocationProp, allocFlags.gpuDirectRDMACapable);
SAME_PLACE(AllocationProperties, usage, CUmemAllocationProp, allocFlags.usage);
SAME_SIZE(AccessDescription, CUmemAccessDesc);
SAME_PLACE(AccessDescription, flags, CUmemAccessDesc, flags);
SAME_SIZE(PoolProperties, CUmemPoolProps);
SAME_PLACE(PoolProperties, location, CUmemPoolProps, location);

// Added by later releases of CUDA 12 and 13.
#if CUDA_VERSION >= 13000
SAME(driver_version, 13000);
SAME(limit_count, CU_LIMIT_MAX);
SAME(location_host, CU_MEM_LOCATION_TYPE_HOST);
SAME(handle_fabric, CU_MEM_HANDLE_TYPE_FABRIC);
SAME(range_flag_dmabuf_pcie, CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE);
SAME(pointer_mapping_size, CU_POINTER_ATTRIBUTE_MAPPING_SIZE);
SAME(pointer_mapping_base, CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR);
SAME(pointer_memory_block_id, CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID);
SAME(pointer_is_hw_decompress_capable, CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE);
SAME(device_fabric_handles_supported, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED);
SAME(p2p_only_partial_native_atomic_supported, CU_DEVICE_P2P_ATTRIBUTE_ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED);
SAME_PLACE(PoolProperties, size_max_bytes, CUmemPoolProps, maxSize);
SAME_PLACE(PoolProperties, usage, CUmemPoolProps, usage);
SAME_SIZE(ContextParameters, CUctxCreateParams);
SAME_PLACE(ContextParameters, cig, CUctxCreateParams, cigParams);
#endif
#if CUDA_VERSION == 13000
SAME(device_attribute_last, CU_DEVICE_ATTRIBUTE_MAX - 1);
#endif

int main() {}
