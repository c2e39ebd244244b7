// Functions that the twin does not implement: each returns NVML_ERROR_NOT_SUPPORTED and has no effect.
#include "nvml/entry.hpp"

namespace gdrkit::twin::nvml {

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
