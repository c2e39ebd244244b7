// The CUDA twin as a C program meets it: opened by dlopen, called by name.
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

inline void* driver() {
    static void* const library = [] {
        void* opened = dlopen(GDRKIT_CUDA_TWIN, RTLD_NOW | RTLD_LOCAL);
        if (opened == nullptr) {
            std::fprintf(stderr, "%s\n", dlerror());
            std::exit(1);
        }
        return opened;
    }();
    return library;
}

// Calls an entry. Arguments must have the types of the interface: lengths, addresses and handles are u64.
template <typename... Arguments> int cu(const char* symbol, Arguments... arguments) {
    void* const entry = dlsym(driver(), symbol);
    if (entry == nullptr) {
        std::fprintf(stderr, "%s is not exported\n", symbol);
        std::exit(1);
    }
    return reinterpret_cast<int (*)(Arguments...)>(entry)(arguments...);
}

// Checks that an entry answers this.
#define ANSWERS(code, ...)                                                                                             \
    do {                                                                                                               \
        const int answer_ = cu(__VA_ARGS__);                                                                           \
        if (answer_ != (code)) {                                                                                       \
            std::fprintf(stderr, "%s:%d: %s answered %d, not %d\n", __FILE__, __LINE__, #__VA_ARGS__, answer_,         \
                         static_cast<int>(code));                                                                      \
            std::exit(1);                                                                                              \
        }                                                                                                              \
    } while (0)
#define WORKS(...) ANSWERS(success, __VA_ARGS__)

// cuInit and the primary context of the device, current in this thread.
inline Handle begin(int device = 0) {
    Handle context = 0;
    WORKS("cuInit", 0U);
    WORKS("cuDevicePrimaryCtxRetain", &context, device);
    WORKS("cuCtxSetCurrent", context);
    return context;
}

inline u64 allocate(u64 length_bytes) {
    u64 pointer = 0;
    WORKS("cuMemAlloc_v2", &pointer, length_bytes);
    return pointer;
}

inline u64 buffer_id(u64 pointer) {
    u64 id = 0;
    WORKS("cuPointerGetAttribute", static_cast<void*>(&id), static_cast<int>(pointer_buffer_id), pointer);
    return id;
}

inline u64 free_memory() {
    u64 free = 0, total = 0;
    WORKS("cuMemGetInfo_v2", &free, &total);
    return free;
}

// Whether the device comes to have this much free memory. The thread that hands a descriptor to another process closes
// its own copy when it comes to it, so a test that let go of everything may be some moments early.
inline bool comes_to_have_free(u64 length_bytes) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (free_memory() != length_bytes) {
        if (std::chrono::steady_clock::now() > end) {
            return false;
        }
        sched_yield();
    }
    return true;
}

inline void write_device(u64 to, const std::vector<unsigned char>& bytes) {
    WORKS("cuMemcpyHtoD_v2", to, static_cast<const void*>(bytes.data()), u64{bytes.size()});
}

inline std::vector<unsigned char> read_device(u64 from, std::size_t length_bytes) {
    std::vector<unsigned char> bytes(length_bytes);
    WORKS("cuMemcpyDtoH_v2", static_cast<void*>(bytes.data()), from, u64{length_bytes});
    return bytes;
}

// A payload in which every position differs from its neighbours and from other seeds.
inline std::vector<unsigned char> pattern(std::size_t length_bytes, unsigned seed) {
    std::vector<unsigned char> bytes(length_bytes);
    for (std::size_t at = 0; at < length_bytes; ++at) {
        bytes[at] = static_cast<unsigned char>((at * 131 + at / 251 + seed) & 0xff);
    }
    return bytes;
}

// Runs `body` in a forked child and returns its wait status.
template <typename Body> int status_of_child(Body&& body) {
    std::fflush(nullptr);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        // Whatever the sanitizers installed: the test asks for the plain signal.
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
