// Loads the fault plan and applies it to each call (entry.hpp), checks that cuInit was called, and implements cuInit,
// cuDriverGetVersion and cuFlushGPUDirectRDMAWrites.
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/entry.hpp"
#include "cuda/gpu_view.hpp"
#include "cuda/stream.hpp"
#include "cuda/visible_devices.hpp"
#include "model/config.hpp"
#include "model/fault.hpp"
#include "model/note.hpp"
#include "model/usage.hpp"

GDRKIT_TWIN_NOTE("cuda twin of gdrkit")

namespace gdrkit::twin::cuda {
namespace {

// functions.def lists every function as X(name, since, symbol, kind). Each kind is a macro here: `implemented` expands
// to a fault point, `not_supported` and `refused` expand to nothing.
#define implemented(symbol) {#symbol, FaultKind::status},
#define not_supported(symbol)
#define refused(symbol)
#define X(name, since, symbol, kind) kind(symbol)
constexpr FaultPoint fault_points[] = {
#include "cuda/functions.def"
};
#undef X
#undef implemented
#undef refused
#undef not_supported

// The rules of the fault plan for functions with this prefix are meant for this library. Functions with the longer
// prefix "cuFile" belong to the cuFile twin.
constexpr std::string_view fault_prefixes[] = {"cu"};

// When this function is called for the first time, read the environment and the fault plan, and record that the process
// uses the twin. Return the text of the error; empty if both are valid.
const std::string& configuration_error() {
    static const auto* const error = [] {
        const std::string& config_error = config().error;
        record_use(UsedApi::cuda);
        std::string plan_error = load_faults(fault_points, fault_prefixes);
        return new std::string(config_error.empty() ? std::move(plan_error) : config_error);
    }();
    return *error;
}

// The process that called cuInit. A forked child inherits the memory of the driver, but none of its threads, so it
// cannot use the driver.
std::atomic<pid_t> initialised_pid{0};

} // namespace

void load_fault_plan() {
    configuration_error();
}

bool begin_call(std::string_view symbol, Result* error) {
    configuration_error();
    const auto injected_code = find_injected_fault(symbol);
    if (injected_code) {
        *error = static_cast<Result>(*injected_code);
    }
    return !injected_code;
}

Result check_ready() {
    if (is_in_host_function()) {
        return not_permitted;
    }
    return initialised_pid.load(std::memory_order_acquire) == getpid() ? success : not_initialized;
}

GDRKIT_CUDA_ENTRY Result cuInit(unsigned flags) {
    return run_entry_before_init("cuInit", [&] {
        if (!configuration_error().empty() || flags != 0) {
            return invalid_value;
        }
        if (visible_devices().init_result != success) {
            return visible_devices().init_result;
        }
        pid_t previous_pid = 0;
        const bool is_first_call = initialised_pid.compare_exchange_strong(previous_pid, getpid());
        return is_first_call || previous_pid == getpid() ? success : not_initialized;
    });
}

GDRKIT_CUDA_ENTRY Result cuDriverGetVersion(int* version) {
    return run_entry_before_init("cuDriverGetVersion", [&] {
        if (version == nullptr) {
            return invalid_value;
        }
        *version = driver_version;
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuFlushGPUDirectRDMAWrites(int target, int scope) {
    return run_entry_in_context("cuFlushGPUDirectRDMAWrites", [&](const ContextRef&) {
        if (target != flush_current_context || (scope != flush_to_owner && scope != flush_to_all_devices)) {
            return invalid_value;
        }
        // The verbs twin writes the data of a peer to memory before it reports the completion. So only a GPU's view can
        // lack the data.
        flush_remote_writes();
        return success;
    });
}

} // namespace gdrkit::twin::cuda
