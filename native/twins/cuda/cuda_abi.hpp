// The part of the CUDA driver's binary interface that the twin implements, written from the public documentation of
// CUDA 13.0. Handles are 64-bit numbers, never addresses of the twin's objects.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gdrkit::twin::cuda {

inline constexpr int driver_version = 13000;

// CUresult codes that the twin returns; errors.cpp names all codes.
enum Result : int {
    success = 0,
    invalid_value = 1,
    out_of_memory = 2,
    not_initialized = 3,
    no_device = 100,
    invalid_device = 101,
    invalid_context = 201,
    map_failed = 205,
    unsupported_limit = 215,
    peer_access_unsupported = 217,
    operating_system_error = 304,
    invalid_handle = 400,
    illegal_state = 401,
    not_found = 500,
    not_ready = 600,
    peer_access_already_enabled = 704,
    peer_access_not_enabled = 705,
    primary_context_active = 708,
    context_is_destroyed = 709,
    host_memory_already_registered = 712,
    host_memory_not_registered = 713,
    not_permitted = 800,
    not_supported = 801,
    stream_capture_unsupported = 900,
    stream_capture_invalidated = 901,
    stream_capture_merge = 902,
    stream_capture_unmatched = 903,
    stream_capture_unjoined = 904,
    stream_capture_isolation = 905,
    stream_capture_implicit = 906,
    captured_event = 907,
    stream_capture_wrong_thread = 908,
    graph_update_failure = 910,
    invalid_resource_type = 914,
    invalid_resource_configuration = 915,
    unknown_error = 999,
};

using Device = std::int32_t;
using DevicePointer = std::uint64_t;
using Handle = std::uint64_t; // CUcontext, CUstream, CUevent and the other handles

inline constexpr Device cpu_device = -1;             // CU_DEVICE_CPU
inline constexpr Device invalid_device_ordinal = -2; // CU_DEVICE_INVALID

inline constexpr Handle default_stream_handle = 0;
inline constexpr Handle legacy_stream_handle = 1;     // CU_STREAM_LEGACY
inline constexpr Handle per_thread_stream_handle = 2; // CU_STREAM_PER_THREAD

// CUmemorytype
enum MemoryType : std::uint32_t { memory_host = 1, memory_device = 2, memory_array = 3, memory_unified = 4 };

// CUctx_flags
enum ContextFlags : std::uint32_t {
    context_sched_mask = 0x07,
    context_map_host = 0x08,
    context_sync_memops = 0x80,
    context_flags_mask = 0xff,
};

// CUstream_flags, CUevent_flags, CUevent_record_flags
enum StreamFlags : std::uint32_t { stream_non_blocking = 1 };
enum EventFlags : std::uint32_t { event_blocking_sync = 1, event_disable_timing = 2, event_interprocess = 4 };
enum EventRecordFlags : std::uint32_t { event_record_external = 1 }; // CU_EVENT_WAIT_EXTERNAL has the same value

// CUstreamWaitValue_flags. The first four are conditions, and exclude each other.
enum WaitValueFlags : std::uint32_t { wait_geq = 0, wait_eq = 1, wait_and = 2, wait_nor = 3, wait_flush = 1U << 30 };

// CUflushGPUDirectRDMAWritesOptions
enum FlushOptions : int { flush_option_host = 1, flush_option_memops = 2 };

// CUstreamCaptureMode
enum CaptureMode : int { capture_mode_global = 0, capture_mode_thread_local = 1, capture_mode_relaxed = 2 };

// CU_MEMHOSTALLOC_*, CU_MEMHOSTREGISTER_*
enum HostAllocFlags : std::uint32_t {
    host_alloc_portable = 1,
    host_alloc_devicemap = 2,
    host_alloc_write_combined = 4
};
enum HostRegisterFlags : std::uint32_t {
    host_register_portable = 1,
    host_register_devicemap = 2,
    host_register_iomemory = 4,
    host_register_read_only = 8,
};

// CUmemAttach_flags
enum AttachFlags : std::uint32_t { attach_global = 1, attach_host = 2, attach_single = 4 };

// CUmem_advise, CUmem_range_attribute
enum MemoryAdvice : int {
    advise_set_read_mostly = 1,
    advise_unset_read_mostly = 2,
    advise_set_preferred_location = 3,
    advise_unset_preferred_location = 4,
    advise_set_accessed_by = 5,
    advise_unset_accessed_by = 6,
};
enum RangeAttribute : int {
    range_read_mostly = 1,
    range_preferred_location = 2,
    range_accessed_by = 3,
    range_last_prefetch_location = 4,
    range_preferred_location_type = 5,
    range_preferred_location_id = 6,
    range_last_prefetch_location_type = 7,
    range_last_prefetch_location_id = 8,
};

// CUipcMem_flags
inline constexpr std::uint32_t ipc_lazy_enable_peer_access = 1;

