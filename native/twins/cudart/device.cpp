// Queries of devices, versions and entry points of the driver.
#include <cstring>

#include "cudart/entry.hpp"

namespace gdrkit::twin::cudart {
namespace {

// Fill the properties of a device. Each M(attribute, member) names a cudaDevAttr by its number, and the member of
// cudaDeviceProp that gets its value. CUDA 13 removed the members of the part for CUDA 12.
Error fill_properties(DeviceProperties* properties, Device device) {
    struct AttributeMember {
        int attribute;
        void* member;
        std::size_t member_bytes;
    };
#define M(attribute, member)                                                                                           \
    { attribute, &properties->member, sizeof(properties->member) }
    const AttributeMember members[] = {
        M(8, shared_bytes_per_block),
        M(12, registers_per_block),
        M(10, warp_size),
        M(11, pitch_max),
        M(1, threads_per_block_max),
        M(2, threads_dimensions_max[0]),
        M(3, threads_dimensions_max[1]),
        M(4, threads_dimensions_max[2]),
        M(5, grid_size_max[0]),
        M(6, grid_size_max[1]),
        M(7, grid_size_max[2]),
        M(9, total_constant_bytes),
        M(75, major),
        M(76, minor),
        M(14, texture_alignment),
        M(51, texture_pitch_alignment),
        M(16, multiprocessor_count),
        M(18, integrated),
        M(19, can_map_host_memory),
        M(21, texture_1d_max),
        M(77, texture_1d_mipmap_max),
        M(22, texture_2d_max[0]),
        M(23, texture_2d_max[1]),
        M(73, texture_2d_mipmap_max[0]),
        M(74, texture_2d_mipmap_max[1]),
        M(70, texture_2d_linear_max[0]),
        M(71, texture_2d_linear_max[1]),
        M(72, texture_2d_linear_max[2]),
        M(45, texture_2d_gather_max[0]),
        M(46, texture_2d_gather_max[1]),
        M(24, texture_3d_max[0]),
        M(25, texture_3d_max[1]),
        M(26, texture_3d_max[2]),
        M(47, texture_3d_alternative_max[0]),
        M(48, texture_3d_alternative_max[1]),
        M(49, texture_3d_alternative_max[2]),
        M(52, texture_cubemap_max),
        M(42, texture_1d_layered_max[0]),
        M(43, texture_1d_layered_max[1]),
        M(27, texture_2d_layered_max[0]),
        M(28, texture_2d_layered_max[1]),
        M(29, texture_2d_layered_max[2]),
        M(53, texture_cubemap_layered_max[0]),
        M(54, texture_cubemap_layered_max[1]),
        M(55, surface_1d_max),
        M(56, surface_2d_max[0]),
        M(57, surface_2d_max[1]),
        M(58, surface_3d_max[0]),
        M(59, surface_3d_max[1]),
        M(60, surface_3d_max[2]),
        M(61, surface_1d_layered_max[0]),
        M(62, surface_1d_layered_max[1]),
        M(63, surface_2d_layered_max[0]),
        M(64, surface_2d_layered_max[1]),
        M(65, surface_2d_layered_max[2]),
        M(66, surface_cubemap_max),
        M(67, surface_cubemap_layered_max[0]),
        M(68, surface_cubemap_layered_max[1]),
        M(30, surface_alignment),
        M(31, concurrent_kernels),
        M(32, ecc_enabled),
        M(33, pci_bus_id),
        M(34, pci_device_id),
        M(50, pci_domain_id),
        M(35, tcc_driver),
        M(40, async_engine_count),
        M(41, unified_addressing),
        M(37, memory_bus_bits),
        M(38, l2_cache_bytes),
        M(108, persisting_l2_cache_bytes_max),
        M(39, threads_per_multiprocessor_max),
        M(78, stream_priorities_supported),
        M(79, global_l1_cache_supported),
        M(80, local_l1_cache_supported),
        M(81, shared_bytes_per_multiprocessor),
        M(82, registers_per_multiprocessor),
        M(83, managed_memory),
        M(84, is_multi_gpu_board),
        M(85, multi_gpu_board_group_id),
        M(86, host_native_atomic_supported),
        M(88, pageable_memory_access),
        M(89, concurrent_managed_access),
        M(90, compute_preemption_supported),
        M(91, can_use_host_pointer_for_registered_memory),
        M(95, cooperative_launch),
        M(97, shared_bytes_per_block_optin),
        M(100, pageable_memory_access_uses_host_page_tables),
        M(101, direct_managed_access_from_host),
        M(106, blocks_per_multiprocessor_max),
        M(109, access_policy_window_bytes_max),
        M(111, reserved_shared_bytes_per_block),
        M(99, host_register_supported),
        M(112, sparse_array_supported),
        M(113, host_register_read_only_supported),
        M(114, timeline_semaphore_interop_supported),
        M(115, memory_pools_supported),
        M(116, gpu_direct_rdma_supported),
        M(117, gpu_direct_rdma_flush_options),
        M(118, gpu_direct_rdma_writes_ordering),
        M(119, memory_pool_handle_types),
        M(121, deferred_mapping_array_supported),
        M(125, ipc_event_supported),
        M(120, cluster_launch),
        M(129, unified_function_pointers),
#if GDRKIT_CUDART_MAJOR == 12
        M(13, clock_khz),
        M(15, device_overlap),
        M(17, kernel_timeout_enabled),
        M(20, compute_mode),
        M(69, texture_1d_linear_max),
        M(36, memory_clock_khz),
        M(87, single_to_double_ratio),
        M(96, cooperative_multi_device_launch),
#else
        M(130, device_numa_config),
        M(131, device_numa_id),
        M(133, mps_enabled),
        M(134, host_numa_id),
        M(139, gpu_pci_device_id),
        M(140, gpu_pci_subsystem_id),
        M(143, host_numa_multinode_ipc_supported),
#endif
    };
#undef M
    std::memset(static_cast<void*>(properties), 0, sizeof *properties);
    for (const AttributeMember& entry : members) {
        int value = 0;
        if (const Error error = call(&Driver::cuDeviceGetAttribute, &value, entry.attribute, device);
            error != success) {
            return error;
        }
        // The members have 4 or 8 bytes. The copy is right for both sizes, because the machine is little-endian.
        const std::int64_t wide_value = value;
        std::memcpy(entry.member, &wide_value, entry.member_bytes);
    }
    Error error = call(&Driver::cuDeviceGetName, properties->name, static_cast<int>(sizeof properties->name), device);
    if (error == success) {
        error = call(&Driver::cuDeviceGetUuid_v2, static_cast<void*>(properties->uuid), device);
    }
    return error == success ? call(&Driver::cuDeviceTotalMem_v2, &properties->total_global_bytes, device) : error;
}

Error get_properties(DeviceProperties* destination, Device device, std::size_t destination_bytes) {
    if (destination == nullptr) {
        return invalid_value;
    }
    if (const Error error = check_device(device); error != success) {
        return error;
    }
    DeviceProperties properties;
    const Error error = fill_properties(&properties, device);
    if (error == success) {
        std::memcpy(static_cast<void*>(destination), &properties, destination_bytes);
    }
    return error;
}

Error find_entry_point(const char* name, void** function, int version, std::uint64_t flags, int* status) {
    if (name == nullptr || function == nullptr) {
        return invalid_value;
    }
    int driver_status = 0;
    const Error error = call(&Driver::cuGetProcAddress_v2, name, function, version, flags, &driver_status);
    if (error != success) {
        return error;
    }
    if (status != nullptr) {
        *status = driver_status;
    }
    return success;
}

// Convert the flags of a function with the suffix _ptsz, for which the default is the per-thread form.
std::uint64_t select_per_thread_stream(std::uint64_t flags) {
    return flags == entry_point_default ? entry_point_per_thread_stream : flags;
}

} // namespace

GDRKIT_CUDART_ENTRY Error cudaGetDeviceCount(int* count) {
    return run_entry_before_init([&] {
        if (count == nullptr) {
            return invalid_value;
        }
        *count = 0;
        const Error init_error = initialize_driver();
        const Error error = init_error == success ? call(&Driver::cuDeviceGetCount, count) : init_error;
        return error == success && *count == 0 ? no_device : error;
    });
}

#if GDRKIT_CUDART_MAJOR == 12
// Programs that were built for CUDA 11 call this function with a shorter structure.
GDRKIT_CUDART_ENTRY Error cudaGetDeviceProperties(DeviceProperties* properties, Device device) {
    return run_entry(
        [&] { return get_properties(properties, device, offsetof(DeviceProperties, host_register_supported)); });
}

GDRKIT_CUDART_ENTRY Error cudaGetDeviceProperties_v2(DeviceProperties* properties, Device device) {
    return run_entry([&] { return get_properties(properties, device, sizeof *properties); });
}
#else
GDRKIT_CUDART_ENTRY Error cudaGetDeviceProperties(DeviceProperties* properties, Device device) {
    return run_entry([&] { return get_properties(properties, device, sizeof *properties); });
}
#endif

GDRKIT_CUDART_ENTRY Error cudaDeviceGetAttribute(int* value, int attribute, Device device) {
    return run_entry([&] { return call(&Driver::cuDeviceGetAttribute, value, attribute, device); });
}

GDRKIT_CUDART_ENTRY Error cudaDeviceGetP2PAttribute(int* value, int attribute, Device from, Device to) {
    return run_entry([&] { return call(&Driver::cuDeviceGetP2PAttribute, value, attribute, from, to); });
}

GDRKIT_CUDART_ENTRY Error cudaDeviceCanAccessPeer(int* can_access, Device device, Device peer) {
    return run_entry([&] { return call(&Driver::cuDeviceCanAccessPeer, can_access, device, peer); });
}

GDRKIT_CUDART_ENTRY Error cudaDeviceGetPCIBusId(char* bus_id, int length_bytes, Device device) {
    return run_entry([&] { return call(&Driver::cuDeviceGetPCIBusId, bus_id, length_bytes, device); });
}

GDRKIT_CUDART_ENTRY Error cudaDeviceGetByPCIBusId(Device* device, const char* bus_id) {
    return run_entry([&] { return call(&Driver::cuDeviceGetByPCIBusId, device, bus_id); });
}

GDRKIT_CUDART_ENTRY Error cudaDriverGetVersion(int* version) {
    return run_entry_before_init([&] {
        if (version == nullptr) {
            return invalid_value;
        }
        // Without a driver, the version is 0 and the call succeeds.
        *version = 0;
        return driver().is_loaded ? call(&Driver::cuDriverGetVersion, version) : success;
    });
}

GDRKIT_CUDART_ENTRY Error cudaRuntimeGetVersion(int* version) {
    return run_entry_before_init([&] {
        if (version == nullptr) {
            return invalid_value;
        }
        *version = runtime_version;
        return success;
    });
}

GDRKIT_CUDART_ENTRY Error cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version,
                                                           std::uint64_t flags, int* status) {
    return run_entry([&] { return find_entry_point(name, function, static_cast<int>(version), flags, status); });
}

GDRKIT_CUDART_ENTRY Error cudaGetDriverEntryPointByVersion_ptsz(const char* name, void** function, unsigned version,
                                                                std::uint64_t flags, int* status) {
    return cudaGetDriverEntryPointByVersion(name, function, version, select_per_thread_stream(flags), status);
}

GDRKIT_CUDART_ENTRY Error cudaGetDriverEntryPoint(const char* name, void** function, std::uint64_t flags, int* status) {
    return cudaGetDriverEntryPointByVersion(name, function, runtime_version, flags, status);
}

GDRKIT_CUDART_ENTRY Error cudaGetDriverEntryPoint_ptsz(const char* name, void** function, std::uint64_t flags,
                                                       int* status) {
    return cudaGetDriverEntryPoint(name, function, select_per_thread_stream(flags), status);
}

GDRKIT_CUDART_ENTRY ChannelFormat cudaCreateChannelDesc(int x, int y, int z, int w, int kind) {
    return {x, y, z, w, kind};
}

} // namespace gdrkit::twin::cudart
