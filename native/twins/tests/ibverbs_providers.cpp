// Tests of the software twin of libibverbs: the libraries of this machine's rdma-core can be loaded with the twin in
// place of libibverbs. The test loads librdmacm, the providers in the folder libibverbs, which register themselves when
// they are loaded, and the provider libraries that programs link (libefa, libmana, libmlx4 and libmlx5).
#include <dlfcn.h>

#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/ibverbs_support.hpp"

namespace {

namespace fs = std::filesystem;

constexpr int skipped_exit_code = 77; // SKIP_RETURN_CODE in ibverbs.cmake

// Return the paths of the libraries to load, or an empty list on a machine without rdma-core.
std::vector<fs::path> list_rdma_core_libraries() {
    std::vector<fs::path> libraries;
#if defined(__x86_64__)
    const char* const debian_folder = "/usr/lib/x86_64-linux-gnu";
#else
    const char* const debian_folder = "/usr/lib/aarch64-linux-gnu";
#endif
    for (const char* const folder : {debian_folder, "/usr/lib64"}) {
        std::error_code error; // set if the folder does not exist; the loop is then empty
        for (const auto& entry : fs::directory_iterator(fs::path(folder) / "libibverbs", error)) {
            libraries.push_back(entry.path());
        }
        for (const char* const file_name :
             {"libefa.so.1", "libmana.so.1", "libmlx4.so.1", "libmlx5.so.1", "librdmacm.so.1"}) {
            if (fs::exists(fs::path(folder) / file_name)) {
                libraries.push_back(fs::path(folder) / file_name);
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
        // RTLD_NOW resolves every symbol, so dlopen fails if the twin lacks a function that the library imports. Some
        // of these functions are private to rdma-core (symbol version IBVERBS_PRIVATE_*).
        if (dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL) == nullptr) {
            std::fprintf(stderr, "%s\n", dlerror());
            CHECK(false && "a library of rdma-core cannot be loaded");
        }
    }
    CHECK(count_devices() == device_count); // the providers claim no further devices
    // The libraries use the twin, which has the SONAME libibverbs.so.1, and have loaded no other library of this name.
    CHECK(dlopen(GDRKIT_LIBRARY, RTLD_NOW | RTLD_NOLOAD) == dlopen("libibverbs.so.1", RTLD_NOW | RTLD_NOLOAD));
    // libmlx5 compares the pointer behind the ibv_device with its own table of functions, and must not take the twin's
    // device for a device of its own.
    if (void* const mlx5 = dlopen("libmlx5.so.1", RTLD_NOW | RTLD_NOLOAD)) {
        const auto is_supported = reinterpret_cast<bool (*)(ibv_device*)>(dlsym(mlx5, "mlx5dv_is_supported"));
        CHECK(is_supported != nullptr);
        ibv_device** const devices = ibv_get_device_list(nullptr);
        CHECK(devices != nullptr && !is_supported(devices[0]));
        ibv_free_device_list(devices);
    }
    return 0;
}
