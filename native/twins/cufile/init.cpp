// Fault points, control interface, ELF note and unsupported functions of the cuFile twin.
#include <cerrno>
#include <cstdio>
#include <string>

#include "control/control.h"
#include "cufile/entry.hpp"
#include "model/config.hpp"
#include "model/fault.hpp"
#include "model/ledger.hpp"
#include "model/note.hpp"
#include "model/usage.hpp"

GDRKIT_TWIN_NOTE("cufile twin of gdrkit")

using namespace gdrkit::twin;

namespace gdrkit::twin::cufile {
namespace {

// functions.def lists every exported function as X(symbol, kind). Each kind is a macro here: `implemented` expands to a
// fault point of the function, `nothing` and `unsupported` expand to no fault point.
#define implemented(symbol) {#symbol, FaultKind::status, max_status},
#define nothing(symbol)
#define unsupported(symbol)
#define X(symbol, kind) kind(symbol)
constexpr FaultPoint fault_points[] = {
#include "cufile/functions.def"
    // Fault points that are not functions: the path of a transfer, an entry of a batch, and a transfer of a stream.
    {"cufile.route", FaultKind::route},
    {"cufile.batch_io", FaultKind::status, max_status},
    // For a transfer of a stream, a plan may also have status=0. The transfer then moves no bytes and reports 0 bytes,
    // as
    // was observed with cuFile 1.15.
    {"cufile.async_io", FaultKind::status, max_status, 0},
};
#undef X
#undef implemented
#undef nothing
#undef unsupported

// A rule of the fault plan is for this library if its name begins with one of these prefixes.
constexpr std::string_view fault_prefixes[] = {"cuFile", "cufile."};

} // namespace

const std::string_view& configuration_error() {
    static const auto* const error = [] {
        const std::string& config_error = config().error;
        record_use(UsedApi::cufile);
        std::string plan_error = load_faults(fault_points, fault_prefixes);
        return new std::string_view(*new std::string(config_error.empty() ? std::move(plan_error) : config_error));
    }();
    return *error;
}

int take_injected_failure(std::string_view symbol) {
    configuration_error();
    return find_injected_fault(symbol).value_or(success);
}

#define GDRKIT_UNSUPPORTED(symbol)                                                                                     \
    GDRKIT_CUFILE_ENTRY Error symbol() {                                                                               \
        return make_error(platform_not_supported);                                                                     \
    }
GDRKIT_UNSUPPORTED(cuFileDriverGetP2PFlags)
GDRKIT_UNSUPPORTED(cuFileDriverSetP2PFlags)
GDRKIT_UNSUPPORTED(cuFileExportPCIeTopology)
GDRKIT_UNSUPPORTED(cuFileGetParameterGpuBounceBufferSlabArray)
GDRKIT_UNSUPPORTED(cuFileSetParameterGpuBounceBufferSlabArray)
#undef GDRKIT_UNSUPPORTED

} // namespace gdrkit::twin::cufile

extern "C" [[gnu::visibility("default")]] int gdrkit_twin_ledger(char* buffer, std::size_t size_bytes) {
    const std::string json = "{\"library\":\"cufile\",\"handles\":" + ledger_json() +
                             ",\"calls\":" + format_calls_json() + ",\"delayed\":" + format_delayed_calls_json() +
                             ",\"seed\":" + std::to_string(config().seed) + "}";
    return std::snprintf(buffer, size_bytes, "%s", json.c_str());
}

extern "C" [[gnu::visibility("default")]] int gdrkit_twin_faults(const char* plan) {
    cufile::configuration_error();
    const std::string error = plan == nullptr ? "expected the text of a fault plan, got NULL" : replace_faults(plan);
    if (!error.empty()) {
        std::fprintf(stderr, "gdrkit twin: fault plan: %s\n", error.c_str());
        return EINVAL;
    }
    return 0;
}
