// Helpers for the tests of the software twins of libcudart (the CUDA runtime). They open a twin with dlopen and call
// its functions by name. The build compiles each test once for each version of the runtime.
#pragma once

#include <string_view>

#include "cuda_peer.hpp"
#include "cudart/cudart_abi.hpp"

namespace gdrkit::twin::cudart {

using cuda::u64;

// Return the dlopen handle of the twin of the CUDA runtime.
inline void* runtime_library() {
    static void* const handle = [] {
        cuda::driver_library(); // open the CUDA twin first, so that the runtime finds it by its SONAME
        void* const runtime_handle = dlopen(GDRKIT_CUDART_TWIN, RTLD_NOW | RTLD_LOCAL);
        if (runtime_handle == nullptr) {
            std::fprintf(stderr, "%s\n", dlerror());
            std::exit(1);
        }
        return runtime_handle;
    }();
    return handle;
}

inline void* find_function(const char* symbol) {
    void* const function_address = dlsym(runtime_library(), symbol);
    if (function_address == nullptr) {
        std::fprintf(stderr, "%s is not exported\n", symbol);
        std::exit(1);
    }
    return function_address;
}

// Call a function of the runtime by name. The arguments must have the types of the API: lengths and handles are u64.
template <typename... Arguments> int call_runtime(const char* symbol, Arguments... arguments) {
    return reinterpret_cast<int (*)(Arguments...)>(find_function(symbol))(arguments...);
}

// Call a function of the runtime by name, and check that it returns the error code `code`.
#define EXPECT_ERROR(code, ...)                                                                                        \
    do {                                                                                                               \
        const int error_ = call_runtime(__VA_ARGS__);                                                                  \
        if (error_ != (code)) {                                                                                        \
            std::fprintf(stderr, "%s:%d: %s returned %d, not %d\n", __FILE__, __LINE__, #__VA_ARGS__, error_,          \
                         static_cast<int>(code));                                                                      \
            std::exit(1);                                                                                              \
        }                                                                                                              \
    } while (0)
#define EXPECT_OK(...) EXPECT_ERROR(0, __VA_ARGS__)

inline void* allocate(u64 length_bytes) {
    void* pointer = nullptr;
    EXPECT_OK("cudaMalloc", &pointer, length_bytes);
    return pointer;
}

inline void write_memory(void* to_address, const std::vector<unsigned char>& bytes) {
    EXPECT_OK("cudaMemcpy", to_address, static_cast<const void*>(bytes.data()), u64{bytes.size()}, int{host_to_device});
}

inline std::vector<unsigned char> read_memory(const void* from_address, u64 length_bytes) {
    std::vector<unsigned char> bytes(length_bytes);
    EXPECT_OK("cudaMemcpy", static_cast<void*>(bytes.data()), from_address, length_bytes, int{device_to_host});
    return bytes;
}

// Run `body`, and return the text that it writes to standard error.
template <typename Body> std::string capture_stderr(Body&& body) {
    std::fflush(stderr);
    const int saved_stderr_fd = dup(STDERR_FILENO);
    std::FILE* const capture_file = std::tmpfile();
    CHECK(saved_stderr_fd >= 0 && capture_file != nullptr && dup2(fileno(capture_file), STDERR_FILENO) >= 0);
    body();
    CHECK(dup2(saved_stderr_fd, STDERR_FILENO) >= 0);
    close(saved_stderr_fd);
    std::rewind(capture_file);
    std::string stderr_text;
    for (int byte = std::fgetc(capture_file); byte != EOF; byte = std::fgetc(capture_file)) {
        stderr_text += static_cast<char>(byte);
    }
    std::fclose(capture_file);
    return stderr_text;
}

} // namespace gdrkit::twin::cudart
