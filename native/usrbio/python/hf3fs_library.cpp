#include "hf3fs_library.hpp"

#include <dlfcn.h>

namespace gdrkit::usrbio {

namespace {

Functions loaded;
void* handle = nullptr;

} // namespace

std::string open_library(const std::string& path) {
    if (handle != nullptr) {
        return {};
    }
    // It is never closed, because the library has its own threads, tables of descriptors and handlers.
    handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
        return dlerror();
    }
#define GDRKIT_RESOLVE(name, result, ...) loaded.name = reinterpret_cast<decltype(loaded.name)>(dlsym(handle, #name));
    GDRKIT_HF3FS_FUNCTIONS(GDRKIT_RESOLVE)
#undef GDRKIT_RESOLVE
    return {};
}

const Functions& functions() noexcept {
    return loaded;
}

std::vector<std::string> function_names() {
    std::vector<std::string> names;
#define GDRKIT_LIST(name, result, ...)                                                                                 \
    if (loaded.name != nullptr) {                                                                                      \
        names.emplace_back(#name);                                                                                     \
    }
    GDRKIT_HF3FS_FUNCTIONS(GDRKIT_LIST)
#undef GDRKIT_LIST
    return names;
}

} // namespace gdrkit::usrbio
