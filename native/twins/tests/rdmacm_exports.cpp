// Tests that the librdmacm twin exports exactly the symbols and versions of the contract, and every symbol of an
// installed librdmacm. Unimplemented functions must fail by their conventions.
#include <dlfcn.h>

#include <cerrno>
#include <cstdint>
#include <filesystem>

#include "tests/contract.hpp"

namespace {

using namespace gdrkit::twin;

// The type with which every function can be called: unimplemented functions ignore their arguments.
using AnyFunction = std::intptr_t (*)(void*, void*, void*, void*, void*, void*);

// Return the names of the exported functions. The linker defines the names of symbol versions as symbols too; they and
// the twin's control interface are left out.
std::set<std::string> list_functions(const char* library) {
    std::set<std::string> names = exported_symbols(library);
    std::erase_if(names,
                  [](const std::string& name) { return name.starts_with("RDMACM_") || name == "GDRKIT_TWIN_1"; });
    return names;
}

void check_convention(void* library, const std::string& name, const std::string& version, const std::string& kind) {
    void* const symbol = dlvsym(library, name.c_str(), version.c_str());
    CHECK(symbol != nullptr);
    if (kind == "implemented") {
        return;
    }
    CHECK(kind == "minus1");
    errno = 0;
    CHECK(reinterpret_cast<AnyFunction>(symbol)(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr) == -1);
    CHECK(errno == EOPNOTSUPP);
}

} // namespace

int main() {
    std::set<std::string> contract;
    void* const library = dlopen(GDRKIT_LIBRARY, RTLD_NOW);
    CHECK(library != nullptr);
    for (const auto& [symbol, kind] : read_table(GDRKIT_CONTRACTS "/rdmacm.conventions")) {
        const auto at = symbol.find('@');
        const std::string name = symbol.substr(0, at), version = symbol.substr(at + 1);
        CHECK(contract.insert(name).second);
        check_convention(library, name, version, kind);
    }
    CHECK(list_functions(GDRKIT_LIBRARY) == contract);
    for (const char* installed : {"/usr/lib/x86_64-linux-gnu/librdmacm.so.1", "/usr/lib64/librdmacm.so.1"}) {
        if (std::filesystem::exists(installed)) {
            for (const std::string& name : list_functions(installed)) {
                CHECK(contract.contains(name));
            }
        }
    }
    return 0;
}
