// Registration of device code, which succeeds, and launches of kernels, which are refused: the twin runs no kernels.
#include <cxxabi.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "cudart/entry.hpp"

namespace gdrkit::twin::cudart {
namespace {

struct Kernels {
    std::mutex mutex;
    // The name of each kernel, by the address of its host function. The names are copied, because the compiler's texts
    // live only as long as their library.
    std::map<const void*, std::string> names;
};

Kernels& kernels() {
    static auto* const instance = new Kernels;
    return *instance;
}

// A launch that the compiled program has announced by __cudaPushCallConfiguration.
struct LaunchConfiguration {
    Dimensions grid, block;
    std::size_t shared_bytes;
    Handle stream;
};
thread_local std::vector<LaunchConfiguration> pending_launches;

std::string make_readable_name(const std::string& symbol) {
    int status = 0;
    char* const demangled = abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status);
    std::string name = demangled != nullptr ? demangled : symbol;
    std::free(demangled);
    return name;
}

// Refuse a call of the program that needs a kernel, and print the name of the kernel. `kernel` is the address of its
// host function. `operation` is the subject of the printed line.
Error refuse_kernel_call(const char* operation, const void* kernel) {
    return run_entry_before_init([&] {
        std::string name;
        {
            Kernels& kernel_table = kernels();
            std::lock_guard lock(kernel_table.mutex);
            const auto entry = kernel_table.names.find(kernel);
            if (entry == kernel_table.names.end()) {
                return invalid_device_function;
            }
            name = make_readable_name(entry->second);
        }
        print_once((operation + (" of the kernel " + name)).c_str(),
                   "fails with cudaErrorNotSupported: the software twin of CUDA runs no kernels");
        return not_supported;
    });
}

} // namespace

// Code that nvcc has generated calls the __cuda* functions: it registers the device code of a library when the library
// is loaded, and configures each launch. The twin needs only the names of the kernels.

GDRKIT_CUDART_ENTRY void** __cudaRegisterFatBinary(void* binary) {
    return new void*(binary);
}

GDRKIT_CUDART_ENTRY void __cudaRegisterFatBinaryEnd(void**) {}

GDRKIT_CUDART_ENTRY void __cudaUnregisterFatBinary(void** handle) {
    delete handle;
}

GDRKIT_CUDART_ENTRY char __cudaInitModule(void**) {
    return 1;
}

GDRKIT_CUDART_ENTRY void __cudaRegisterFunction(void**, const void* host_function, char*, const char* name, int, void*,
                                                void*, void*, void*, int*) {
    Kernels& kernel_table = kernels();
    std::lock_guard lock(kernel_table.mutex);
    kernel_table.names[host_function] = name;
}

GDRKIT_CUDART_ENTRY void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}

GDRKIT_CUDART_ENTRY void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, std::size_t, int, int) {}

GDRKIT_CUDART_ENTRY void __cudaRegisterHostVar(void**, const char*, char*, std::size_t) {}

GDRKIT_CUDART_ENTRY void __cudaRegisterUnifiedTable(void**, void*) {}

GDRKIT_CUDART_ENTRY unsigned __cudaPushCallConfiguration(Dimensions grid, Dimensions block, std::size_t shared_bytes,
                                                         Handle stream) {
    pending_launches.push_back({grid, block, shared_bytes, stream});
    return 0;
}

GDRKIT_CUDART_ENTRY Error __cudaPopCallConfiguration(Dimensions* grid, Dimensions* block, std::size_t* shared_bytes,
                                                     Handle* stream) {
    if (pending_launches.empty()) {
        return record_error(missing_configuration);
    }
    const LaunchConfiguration configuration = pending_launches.back();
    pending_launches.pop_back();
    *grid = configuration.grid;
    *block = configuration.block;
    *shared_bytes = configuration.shared_bytes;
    *stream = configuration.stream;
    return success;
}

// The handle of a kernel is the address of its host function.
GDRKIT_CUDART_ENTRY Error cudaGetKernel(const void** kernel, const void* host_function) {
    return run_entry_before_init([&] {
        if (kernel == nullptr) {
            return invalid_value;
        }
        *kernel = host_function;
        return success;
    });
}

GDRKIT_CUDART_ENTRY Error __cudaGetKernel(const void** kernel, const void* host_function) {
    return cudaGetKernel(kernel, host_function);
}

#define GDRKIT_LAUNCH(name)                                                                                            \
    GDRKIT_CUDART_ENTRY Error name(const void* kernel, Dimensions, Dimensions, void**, std::size_t, Handle) {          \
        return refuse_kernel_call("the launch", kernel);                                                               \
    }
GDRKIT_LAUNCH(cudaLaunchKernel)
GDRKIT_LAUNCH(cudaLaunchKernel_ptsz)
GDRKIT_LAUNCH(__cudaLaunchKernel)
GDRKIT_LAUNCH(__cudaLaunchKernel_ptsz)
GDRKIT_LAUNCH(cudaLaunchCooperativeKernel)
GDRKIT_LAUNCH(cudaLaunchCooperativeKernel_ptsz)

GDRKIT_CUDART_ENTRY Error cudaLaunchKernelExC(const void*, const void* kernel, void**) {
    return refuse_kernel_call("the launch", kernel);
}

GDRKIT_CUDART_ENTRY Error cudaLaunchKernelExC_ptsz(const void*, const void* kernel, void**) {
    return refuse_kernel_call("the launch", kernel);
}

GDRKIT_CUDART_ENTRY Error cudaFuncGetAttributes(void*, const void* kernel) {
    return refuse_kernel_call("cudaFuncGetAttributes", kernel);
}

GDRKIT_CUDART_ENTRY Error cudaFuncSetAttribute(const void* kernel, int, int) {
    return refuse_kernel_call("cudaFuncSetAttribute", kernel);
}

} // namespace gdrkit::twin::cudart
