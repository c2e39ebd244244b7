// What the tests of GPU iovs share: the CUDA driver as an application calls it, a folder that stands for a mount, and a
// second process. They are right on a real GPU as on the twin of libcuda: LD_LIBRARY_PATH alone decides which it is.
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

// An entry of the driver by its symbol. Arguments have the types of the interface: lengths and addresses are u64.
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

inline void* pointer_of(u64 address) {
    return reinterpret_cast<void*>(address);
}

// Every position differs from its neighbours, and from the same position of another seed.
inline std::vector<std::uint8_t> pattern(std::size_t bytes, unsigned seed) {
    std::vector<std::uint8_t> all(bytes);
    for (std::size_t at = 0; at < bytes; ++at) {
        all[at] = static_cast<std::uint8_t>(at * 131 + at / 251 + seed);
    }
    return all;
}

inline void write(u64 to, const std::vector<std::uint8_t>& bytes) {
    CHECK_EQUAL(cu("cuMemcpyHtoD_v2", to, static_cast<const void*>(bytes.data()), u64{bytes.size()}), 0);
}

inline std::vector<std::uint8_t> read(u64 from, std::size_t bytes) {
    std::vector<std::uint8_t> all(bytes);
    CHECK_EQUAL(cu("cuMemcpyDtoH_v2", static_cast<void*>(all.data()), from, u64{bytes}), 0);
    return all;
}

inline bool synchronizes_copies(u64 pointer) {
    unsigned on = 0;
    CHECK_EQUAL(cu("cuPointerGetAttribute", static_cast<void*>(&on), 6, pointer), 0);
    return on != 0;
}

// A folder with what a mount has for publications. Nobody serves it.
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
    for (std::size_t at = 0; at < length; ++at) {
        const auto byte = static_cast<const std::uint8_t*>(bytes)[at];
        text += digits[byte >> 4];
        text += digits[byte & 0xf];
    }
    return text;
}

inline std::vector<std::uint8_t> from_hex(const std::string& text) {
    std::vector<std::uint8_t> bytes;
    for (std::size_t at = 0; at + 1 < text.size(); at += 2) {
        bytes.push_back(static_cast<std::uint8_t>(std::stoul(text.substr(at, 2), nullptr, 16)));
    }
    return bytes;
}

// Runs this program anew with these arguments (a fork alone would inherit a driver that does not work there) and
// returns its exit status; 128 and more: killed by a signal.
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
