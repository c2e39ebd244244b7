// Tests of the functions that a software twin of libcudart (the CUDA runtime) exports. They match the contract (a list
// in native/twins/contracts) and have the version of the library, and unimplemented functions fail as documented.
#include <algorithm>
#include <map>

#include "contract.hpp"
#include "cudart_library.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cudart;

namespace {

constexpr const char* symbol_version = GDRKIT_CUDART_MAJOR == 12 ? "libcudart.so.12" : "libcudart.so.13";

std::map<std::string, std::string> read_conventions() {
    std::map<std::string, std::string> kinds;
    for (const auto& [symbol, convention] : read_table(GDRKIT_CONTRACT)) {
        CHECK(kinds.emplace(symbol, convention).second);
    }
    return kinds;
}

void test_exports_match_contract() {
    std::set<std::string> symbols = read_exported_symbols(GDRKIT_CUDART_TWIN);
    CHECK(symbols.erase(symbol_version) == 1); // the linker also defines a symbol with the name of the version
    for (const auto& [symbol, convention] : read_conventions()) {
        CHECK(symbols.erase(symbol) == 1);
        CHECK(dlvsym(runtime(), symbol.c_str(), symbol_version) == find_function(symbol.c_str()));
    }
    CHECK(symbols.empty());
}

// Each call of an unimplemented function fails, and the first call prints one line. The functions need no driver for
// this.
void test_unimplemented_functions_fail() {
    int count = 0;
    const std::string text = capture_stderr([&] {
        for (const auto& [symbol, convention] : read_conventions()) {
            if (convention == "not_supported") {
                EXPECT_ERROR(not_supported, symbol.c_str());
                EXPECT_ERROR(not_supported, symbol.c_str());
                ++count;
            }
        }
    });
    CHECK(count > 100 && std::count(text.begin(), text.end(), '\n') == count);
    CHECK(text.find("gdrkit: cudaGraphAddKernelNode fails with cudaErrorNotSupported: ") != std::string::npos);
    EXPECT_ERROR(not_supported, "cudaGetLastError");
    EXPECT_OK("cudaGetLastError");
}

void test_errors_have_names_and_texts() {
    const auto get_text = [](const char* symbol, int code) {
        return std::string_view(reinterpret_cast<const char* (*)(int)>(find_function(symbol))(code));
    };
    CHECK(get_text("cudaGetErrorName", 2) == "cudaErrorMemoryAllocation");
    CHECK(get_text("cudaGetErrorName", 801) == "cudaErrorNotSupported");
    CHECK(get_text("cudaGetErrorString", 2) == "out of memory");
    CHECK(get_text("cudaGetErrorString", 35) == "CUDA driver version is insufficient for CUDA runtime version");
    CHECK(get_text("cudaGetErrorName", 5555) == "unrecognized error code");
    CHECK(get_text("cudaGetErrorString", -1) == "unrecognized error code");
}

} // namespace

int main() {
    test_exports_match_contract();
    test_unimplemented_functions_fail();
    test_errors_have_names_and_texts();
}
