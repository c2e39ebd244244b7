// Tests of the software twin of libnvidia-ml (NVML): its exports match the contract, unimplemented functions fail as
// documented, structures of older versions keep their size, and the process list contains this process while it has a
// CUDA context. The tests run with three GPUs.
#include <sched.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <string_view>

#include "contract.hpp"
#include "cuda_driver.hpp"
#include "nvml/nvml_abi.hpp"

using namespace gdrkit::twin;
using nvml::Gpu;

namespace {

// A function of the library. The convention `not_supported` means that the twin does not implement it.
struct Function {
    const char* symbol;
    const char* convention;
};

constexpr Function functions[] = {
#define X(symbol, convention) {#symbol, #convention},
#include "nvml/functions.def"
#undef X
};

template <typename... Arguments> int call_nvml(const char* symbol, Arguments... arguments) {
    static void* const library = dlopen(GDRKIT_NVML_TWIN, RTLD_NOW | RTLD_LOCAL);
    CHECK(library != nullptr);
    void* const function_address = dlsym(library, symbol);
    CHECK(function_address != nullptr);
    return reinterpret_cast<int (*)(Arguments...)>(function_address)(arguments...);
}

Gpu* get_gpu(unsigned index) {
    Gpu* gpu = nullptr;
    CHECK(call_nvml("nvmlDeviceGetHandleByIndex_v2", index, &gpu) == nvml::success);
    return gpu;
}

void test_exports_match_contract() {
    std::set<std::string> contract_symbols;
    std::map<std::string, std::string> convention_by_symbol;
    for (const auto& [symbol, convention] : read_table(GDRKIT_CONTRACTS "/nvml.conventions")) {
        CHECK(contract_symbols.insert(symbol).second);
        convention_by_symbol[symbol] = convention;
    }
    CHECK(contract_symbols == read_exported_symbols(GDRKIT_NVML_TWIN));
    for (const Function& function : functions) {
        CHECK(convention_by_symbol[function.symbol] == function.convention);
    }
    CHECK(convention_by_symbol.size() == std::size(functions));
}

void check_unimplemented_functions(int expected_result) {
    int unimplemented_count = 0;
    for (const Function& function : functions) {
        if (std::string_view(function.convention) == "not_supported") {
            CHECK(call_nvml(function.symbol) == expected_result);
            ++unimplemented_count;
        }
    }
    CHECK(unimplemented_count > 300);
}

void test_invalid_arguments_are_refused() {
    Gpu* gpu = nullptr;
    unsigned value = 0;
    char name[8];
    CHECK(call_nvml("nvmlDeviceGetHandleByIndex_v2", 3U, &gpu) == nvml::invalid_argument);
    CHECK(call_nvml("nvmlDeviceGetHandleByUUID", "GPU-0", &gpu) == nvml::not_found);
    CHECK(call_nvml("nvmlDeviceGetHandleByPciBusId_v2", "nonsense", &gpu) == nvml::invalid_argument);
    CHECK(call_nvml("nvmlDeviceGetHandleByPciBusId_v2", "00000000:A3:00.0", &gpu) == nvml::not_found);
    CHECK(call_nvml("nvmlDeviceGetHandleByPciBusId_v2", "0000:a2:00.0", &gpu) == nvml::success && gpu == get_gpu(2));
    CHECK(call_nvml("nvmlDeviceGetIndex", static_cast<Gpu*>(nullptr), &value) == nvml::invalid_argument);
    CHECK(call_nvml("nvmlDeviceGetIndex", get_gpu(1), static_cast<unsigned*>(nullptr)) == nvml::invalid_argument);
    CHECK(call_nvml("nvmlDeviceGetName", get_gpu(1), name, 8U) == nvml::insufficient_size);
    nvml::MemoryV2 memory{};
    CHECK(call_nvml("nvmlDeviceGetMemoryInfo_v2", get_gpu(0), &memory) == nvml::argument_version_mismatch);
}

// A program that calls an old function passes a smaller structure, and the function must not write beyond it. The test
// fills the memory with 0xee to detect such writes.
void test_old_structures_keep_their_size() {
    for (const auto& [symbol, length_bytes] : {std::pair{"nvmlDeviceGetPciInfo", nvml::pci_info_v1_bytes},
                                               std::pair{"nvmlDeviceGetPciInfo_v2", nvml::pci_info_v2_bytes},
                                               std::pair{"nvmlDeviceGetPciInfo_v3", sizeof(nvml::PciInfo)}}) {
        unsigned char bytes[128];
        std::memset(bytes, 0xee, sizeof bytes);
        CHECK(call_nvml(symbol, get_gpu(1), static_cast<void*>(bytes)) == nvml::success);
        CHECK(std::string_view(reinterpret_cast<char*>(bytes)) == "0000:A1:00.0");
        CHECK(bytes[length_bytes - 1] != 0xee && bytes[length_bytes] == 0xee);
        std::uint32_t pci_ids = 0;
        std::memcpy(&pci_ids, bytes + offsetof(nvml::PciInfo, pci_device_id), sizeof pci_ids);
        CHECK(pci_ids == 0xfff110de); // as in sysfs, where write_devices.cpp writes the two ids
    }
    nvml::FabricInfoV3 fabric_info{};
    std::memset(static_cast<void*>(&fabric_info), 0xee, sizeof fabric_info);
    fabric_info.base.version = nvml::fabric_v2_version;
    CHECK(call_nvml("nvmlDeviceGetGpuFabricInfoV", get_gpu(0), &fabric_info) == nvml::success);
    CHECK(fabric_info.base.version == nvml::fabric_v2_version && fabric_info.base.state == 0 &&
          fabric_info.health_summary == 0xee);
}

void test_versioned_structures_name_the_gpu() {
    nvml::DriverBranch branch{};
    CHECK(call_nvml("nvmlSystemGetDriverBranch", &branch, 80U) == nvml::argument_version_mismatch);
    branch.version = nvml::driver_branch_version;
    CHECK(call_nvml("nvmlSystemGetDriverBranch", &branch, 80U) == nvml::success && branch.text[0] == 'r');
    CHECK(call_nvml("nvmlSystemGetDriverBranch", &branch, 4U) == nvml::insufficient_size);
    nvml::Uuid uuid{};
    uuid.version = nvml::uuid_version;
    uuid.type = nvml::uuid_text_type;
    CHECK(call_nvml("nvmlDeviceGetUUID", get_gpu(1), static_cast<char*>(uuid.text), 41U) == nvml::success);
    Gpu* gpu = nullptr;
    CHECK(call_nvml("nvmlDeviceGetHandleByUUIDV", &uuid, &gpu) == nvml::success && gpu == get_gpu(1));
    nvml::Pdi pdi{nvml::pdi_version, 0}, other_pdi = pdi;
    CHECK(call_nvml("nvmlDeviceGetPdi", get_gpu(0), &pdi) == nvml::success);
    CHECK(call_nvml("nvmlDeviceGetPdi", get_gpu(1), &other_pdi) == nvml::success && pdi.value != other_pdi.value);
    nvml::PciInfoExt pci_info{};
    CHECK(call_nvml("nvmlDeviceGetPciInfoExt", get_gpu(1), &pci_info) == nvml::argument_version_mismatch);
    pci_info.version = nvml::pci_info_ext_version;
    CHECK(call_nvml("nvmlDeviceGetPciInfoExt", get_gpu(1), &pci_info) == nvml::success);
    CHECK(pci_info.bus == 0xa1 && pci_info.pci_device_id == 0xfff110de &&
          std::string_view(pci_info.bus_id) == "00000000:A1:00.0");
}

void test_gpu_is_near_to_processors_and_gpus() {
    unsigned long mask_words[2]{};
    CHECK(call_nvml("nvmlDeviceGetCpuAffinity", get_gpu(0), 2U, &mask_words[0]) == nvml::success);
    cpu_set_t allowed_cpus{};
    CHECK(sched_getaffinity(0, sizeof allowed_cpus, &allowed_cpus) == 0);
    for (std::size_t cpu = 0; cpu < 128; ++cpu) {
        CHECK(((mask_words[cpu / 64] >> (cpu % 64)) & 1) == (CPU_ISSET(cpu, &allowed_cpus) ? 1UL : 0UL));
    }
    CHECK(call_nvml("nvmlDeviceGetCpuAffinityWithinScope", get_gpu(0), 2U, &mask_words[0], 2U) ==
          nvml::invalid_argument); // the scopes are 0 (NUMA node) and 1 (socket)
    CHECK(call_nvml("nvmlDeviceGetMemoryAffinity", get_gpu(0), 2U, &mask_words[0], 0U) == nvml::success);
    CHECK(mask_words[0] == 1 && mask_words[1] == 0); // the NUMA node 0
    Gpu* nearest_gpus[3]{};
    unsigned nearest_count = 1;
    CHECK(call_nvml("nvmlDeviceGetTopologyNearestGpus", get_gpu(1), nvml::topology_host_bridge, &nearest_count,
                    &nearest_gpus[0]) == nvml::insufficient_size);
    CHECK(nearest_count == 2);
    CHECK(call_nvml("nvmlDeviceGetTopologyNearestGpus", get_gpu(1), nvml::topology_host_bridge, &nearest_count,
                    &nearest_gpus[0]) == nvml::success);
    CHECK(nearest_gpus[0] == get_gpu(0) && nearest_gpus[1] == get_gpu(2) && nearest_gpus[2] == nullptr);
    constexpr int topology_internal = 0; // two GPUs on one board
    CHECK(call_nvml("nvmlDeviceGetTopologyNearestGpus", get_gpu(1), topology_internal, &nearest_count,
                    &nearest_gpus[0]) == nvml::success &&
          nearest_count == 0);
    CHECK(call_nvml("nvmlDeviceSetPersistenceMode", get_gpu(0), 0) == nvml::success);
    CHECK(call_nvml("nvmlDeviceSetPersistenceMode", get_gpu(0), 1) == nvml::unsupported);
}

// The twin reports an idle GPU, and does not write beyond the memory of its results. The value 9 is never a result.
void test_gpu_is_idle() {
    unsigned value = 9, pending_mode = 9;
    std::uint64_t reasons = 9;
    int performance_states[3] = {9, 9, 9};
    for (const char* symbol :
         {"nvmlDeviceGetVirtualizationMode", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetC2cModeInfoV",
          "nvmlDeviceGetPerformanceState", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetPcieReplayCounter"}) {
        value = 9;
        CHECK(call_nvml(symbol, get_gpu(0), &value) == nvml::success && value == 0);
        CHECK(call_nvml(symbol, get_gpu(0), static_cast<unsigned*>(nullptr)) == nvml::invalid_argument);
    }
    CHECK(call_nvml("nvmlDeviceGetMigMode", get_gpu(0), &value, &pending_mode) == nvml::success && value == 0 &&
          pending_mode == 0);
    CHECK(call_nvml("nvmlDeviceGetCurrentClocksEventReasons", get_gpu(0), &reasons) == nvml::success &&
          reasons == 1); // nvmlClocksEventReasonGpuIdle
    CHECK(call_nvml("nvmlDeviceGetSupportedPerformanceStates", get_gpu(0), &performance_states[0], 8U) ==
          nvml::success);
    CHECK(performance_states[0] == 0 && performance_states[1] == 32 &&
          performance_states[2] == 9); // 32: NVML_PSTATE_UNKNOWN
    CHECK(call_nvml("nvmlDeviceGetSupportedPerformanceStates", get_gpu(0), &performance_states[0], 3U) ==
          nvml::insufficient_size);
    nvml::DynamicPstates pstates_info[2];
    std::memset(static_cast<void*>(pstates_info), 0xee, sizeof pstates_info);
    CHECK(call_nvml("nvmlDeviceGetDynamicPstatesInfo", get_gpu(0), &pstates_info[0]) == nvml::success);
    CHECK(pstates_info[0].utilization[7].threshold_down == 0 && pstates_info[1].flags == 0xeeeeeeee);
    for (const char* symbol : {"nvmlDeviceGetAddressingMode", "nvmlDeviceGetCapabilities"}) {
        nvml::VersionedValue versioned_value{nvml::versioned_value_version, 9};
        CHECK(call_nvml(symbol, get_gpu(0), &versioned_value) == nvml::success && versioned_value.value == 0);
        versioned_value.version = 0;
        CHECK(call_nvml(symbol, get_gpu(0), &versioned_value) == nvml::argument_version_mismatch);
    }
    nvml::RepairStatus repair{nvml::repair_status_version, 9, 9};
    CHECK(call_nvml("nvmlDeviceGetRepairStatus", get_gpu(0), &repair) == nvml::success && repair.is_tpc_pending == 0);
    // The counters are NVML_PCIE_UTIL_TX_BYTES (0) and NVML_PCIE_UTIL_RX_BYTES (1).
    CHECK(call_nvml("nvmlDeviceGetPcieThroughput", get_gpu(0), 1U, &value) == nvml::success && value == 0);
    CHECK(call_nvml("nvmlDeviceGetPcieThroughput", get_gpu(0), 2U, &value) == nvml::invalid_argument);
    CHECK(call_nvml("nvmlDeviceGetCurrPcieLinkGeneration", get_gpu(0), &value) == nvml::success && value == 5);
    CHECK(call_nvml("nvmlDeviceGetMaxPcieLinkWidth", get_gpu(0), &value) == nvml::success && value == 16);
}

// No event occurs, so each wait lasts as long as its timeout.
void test_wait_for_events_ends_with_its_timeout() {
    using Milliseconds = std::chrono::milliseconds;
    const auto get_time = [] { return std::chrono::steady_clock::now(); };
    nvml::EventSet *event_set = nullptr, *other_event_set = nullptr;
    std::uint64_t event_types = 0;
    unsigned char event_data[32];
    CHECK(call_nvml("nvmlEventSetCreate", &event_set) == nvml::success &&
          call_nvml("nvmlEventSetCreate", &other_event_set) == nvml::success);
    CHECK(event_set != other_event_set &&
          call_nvml("nvmlDeviceGetSupportedEventTypes", get_gpu(0), &event_types) == nvml::success &&
          event_types == 8); // nvmlEventTypeXidCriticalError
    CHECK(call_nvml("nvmlDeviceRegisterEvents", get_gpu(0), event_types, event_set) == nvml::success);
    CHECK(call_nvml("nvmlDeviceRegisterEvents", get_gpu(0), event_types | 1, event_set) == nvml::unsupported);
    const auto begin = get_time();
    CHECK(call_nvml("nvmlEventSetWait_v2", event_set, static_cast<void*>(event_data), 30U) == nvml::timeout);
    CHECK(get_time() - begin >= Milliseconds(30));
    CHECK(call_nvml("nvmlEventSetFree", event_set) == nvml::success &&
          call_nvml("nvmlEventSetFree", event_set) == nvml::invalid_argument);
    CHECK(call_nvml("nvmlEventSetWait_v2", event_set, static_cast<void*>(event_data), 30U) == nvml::invalid_argument);
    CHECK(call_nvml("nvmlDeviceRegisterEvents", get_gpu(0), event_types, event_set) == nvml::invalid_argument);
    CHECK(call_nvml("nvmlEventSetFree", other_event_set) == nvml::success);
    // The field `version` contains the size of the structure and, in the bits 24 to 31, the version 1.
    nvml::SystemEventSetRequest set_request{0, nullptr};
    CHECK(call_nvml("nvmlSystemEventSetCreate", &set_request) == nvml::argument_version_mismatch);
    set_request.version = sizeof set_request | 1U << 24;
    CHECK(call_nvml("nvmlSystemEventSetCreate", &set_request) == nvml::success);
    // The event types 1 and 2 mean that a driver was bound or unbound.
    nvml::SystemEventRegistration registration{sizeof registration | 1U << 24, 1 | 2, set_request.set};
    CHECK(call_nvml("nvmlSystemRegisterEvents", &registration) == nvml::success);
    registration.event_types = 4; // not an event type
    CHECK(call_nvml("nvmlSystemRegisterEvents", &registration) == nvml::invalid_argument);
    nvml::SystemEventWait wait_request{sizeof wait_request | 1U << 24, 1, set_request.set, event_data, 1, 9};
    CHECK(call_nvml("nvmlSystemEventSetWait", &wait_request) == nvml::timeout && wait_request.event_count == 0);
    CHECK(call_nvml("nvmlSystemEventSetFree", &set_request) == nvml::success);
    CHECK(call_nvml("nvmlSystemEventSetWait", &wait_request) == nvml::invalid_argument);
}

void test_uuid_may_have_no_prefix() {
    char uuid_text[41] = {};
    Gpu* gpu = nullptr;
    CHECK(call_nvml("nvmlDeviceGetUUID", get_gpu(1), &uuid_text[0], 41U) == nvml::success);
    CHECK(call_nvml("nvmlDeviceGetHandleByUUID", static_cast<const char*>(uuid_text + 4), &gpu) == nvml::success);
    CHECK(gpu == get_gpu(1)); // uuid_text + 4 is behind the prefix "GPU-"
    CHECK(call_nvml("nvmlDeviceGetHandleByUUID", static_cast<const char*>(uuid_text + 5), &gpu) == nvml::not_found);
}

void test_gpus_near_to_a_processor() {
    cpu_set_t allowed_cpus{};
    CHECK(sched_getaffinity(0, sizeof allowed_cpus, &allowed_cpus) == 0);
    for (unsigned cpu = 0; cpu < 64; ++cpu) {
        Gpu* near_gpus[3]{};
        unsigned near_count = 0;
        const bool is_allowed = CPU_ISSET(cpu, &allowed_cpus);
        CHECK(call_nvml("nvmlSystemGetTopologyGpuSet", cpu, &near_count, static_cast<Gpu**>(nullptr)) == nvml::success);
        CHECK(near_count == (is_allowed ? 3U : 0U));
        CHECK(call_nvml("nvmlSystemGetTopologyGpuSet", cpu, &near_count, &near_gpus[0]) == nvml::success);
        CHECK(near_gpus[2] == (is_allowed ? get_gpu(2) : nullptr));
        near_count = 2;
        CHECK(call_nvml("nvmlSystemGetTopologyGpuSet", cpu, &near_count, &near_gpus[0]) ==
              (is_allowed ? nvml::insufficient_size : nvml::success));
    }
}

void test_process_is_listed_while_it_has_a_context() {
    constexpr std::uint64_t length_bytes = 2U << 20;
    unsigned process_count = 0;
    const auto query_processes = [&](unsigned capacity, nvml::ProcessInfo* info) {
        process_count = capacity;
        return call_nvml("nvmlDeviceGetComputeRunningProcesses_v3", get_gpu(0), &process_count, info);
    };
    nvml::ProcessInfo info{};
    CHECK(query_processes(1, &info) == nvml::success && process_count == 0);
    cuda::use_primary_context(0);
    const auto pointer = cuda::allocate(length_bytes);
    CHECK(query_processes(0, nullptr) == nvml::insufficient_size && process_count == 1);
    CHECK(query_processes(1, &info) == nvml::success && process_count == 1);
    CHECK(info.pid == static_cast<std::uint32_t>(getpid()) && info.used_bytes == length_bytes);
    nvml::Memory memory{};
    CHECK(call_nvml("nvmlDeviceGetMemoryInfo", get_gpu(0), &memory) == nvml::success && memory.used == length_bytes);
    CHECK(call_nvml("nvmlDeviceGetMemoryInfo", get_gpu(1), &memory) == nvml::success && memory.used == 0);
    CHECK(cuda::call_driver("cuMemFree_v2", pointer) == cuda::success);
}

// main() has initialized the library before, so only the second shutdown ends it.
void test_every_init_needs_a_shutdown() {
    unsigned gpu_count = 0;
    CHECK(call_nvml("nvmlInitWithFlags", 0U) == nvml::success);
    CHECK(call_nvml("nvmlShutdown") == nvml::success);
    CHECK(call_nvml("nvmlDeviceGetCount_v2", &gpu_count) == nvml::success && gpu_count == 3);
    CHECK(call_nvml("nvmlShutdown") == nvml::success);
    CHECK(call_nvml("nvmlDeviceGetCount_v2", &gpu_count) == nvml::uninitialized);
    CHECK(call_nvml("nvmlShutdown") == nvml::uninitialized);
}

} // namespace

int main() {
    test_exports_match_contract();
    check_unimplemented_functions(nvml::uninitialized);
    CHECK(call_nvml("nvmlInit_v2") == nvml::success);
    check_unimplemented_functions(nvml::unsupported);
    test_invalid_arguments_are_refused();
    test_old_structures_keep_their_size();
    test_versioned_structures_name_the_gpu();
    test_gpu_is_near_to_processors_and_gpus();
    test_gpu_is_idle();
    test_wait_for_events_ends_with_its_timeout();
    test_uuid_may_have_no_prefix();
    test_gpus_near_to_a_processor();
    test_process_is_listed_while_it_has_a_context();
    test_every_init_needs_a_shutdown();
}
