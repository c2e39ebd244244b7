// The calls of the runtime twin into the CUDA driver. libcuda may be the CUDA twin or a real driver, so the runtime
// twin calls only documented functions.
#pragma once

#include "cuda/array_abi.hpp"
#include "cuda/cuda_abi.hpp"
#include "cuda/graph_abi.hpp"
#include "cudart/cudart_abi.hpp"

namespace gdrkit::twin::cudart {

// The functions of the driver that the twin calls.
struct Driver {
    bool is_loaded = false;
#define X(symbol, parameters) int(*symbol) parameters = nullptr;
#include "cudart/driver_functions.def"
#undef X
};

// Return the functions of this process's libcuda.so.1, which is opened at the first call. A function that this libcuda
// does not have is null.
const Driver& driver();

// Call a function of the driver and return its error. Both interfaces use the same error numbers.
template <typename... Parameters, typename... Arguments>
Error call(int (*Driver::*function)(Parameters...), Arguments... arguments) {
    if (!driver().is_loaded) {
        return insufficient_driver;
    }
    const auto driver_function = driver().*function;
    return driver_function == nullptr ? call_requires_newer_driver : static_cast<Error>(driver_function(arguments...));
}

inline Address to_address(const void* pointer) {
    return reinterpret_cast<Address>(pointer);
}

} // namespace gdrkit::twin::cudart
