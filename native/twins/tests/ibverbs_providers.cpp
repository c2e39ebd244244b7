// Tests of the software twin of libibverbs: the libraries of this machine's rdma-core can be loaded with the twin in
// place of libibverbs. These are the providers, which register themselves when they are loaded, the libraries of
// providers that programs link (libmlx5, libefa), and librdmacm.
#include <dlfcn.h>

#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/ibverbs_support.hpp"

namespace {

namespace fs = std::filesystem;

constexpr int skipped_exit_code = 77; // SKIP_RETURN_CODE of the test

// Return the paths of the libraries, or an empty list on a machine without rdma-core.
std::vector<fs::path> list_rdma_core_libraries() {
    std::vector<fs::path> libraries;
#if defined(__x86_64__)
    const char* const debian_folder = "/usr/lib/x86_64-linux-gnu";
#else
    const char* const debian_folder = "/usr/lib/aarch64-linux-gnu";
#endif
    for (const char* const folder : {debian_folder, "/usr/lib64"}) {
        std::error_code ignored;
        for (const auto& entry : fs::directory_iterator(fs::path(folder) / "libibverbs", ignored)) {
            libraries.push_back(entry.path());
        }
        for (const char* const name :
             {"libefa.so.1", "libmana.so.1", "libmlx4.so.1", "libmlx5.so.1", "librdmacm.so.1"}) {
            if (fs::exists(fs::path(folder) / name)) {
                libraries.push_back(fs::path(folder) / name);
            }
        }
    }
    return libraries;
}

int count_devices() {
    int count = -1;
    ibv_device** const devices = ibv_get_device_list(&count);
    CHECK(devices != nullptr);
    ibv_free_device_list(devices);
    return count;
}

} // namespace

int main() {
    const std::vector<fs::path> libraries = list_rdma_core_libraries();
    if (libraries.empty()) {
        std::fprintf(stderr, "skipped: rdma-core is not installed\n");
        return skipped_exit_code;
    }
    const int device_count = count_devices();
    for (const fs::path& library : libraries) {
        // RTLD_NOW resolves every symbol, so a missing private entry makes dlopen fail.
        if (dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL) == nullptr) {
            std::fprintf(stderr, "%s\n", dlerror());
            CHECK(false && "a library of rdma-core cannot be loaded");
        }
    }
    CHECK(count_devices() == device_count);
    // Only the twin is loaded: the libraries have bound to it by its SONAME.
    CHECK(dlopen(GDRKIT_LIBRARY, RTLD_NOW | RTLD_NOLOAD) == dlopen("libibverbs.so.1", RTLD_NOW | RTLD_NOLOAD));
    // libmlx5 compares a private member of the device with its own table.
    if (void* const mlx5 = dlopen("libmlx5.so.1", RTLD_NOW | RTLD_NOLOAD)) {
        const auto is_supported = reinterpret_cast<bool (*)(ibv_device*)>(dlsym(mlx5, "mlx5dv_is_supported"));
        CHECK(is_supported != nullptr);
        ibv_device** const devices = ibv_get_device_list(nullptr);
        CHECK(devices != nullptr && !is_supported(devices[0]));
        ibv_free_device_list(devices);
    }
    return 0;
}
