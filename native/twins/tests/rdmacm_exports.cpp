// Tests of the functions that the software twin of librdmacm exports. They are exactly the functions of the contract
// (native/twins/contracts/rdmacm.conventions), and the contract has every function of an installed librdmacm. Each
// function without an implementation returns -1 and sets errno to EOPNOTSUPP.
#include <dlfcn.h>

#include <cerrno>
#include <cstdint>
#include <filesystem>

#include "tests/contract.hpp"

namespace {

using namespace gdrkit::twin;

// A type with which the test can call every unimplemented function, because these functions ignore their arguments.
using AnyFunction = std::intptr_t (*)(void*, void*, void*, void*, void*, void*);

// Return the names of the exported functions. Leave out the names of the symbol versions, which the linker also defines
// as symbols.
std::set<std::string> list_functions(const char* library_path) {
    std::set<std::string> names = read_exported_symbols(library_path);
    std::erase_if(names,
                  [](const std::string& name) { return name.starts_with("RDMACM_") || name == "GDRKIT_TWIN_1"; });
    return names;
}

// Check that the library has the function in this version. `implementation` is "implemented", or "minus1" for a
// function without an implementation, which must return -1.
void check_function(void* library, const std::string& name, const std::string& version,
                    const std::string& implementation) {
    void* const function_address = dlvsym(library, name.c_str(), version.c_str());
    CHECK(function_address != nullptr);
    if (implementation == "implemented") {
        return;
    }
    CHECK(implementation == "minus1");
    errno = 0;
    CHECK(reinterpret_cast<AnyFunction>(function_address)(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr) == -1);
    CHECK(errno == EOPNOTSUPP);
}

} // namespace

int main() {
    std::set<std::string> contract_names;
    void* const library = dlopen(GDRKIT_LIBRARY, RTLD_NOW);
    CHECK(library != nullptr);
    for (const auto& [symbol, implementation] : read_table(GDRKIT_CONTRACTS "/rdmacm.conventions")) {
        const auto at_sign = symbol.find('@');
        const std::string name = symbol.substr(0, at_sign), version = symbol.substr(at_sign + 1);
        CHECK(contract_names.insert(name).second);
        check_function(library, name, version, implementation);
    }
    CHECK(list_functions(GDRKIT_LIBRARY) == contract_names);
    for (const char* installed_library : {"/usr/lib/x86_64-linux-gnu/librdmacm.so.1", "/usr/lib64/librdmacm.so.1"}) {
        if (std::filesystem::exists(installed_library)) {
            for (const std::string& name : list_functions(installed_library)) {
                CHECK(contract_names.contains(name));
            }
        }
    }
    return 0;
}
