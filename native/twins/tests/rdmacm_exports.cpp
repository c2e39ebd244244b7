// Tests of the functions that the software twin of librdmacm exports: exactly the symbols and versions of the contract
// (a list in native/twins/contracts), and every symbol of an installed librdmacm. Unimplemented functions fail by their
// conventions.
#include <dlfcn.h>

#include <cerrno>
#include <cstdint>
#include <filesystem>

#include "tests/contract.hpp"

namespace {

using namespace gdrkit::twin;

// A type with which the test can call every function, because unimplemented functions ignore their arguments.
using AnyFunction = std::intptr_t (*)(void*, void*, void*, void*, void*, void*);

// Return the names of the exported functions. Leave out the twin's control interface, and the names of symbol versions,
// which the linker also defines as symbols.
std::set<std::string> list_functions(const char* library) {
    std::set<std::string> names = read_exported_symbols(library);
    std::erase_if(names,
                  [](const std::string& name) { return name.starts_with("RDMACM_") || name == "GDRKIT_TWIN_1"; });
    return names;
}

void check_convention(void* library, const std::string& name, const std::string& version,
                      const std::string& convention) {
    void* const symbol = dlvsym(library, name.c_str(), version.c_str());
    CHECK(symbol != nullptr);
    if (convention == "implemented") {
        return;
    }
    CHECK(convention == "minus1");
    errno = 0;
    CHECK(reinterpret_cast<AnyFunction>(symbol)(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr) == -1);
    CHECK(errno == EOPNOTSUPP);
}

} // namespace

int main() {
    std::set<std::string> contract;
    void* const library = dlopen(GDRKIT_LIBRARY, RTLD_NOW);
    CHECK(library != nullptr);
    for (const auto& [symbol, convention] : read_table(GDRKIT_CONTRACTS "/rdmacm.conventions")) {
        const auto at_sign = symbol.find('@');
        const std::string name = symbol.substr(0, at_sign), version = symbol.substr(at_sign + 1);
        CHECK(contract.insert(name).second);
        check_convention(library, name, version, convention);
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
