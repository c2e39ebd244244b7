// The functions of the NVML twin about the board of a GPU: its settings, and the processors and NUMA nodes that are
// near to it.

#include <sched.h>

#include <algorithm>
#include <cstring>

#include "model/gpu.hpp"
#include "nvml/entry.hpp"

namespace gdrkit::twin::nvml {
namespace {

constexpr int brand_nvidia = 14; // NVML_BRAND_NVIDIA
// This number is one more than the largest scope. The scopes are NVML_AFFINITY_SCOPE_NODE (0) and
// NVML_AFFINITY_SCOPE_SOCKET (1).
constexpr unsigned affinity_scope_end = 2;
constexpr unsigned word_bits = 64;

// Store the set of processors that are near to a GPU, one bit for each processor: every processor that this thread may
// use.
int store_near_processors(const Gpu* gpu, unsigned word_count, unsigned long* mask_words) {
    return run_if_arguments_valid(gpu, mask_words, [&](int) {
        cpu_set_t allowed_cpus{};
        if (word_count == 0) {
            return invalid_argument;
        }
        if (sched_getaffinity(0, sizeof allowed_cpus, &allowed_cpus) != 0) {
            return unknown;
        }
        std::fill_n(mask_words, word_count, 0UL);
        const auto cpu_count = std::min<std::size_t>(CPU_SETSIZE, std::size_t{word_count} * word_bits);
        for (std::size_t cpu = 0; cpu < cpu_count; ++cpu) {
            if (CPU_ISSET(cpu, &allowed_cpus)) {
                mask_words[cpu / word_bits] |= 1UL << (cpu % word_bits);
            }
        }
        return success;
    });
}

// Accept only the state 0 (off) for a setting: the settings of the twin's GPUs cannot be switched on.
int accept_only_off(const Gpu* gpu, int state) {
    return run_if_initialized([&] {
        if (find_gpu_number(gpu) < 0 || state < 0 || state > 1) {
            return invalid_argument;
        }
        return state == 0 ? success : unsupported;
    });
}

} // namespace

GDRKIT_NVML_ENTRY int nvmlDeviceGetBrand(const Gpu* gpu, int* brand) {
    return store_constant(gpu, brand, brand_nvidia);
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetPersistenceMode(const Gpu* gpu, int* state) {
    return store_constant(gpu, state, 0);
}

GDRKIT_NVML_ENTRY int nvmlDeviceSetPersistenceMode(const Gpu* gpu, int state) {
    return accept_only_off(gpu, state);
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetDisplayMode(const Gpu* gpu, int* state) {
    return store_constant(gpu, state, 0);
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetDisplayActive(const Gpu* gpu, int* state) {
    return store_constant(gpu, state, 0);
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetModuleId(const Gpu* gpu, unsigned* module_id) {
    return run_if_arguments_valid(gpu, module_id, [&](int gpu_number) {
        *module_id = static_cast<unsigned>(gpu_number);
        return success;
    });
}

// The per-device identifier (PDI) of a twin's GPU is the first eight bytes of the UUID.
GDRKIT_NVML_ENTRY int nvmlDeviceGetPdi(const Gpu* gpu, Pdi* pdi) {
    return run_if_arguments_valid(gpu, pdi, [&](int gpu_number) {
        if (pdi->version != pdi_version) {
            return argument_version_mismatch;
        }
        const auto uuid = make_gpu_uuid(gpu_number);
        std::memcpy(&pdi->value, uuid.data(), sizeof pdi->value);
        return success;
    });
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetCpuAffinity(const Gpu* gpu, unsigned word_count, unsigned long* mask_words) {
    return store_near_processors(gpu, word_count, mask_words);
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetCpuAffinityWithinScope(const Gpu* gpu, unsigned word_count,
                                                          unsigned long* mask_words, unsigned scope) {
    return scope < affinity_scope_end || !is_initialized() ? store_near_processors(gpu, word_count, mask_words)
                                                           : invalid_argument;
}

// Report NUMA node 0, which exists on every machine, as the near node (bit 0).
GDRKIT_NVML_ENTRY int nvmlDeviceGetMemoryAffinity(const Gpu* gpu, unsigned word_count, unsigned long* mask_words,
                                                  unsigned scope) {
    return run_if_arguments_valid(gpu, mask_words, [&](int) {
        if (word_count == 0 || scope >= affinity_scope_end) {
            return invalid_argument;
        }
        std::fill_n(mask_words, word_count, 0UL);
        mask_words[0] = 1;
        return success;
    });
}

} // namespace gdrkit::twin::nvml
