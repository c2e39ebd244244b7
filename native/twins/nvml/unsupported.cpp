// The functions of NVML that the twin does not implement. Each function ignores its arguments and returns
// NVML_ERROR_NOT_SUPPORTED, or NVML_ERROR_UNINITIALIZED before nvmlInit_v2.
#include "nvml/entry.hpp"

namespace gdrkit::twin::nvml {

// functions.def has a line X(symbol, kind) for each exported function. `kind` is the name of one of these two macros.
#define implemented(symbol)
#define not_supported(symbol)                                                                                          \
    GDRKIT_NVML_ENTRY int symbol();                                                                                    \
    int symbol() {                                                                                                     \
        return is_initialized() ? unsupported : uninitialized;                                                         \
    }
#define X(symbol, kind) kind(symbol)
#include "nvml/functions.def"
#undef X
#undef implemented
#undef not_supported

} // namespace gdrkit::twin::nvml
