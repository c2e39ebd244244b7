// Loads the client library and looks up its functions.
#include "hf3fs_library.hpp"

#include <dlfcn.h>

namespace gdrkit::usrbio {

namespace {

Functions loaded_functions;
void* library_handle = nullptr;

} // namespace

std::string open_library(const std::string& path) {
    if (library_handle != nullptr) {
        return {};
    }
    // The library is never closed, because it has threads, tables of descriptors and handlers for fork().
    library_handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library_handle == nullptr) {
        return dlerror();
    }
#define GDRKIT_RESOLVE(name, result_type, ...)                                                                         \
    loaded_functions.name = reinterpret_cast<decltype(loaded_functions.name)>(dlsym(library_handle, #name));
    GDRKIT_HF3FS_FUNCTIONS(GDRKIT_RESOLVE)
#undef GDRKIT_RESOLVE
    return {};
}

const Functions& functions() noexcept {
    return loaded_functions;
}

std::vector<std::string> function_names() {
    std::vector<std::string> names;
#define GDRKIT_LIST(name, result_type, ...)                                                                            \
    if (loaded_functions.name != nullptr) {                                                                            \
        names.emplace_back(#name);                                                                                     \
    }
    GDRKIT_HF3FS_FUNCTIONS(GDRKIT_LIST)
#undef GDRKIT_LIST
    return names;
}

} // namespace gdrkit::usrbio
