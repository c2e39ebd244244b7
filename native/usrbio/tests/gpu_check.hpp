// Helpers for the tests of GPU iovs: an application's calls of the CUDA driver, a folder with the layout of a 3FS
// mount, and a second process.
//
// The tests are valid on a real GPU and on the software twin of libcuda, a library that emulates the driver.
// LD_LIBRARY_PATH selects one of them.
#pragma once

#include <dlfcn.h>
#include <fcntl.h>
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

// Calls the function of the driver with this symbol. The arguments must have the types of the CUDA interface: lengths
// and addresses are u64.
template <typename... Arguments> int call_cuda(const char* symbol, Arguments... arguments) {
    static void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    CHECK(library != nullptr);
    void* const function = dlsym(library, symbol);
    CHECK(function != nullptr);
    return reinterpret_cast<int (*)(Arguments...)>(function)(arguments...);
}

// Makes the primary context of the device current in this thread, and returns it.
inline void* use_device(int device) {
    void* context = nullptr;
    CHECK_EQUAL(call_cuda("cuInit", 0U), 0);
    CHECK_EQUAL(call_cuda("cuDevicePrimaryCtxRetain", &context, device), 0);
    CHECK_EQUAL(call_cuda("cuCtxSetCurrent", context), 0);
    return context;
}

inline void* get_current_context() {
    void* context = nullptr;
    CHECK_EQUAL(call_cuda("cuCtxGetCurrent", &context), 0);
    return context;
}

inline u64 allocate_device_memory(u64 bytes) {
    u64 address = 0;
    CHECK_EQUAL(call_cuda("cuMemAlloc_v2", &address, bytes), 0);
    return address;
}

inline void free_device_memory(u64 address) {
    CHECK_EQUAL(call_cuda("cuMemFree_v2", address), 0);
}

inline void* to_pointer(u64 address) {
    return reinterpret_cast<void*>(address);
}

// Returns test data. Each byte differs from its neighbours, and from the byte at the same position with another seed.
inline std::vector<std::uint8_t> make_pattern(std::size_t length, unsigned seed) {
    std::vector<std::uint8_t> bytes(length);
    for (std::size_t index = 0; index < length; ++index) {
        bytes[index] = static_cast<std::uint8_t>(index * 131 + index / 251 + seed);
    }
    return bytes;
}

inline void copy_to_device(u64 destination, const std::vector<std::uint8_t>& bytes) {
    CHECK_EQUAL(call_cuda("cuMemcpyHtoD_v2", destination, static_cast<const void*>(bytes.data()), u64{bytes.size()}),
                0);
}

inline std::vector<std::uint8_t> copy_from_device(u64 source, std::size_t length) {
    std::vector<std::uint8_t> bytes(length);
    CHECK_EQUAL(call_cuda("cuMemcpyDtoH_v2", static_cast<void*>(bytes.data()), source, u64{length}), 0);
    return bytes;
}

// Returns whether CU_POINTER_ATTRIBUTE_SYNC_MEMOPS is set for the memory. The library sets it for
// the memory of each GPU iov, except VMM memory.
inline bool has_sync_memops(u64 address) {
    constexpr int sync_memops_attribute = 6; // CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
    unsigned is_enabled = 0;
    CHECK_EQUAL(call_cuda("cuPointerGetAttribute", static_cast<void*>(&is_enabled), sync_memops_attribute, address), 0);
    return is_enabled != 0;
}

// A temporary folder with the layout of a 3FS mount. No agent serves it.
class Mount {
public:
    Mount() {
        char path_template[] = "/tmp/usrbio-gpu-XXXXXX";
        CHECK(mkdtemp(path_template) != nullptr);
        path_ = path_template;
        std::filesystem::create_directories(iovs_folder());
    }
    Mount(const Mount&) = delete;
    Mount& operator=(const Mount&) = delete;
    ~Mount() { std::filesystem::remove_all(path_); }
    [[nodiscard]] const char* path() const { return path_.c_str(); }
    // The folder in which the client library creates one symbolic link for each iov.
    [[nodiscard]] std::filesystem::path iovs_folder() const { return std::filesystem::path(path_) / "3fs-virt/iovs"; }
    [[nodiscard]] std::size_t count_links() const {
        return static_cast<std::size_t>(
            std::distance(std::filesystem::directory_iterator(iovs_folder()), std::filesystem::directory_iterator()));
    }
    [[nodiscard]] std::filesystem::path get_only_link_path() const {
        CHECK_EQUAL(count_links(), std::size_t{1});
        return std::filesystem::directory_iterator(iovs_folder())->path();
    }

private:
    std::string path_;
};

inline std::string format_hex(const void* bytes, std::size_t length) {
    static constexpr char digits[] = "0123456789abcdef";
    std::string text;
    for (std::size_t index = 0; index < length; ++index) {
        const auto byte = static_cast<const std::uint8_t*>(bytes)[index];
        text += digits[byte >> 4];
        text += digits[byte & 0xf];
    }
    return text;
}

inline std::vector<std::uint8_t> parse_hex(const std::string& text) {
    std::vector<std::uint8_t> bytes;
    for (std::size_t index = 0; index + 1 < text.size(); index += 2) {
        bytes.push_back(static_cast<std::uint8_t>(std::stoul(text.substr(index, 2), nullptr, 16)));
    }
    return bytes;
}

// Runs this program again, with these arguments, as a second process. A fork alone would not suffice, because a forked
// child cannot use the CUDA driver of its parent. Returns the exit status, or 128 + the signal that killed the process.
inline int run_peer(std::vector<std::string> arguments) {
    std::fflush(nullptr);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        std::vector<char*> argv{const_cast<char*>("peer")};
        for (std::string& argument : arguments) {
            argv.push_back(argument.data());
        }
        argv.push_back(nullptr);
        execv("/proc/self/exe", argv.data());
        _exit(127);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Writes the file `folder`/reach with the permissions `mode`. From this file, the client library reads whether a NIC
// has moved bytes to and from a device.
inline void write_reach_file(const std::string& folder, int device, bool has_moved, mode_t mode = 0600) {
    std::uint8_t uuid[16];
    CHECK_EQUAL(call_cuda("cuInit", 0U), 0);
    CHECK_EQUAL(call_cuda("cuDeviceGetUuid", static_cast<void*>(uuid), device), 0);
    const std::string uuid_text = format_hex(uuid, 4) + '-' + format_hex(uuid + 4, 2) + '-' + format_hex(uuid + 6, 2) +
                                  '-' + format_hex(uuid + 8, 2) + '-' + format_hex(uuid + 10, 6);
    const std::string text = "gdrkit-reach 1\ngpu=GPU-another nic=twin0 moved=yes state=unproven\ngpu=GPU-" +
                             uuid_text + " nic=twin0 moved=" + (has_moved ? "yes" : "no") + " state=unproven\n";
    CHECK(mkdir(folder.c_str(), 0700) == 0 || errno == EEXIST);
    const std::string path = folder + "/reach";
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    CHECK(write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size()));
    CHECK(fchmod(fd, mode) == 0 && close(fd) == 0);
}

} // namespace gdrkit::usrbio::test
