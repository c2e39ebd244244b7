// The control interface (control/control.h) of the libhl-thunk twin. It reports live handles and call counts as JSON,
// and replaces the fault plan.
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

extern "C" [[gnu::visibility("default")]] int gdrkit_twin_ledger(char* buffer, std::size_t size_bytes) {
    static_cast<void>(gaudi::configuration_error()); // reads the fault plan, unless an earlier call did
    // The twin does not notice if the program closes a device file by close(2). So close such devices first, or the
    // counts would include them.
    gaudi::close_unreferenced_devices();
    const std::string json = "{\"library\":\"hlthunk\",\"handles\":" + ledger_json() +
                             ",\"calls\":" + format_calls_json() + ",\"seed\":" + std::to_string(config().seed) +
                             ",\"open_devices\":" + std::to_string(gaudi::count_open_devices()) +
                             ",\"exports\":" + std::to_string(gaudi::count_live_exports()) +
                             ",\"trace\":" + trace_json() + "}";
    return std::snprintf(buffer, size_bytes, "%s", json.c_str());
}

extern "C" [[gnu::visibility("default")]] int gdrkit_twin_faults(const char* plan) {
    static_cast<void>(gaudi::configuration_error()); // reads the fault plan, unless an earlier call did
    const std::string error = plan == nullptr ? "expected the text of a fault plan, got NULL" : replace_faults(plan);
    if (!error.empty()) {
        std::fprintf(stderr, "gdrkit twin: fault plan: %s\n", error.c_str());
        return EINVAL;
    }
    return 0;
}