// CUmemRangeHandleType, CUmemRangeFlags
inline constexpr int range_handle_dmabuf = 1;
inline constexpr std::uint64_t range_flag_dmabuf_pcie = 1;

// CUpointer_attribute
enum PointerAttribute : int {
    pointer_context = 1,
    pointer_memory_type = 2,
    pointer_device_pointer = 3,
    pointer_host_pointer = 4,
    pointer_p2p_tokens = 5,
    pointer_sync_memops = 6,
    pointer_buffer_id = 7,
    pointer_is_managed = 8,
    pointer_device_ordinal = 9,
    pointer_is_legacy_ipc_capable = 10,
    pointer_range_start = 11,
    pointer_range_size = 12,
    pointer_mapped = 13,
    pointer_allowed_handle_types = 14,
    pointer_is_gpu_direct_rdma_capable = 15,
    pointer_access_flags = 16,
    pointer_mempool_handle = 17,
    pointer_mapping_size = 18,
    pointer_mapping_base = 19,
    pointer_memory_block_id = 20,
    pointer_is_hw_decompress_capable = 21,
};

// CUdevice_attribute: the attributes that the twin or its tests use by name. device.cpp lists the others by number.
enum DeviceAttribute : int {
    device_max_threads_per_block = 1,
    device_warp_size = 10,
    device_max_pitch = 11,
    device_multiprocessor_count = 16,
    device_integrated = 18,
    device_can_map_host_memory = 19,
    device_pci_bus_id = 33,
    device_pci_device_id = 34,
    device_async_engine_count = 40,
    device_unified_addressing = 41,
    device_pci_domain_id = 50,
    device_compute_capability_major = 75,
    device_compute_capability_minor = 76,
    device_stream_priorities_supported = 78,
    device_managed_memory = 83,
    device_concurrent_managed_access = 89,
    device_can_use_host_pointer_for_registered_memory = 91,
    device_host_register_supported = 99,
    device_vmm_supported = 102,
    device_posix_fd_handles_supported = 103,
    device_gpu_direct_rdma_with_vmm_supported = 110,
    device_read_only_host_register_supported = 113,
    device_memory_pools_supported = 115,
    device_gpu_direct_rdma_supported = 116,
    device_flush_writes_options = 117,
    device_writes_ordering = 118,
    device_mempool_handle_types = 119,
    device_dmabuf_supported = 124,
    device_ipc_event_supported = 125,
    device_tensor_map_access_supported = 127,
    device_fabric_handles_supported = 128,
    device_numa_id = 131,
    device_multicast_supported = 132,
    device_host_numa_id = 134,
    device_host_numa_memory_pools_supported = 142,
    device_host_memory_pools_supported = 144,
    device_attribute_last = 147,
};

// CUdevice_P2PAttribute
enum P2pAttribute : int {
    p2p_performance_rank = 1,
    p2p_access_supported = 2,
    p2p_native_atomic_supported = 3,
    p2p_array_access_supported = 4,
    p2p_only_partial_native_atomic_supported = 5,
};

// CUflushGPUDirectRDMAWritesTarget, ...Scope
enum FlushTarget : int { flush_current_context = 0 };
enum FlushScope : int { flush_to_owner = 100, flush_to_all_devices = 200 };

// CUmemAllocationType, CUmemAllocationHandleType, CUmemLocationType, CUmemAccess_flags,
// CUmemAllocationGranularity_flags
enum AllocationType : int { allocation_pinned = 1, allocation_managed = 2 };
enum HandleType : int { handle_none = 0, handle_posix_fd = 1, handle_fabric = 8, handle_types_mask = 15 };
enum LocationType : int {
    location_none = 0,
    location_device = 1,
    location_host = 2,
    location_host_numa = 3,
    location_host_numa_current = 4,
};
enum AccessFlags : int { access_none = 0, access_read = 1, access_read_write = 3 };
enum Granularity : int { granularity_minimum = 0, granularity_recommended = 1 };

// CUmemPool_attribute
enum PoolAttribute : int {
    pool_reuse_follow_event_dependencies = 1,
    pool_reuse_allow_opportunistic = 2,
    pool_reuse_allow_internal_dependencies = 3,
    pool_release_threshold = 4,
    pool_reserved_current = 5,
    pool_reserved_high = 6,
    pool_used_current = 7,
    pool_used_high = 8,
};

// The number of CUlimit values.
inline constexpr int limit_count = 10;

// CUdriverProcAddress_flags, CUdriverProcAddressQueryResult
enum ProcAddressFlags : std::uint64_t { proc_default = 0, proc_legacy_stream = 1, proc_per_thread_stream = 2 };
enum ProcAddressStatus : int { proc_success = 0, proc_symbol_not_found = 1, proc_version_not_sufficient = 2 };

struct Uuid { // CUuuid
    std::uint8_t bytes[16];
};
static_assert(sizeof(Uuid) == 16);

