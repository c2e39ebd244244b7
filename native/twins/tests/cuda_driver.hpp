// Helpers for the tests of the CUDA twin, the software twin of libcuda. They open the twin with dlopen and call its
// functions by name, as a C program does.
#pragma once

#include <dlfcn.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "check.hpp"
#include "cuda/cuda_abi.hpp"

namespace gdrkit::twin::cuda {

using u64 = std::uint64_t;

// Return the dlopen handle of the CUDA twin.
inline void* driver_library() {
    static void* const driver_handle = [] {
        void* handle = dlopen(GDRKIT_CUDA_TWIN, RTLD_NOW | RTLD_LOCAL);
        if (handle == nullptr) {
            std::fprintf(stderr, "%s\n", dlerror());
            std::exit(1);
        }
        return handle;
    }();
    return driver_handle;
}

// Call a function of the driver by name. The arguments must have the types of the API: lengths, addresses and handles
// are u64.
template <typename... Arguments> int call_driver(const char* symbol, Arguments... arguments) {
    void* const function_address = dlsym(driver_library(), symbol);
    if (function_address == nullptr) {
        std::fprintf(stderr, "%s is not exported\n", symbol);
        std::exit(1);
    }
    return reinterpret_cast<int (*)(Arguments...)>(function_address)(arguments...);
}

// Call a function of the driver by name, and check that it returns the status `code`.
#define EXPECT_RESULT(code, ...)                                                                                       \
    do {                                                                                                               \
        const int result_ = call_driver(__VA_ARGS__);                                                                  \
        if (result_ != (code)) {                                                                                       \
            std::fprintf(stderr, "%s:%d: %s returned %d, not %d\n", __FILE__, __LINE__, #__VA_ARGS__, result_,         \
                         static_cast<int>(code));                                                                      \
            std::exit(1);                                                                                              \
        }                                                                                                              \
    } while (0)
#define EXPECT_SUCCESS(...) EXPECT_RESULT(success, __VA_ARGS__)

// Call cuInit and make the primary context of the device current in this thread.
inline Handle use_primary_context(int device = 0) {
    Handle context = 0;
    EXPECT_SUCCESS("cuInit", 0U);
    EXPECT_SUCCESS("cuDevicePrimaryCtxRetain", &context, device);
    EXPECT_SUCCESS("cuCtxSetCurrent", context);
    return context;
}

inline u64 allocate(u64 length_bytes) {
    u64 pointer = 0;
    EXPECT_SUCCESS("cuMemAlloc_v2", &pointer, length_bytes);
    return pointer;
}

inline u64 query_buffer_id(u64 pointer) {
    u64 buffer_id = 0;
    EXPECT_SUCCESS("cuPointerGetAttribute", static_cast<void*>(&buffer_id), static_cast<int>(pointer_buffer_id),
                   pointer);
    return buffer_id;
}

inline u64 query_free_memory() {
    u64 free_bytes = 0, total_bytes = 0;
    EXPECT_SUCCESS("cuMemGetInfo_v2", &free_bytes, &total_bytes);
    return free_bytes;
}

// Wait until the device has exactly `expected_bytes` of free memory. Return false after a timeout. Memory may become
// free late: a thread that sends a descriptor of the memory to another process closes its own copy only after the send.
inline bool wait_for_free_memory(u64 expected_bytes) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (query_free_memory() != expected_bytes) {
        if (std::chrono::steady_clock::now() > deadline) {
            return false;
        }
        sched_yield();
    }
    return true;
}

inline void write_device(u64 to_address, const std::vector<unsigned char>& bytes) {
    EXPECT_SUCCESS("cuMemcpyHtoD_v2", to_address, static_cast<const void*>(bytes.data()), u64{bytes.size()});
}

inline std::vector<unsigned char> read_device(u64 from_address, std::size_t length_bytes) {
    std::vector<unsigned char> bytes(length_bytes);
    EXPECT_SUCCESS("cuMemcpyDtoH_v2", static_cast<void*>(bytes.data()), from_address, u64{length_bytes});
    return bytes;
}

// Return test data in which neighbouring bytes, and data of different seeds, differ.
inline std::vector<unsigned char> make_pattern(std::size_t length_bytes, unsigned seed) {
    std::vector<unsigned char> bytes(length_bytes);
    for (std::size_t index = 0; index < length_bytes; ++index) {
        bytes[index] = static_cast<unsigned char>((index * 131 + index / 251 + seed) & 0xff);
    }
    return bytes;
}

// Run `body` in a forked child and return its wait status.
template <typename Body> int run_in_child(Body&& body) {
    std::fflush(nullptr);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        // Remove the signal handlers of the sanitizers, because some tests expect that a signal ends the child.
        signal(SIGSEGV, SIG_DFL);
        signal(SIGABRT, SIG_DFL);
        if (std::freopen("/dev/null", "w", stderr) == nullptr) {
            _exit(3);
        }
        body();
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    return status;
}

} // namespace gdrkit::twin::cuda
