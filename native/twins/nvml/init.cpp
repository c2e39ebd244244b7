// The functions of the NVML twin that need no GPU: initialization, error texts, and queries of the system (versions,
// process names).

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <string>

#include "model/config.hpp"
#include "model/gpu.hpp"
#include "model/note.hpp"
#include "nvml/entry.hpp"

GDRKIT_TWIN_NOTE("nvml twin of gdrkit")

namespace gdrkit::twin::nvml {
namespace {

// The twin reports driver 580, because this was the first driver with CUDA 13.0. No real driver has the number 580.00,
// so the text shows that it comes from the twin.
constexpr std::string_view driver_version_text = "580.00";
constexpr std::string_view driver_branch_text = "r580_00";
constexpr std::string_view library_version_text = "13.580.00";
static_assert(cuda_driver_version == 13000);

std::atomic<unsigned> initialization_count = 0; // calls of nvmlInit minus calls of nvmlShutdown

// The text that nvmlErrorString returns for a code of nvmlReturn_t.
struct ErrorText {
    int code;
    const char* text;
};

constexpr ErrorText error_texts[] = {
    {0, "Success"},
    {1, "Uninitialized"},
    {2, "Invalid Argument"},
    {3, "Not Supported"},
    {4, "Insufficient Permissions"},
    {5, "Already Initialized"},
    {6, "Not Found"},
    {7, "Insufficient Size"},
    {8, "Insufficient External Power"},
    {9, "Driver Not Loaded"},
    {10, "Timeout"},
    {11, "Interrupt Request Issue"},
    {12, "NVML Shared Library Not Found"},
    {13, "Function Not Found"},
    {14, "Corrupted infoROM"},
    {15, "GPU is lost"},
    {16, "GPU requires reset"},
    {17, "GPU access blocked by the operating system"},
    {18, "Driver/library version mismatch"},
    {19, "In use by another client"},
    {20, "Insufficient Memory"},
    {21, "No data"},
    {22, "The requested vgpu operation is not available on the target device, because ECC is enabled"},
    {23, "Insufficient Resources"},
    {24, "Frequency Not Supported"},
    {25, "Argument Version Mismatch"},
    {26, "Deprecated"},
    {27, "Not Ready"},
    {28, "GPU Not Found"},
    {29, "Invalid State"},
};

int initialize() {
    // config() has printed the error in the environment variables when it read them.
    if (!config().error.empty()) {
        return invalid_argument;
    }
    ++initialization_count;
    return success;
}

int store_cuda_version(int* cuda_version) {
    if (cuda_version == nullptr) {
        return invalid_argument;
    }
    *cuda_version = cuda_driver_version;
    return success;
}

} // namespace

bool is_initialized() {
    return initialization_count != 0;
}

GDRKIT_NVML_ENTRY int nvmlInit() {
    return initialize();
}

GDRKIT_NVML_ENTRY int nvmlInit_v2() {
    return initialize();
}

GDRKIT_NVML_ENTRY int nvmlInitWithFlags(unsigned) {
    return initialize();
}

GDRKIT_NVML_ENTRY int nvmlShutdown() {
    unsigned count = initialization_count;
    while (count != 0 && !initialization_count.compare_exchange_weak(count, count - 1)) {
    }
    return count != 0 ? success : uninitialized;
}

GDRKIT_NVML_ENTRY const char* nvmlErrorString(int code) {
    for (const ErrorText& error : error_texts) {
        if (error.code == code) {
            return error.text;
        }
    }
    return "Unknown Error";
}

GDRKIT_NVML_ENTRY int nvmlSystemGetDriverVersion(char* buffer, unsigned length_bytes) {
    return run_if_initialized([&] { return store_text(driver_version_text, buffer, length_bytes); });
}

GDRKIT_NVML_ENTRY int nvmlSystemGetDriverBranch(DriverBranch* branch, unsigned length_bytes) {
    return run_if_initialized([&] {
        if (branch == nullptr) {
            return invalid_argument;
        }
        if (branch->version != driver_branch_version) {
            return argument_version_mismatch;
        }
        return store_text(driver_branch_text, branch->text, std::min<unsigned>(length_bytes, sizeof branch->text));
    });
}

GDRKIT_NVML_ENTRY int nvmlSystemGetNVMLVersion(char* buffer, unsigned length_bytes) {
    return run_if_initialized([&] { return store_text(library_version_text, buffer, length_bytes); });
}

// As documented, nvmlSystemGetCudaDriverVersion and its version 2 also work before nvmlInit_v2.
GDRKIT_NVML_ENTRY int nvmlSystemGetCudaDriverVersion(int* cuda_version) {
    return store_cuda_version(cuda_version);
}

GDRKIT_NVML_ENTRY int nvmlSystemGetCudaDriverVersion_v2(int* cuda_version) {
    return store_cuda_version(cuda_version);
}

GDRKIT_NVML_ENTRY int nvmlSystemGetProcessName(unsigned pid, char* buffer, unsigned length_bytes) {
    return run_if_initialized([&] {
        if (buffer == nullptr || length_bytes == 0) {
            return invalid_argument;
        }
        // The name of a process is the first argument of its command line.
        std::ifstream command_line_file("/proc/" + std::to_string(pid) + "/cmdline");
        std::string process_name;
        if (!std::getline(command_line_file, process_name, '\0')) {
            return not_found;
        }
        // Like the real library, cut the name if the buffer is too small.
        return store_text(process_name.substr(0, length_bytes - 1), buffer, length_bytes);
    });
}

// A unit is a chassis of an S-class system. The emulated machine has none.
GDRKIT_NVML_ENTRY int nvmlUnitGetCount(unsigned* count) {
    return run_if_initialized([&] {
        if (count == nullptr) {
            return invalid_argument;
        }
        *count = 0;
        return success;
    });
}

} // namespace gdrkit::twin::nvml
