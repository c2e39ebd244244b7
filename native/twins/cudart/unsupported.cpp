// Functions that the twin does not implement. Each call returns cudaErrorNotSupported. The first call of each function
// also prints one line on stderr.
#include "cudart/entry.hpp"

namespace gdrkit::twin::cudart {
namespace {

Error refuse_unsupported(const char* symbol) {
    return run_entry_before_init([&] {
        print_once(symbol, "fails with cudaErrorNotSupported: the software twin of the CUDA runtime does not have it");
        return not_supported;
    });
}

} // namespace

#define GDRKIT_UNSUPPORTED(symbol)                                                                                     \
    GDRKIT_CUDART_ENTRY Error symbol();                                                                                \
    Error symbol() {                                                                                                   \
        return refuse_unsupported(#symbol);                                                                            \
    }
// The build generates unsupported_functions.inc from the contract of the library (twins/contracts).
#include "unsupported_functions.inc"

} // namespace gdrkit::twin::cudart