struct IpcHandle { // CUipcMemHandle and CUipcEventHandle
    std::uint8_t reserved[64];
};
static_assert(sizeof(IpcHandle) == 64);

struct DeviceProperties { // CUdevprop; memory sizes in bytes, clock rate in kHz
    std::int32_t max_threads_per_block;
    std::int32_t max_threads_dim[3];
    std::int32_t max_grid_size[3];
    std::int32_t shared_memory_per_block;
    std::int32_t total_constant_memory;
    std::int32_t simd_width;
    std::int32_t memory_pitch;
    std::int32_t registers_per_block;
    std::int32_t clock_rate;
    std::int32_t texture_alignment;
};
static_assert(sizeof(DeviceProperties) == 56 && offsetof(DeviceProperties, simd_width) == 36);

struct Location { // CUmemLocation
    std::int32_t type;
    std::int32_t id;
};
static_assert(sizeof(Location) == 8 && offsetof(Location, id) == 4);

struct AllocationProperties { // CUmemAllocationProp
    std::int32_t type;
    std::int32_t requested_handle_types;
    Location location;
    void* win32_handle_metadata;
    std::uint8_t compression_type;
    std::uint8_t gpu_direct_rdma_capable;
    std::uint16_t usage;
    std::uint8_t reserved[4];
};
static_assert(sizeof(AllocationProperties) == 32 && offsetof(AllocationProperties, location) == 8 &&
              offsetof(AllocationProperties, win32_handle_metadata) == 16 &&
              offsetof(AllocationProperties, gpu_direct_rdma_capable) == 25 &&
              offsetof(AllocationProperties, usage) == 26);

struct AccessDescription { // CUmemAccessDesc
    Location location;
    std::int32_t flags;
};
static_assert(sizeof(AccessDescription) == 12 && offsetof(AccessDescription, flags) == 8);

struct PoolProperties { // CUmemPoolProps
    std::int32_t allocation_type;
    std::int32_t handle_types;
    Location location;
    void* win32_security_attributes;
    std::size_t size_max_bytes;
    std::uint16_t usage;
    std::uint8_t reserved[54];
};
static_assert(sizeof(PoolProperties) == 88 && offsetof(PoolProperties, size_max_bytes) == 24 &&
              offsetof(PoolProperties, usage) == 32);

// One side of CUDA_MEMCPY2D. The copy begins at the byte `x_bytes` of the row `y`.
struct CopySide2d {
    std::uint64_t x_bytes, y;
    std::uint32_t memory_type;
    const void* host;
    DevicePointer device;
    void* array;
    std::uint64_t pitch_bytes;
};

struct Copy2d { // CUDA_MEMCPY2D
    CopySide2d from, to;
    std::uint64_t width_bytes, height;
};
static_assert(sizeof(Copy2d) == 128 && offsetof(Copy2d, from.pitch_bytes) == 48);

// One side of CUDA_MEMCPY3D or CUDA_MEMCPY3D_PEER. The copy begins at the byte `x_bytes` of the row `y` in the slice
// `z`. `lod` is the level of detail of a mipmapped array, and must be 0. Only CUDA_MEMCPY3D_PEER uses `context`; in
// CUDA_MEMCPY3D, this field is reserved.
struct CopySide3d {
    std::uint64_t x_bytes, y, z, lod;
    std::uint32_t memory_type;
    const void* host;
    DevicePointer device;
    void* array;
    Handle context;
    std::uint64_t pitch_bytes, height;
};

struct Copy3d { // CUDA_MEMCPY3D and CUDA_MEMCPY3D_PEER
    CopySide3d from, to;
    std::uint64_t width_bytes, height, depth;
};
static_assert(sizeof(Copy3d) == 200 && offsetof(Copy3d, from.pitch_bytes) == 72);

// CUmemcpySrcAccessOrder
enum CopyOrder : int { copy_order_stream = 1, copy_order_during_call = 2, copy_order_any = 3 };

struct CopyAttributes { // CUmemcpyAttributes
    std::int32_t source_order;
    Location source_hint;
    Location destination_hint;
    std::uint32_t flags;
};
static_assert(sizeof(CopyAttributes) == 24 && offsetof(CopyAttributes, source_hint) == 4 &&
              offsetof(CopyAttributes, flags) == 20);

struct ContextParameters { // CUctxCreateParams
    void* exec_affinity;
    std::int32_t exec_affinity_count;
    void* cig; // CUctxCigParam: CUDA in Graphics
};
static_assert(sizeof(ContextParameters) == 24 && offsetof(ContextParameters, cig) == 16);

} // namespace gdrkit::twin::cuda

// This macro gives an exported function C linkage and default visibility. No exception may leave the function.
#define GDRKIT_CUDA_ENTRY extern "C" [[gnu::visibility("default")]]
