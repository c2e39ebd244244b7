// Tests of the NVML twin: its exports match the contract, unimplemented functions fail as documented, structures of
// older versions keep their size, and the process list has this process while it has a context.
#include <sched.h>

#include <map>
#include <string_view>

#include "contract.hpp"
#include "cuda_driver.hpp"
#include "nvml/nvml_abi.hpp"

using namespace gdrkit::twin;
using nvml::Gpu;

namespace {

struct Function {
    const char* symbol;
    const char* kind;
};

constexpr Function functions[] = {
#define X(symbol, kind) {#symbol, #kind},
#include "nvml/functions.def"
#undef X
};

template <typename... Arguments> int call(const char* symbol, Arguments... arguments) {
    static void* const library = dlopen(GDRKIT_NVML_TWIN, RTLD_NOW | RTLD_LOCAL);
    CHECK(library != nullptr);
    void* const entry = dlsym(library, symbol);
    CHECK(entry != nullptr);
    return reinterpret_cast<int (*)(Arguments...)>(entry)(arguments...);
}

Gpu* gpu(unsigned index) {
    Gpu* handle = nullptr;
    CHECK(call("nvmlDeviceGetHandleByIndex_v2", index, &handle) == nvml::success);
    return handle;
}

void test_exports_match_contract() {
    std::set<std::string> contract_symbols;
    std::map<std::string, std::string> kinds;
    for (const auto& [symbol, kind] : read_table(GDRKIT_CONTRACTS "/nvml.conventions")) {
        CHECK(contract_symbols.insert(symbol).second);
        kinds[symbol] = kind;
    }
    CHECK(contract_symbols == exported_symbols(GDRKIT_NVML_TWIN));
    for (const Function& function : functions) {
        CHECK(kinds[function.symbol] == function.kind);
    }
    CHECK(kinds.size() == std::size(functions));
}

void check_unimplemented_functions(int expected) {
    int count = 0;
    for (const Function& function : functions) {
        if (std::string_view(function.kind) == "not_supported") {
            CHECK(call(function.symbol) == expected);
            ++count;
        }
    }
    CHECK(count > 300);
}

void test_invalid_arguments_are_refused() {
    Gpu* handle = nullptr;
    unsigned value = 0;
    char text[8];
    CHECK(call("nvmlDeviceGetHandleByIndex_v2", 3U, &handle) == nvml::invalid_argument);
    CHECK(call("nvmlDeviceGetHandleByUUID", "GPU-0", &handle) == nvml::not_found);
    CHECK(call("nvmlDeviceGetHandleByPciBusId_v2", "nonsense", &handle) == nvml::invalid_argument);
    CHECK(call("nvmlDeviceGetHandleByPciBusId_v2", "00000000:A3:00.0", &handle) == nvml::not_found);
    CHECK(call("nvmlDeviceGetHandleByPciBusId_v2", "0000:a2:00.0", &handle) == nvml::success && handle == gpu(2));
    CHECK(call("nvmlDeviceGetIndex", static_cast<Gpu*>(nullptr), &value) == nvml::invalid_argument);
    CHECK(call("nvmlDeviceGetIndex", gpu(1), static_cast<unsigned*>(nullptr)) == nvml::invalid_argument);
    CHECK(call("nvmlDeviceGetName", gpu(1), text, 8U) == nvml::insufficient_size);
    nvml::MemoryV2 memory{};
    CHECK(call("nvmlDeviceGetMemoryInfo_v2", gpu(0), &memory) == nvml::argument_version_mismatch);
}

// A caller of an old function has a smaller structure.
void test_old_structures_keep_their_size() {
    for (const auto& [symbol, length_bytes] : {std::pair{"nvmlDeviceGetPciInfo", nvml::pci_info_v1_bytes},
                                               std::pair{"nvmlDeviceGetPciInfo_v2", nvml::pci_info_v2_bytes},
                                               std::pair{"nvmlDeviceGetPciInfo_v3", sizeof(nvml::PciInfo)}}) {
        unsigned char bytes[128];
        std::memset(bytes, 0xee, sizeof bytes);
        CHECK(call(symbol, gpu(1), static_cast<void*>(bytes)) == nvml::success);
        CHECK(std::string_view(reinterpret_cast<char*>(bytes)) == "0000:A1:00.0");
        CHECK(bytes[length_bytes - 1] != 0xee && bytes[length_bytes] == 0xee);
    }
    nvml::FabricInfoV3 fabric{};
    std::memset(static_cast<void*>(&fabric), 0xee, sizeof fabric);
    fabric.base.version = nvml::fabric_v2_version;
    CHECK(call("nvmlDeviceGetGpuFabricInfoV", gpu(0), &fabric) == nvml::success);
    CHECK(fabric.base.version == nvml::fabric_v2_version && fabric.base.state == 0 && fabric.health_summary == 0xee);
}

void test_versioned_structures_name_the_gpu() {
    nvml::DriverBranch branch{};
    CHECK(call("nvmlSystemGetDriverBranch", &branch, 80U) == nvml::argument_version_mismatch);
    branch.version = nvml::driver_branch_version;
    CHECK(call("nvmlSystemGetDriverBranch", &branch, 80U) == nvml::success && branch.text[0] == 'r');
    CHECK(call("nvmlSystemGetDriverBranch", &branch, 4U) == nvml::insufficient_size);
    nvml::Uuid uuid{};
    uuid.version = nvml::uuid_version;
    uuid.type = nvml::uuid_text_type;
    CHECK(call("nvmlDeviceGetUUID", gpu(1), static_cast<char*>(uuid.text), 41U) == nvml::success);
    Gpu* handle = nullptr;
    CHECK(call("nvmlDeviceGetHandleByUUIDV", &uuid, &handle) == nvml::success && handle == gpu(1));
    nvml::Pdi pdi{nvml::pdi_version, 0}, other_pdi = pdi;
    CHECK(call("nvmlDeviceGetPdi", gpu(0), &pdi) == nvml::success);
    CHECK(call("nvmlDeviceGetPdi", gpu(1), &other_pdi) == nvml::success && pdi.value != other_pdi.value);
    nvml::PciInfoExt info{};
    CHECK(call("nvmlDeviceGetPciInfoExt", gpu(1), &info) == nvml::argument_version_mismatch);
    info.version = nvml::pci_info_ext_version;
    CHECK(call("nvmlDeviceGetPciInfoExt", gpu(1), &info) == nvml::success);
    CHECK(info.bus == 0xa1 && std::string_view(info.bus_id) == "00000000:A1:00.0");
}

void test_gpu_is_near_to_processors_and_gpus() {
    unsigned long words[2]{};
    CHECK(call("nvmlDeviceGetCpuAffinity", gpu(0), 2U, &words[0]) == nvml::success);
    cpu_set_t allowed{};
    CHECK(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
    for (std::size_t cpu = 0; cpu < 128; ++cpu) {
        CHECK(((words[cpu / 64] >> (cpu % 64)) & 1) == (CPU_ISSET(cpu, &allowed) ? 1UL : 0UL));
    }
    CHECK(call("nvmlDeviceGetCpuAffinityWithinScope", gpu(0), 2U, &words[0], 2U) == nvml::invalid_argument);
    CHECK(call("nvmlDeviceGetMemoryAffinity", gpu(0), 2U, &words[0], 0U) == nvml::success);
    CHECK(words[0] == 1 && words[1] == 0);
    Gpu* nearest[3]{};
    unsigned count = 1;
    CHECK(call("nvmlDeviceGetTopologyNearestGpus", gpu(1), nvml::topology_host_bridge, &count, &nearest[0]) ==
          nvml::insufficient_size);
    CHECK(count == 2);
    CHECK(call("nvmlDeviceGetTopologyNearestGpus", gpu(1), nvml::topology_host_bridge, &count, &nearest[0]) ==
          nvml::success);
    CHECK(nearest[0] == gpu(0) && nearest[1] == gpu(2) && nearest[2] == nullptr);
    CHECK(call("nvmlDeviceGetTopologyNearestGpus", gpu(1), 0, &count, &nearest[0]) == nvml::success && count == 0);
    CHECK(call("nvmlDeviceSetPersistenceMode", gpu(0), 0) == nvml::success);
    CHECK(call("nvmlDeviceSetPersistenceMode", gpu(0), 1) == nvml::unsupported);
}

// The GPU is idle, and each structure keeps its size.
void test_gpu_is_idle() {
    unsigned value = 9, pending = 9;
    std::uint64_t reasons = 9;
    int states[3] = {9, 9, 9};
    for (const char* symbol :
         {"nvmlDeviceGetVirtualizationMode", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetC2cModeInfoV",
          "nvmlDeviceGetPerformanceState", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetPcieReplayCounter"}) {
        value = 9;
        CHECK(call(symbol, gpu(0), &value) == nvml::success && value == 0);
        CHECK(call(symbol, gpu(0), static_cast<unsigned*>(nullptr)) == nvml::invalid_argument);
    }
    CHECK(call("nvmlDeviceGetMigMode", gpu(0), &value, &pending) == nvml::success && value == 0 && pending == 0);
    CHECK(call("nvmlDeviceGetCurrentClocksEventReasons", gpu(0), &reasons) == nvml::success && reasons == 1);
    CHECK(call("nvmlDeviceGetSupportedPerformanceStates", gpu(0), &states[0], 8U) == nvml::success);
    CHECK(states[0] == 0 && states[1] == 32 && states[2] == 9);
    CHECK(call("nvmlDeviceGetSupportedPerformanceStates", gpu(0), &states[0], 3U) == nvml::insufficient_size);
    nvml::DynamicPstates info[2];
    std::memset(static_cast<void*>(info), 0xee, sizeof info);
    CHECK(call("nvmlDeviceGetDynamicPstatesInfo", gpu(0), &info[0]) == nvml::success);
    CHECK(info[0].utilization[7].threshold_down == 0 && info[1].flags == 0xeeeeeeee);
    for (const char* symbol : {"nvmlDeviceGetAddressingMode", "nvmlDeviceGetCapabilities"}) {
        nvml::VersionedValue versioned{nvml::versioned_value_version, 9};
        CHECK(call(symbol, gpu(0), &versioned) == nvml::success && versioned.value == 0);
        versioned.version = 0;
        CHECK(call(symbol, gpu(0), &versioned) == nvml::argument_version_mismatch);
    }
    nvml::RepairStatus repair{nvml::repair_status_version, 9, 9};
    CHECK(call("nvmlDeviceGetRepairStatus", gpu(0), &repair) == nvml::success && repair.is_tpc_pending == 0);
    CHECK(call("nvmlDeviceGetPcieThroughput", gpu(0), 1U, &value) == nvml::success && value == 0);
    CHECK(call("nvmlDeviceGetPcieThroughput", gpu(0), 2U, &value) == nvml::invalid_argument);
    CHECK(call("nvmlDeviceGetCurrPcieLinkGeneration", gpu(0), &value) == nvml::success && value == 5);
    CHECK(call("nvmlDeviceGetMaxPcieLinkWidth", gpu(0), &value) == nvml::success && value == 16);
}

// Nothing happens, so each wait lasts as long as its timeout.
void test_wait_for_events_ends_with_its_timeout() {
    using Milliseconds = std::chrono::milliseconds;
    const auto now = [] { return std::chrono::steady_clock::now(); };
    nvml::EventSet *set = nullptr, *other = nullptr;
    std::uint64_t types = 0;
    unsigned char data[32];
    CHECK(call("nvmlEventSetCreate", &set) == nvml::success && call("nvmlEventSetCreate", &other) == nvml::success);
    CHECK(set != other && call("nvmlDeviceGetSupportedEventTypes", gpu(0), &types) == nvml::success && types == 8);
    CHECK(call("nvmlDeviceRegisterEvents", gpu(0), types, set) == nvml::success);
    CHECK(call("nvmlDeviceRegisterEvents", gpu(0), types | 1, set) == nvml::unsupported);
    const auto begin = now();
    CHECK(call("nvmlEventSetWait_v2", set, static_cast<void*>(data), 30U) == nvml::timeout);
    CHECK(now() - begin >= Milliseconds(30));
    CHECK(call("nvmlEventSetFree", set) == nvml::success && call("nvmlEventSetFree", set) == nvml::invalid_argument);
    CHECK(call("nvmlEventSetWait_v2", set, static_cast<void*>(data), 30U) == nvml::invalid_argument);
    CHECK(call("nvmlDeviceRegisterEvents", gpu(0), types, set) == nvml::invalid_argument);
    CHECK(call("nvmlEventSetFree", other) == nvml::success);
    nvml::SystemEventSetRequest request{0, nullptr};
    CHECK(call("nvmlSystemEventSetCreate", &request) == nvml::argument_version_mismatch);
    request.version = sizeof request | 1U << 24;
    CHECK(call("nvmlSystemEventSetCreate", &request) == nvml::success);
    nvml::SystemEventRegistration registration{sizeof registration | 1U << 24, 3, request.set};
    CHECK(call("nvmlSystemRegisterEvents", &registration) == nvml::success);
    registration.types = 4;
    CHECK(call("nvmlSystemRegisterEvents", &registration) == nvml::invalid_argument);
    nvml::SystemEventWait wait{sizeof wait | 1U << 24, 1, request.set, data, 1, 9};
    CHECK(call("nvmlSystemEventSetWait", &wait) == nvml::timeout && wait.event_count == 0);
    CHECK(call("nvmlSystemEventSetFree", &request) == nvml::success);
    CHECK(call("nvmlSystemEventSetWait", &wait) == nvml::invalid_argument);
}

void test_uuid_may_have_no_prefix() {
    char text[41] = {};
    Gpu* handle = nullptr;
    CHECK(call("nvmlDeviceGetUUID", gpu(1), &text[0], 41U) == nvml::success);
    CHECK(call("nvmlDeviceGetHandleByUUID", static_cast<const char*>(text + 4), &handle) == nvml::success);
    CHECK(handle == gpu(1));
    CHECK(call("nvmlDeviceGetHandleByUUID", static_cast<const char*>(text + 5), &handle) == nvml::not_found);
}

void test_gpus_near_to_a_processor() {
    cpu_set_t allowed{};
    CHECK(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
    for (unsigned cpu = 0; cpu < 64; ++cpu) {
        Gpu* near_gpus[3]{};
        unsigned count = 0;
        const bool is_allowed = CPU_ISSET(cpu, &allowed);
        CHECK(call("nvmlSystemGetTopologyGpuSet", cpu, &count, static_cast<Gpu**>(nullptr)) == nvml::success);
        CHECK(count == (is_allowed ? 3U : 0U));
        CHECK(call("nvmlSystemGetTopologyGpuSet", cpu, &count, &near_gpus[0]) == nvml::success);
        CHECK(near_gpus[2] == (is_allowed ? gpu(2) : nullptr));
        count = 2;
        CHECK(call("nvmlSystemGetTopologyGpuSet", cpu, &count, &near_gpus[0]) ==
              (is_allowed ? nvml::insufficient_size : nvml::success));
    }
}

void test_process_is_listed_while_it_has_a_context() {
    constexpr std::uint64_t length_bytes = 2U << 20;
    unsigned count = 0;
    const auto processes = [&](unsigned capacity, nvml::ProcessInfo* info) {
        count = capacity;
        return call("nvmlDeviceGetComputeRunningProcesses_v3", gpu(0), &count, info);
    };
    nvml::ProcessInfo info{};
    CHECK(processes(1, &info) == nvml::success && count == 0);
    cuda::init_device(0);
    const auto pointer = cuda::allocate(length_bytes);
    CHECK(processes(0, nullptr) == nvml::insufficient_size && count == 1);
    CHECK(processes(1, &info) == nvml::success && count == 1);
    CHECK(info.pid == static_cast<std::uint32_t>(getpid()) && info.used_bytes == length_bytes);
    nvml::Memory memory{};
    CHECK(call("nvmlDeviceGetMemoryInfo", gpu(0), &memory) == nvml::success && memory.used == length_bytes);
    CHECK(call("nvmlDeviceGetMemoryInfo", gpu(1), &memory) == nvml::success && memory.used == 0);
    CHECK(cuda::cu("cuMemFree_v2", pointer) == cuda::success);
}

void test_every_init_needs_a_shutdown() {
    unsigned count = 0;
    CHECK(call("nvmlInitWithFlags", 0U) == nvml::success);
    CHECK(call("nvmlShutdown") == nvml::success);
    CHECK(call("nvmlDeviceGetCount_v2", &count) == nvml::success && count == 3);
    CHECK(call("nvmlShutdown") == nvml::success);
    CHECK(call("nvmlDeviceGetCount_v2", &count) == nvml::uninitialized);
    CHECK(call("nvmlShutdown") == nvml::uninitialized);
}

} // namespace

int main() {
    test_exports_match_contract();
    check_unimplemented_functions(nvml::uninitialized);
    CHECK(call("nvmlInit_v2") == nvml::success);
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
