// The functions of the NVML twin about the GPUs of the emulated machine: handles, identity and memory. The CUDA twin
// has the same GPUs. CUDA_VISIBLE_DEVICES has no effect here, as in the real library.

#include <dlfcn.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>

#include "control/control.h"
#include "model/config.hpp"
#include "model/gpu.hpp"
#include "nvml/entry.hpp"

namespace gdrkit::twin::nvml {

// The object to which a GPU handle points. Only its address is used.
struct Gpu {};

namespace {

// NVML combines the two PCI ids of a device into one number.
constexpr std::uint32_t combined_pci_id = gpu_pci_device_id << 16 | gpu_pci_vendor_id;

// The address of gpus[gpu_number] is the handle of the GPU with this number.
std::array<Gpu, 16> gpus;

int gpu_count() {
    return static_cast<int>(config().gpu_count);
}

std::string format_uuid(int gpu_number) {
    std::string text = "GPU-";
    int byte_index = 0;
    for (const char byte : make_gpu_uuid(gpu_number)) {
        char byte_text[3];
        std::snprintf(byte_text, sizeof byte_text, "%02x", static_cast<unsigned char>(byte));
        // A hyphen stands before these bytes of a UUID (8-4-4-4-12 digits).
        text += byte_index == 4 || byte_index == 6 || byte_index == 8 || byte_index == 10 ? "-" : "";
        text += byte_text;
        ++byte_index;
    }
    return text;
}

// Serial numbers of real boards have 13 digits.
std::string format_serial(int gpu_number) {
    char text[16];
    std::snprintf(text, sizeof text, "%013d", gpu_number);
    return text;
}

std::string format_pci_address(int gpu_number) {
    char text[32];
    std::snprintf(text, sizeof text, "0000:%02X:00.0", static_cast<unsigned>(first_gpu_pci_bus + gpu_number));
    return text;
}

template <typename Predicate> int find_gpu(Gpu** gpu, Predicate&& matches) {
    return run_if_initialized([&] {
        if (gpu == nullptr) {
            return invalid_argument;
        }
        for (int gpu_number = 0; gpu_number < gpu_count(); ++gpu_number) {
            if (matches(gpu_number)) {
                *gpu = &gpus[static_cast<std::size_t>(gpu_number)];
                return success;
            }
        }
        return not_found;
    });
}

int store_count(unsigned* count) {
    return run_if_initialized([&] {
        if (count == nullptr) {
            return invalid_argument;
        }
        *count = config().gpu_count;
        return success;
    });
}

int find_gpu_by_index(unsigned index, Gpu** gpu) {
    const int result = find_gpu(gpu, [&](int gpu_number) { return static_cast<unsigned>(gpu_number) == index; });
    return result == not_found ? invalid_argument : result;
}

int find_gpu_by_pci_address(const char* text, Gpu** gpu) {
    const auto bus = text == nullptr ? std::nullopt : parse_pci_bus(text);
    if (!bus && is_initialized()) {
        return invalid_argument;
    }
    // If NVML is not initialized, find_gpu returns an error before the function below uses `bus`, which may be empty.
    return find_gpu(gpu, [&](int gpu_number) { return gpu_number + first_gpu_pci_bus == *bus; });
}

// Store the first `length_bytes` bytes of a PciInfo, which are the caller's version of the structure.
int store_pci_info(const Gpu* gpu, void* pci_info, std::size_t length_bytes) {
    return run_if_arguments_valid(gpu, pci_info, [&](int gpu_number) {
        PciInfo info{};
        info.bus = static_cast<std::uint32_t>(first_gpu_pci_bus + gpu_number);
        info.pci_device_id = combined_pci_id;
        const std::string address = format_pci_address(gpu_number);
        address.copy(info.bus_id_legacy, sizeof info.bus_id_legacy - 1);
        if (length_bytes == sizeof info) {
            // Version 3 of the structure has a domain of eight digits.
            ("0000" + address).copy(info.bus_id, sizeof info.bus_id - 1);
        }
        std::memcpy(pci_info, &info, length_bytes);
        return success;
    });
}

// Return the bytes that this process uses on a GPU, or nullopt if the process has no context there or has not loaded
// the CUDA twin. Each process can allocate all memory of a GPU, so other processes do not count.
std::optional<std::uint64_t> count_bytes_of_this_process(int gpu_number) {
    void* const cuda_twin = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (cuda_twin == nullptr) {
        return std::nullopt;
    }
    using UsageFunction = decltype(&gdrkit_twin_gpu_usage);
    const auto query_usage = reinterpret_cast<UsageFunction>(dlsym(cuda_twin, "gdrkit_twin_gpu_usage"));
    unsigned long long used_bytes = 0;
    const bool has_context = query_usage != nullptr && query_usage(gpu_number, &used_bytes) == 1;
    dlclose(cuda_twin);
    return has_context ? std::optional(std::uint64_t{used_bytes}) : std::nullopt;
}

Memory query_memory(int gpu_number) {
    const std::uint64_t used_bytes = count_bytes_of_this_process(gpu_number).value_or(0);
    return {gpu_memory_bytes, gpu_memory_bytes - used_bytes, used_bytes};
}

template <typename Info> int store_processes(const Gpu* gpu, unsigned* count, Info* processes) {
    return run_if_arguments_valid(gpu, count, [&](int gpu_number) {
        const auto used_bytes = count_bytes_of_this_process(gpu_number);
        const unsigned capacity = *count;
        *count = used_bytes ? 1 : 0;
        if (*count > capacity) {
            return insufficient_size;
        }
        if (used_bytes) {
            if (processes == nullptr) {
                return invalid_argument;
            }
            Info process{};
            process.pid = static_cast<std::uint32_t>(getpid());
            process.used_bytes = *used_bytes;
            if constexpr (requires { process.gpu_instance; }) {
                process.gpu_instance = process.compute_instance = no_instance;
            }
            *processes = process;
        }
        return success;
    });
}

// No process is a graphics process, because every process that uses a GPU of the twin is a compute process.
int store_no_processes(const Gpu* gpu, unsigned* count) {
    return store_constant(gpu, count, 0U);
}

} // namespace

int find_gpu_number(const Gpu* gpu) {
    for (int gpu_number = 0; gpu_number < gpu_count(); ++gpu_number) {
        if (gpu == &gpus[static_cast<std::size_t>(gpu_number)]) {
            return gpu_number;
        }
    }
    return -1;
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetCount(unsigned* count) {
    return store_count(count);
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetCount_v2(unsigned* count) {
    return store_count(count);
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetHandleByIndex(unsigned index, Gpu** gpu) {
    return find_gpu_by_index(index, gpu);
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu** gpu) {
    return find_gpu_by_index(index, gpu);
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetHandleByUUID(const char* uuid, Gpu** gpu) {
    // A caller may leave out the prefix "GPU-", which has four characters.
    return find_gpu(gpu, [&](int gpu_number) {
        const std::string uuid_text = format_uuid(gpu_number);
        return uuid != nullptr && (uuid_text == uuid || uuid_text.substr(4) == uuid);
    });
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetHandleByUUIDV(const Uuid* uuid, Gpu** gpu) {
    if (uuid != nullptr && uuid->version != uuid_version && is_initialized()) {
        return argument_version_mismatch;
    }
    return find_gpu(gpu, [&](int gpu_number) {
        if (uuid == nullptr) {
            return false;
        }
        const auto bytes = make_gpu_uuid(gpu_number);
        const std::string text = format_uuid(gpu_number);
        return uuid->type == uuid_text_type    ? std::strncmp(uuid->text, text.c_str(), sizeof uuid->text) == 0
               : uuid->type == uuid_bytes_type ? std::memcmp(uuid->bytes, bytes.data(), sizeof uuid->bytes) == 0
                                               : false;
    });
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetHandleBySerial(const char* serial, Gpu** gpu) {
    return find_gpu(gpu, [&](int gpu_number) { return serial != nullptr && format_serial(gpu_number) == serial; });
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetHandleByPciBusId(const char* address, Gpu** gpu) {
    return find_gpu_by_pci_address(address, gpu);
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetHandleByPciBusId_v2(const char* address, Gpu** gpu) {
    return find_gpu_by_pci_address(address, gpu);
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetIndex(const Gpu* gpu, unsigned* index) {
    return run_if_arguments_valid(gpu, index, [&](int gpu_number) {
        *index = static_cast<unsigned>(gpu_number);
        return success;
    });
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetMinorNumber(const Gpu* gpu, unsigned* minor) {
    return run_if_arguments_valid(gpu, minor, [&](int gpu_number) {
        *minor = static_cast<unsigned>(gpu_number);
        return success;
    });
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetName(const Gpu* gpu, char* buffer, unsigned length_bytes) {
    return run_if_arguments_valid(gpu, buffer, [&](int) { return store_text(gpu_name, buffer, length_bytes); });
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetUUID(const Gpu* gpu, char* buffer, unsigned length_bytes) {
    return run_if_arguments_valid(
        gpu, buffer, [&](int gpu_number) { return store_text(format_uuid(gpu_number), buffer, length_bytes); });
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetSerial(const Gpu* gpu, char* buffer, unsigned length_bytes) {
    return run_if_arguments_valid(
        gpu, buffer, [&](int gpu_number) { return store_text(format_serial(gpu_number), buffer, length_bytes); });
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetCudaComputeCapability(const Gpu* gpu, int* major, int* minor) {
    return run_if_arguments_valid(gpu, major, [&](int) {
        if (minor == nullptr) {
            return invalid_argument;
        }
        *major = gpu_compute_major;
        *minor = gpu_compute_minor;
        return success;
    });
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetArchitecture(const Gpu* gpu, int* architecture) {
    return store_constant(gpu, architecture, architecture_hopper);
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetPciInfo(const Gpu* gpu, void* info) {
    return store_pci_info(gpu, info, pci_info_v1_bytes);
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetPciInfo_v2(const Gpu* gpu, void* info) {
    return store_pci_info(gpu, info, pci_info_v2_bytes);
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetPciInfo_v3(const Gpu* gpu, void* info) {
    return store_pci_info(gpu, info, sizeof(PciInfo));
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetPciInfoExt(const Gpu* gpu, PciInfoExt* info) {
    return run_if_arguments_valid(gpu, info, [&](int gpu_number) {
        if (info->version != pci_info_ext_version) {
            return argument_version_mismatch;
        }
        const auto bus = static_cast<std::uint32_t>(first_gpu_pci_bus + gpu_number);
        // The zeros are the PCI domain, the device number on the bus, and the subsystem id.
        *info = {pci_info_ext_version, 0, bus, 0, combined_pci_id, 0, class_display, subclass_3d_controller, {}};
        ("0000" + format_pci_address(gpu_number)).copy(info->bus_id, sizeof info->bus_id - 1);
        return success;
    });
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetMemoryInfo(const Gpu* gpu, Memory* memory) {
    return run_if_arguments_valid(gpu, memory, [&](int gpu_number) {
        *memory = query_memory(gpu_number);
        return success;
    });
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetMemoryInfo_v2(const Gpu* gpu, MemoryV2* memory) {
    return run_if_arguments_valid(gpu, memory, [&](int gpu_number) {
        if (memory->version != memory_v2_version) {
            return argument_version_mismatch;
        }
        const Memory values = query_memory(gpu_number);
        *memory = {memory_v2_version, values.total, 0, values.free, values.used};
        return success;
    });
}

// The reported BAR1 has the size of the memory and is unused, because all memory can be exported as a dma-buf, and a
// dma-buf of the twin uses no part of BAR1.
GDRKIT_NVML_ENTRY int nvmlDeviceGetBAR1MemoryInfo(const Gpu* gpu, Memory* memory) {
    return store_constant(gpu, memory, Memory{gpu_memory_bytes, gpu_memory_bytes, 0});
}

// The percentages describe the share of time in which kernels ran. The twin runs no kernels.
GDRKIT_NVML_ENTRY int nvmlDeviceGetUtilizationRates(const Gpu* gpu, Utilization* rates) {
    return store_constant(gpu, rates, Utilization{0, 0});
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetComputeMode(const Gpu* gpu, int* mode) {
    return store_constant(gpu, mode, 0); // NVML_COMPUTEMODE_DEFAULT
}

// ECC is off, as the CUDA twin reports.
GDRKIT_NVML_ENTRY int nvmlDeviceGetEccMode(const Gpu* gpu, int* current, int* pending) {
    return run_if_arguments_valid(gpu, current, [&](int) {
        if (pending == nullptr) {
            return invalid_argument;
        }
        *current = *pending = 0;
        return success;
    });
}

// The GPUs are near to every processor that this thread may use.
GDRKIT_NVML_ENTRY int nvmlSystemGetTopologyGpuSet(unsigned cpu, unsigned* count, Gpu** near_gpus) {
    return run_if_initialized([&] {
        cpu_set_t allowed_cpus{};
        if (count == nullptr || cpu >= CPU_SETSIZE) {
            return invalid_argument;
        }
        if (sched_getaffinity(0, sizeof allowed_cpus, &allowed_cpus) != 0) {
            return unknown;
        }
        const unsigned near_count = CPU_ISSET(cpu, &allowed_cpus) ? config().gpu_count : 0;
        const bool is_large_enough = near_gpus == nullptr || *count >= near_count;
        *count = near_count;
        for (unsigned gpu_number = 0; near_gpus != nullptr && is_large_enough && gpu_number < near_count;
             ++gpu_number) {
            near_gpus[gpu_number] = &gpus[gpu_number];
        }
        return is_large_enough ? success : insufficient_size;
    });
}

// Any two GPUs have a host bridge as their nearest common PCI device, so all other GPUs are nearest at this level.
GDRKIT_NVML_ENTRY int nvmlDeviceGetTopologyNearestGpus(const Gpu* gpu, int level, unsigned* count, Gpu** nearest) {
    return run_if_arguments_valid(gpu, count, [&](int gpu_number) {
        const auto near_count = static_cast<unsigned>(level == topology_host_bridge ? gpu_count() - 1 : 0);
        if (nearest != nullptr && *count < near_count) {
            *count = near_count;
            return insufficient_size;
        }
        *count = near_count;
        for (int other_number = 0, index = 0; nearest != nullptr && near_count != 0 && other_number < gpu_count();
             ++other_number) {
            if (other_number != gpu_number) {
                nearest[index++] = &gpus[static_cast<std::size_t>(other_number)];
            }
        }
        return success;
    });
}

GDRKIT_NVML_ENTRY int nvmlDeviceIsMigDeviceHandle(const Gpu* gpu, unsigned* is_mig) {
    return store_constant(gpu, is_mig, 0U);
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetComputeRunningProcesses(const Gpu* gpu, unsigned* count, ProcessInfoV1* processes) {
    return store_processes(gpu, count, processes);
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetComputeRunningProcesses_v2(const Gpu* gpu, unsigned* count, ProcessInfo* processes) {
    return store_processes(gpu, count, processes);
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetComputeRunningProcesses_v3(const Gpu* gpu, unsigned* count, ProcessInfo* processes) {
    return store_processes(gpu, count, processes);
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetGraphicsRunningProcesses(const Gpu* gpu, unsigned* count, void*) {
    return store_no_processes(gpu, count);
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetGraphicsRunningProcesses_v2(const Gpu* gpu, unsigned* count, void*) {
    return store_no_processes(gpu, count);
}

GDRKIT_NVML_ENTRY int nvmlDeviceGetGraphicsRunningProcesses_v3(const Gpu* gpu, unsigned* count, void*) {
    return store_no_processes(gpu, count);
}

} // namespace gdrkit::twin::nvml
