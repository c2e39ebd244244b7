// The control interface of the CUDA twin (control/control.h): live handles and call counts as JSON, the GPU memory that
// the process uses, and the fault plan.
#include "control/control.h"

#include <cerrno>
#include <cstdio>
#include <string>

#include "cuda/device.hpp"
#include "cuda/entry.hpp"
#include "cuda/memory.hpp"
#include "cuda/visible_devices.hpp"
#include "model/config.hpp"
#include "model/fault.hpp"
#include "model/ledger.hpp"

using namespace gdrkit::twin;

extern "C" [[gnu::visibility("default")]] int gdrkit_twin_ledger(char* buffer, std::size_t size_bytes) {
    // The program may have freed memory while a dma-buf of it existed. Release this memory if the dma-buf is closed
    // now.
    cuda::reclaim_unreferenced_memory();
    const std::string json = "{\"library\":\"cuda\",\"handles\":" + ledger_json() +
                             ",\"calls\":" + format_calls_json() + ",\"seed\":" + std::to_string(config().seed) + "}";
    return std::snprintf(buffer, size_bytes, "%s", json.c_str());
}

// The twin of NVML calls this function. control.h describes its result.
extern "C" [[gnu::visibility("default")]] int gdrkit_twin_gpu_usage(int physical_number,
                                                                    unsigned long long* used_bytes) {
    const auto device = cuda::find_ordinal(physical_number);
    if (!device || !cuda::has_live_context(*device)) {
        return 0;
    }
    *used_bytes = cuda::device_capacity_bytes - cuda::count_free_bytes(*device);
    return 1;
}

extern "C" [[gnu::visibility("default")]] int gdrkit_twin_faults(const char* plan) {
    cuda::load_fault_plan();
    const std::string error = plan == nullptr ? "expected the text of a fault plan, got NULL" : replace_faults(plan);
    if (!error.empty()) {
        std::fprintf(stderr, "gdrkit twin: fault plan: %s\n", error.c_str());
        return EINVAL;
    }
    return 0;
}
