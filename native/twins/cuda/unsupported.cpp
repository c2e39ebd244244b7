// Functions that the twin does not implement: each returns CUDA_ERROR_NOT_SUPPORTED.
#include <errno.h> // program_invocation_short_name
#include <unistd.h>

#include <atomic>
#include <cstdio>

#include "cuda/cuda_abi.hpp"

namespace gdrkit::twin::cuda {

// The CUDA runtime calls this undocumented function to get tables of private driver functions, and does not work
// without these tables. The twin prints an explanation once in each process.
GDRKIT_CUDA_ENTRY Result cuGetExportTable(const void** table, const void*) {
    static std::atomic<pid_t> explained_pid{0};
    if (explained_pid.exchange(getpid()) != getpid()) {
        std::fprintf(
            stderr,
            "gdrkit: %s contains the CUDA runtime as a static library, or loads NVIDIA's libcudart.so. It cannot "
            "run on the software twin of CUDA, which does not have the undocumented export tables of the driver "
            "(cuGetExportTable). Link it to libcudart.so.12 or libcudart.so.13 (nvcc -cudart shared), which have "
            "twins, or run it on a GPU\n",
            program_invocation_short_name);
    }
    if (table != nullptr) {
        *table = nullptr;
    }
    return not_supported;
}

// functions.def contains the kind of each function: implemented, refused or not_supported. The macro of the kind
// not_supported defines the function. The macros of the other kinds are empty, because these functions have code of
// their own.
//
// The return value 801 is CUDA_ERROR_NOT_SUPPORTED. Its enumerator not_supported cannot be used here, because a macro
// has the same name.
#define implemented(symbol)
#define refused(symbol)
#define not_supported(symbol)                                                                                          \
    GDRKIT_CUDA_ENTRY int symbol();                                                                                    \
    int symbol() {                                                                                                     \
        return 801;                                                                                                    \
    }
#define X(name, since, symbol, kind) kind(symbol)
#include "cuda/functions.def"
#undef X
#undef implemented
#undef refused
#undef not_supported

} // namespace gdrkit::twin::cuda
