// Start-up of the hl-thunk twin: reads the environment and the fault plan. Also defines the fault points, and the ELF
// note by which a report recognizes the twin.
#include <array>

#include "hlthunk/entry.hpp"
#include "model/config.hpp"
#include "model/fault.hpp"
#include "model/note.hpp"
#include "model/usage.hpp"

GDRKIT_TWIN_NOTE("hlthunk twin of gdrkit")

namespace gdrkit::twin::gaudi {
namespace {

// functions.def lists X(symbol, convention) for every function. The convention says whether the twin implements the
// function, and how it reports errors. Here each convention is a macro: `implemented` expands to a fault point, the
// others expand to nothing. So the array has the functions that a rule of a fault plan may make fail.
#define implemented(symbol) {#symbol, FaultKind::errno_value},
#define cannot_fail(symbol)
#define minus_errno(symbol)
#define null(symbol)
#define nothing(symbol)
#define X(symbol, convention) convention(symbol)
constexpr FaultPoint fault_points[] = {
#include "hlthunk/functions.def"
};
#undef X
#undef implemented
#undef cannot_fail
#undef minus_errno
#undef null
#undef nothing

// The twin checks the rules of a fault plan for functions with this prefix, and ignores all other rules.
constexpr std::array<std::string_view, 1> fault_prefixes = {"hlthunk_"};

// Return the error text, which is empty if the environment and the fault plan are valid.
std::string load_config_and_plan() {
    const std::string& config_error = config().error;
    record_use(UsedApi::hlthunk);
    std::string plan_error = load_faults(fault_points, fault_prefixes);
    return config_error.empty() ? std::move(plan_error) : config_error;
}

} // namespace

const std::string& configuration_error() {
    // The string is never destroyed, because a thread may read it while the process exits.
    static const auto* const error = new std::string(load_config_and_plan());
    return *error;
}

int begin_call(std::string_view symbol) {
    if (!configuration_error().empty()) {
        return EINVAL;
    }
    const auto fault = find_injected_fault(symbol);
    return fault ? *fault : 0;
}

} // namespace gdrkit::twin::gaudi
