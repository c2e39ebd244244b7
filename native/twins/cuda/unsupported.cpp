// Functions that the twin does not implement: each returns CUDA_ERROR_NOT_SUPPORTED and has no effect.
#include "cuda/cuda_abi.hpp"

namespace gdrkit::twin::cuda {

// The return value 801 is CUDA_ERROR_NOT_SUPPORTED. Its enumerator not_supported cannot be used here, because a macro
// has the same name.
#define implemented(symbol)
#define not_supported(symbol)                                                                                          \
    GDRKIT_CUDA_ENTRY int symbol();                                                                                    \
    int symbol() {                                                                                                     \
        return 801;                                                                                                    \
    }
#define X(name, since, symbol, kind) kind(symbol)
#include "cuda/functions.def"
#undef X
#undef implemented
#undef not_supported

} // namespace gdrkit::twin::cuda
