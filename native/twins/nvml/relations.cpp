// The functions of the NVML twin about relations between GPUs (topology, peer access, fabric) and about field values.
// The GPUs of the twin are connected over PCIe and have no NVLinks and no fabric. nvmlDeviceGetFieldValues
// reports every field as unsupported, for example the counters of link traffic.

#include <cstring>

#include "nvml/entry.hpp"

namespace gdrkit::twin::nvml {
namespace {

// Run the body of an exported function about two GPUs. The body gets true if both handles mean the same GPU.
template <typename Value, typename Body>
int run_pair_entry(const Gpu* first, const Gpu* second, Value* result, Body&& body) {
    return run_if_arguments_valid(
        first, result, [&](int) { return find_gpu_number(second) < 0 ? invalid_argument : body(first == second); });
}

} // namespace

GDRKIT_NVML_ENTRY int nvmlDeviceGetTopologyCommonAncestor(const Gpu* first, const Gpu* second, int* level) {
    return run_pair_entry(first, second, level, [&](bool is_same) {
        *level = is_same ? 0 : topology_host_bridge; // 0: NVML_TOPOLOGY_INTERNAL
        return success;
    });
}

GDRKIT_NVML_ENTRY int nvmlDeviceOnSameBoard(const Gpu* first, const Gpu* second, int* is_same_board) {
    return run_pair_entry(first, second, is_same_board, [&](bool is_same) {
        *is_same_board = is_same ? 1 : 0;
        return success;
    });
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetP2PStatus(const Gpu* first, const Gpu* second, int capability, int* status) {
    return run_pair_entry(first, second, status, [&](bool is_same) {
        if (is_same || capability < p2p_read || capability >= p2p_end) {
            return invalid_argument;
        }
        const bool is_supported = capability == p2p_read || capability == p2p_write || capability == p2p_pci;
        *status = is_supported ? p2p_ok : p2p_not_supported;
        return success;
    });
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetGpuFabricInfo(const Gpu* gpu, FabricInfo* info) {
    return store_constant(gpu, info, FabricInfo{});
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetGpuFabricInfoV(const Gpu* gpu, FabricInfoV2* info) {
    return run_if_arguments_valid(gpu, info, [&](int) {
        const std::uint32_t version = info->version;
        if (version != fabric_v2_version && version != fabric_v3_version) {
            return argument_version_mismatch;
        }
        // The lower 24 bits of the version are the size of the caller's structure. All other fields are zero: the GPU
        // has no fabric.
        std::memset(static_cast<void*>(info), 0, version & 0xffffff);
        info->version = version;
        return success;
    });
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetFieldValues(const Gpu* gpu, int count, FieldValue* values) {
    return run_if_arguments_valid(gpu, values, [&](int) {
        if (count < 0) {
            return invalid_argument;
        }
        for (int index = 0; index < count; ++index) {
            values[index].result = unsupported;
        }
        return success;
    });
}

} // namespace gdrkit::twin::nvml
