// Helpers for the tests of GPU iovs: the CUDA driver as an application calls it, a folder that serves as a mount, and a
// second process. The tests are valid on a real GPU and on the software twin of libcuda; LD_LIBRARY_PATH decides which
// one is loaded.
#pragma once

#include <dlfcn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/check.hpp"
#include "usrbio/include/hf3fs_usrbio_gdr.h"

namespace gdrkit::usrbio::test {

using u64 = std::uint64_t;

// Calls a function of the driver by its symbol. Arguments must have the types of its interface: lengths and addresses
// are u64.
template <typename... Arguments> int cu(const char* symbol, Arguments... arguments) {
    static void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    CHECK(library != nullptr);
    void* const entry = dlsym(library, symbol);
    CHECK(entry != nullptr);
    return reinterpret_cast<int (*)(Arguments...)>(entry)(arguments...);
}

inline void* make_current(int device) {
    void* context = nullptr;
    CHECK_EQUAL(cu("cuInit", 0U), 0);
    CHECK_EQUAL(cu("cuDevicePrimaryCtxRetain", &context, device), 0);
    CHECK_EQUAL(cu("cuCtxSetCurrent", context), 0);
    return context;
}

inline void* current() {
    void* context = nullptr;
    CHECK_EQUAL(cu("cuCtxGetCurrent", &context), 0);
    return context;
}

inline u64 allocate(u64 bytes) {
    u64 pointer = 0;
    CHECK_EQUAL(cu("cuMemAlloc_v2", &pointer, bytes), 0);
    return pointer;
}

inline void release(u64 pointer) {
    CHECK_EQUAL(cu("cuMemFree_v2", pointer), 0);
}

inline void* to_pointer(u64 address) {
    return reinterpret_cast<void*>(address);
}

// Returns bytes that differ from their neighbours, and from the same position with another seed.
inline std::vector<std::uint8_t> pattern(std::size_t bytes, unsigned seed) {
    std::vector<std::uint8_t> bytes_read(bytes);
    for (std::size_t index = 0; index < bytes; ++index) {
        bytes_read[index] = static_cast<std::uint8_t>(index * 131 + index / 251 + seed);
    }
    return bytes_read;
}

inline void write(u64 destination, const std::vector<std::uint8_t>& bytes) {
    CHECK_EQUAL(cu("cuMemcpyHtoD_v2", destination, static_cast<const void*>(bytes.data()), u64{bytes.size()}), 0);
}

inline std::vector<std::uint8_t> read(u64 source, std::size_t bytes) {
    std::vector<std::uint8_t> bytes_read(bytes);
    CHECK_EQUAL(cu("cuMemcpyDtoH_v2", static_cast<void*>(bytes_read.data()), source, u64{bytes}), 0);
    return bytes_read;
}

inline bool has_sync_memops(u64 pointer) {
    unsigned enabled = 0;
    CHECK_EQUAL(cu("cuPointerGetAttribute", static_cast<void*>(&enabled), 6, pointer), 0);
    return enabled != 0;
}

// A folder for publications like that of a mount, without an agent.
class Mount {
public:
    Mount() {
        char name[] = "/tmp/usrbio-gpu-XXXXXX";
        CHECK(mkdtemp(name) != nullptr);
        path_ = name;
        std::filesystem::create_directories(iovs());
    }
    Mount(const Mount&) = delete;
    Mount& operator=(const Mount&) = delete;
    ~Mount() { std::filesystem::remove_all(path_); }
    [[nodiscard]] const char* path() const { return path_.c_str(); }
    [[nodiscard]] std::filesystem::path iovs() const { return std::filesystem::path(path_) / "3fs-virt/iovs"; }
    [[nodiscard]] std::size_t links() const {
        return static_cast<std::size_t>(
            std::distance(std::filesystem::directory_iterator(iovs()), std::filesystem::directory_iterator()));
    }
    [[nodiscard]] std::filesystem::path only_link() const {
        CHECK_EQUAL(links(), std::size_t{1});
        return std::filesystem::directory_iterator(iovs())->path();
    }

private:
    std::string path_;
};

inline std::string hex(const void* bytes, std::size_t length) {
    static constexpr char digits[] = "0123456789abcdef";
    std::string text;
    for (std::size_t index = 0; index < length; ++index) {
        const auto byte = static_cast<const std::uint8_t*>(bytes)[index];
        text += digits[byte >> 4];
        text += digits[byte & 0xf];
    }
    return text;
}

inline std::vector<std::uint8_t> from_hex(const std::string& text) {
    std::vector<std::uint8_t> bytes;
    for (std::size_t index = 0; index + 1 < text.size(); index += 2) {
        bytes.push_back(static_cast<std::uint8_t>(std::stoul(text.substr(index, 2), nullptr, 16)));
    }
    return bytes;
}

// Runs this program again with these arguments, because a forked child cannot use the driver of its parent. Returns its
// exit status; 128 and more: a signal killed it.
inline int run_peer(std::vector<std::string> arguments) {
    std::fflush(nullptr);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        std::vector<char*> pointers{const_cast<char*>("peer")};
        for (std::string& argument : arguments) {
            pointers.push_back(argument.data());
        }
        pointers.push_back(nullptr);
        execv("/proc/self/exe", pointers.data());
        _exit(127);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

} // namespace gdrkit::usrbio::test
