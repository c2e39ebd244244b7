// The control interface of the verbs twin (control/control.h): one function reports the state of the twin as JSON, the
// other replaces the fault plan.

// The library exports the two functions that this header declares.
#pragma GCC visibility push(default)
#include "control/control.h"
#pragma GCC visibility pop

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>

#include "ibverbs/device.hpp"
#include "ibverbs/session.hpp"
#include "model/config.hpp"
#include "model/fault.hpp"
#include "model/ledger.hpp"
#include "model/note.hpp"
#include "model/trace.hpp"

GDRKIT_TWIN_NOTE("ibverbs twin of gdrkit")

using namespace gdrkit::twin;

extern "C" {

int gdrkit_twin_ledger(char* buffer, size_t size_bytes) {
    verbs::start_session();
    const std::string json = "{\"library\":\"ibverbs\",\"handles\":" + ledger_json() +
                             ",\"calls\":" + format_calls_json() + ",\"seed\":" + std::to_string(config().seed) +
                             ",\"traffic\":" + verbs::format_traffic_json() +
                             ",\"delayed\":" + format_delayed_calls_json() + ",\"trace\":" + trace_json() + "}";
    if (size_bytes > 0) {
        const std::size_t copied_bytes = std::min(size_bytes - 1, json.size());
        std::memcpy(buffer, json.data(), copied_bytes);
        buffer[copied_bytes] = '\0';
    }
    return static_cast<int>(json.size());
}

int gdrkit_twin_faults(const char* plan) {
    verbs::start_session();
    const std::string error = replace_faults(plan);
    if (error.empty()) {
        return 0;
    }
    std::fprintf(stderr, "gdrkit twin: fault plan: %s\n", error.c_str());
    return EINVAL;
}

} // extern "C"
