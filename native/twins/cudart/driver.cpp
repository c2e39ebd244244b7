// Opens the CUDA driver and finds its functions.
#include "cudart/driver.hpp"

#include <dlfcn.h>

namespace gdrkit::twin::cudart {

const Driver& driver() {
    static const Driver* const instance = [] {
        auto* const functions = new Driver;
        void* const library = dlopen("libcuda.so.1", RTLD_NOW);
        functions->is_loaded = library != nullptr;
#define X(symbol, parameters)                                                                                          \
    if (library != nullptr) {                                                                                          \
        functions->symbol = reinterpret_cast<int(*) parameters>(dlsym(library, #symbol));                              \
    }
#include "cudart/driver_functions.def"
#undef X
        return functions;
    }();
    return *instance;
}

} // namespace gdrkit::twin::cudart
