// Reads the environment and the fault plan, and defines the fault points and the ELF note.
#include <array>

#include "hlthunk/entry.hpp"
#include "model/config.hpp"
#include "model/fault.hpp"
#include "model/note.hpp"

GDRKIT_TWIN_NOTE("hlthunk twin of gdrkit")

namespace gdrkit::twin::gaudi {
namespace {

#define implemented(symbol) {#symbol, FaultKind::errno_value},
#define cannot_fail(symbol)
#define minus_errno(symbol)
#define null(symbol)
#define nothing(symbol)
#define X(symbol, kind) kind(symbol)
constexpr FaultPoint fault_points[] = {
#include "hlthunk/functions.def"
};
#undef X
#undef implemented
#undef cannot_fail
#undef minus_errno
#undef null
#undef nothing

constexpr std::array<std::string_view, 1> fault_prefixes = {"hlthunk_"};

std::string load() {
    const std::string& variables = config().error;
    std::string plan = load_faults(fault_points, fault_prefixes);
    return variables.empty() ? std::move(plan) : variables;
}

} // namespace

const std::string& load_error() {
    // Never destroyed, because a thread may read it while the process exits.
    static const auto* const error = new std::string(load());
    return *error;
}

int check_call(std::string_view symbol) {
    if (!load_error().empty()) {
        return EINVAL;
    }
    const auto fault = injected_fault(symbol);
    return fault ? *fault : 0;
}

} // namespace gdrkit::twin::gaudi
