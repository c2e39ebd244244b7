// How suites look inside (control/control.h).
#include "control/control.h"

#include <cerrno>
#include <cstdio>
#include <string>

#include "hlthunk/device.hpp"
#include "hlthunk/entry.hpp"
#include "model/config.hpp"
#include "model/fault.hpp"
#include "model/ledger.hpp"
#include "model/trace.hpp"

using namespace gdrkit::twin;

extern "C" [[gnu::visibility("default")]] int gdrkit_twin_ledger(char* buffer, std::size_t size) {
    gaudi::load_error();
    // Whoever asks wants to know what is held now: a file that was closed, also by close(2), is let go first.
    gaudi::release_unused();
    const std::string json =
        "{\"library\":\"hlthunk\",\"handles\":" + ledger_json() + ",\"calls\":" + calls_json() +
        ",\"seed\":" + std::to_string(config().seed) + ",\"open_devices\":" + std::to_string(gaudi::open_devices()) +
        ",\"exports\":" + std::to_string(gaudi::live_exports()) + ",\"trace\":" + trace_json() + "}";
    return std::snprintf(buffer, size, "%s", json.c_str());
}

extern "C" [[gnu::visibility("default")]] int gdrkit_twin_faults(const char* plan) {
    gaudi::load_error();
    const std::string error = plan == nullptr ? "expected a text, found NULL" : replace_faults(plan);
    if (!error.empty()) {
        std::fprintf(stderr, "gdrkit twin: fault plan: %s\n", error.c_str());
        return EINVAL;
    }
    return 0;
}
