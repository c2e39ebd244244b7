// The part of the CUDA runtime's binary interface that the twin implements, written from the public documentation of
// CUDA 12.9 and 13.0. A handle of a stream, an event or a pool is the handle of the driver.
#pragma once

#include <cstddef>
#include <cstdint>

// The build compiles the sources once for libcudart.so.12 and once for libcudart.so.13.
#ifndef GDRKIT_CUDART_MAJOR
#define GDRKIT_CUDART_MAJOR 13
#endif

namespace gdrkit::twin::cudart {

inline constexpr int runtime_version = GDRKIT_CUDART_MAJOR == 12 ? 12090 : 13000;

// cudaError codes that the twin returns by itself. Since CUDA 10.1, errors of the driver have the same number in both
// interfaces.
enum Error : int {
    success = 0,
    invalid_value = 1,
    memory_allocation = 2,
    invalid_pitch_value = 12,
    invalid_channel_descriptor = 20,
    invalid_memcpy_direction = 21,
    insufficient_driver = 35,
    call_requires_newer_driver = 36,
    missing_configuration = 52,
    invalid_device_function = 98,
    no_device = 100,
    invalid_device = 101,
    not_supported = 801,
    unknown_error = 999,
};

using Device = std::int32_t;
using Address = std::uint64_t; // CUdeviceptr
using Handle = std::uint64_t;  // cudaStream_t, cudaEvent_t, cudaMemPool_t, CUcontext

inline constexpr Handle per_thread_stream = 2; // cudaStreamPerThread

// cudaMemcpyKind. With memcpy_default (cudaMemcpyDefault), the addresses determine the direction.
enum CopyKind : int {
    host_to_host = 0,
    host_to_device = 1,
    device_to_host = 2,
    device_to_device = 3,
    memcpy_default = 4
};

// cudaMemoryType of managed memory. The other types have the numbers of CUmemorytype, and 0 is unregistered memory.
inline constexpr std::int32_t memory_managed = 3;

// flag of cudaInitDevice
inline constexpr unsigned init_device_flags_are_valid = 1;

// flags of cudaGetDriverEntryPoint
inline constexpr std::uint64_t entry_point_default = 0;
inline constexpr std::uint64_t entry_point_per_thread_stream = 2;

struct Dimensions { // dim3
    unsigned x, y, z;
};
static_assert(sizeof(Dimensions) == 12);

struct PointerAttributes { // cudaPointerAttributes
    std::int32_t type;
    std::int32_t device;
    void* device_pointer;
    void* host_pointer;
#if GDRKIT_CUDART_MAJOR >= 13
    std::int64_t reserved[8];
#endif
};
static_assert(sizeof(PointerAttributes) == (GDRKIT_CUDART_MAJOR == 12 ? 24 : 88));

struct PitchedPointer { // cudaPitchedPtr
    void* pointer;
    std::size_t pitch;  // in bytes
    std::size_t x_size; // width of the allocation in bytes
    std::size_t y_size; // number of rows of a slice
};
static_assert(sizeof(PitchedPointer) == 32);

struct Extent {        // cudaExtent
    std::size_t width; // in elements for arrays, else in bytes
    std::size_t height, depth;
};
struct Position { // cudaPos
    std::size_t x, y, z;
};

struct Copy3d { // cudaMemcpy3DParms
    void* from_array;
    Position from_position;
    PitchedPointer from;
    void* to_array;
    Position to_position;
    PitchedPointer to;
    Extent extent;
    std::int32_t kind; // CopyKind
};
static_assert(sizeof(Copy3d) == 160 && offsetof(Copy3d, to_array) == 64 && offsetof(Copy3d, kind) == 152);

struct PeerCopy3d { // cudaMemcpy3DPeerParms
    void* from_array;
    Position from_position;
    PitchedPointer from;
    std::int32_t from_device;
    void* to_array;
    Position to_position;
    PitchedPointer to;
    std::int32_t to_device;
    Extent extent;
};
static_assert(sizeof(PeerCopy3d) == 168 && offsetof(PeerCopy3d, to_array) == 72 && offsetof(PeerCopy3d, extent) == 144);

// cudaChannelFormatKind
enum ChannelKind : int { channel_signed = 0, channel_unsigned = 1, channel_float = 2 };

struct ChannelFormat {       // cudaChannelFormatDesc
    std::int32_t x, y, z, w; // bits of each channel; 0: the element does not have this channel
    std::int32_t kind;       // ChannelKind
};
static_assert(sizeof(ChannelFormat) == 20);

// cudaDeviceProp. CUDA 13 removed the members in the conditional parts, except in the last one, where it added members.
struct DeviceProperties {
    char name[256];
    std::uint8_t uuid[16];
    char luid[8];
    std::uint32_t luid_device_node_mask;
    std::size_t total_global_bytes;
    std::size_t shared_bytes_per_block;
    std::int32_t registers_per_block;
    std::int32_t warp_size;
    std::size_t pitch_max;
    std::int32_t threads_per_block_max;
    std::int32_t threads_dimensions_max[3];
    std::int32_t grid_size_max[3];
#if GDRKIT_CUDART_MAJOR == 12
    std::int32_t clock_khz;
#endif
    std::size_t total_constant_bytes;
    std::int32_t major, minor; // compute capability
    std::size_t texture_alignment;
    std::size_t texture_pitch_alignment;
#if GDRKIT_CUDART_MAJOR == 12
    std::int32_t device_overlap;
#endif
    std::int32_t multiprocessor_count;
#if GDRKIT_CUDART_MAJOR == 12
    std::int32_t kernel_timeout_enabled;
#endif
    std::int32_t integrated;
    std::int32_t can_map_host_memory;
#if GDRKIT_CUDART_MAJOR == 12
    std::int32_t compute_mode;
#endif
    std::int32_t texture_1d_max;
    std::int32_t texture_1d_mipmap_max;
#if GDRKIT_CUDART_MAJOR == 12
    std::int32_t texture_1d_linear_max;
#endif
    std::int32_t texture_2d_max[2];
    std::int32_t texture_2d_mipmap_max[2];
    std::int32_t texture_2d_linear_max[3];
    std::int32_t texture_2d_gather_max[2];
    std::int32_t texture_3d_max[3];
    std::int32_t texture_3d_alternative_max[3];
    std::int32_t texture_cubemap_max;
    std::int32_t texture_1d_layered_max[2];
    std::int32_t texture_2d_layered_max[3];
    std::int32_t texture_cubemap_layered_max[2];
    std::int32_t surface_1d_max;
    std::int32_t surface_2d_max[2];
    std::int32_t surface_3d_max[3];
    std::int32_t surface_1d_layered_max[2];
    std::int32_t surface_2d_layered_max[3];
    std::int32_t surface_cubemap_max;
    std::int32_t surface_cubemap_layered_max[2];
    std::size_t surface_alignment;
    std::int32_t concurrent_kernels;
    std::int32_t ecc_enabled;
    std::int32_t pci_bus_id;
    std::int32_t pci_device_id;
    std::int32_t pci_domain_id;
    std::int32_t tcc_driver;
    std::int32_t async_engine_count;
    std::int32_t unified_addressing;
#if GDRKIT_CUDART_MAJOR == 12
    std::int32_t memory_clock_khz;
#endif
    std::int32_t memory_bus_bits;
    std::int32_t l2_cache_bytes;
    std::int32_t persisting_l2_cache_bytes_max;
    std::int32_t threads_per_multiprocessor_max;
    std::int32_t stream_priorities_supported;
    std::int32_t global_l1_cache_supported;
    std::int32_t local_l1_cache_supported;
    std::size_t shared_bytes_per_multiprocessor;
    std::int32_t registers_per_multiprocessor;
    std::int32_t managed_memory;
    std::int32_t is_multi_gpu_board;
    std::int32_t multi_gpu_board_group_id;
    std::int32_t host_native_atomic_supported;
#if GDRKIT_CUDART_MAJOR == 12
    std::int32_t single_to_double_ratio;
#endif
    std::int32_t pageable_memory_access;
    std::int32_t concurrent_managed_access;
    std::int32_t compute_preemption_supported;
    std::int32_t can_use_host_pointer_for_registered_memory;
    std::int32_t cooperative_launch;
#if GDRKIT_CUDART_MAJOR == 12
    std::int32_t cooperative_multi_device_launch;
#endif
    std::size_t shared_bytes_per_block_optin;
    std::int32_t pageable_memory_access_uses_host_page_tables;
    std::int32_t direct_managed_access_from_host;
    std::int32_t blocks_per_multiprocessor_max;
    std::int32_t access_policy_window_bytes_max;
    std::size_t reserved_shared_bytes_per_block;
    // cudaGetDeviceProperties of CUDA 12 fills the structure of CUDA 11, which ends before this member.
    std::int32_t host_register_supported;
    std::int32_t sparse_array_supported;
    std::int32_t host_register_read_only_supported;
    std::int32_t timeline_semaphore_interop_supported;
    std::int32_t memory_pools_supported;
    std::int32_t gpu_direct_rdma_supported;
    std::uint32_t gpu_direct_rdma_flush_options;
    std::int32_t gpu_direct_rdma_writes_ordering;
    std::uint32_t memory_pool_handle_types;
    std::int32_t deferred_mapping_array_supported;
    std::int32_t ipc_event_supported;
    std::int32_t cluster_launch;
    std::int32_t unified_function_pointers;
#if GDRKIT_CUDART_MAJOR == 12
    std::int32_t reserved[63];
#else
    std::int32_t device_numa_config;
    std::int32_t device_numa_id;
    std::int32_t mps_enabled;
    std::int32_t host_numa_id;
    std::uint32_t gpu_pci_device_id;
    std::uint32_t gpu_pci_subsystem_id;
    std::int32_t host_numa_multinode_ipc_supported;
    std::int32_t reserved[56];
#endif
};
static_assert(sizeof(DeviceProperties) == (GDRKIT_CUDART_MAJOR == 12 ? 1032 : 1008));

} // namespace gdrkit::twin::cudart

// Marks an exported function: C linkage and default visibility. Exceptions must not leave it.
#define GDRKIT_CUDART_ENTRY extern "C" [[gnu::visibility("default")]]
