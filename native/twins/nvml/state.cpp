// The functions of the NVML twin about the state of a GPU, for monitoring tools: performance, power, the PCIe link, and
// features that the twin reports as off. The twin's GPUs run no kernels, so they are idle. Their power and their PCIe
// throughput are 0.

#include <algorithm>

#include "nvml/entry.hpp"

namespace gdrkit::twin::nvml {
namespace {

constexpr int virtualization_none = 0; // NVML_GPU_VIRTUALIZATION_MODE_NONE
// NVML_PSTATE_0 and NVML_PSTATE_UNKNOWN, which fills the rest of a list of states.
constexpr int performance_highest = 0, performance_unknown = 32;
constexpr std::uint64_t reason_gpu_idle = 1; // nvmlClocksEventReasonGpuIdle
// The PCIe link of an H200 according to its data sheet.
constexpr unsigned pcie_generation = 5, pcie_lane_count = 16;
constexpr unsigned pcie_counter_end = 2; // NVML_PCIE_UTIL_COUNT: the counters are 0 (sent) and 1 (received)

// Store `value` if the caller's structure has the same version.
template <typename Value> int store_versioned(const Gpu* gpu, Value* result, const Value& value) {
    return run_if_arguments_valid(gpu, result, [&](int) {
        if (result->version != value.version) {
            return argument_version_mismatch;
        }
        *result = value;
        return success;
    });
}

} // namespace

GDRKIT_NVML_ENTRY int nvmlDeviceGetVirtualizationMode(const Gpu* gpu, int* mode) {
    return store_constant(gpu, mode, virtualization_none);
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetMigMode(const Gpu* gpu, unsigned* current_mode, unsigned* pending_mode) {
    return run_if_arguments_valid(gpu, current_mode, [&](int) {
        if (pending_mode == nullptr) {
            return invalid_argument;
        }
        *current_mode = *pending_mode = 0; // NVML_DEVICE_MIG_DISABLE
        return success;
    });
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetMaxMigDeviceCount(const Gpu* gpu, unsigned* count) {
    return store_constant(gpu, count, 0U);
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetC2cModeInfoV(const Gpu* gpu, unsigned* is_enabled) {
    return store_constant(gpu, is_enabled, 0U);
}

// The addressing mode 0 (NVML_DEVICE_ADDRESSING_MODE_NONE) means that the GPU cannot access the pageable memory of a
// process.
GDRKIT_NVML_ENTRY int nvmlDeviceGetAddressingMode(const Gpu* gpu, VersionedValue* mode) {
    return store_versioned(gpu, mode, VersionedValue{versioned_value_version, 0});
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetCapabilities(const Gpu* gpu, VersionedValue* capabilities) {
    return store_versioned(gpu, capabilities, VersionedValue{versioned_value_version, 0});
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetRepairStatus(const Gpu* gpu, RepairStatus* status) {
    return store_versioned(gpu, status, RepairStatus{repair_status_version, 0, 0});
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetGridLicensableFeatures_v4(const Gpu* gpu, LicensableFeatures* features) {
    return store_constant(gpu, features, LicensableFeatures{0, 0});
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetCurrentClocksEventReasons(const Gpu* gpu, std::uint64_t* reasons) {
    return store_constant(gpu, reasons, reason_gpu_idle);
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetSupportedClocksEventReasons(const Gpu* gpu, std::uint64_t* reasons) {
    return store_constant(gpu, reasons, reason_gpu_idle);
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetPerformanceState(const Gpu* gpu, int* state) {
    return store_constant(gpu, state, performance_highest);
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetSupportedPerformanceStates(const Gpu* gpu, int* states, unsigned length_bytes) {
    return run_if_arguments_valid(gpu, states, [&](int) {
        if (length_bytes < sizeof *states) {
            return insufficient_size;
        }
        std::fill_n(states, length_bytes / sizeof *states, performance_unknown);
        states[0] = performance_highest;
        return success;
    });
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetDynamicPstatesInfo(const Gpu* gpu, DynamicPstates* info) {
    return store_constant(gpu, info, DynamicPstates{});
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetPowerUsage(const Gpu* gpu, unsigned* power_mw) {
    return store_constant(gpu, power_mw, 0U);
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetPcieThroughput(const Gpu* gpu, unsigned counter, unsigned* kilobytes_per_s) {
    return run_if_arguments_valid(gpu, kilobytes_per_s, [&](int) {
        if (counter >= pcie_counter_end) {
            return invalid_argument;
        }
        *kilobytes_per_s = 0;
        return success;
    });
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetPcieReplayCounter(const Gpu* gpu, unsigned* count) {
    return store_constant(gpu, count, 0U);
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetCurrPcieLinkGeneration(const Gpu* gpu, unsigned* generation) {
    return store_constant(gpu, generation, pcie_generation);
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetMaxPcieLinkGeneration(const Gpu* gpu, unsigned* generation) {
    return store_constant(gpu, generation, pcie_generation);
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetGpuMaxPcieLinkGeneration(const Gpu* gpu, unsigned* generation) {
    return store_constant(gpu, generation, pcie_generation);
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetCurrPcieLinkWidth(const Gpu* gpu, unsigned* lane_count) {
    return store_constant(gpu, lane_count, pcie_lane_count);
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetMaxPcieLinkWidth(const Gpu* gpu, unsigned* lane_count) {
    return store_constant(gpu, lane_count, pcie_lane_count);
}

} // namespace gdrkit::twin::nvml
