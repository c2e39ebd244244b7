// How suites look inside (control/control.h).
#include "control/control.h"

#include <cerrno>
#include <cstdio>
#include <string>

#include "cuda/entry.hpp"
#include "cuda/memory.hpp"
#include "model/config.hpp"
#include "model/fault.hpp"
#include "model/ledger.hpp"

using namespace gdrkit::twin;

extern "C" [[gnu::visibility("default")]] int gdrkit_twin_ledger(char* buffer, std::size_t size) {
    // Whoever asks wants to know what is held now, so what was freed while a dma-buf of it lived is let go first where
    // that has been closed.
    cuda::sweep();
    const std::string json = "{\"library\":\"cuda\",\"handles\":" + ledger_json() + ",\"calls\":" + calls_json() +
                             ",\"seed\":" + std::to_string(config().seed) + "}";
    return std::snprintf(buffer, size, "%s", json.c_str());
}

extern "C" [[gnu::visibility("default")]] int gdrkit_twin_faults(const char* plan) {
    cuda::load_plan();
    const std::string error = plan == nullptr ? "expected a text, found NULL" : replace_faults(plan);
    if (!error.empty()) {
        std::fprintf(stderr, "gdrkit twin: fault plan: %s\n", error.c_str());
        return EINVAL;
    }
    return 0;
}
