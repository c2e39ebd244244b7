// The emulated GPUs: properties, attributes, UUIDs and PCI addresses.

#include "cuda/device.hpp"

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <optional>
#include <string_view>

#include "cuda/entry.hpp"
#include "cuda/visible_devices.hpp"
#include "model/config.hpp"
#include "model/gpu.hpp"

namespace gdrkit::twin::cuda {
namespace {

// The properties of every device. The members of DeviceProperties name the values.
constexpr DeviceProperties common_properties = {
    1024, {1024, 1024, 64}, {INT_MAX, 65535, 65535}, 49152, 65536, 32, INT_MAX, 65536, 1000000, 512};

static_assert(driver_version == cuda_driver_version);

struct AttributeValue {
    int attribute;
    int value;
};

// The attributes of every device. query_attribute() computes three more. All other attributes are 0: limits of features
// that the twin does not have (kernels, texture fetches), features that the twin does not support, and PCI numbers.
constexpr AttributeValue attribute_values[] = {
    {device_max_threads_per_block, 1024},
    {2, 1024}, // 2 to 7: largest block and grid dimensions of compute capability 9.0
    {3, 1024},
    {4, 64},
    {5, INT_MAX},
    {6, 65535},
    {7, 65535},
    {8, 49152}, // shared memory per block in bytes
    {9, 65536}, // total constant memory in bytes
    {device_warp_size, 32},
    {device_max_pitch, max_pitch_bytes},
    {12, 65536},   // registers per block
    {13, 1000000}, // clock in kHz
    {14, 512},     // texture alignment in bytes
    {15, 1},       // copies can overlap with other work
    {device_multiprocessor_count, multiprocessor_count},
    {device_can_map_host_memory, 1},
    {device_async_engine_count, 2},
    {device_unified_addressing, 1},
    {36, 1000000},             // memory clock in kHz
    {37, gpu_memory_bus_bits}, // memory bus width in bits
    {39, 2048},                // threads per multiprocessor
    {device_compute_capability_major, gpu_compute_major},
    {device_compute_capability_minor, gpu_compute_minor},
    {device_stream_priorities_supported, 1},
    {device_managed_memory, 1},
    {device_concurrent_managed_access, 1},
    {device_can_use_host_pointer_for_registered_memory, 1},
    {device_host_register_supported, 1},
    {device_vmm_supported, 1},
    {device_posix_fd_handles_supported, 1},
    {device_gpu_direct_rdma_with_vmm_supported, 1},
    {device_read_only_host_register_supported, 1},
    {device_memory_pools_supported, 1},
    {device_gpu_direct_rdma_supported, 1},
    {device_dmabuf_supported, 1},
    {device_ipc_event_supported, 1},
    {device_tensor_map_access_supported, 1},
    {device_mempool_handle_types, handle_posix_fd},
    {device_numa_id, -1},
    {device_host_numa_memory_pools_supported, 1},
    {device_host_memory_pools_supported, 1},
};

int query_attribute(Device device, int attribute) {
    if (attribute == device_pci_bus_id) {
        return first_gpu_pci_bus + get_physical_number(device);
    }
    if (attribute == device_writes_ordering) {
        return config().writes_ordering;
    }
    if (attribute == device_flush_writes_options) {
        return config().flush_options;
    }
    const auto* const entry = std::ranges::find(attribute_values, attribute, &AttributeValue::attribute);
    return entry == std::end(attribute_values) ? 0 : entry->value;
}

// Run the body of an exported function that queries one device and stores the result at `output`.
template <typename Value, typename Body>
Result run_device_entry(std::string_view symbol, Device device, Value* output, Body&& body) {
    return run_entry(symbol, [&] {
        if (!device_exists(device)) {
            return invalid_device;
        }
        return output == nullptr ? invalid_value : body();
    });
}

Result fill_uuid(Uuid* uuid, Device device) {
    *uuid = get_uuid_of_physical_device(get_physical_number(device));
    return success;
}

} // namespace

bool device_exists(Device device) {
    return device >= 0 && device < static_cast<int>(visible_devices().physical_numbers.size());
}

GDRKIT_CUDA_ENTRY Result cuDeviceGetCount(int* count) {
    return run_entry("cuDeviceGetCount", [&] {
        if (count == nullptr) {
            return invalid_value;
        }
        *count = static_cast<int>(visible_devices().physical_numbers.size());
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuDeviceGet(Device* device, int ordinal) {
    return run_device_entry("cuDeviceGet", ordinal, device, [&] {
        *device = ordinal;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuDeviceGetName(char* name, int size_bytes, Device device) {
    return run_device_entry("cuDeviceGetName", device, name, [&] {
        if (size_bytes <= 0) {
            return invalid_value;
        }
        std::snprintf(name, static_cast<std::size_t>(size_bytes), "%s", gpu_name.data());
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuDeviceGetUuid(Uuid* uuid, Device device) {
    return run_device_entry("cuDeviceGetUuid", device, uuid, [&] { return fill_uuid(uuid, device); });
}

GDRKIT_CUDA_ENTRY Result cuDeviceGetUuid_v2(Uuid* uuid, Device device) {
    return run_device_entry("cuDeviceGetUuid_v2", device, uuid, [&] { return fill_uuid(uuid, device); });
}

GDRKIT_CUDA_ENTRY Result cuDeviceTotalMem_v2(std::size_t* length_bytes, Device device) {
    return run_device_entry("cuDeviceTotalMem_v2", device, length_bytes, [&] {
        *length_bytes = device_capacity_bytes;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuDeviceGetAttribute(int* value, int attribute, Device device) {
    return run_device_entry("cuDeviceGetAttribute", device, value, [&] {
        if (attribute < 1 || attribute > device_attribute_last) {
            return invalid_value;
        }
        *value = query_attribute(device, attribute);
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuDeviceGetProperties(DeviceProperties* properties, Device device) {
    return run_device_entry("cuDeviceGetProperties", device, properties, [&] {
        *properties = common_properties;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuDeviceComputeCapability(int* major, int* minor, Device device) {
    return run_device_entry("cuDeviceComputeCapability", device, major, [&] {
        if (minor == nullptr) {
            return invalid_value;
        }
        *major = gpu_compute_major;
        *minor = gpu_compute_minor;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuDeviceGetPCIBusId(char* buffer, int size_bytes, Device device) {
    return run_device_entry("cuDeviceGetPCIBusId", device, buffer, [&] {
        char bus_id[16];
        const int bus_id_length =
            std::snprintf(bus_id, sizeof bus_id, "0000:%02X:00.0", first_gpu_pci_bus + get_physical_number(device));
        if (size_bytes <= bus_id_length) {
            return invalid_value;
        }
        std::memcpy(buffer, bus_id, static_cast<std::size_t>(bus_id_length) + 1);
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuDeviceGetByPCIBusId(Device* device, const char* bus_id_text) {
    return run_entry("cuDeviceGetByPCIBusId", [&] {
        const auto bus = bus_id_text == nullptr ? std::nullopt : parse_pci_bus(bus_id_text);
        if (device == nullptr || !bus) {
            return invalid_value;
        }
        const auto ordinal = find_ordinal(*bus - first_gpu_pci_bus);
        if (!ordinal) {
            return invalid_device;
        }
        *device = *ordinal;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuDeviceCanAccessPeer(int* can_access, Device device, Device peer) {
    return run_device_entry("cuDeviceCanAccessPeer", device, can_access, [&] {
        if (!device_exists(peer)) {
            return invalid_device;
        }
        *can_access = device != peer ? 1 : 0;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuDeviceGetP2PAttribute(int* value, int attribute, Device from, Device to) {
    return run_device_entry("cuDeviceGetP2PAttribute", from, value, [&] {
        if (!device_exists(to) || from == to) {
            return invalid_device;
        }
        if (attribute < p2p_performance_rank || attribute > p2p_only_partial_native_atomic_supported) {
            return invalid_value;
        }
        *value = attribute == p2p_access_supported ? 1 : 0;
        return success;
    });
}

} // namespace gdrkit::twin::cuda
