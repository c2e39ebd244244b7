// Tests of the exported functions of a CUDA runtime twin: they match the contract and have the version of the library,
// and unimplemented ones fail as documented.
#include <algorithm>
#include <map>

#include "contract.hpp"
#include "cudart_library.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cudart;

namespace {

constexpr const char* version = GDRKIT_CUDART_MAJOR == 12 ? "libcudart.so.12" : "libcudart.so.13";

std::map<std::string, std::string> conventions() {
    std::map<std::string, std::string> kinds;
    for (const auto& [symbol, kind] : read_table(GDRKIT_CONTRACT)) {
        CHECK(kinds.emplace(symbol, kind).second);
    }
    return kinds;
}

void test_exports_match_contract() {
    std::set<std::string> symbols = exported_symbols(GDRKIT_CUDART_TWIN);
    CHECK(symbols.erase(version) == 1); // the symbol of the version itself
    for (const auto& [symbol, kind] : conventions()) {
        CHECK(symbols.erase(symbol) == 1);
        CHECK(dlvsym(runtime(), symbol.c_str(), version) == function(symbol.c_str()));
    }
    CHECK(symbols.empty());
}

// Each call fails, and prints one line once. No function needs a driver for that.
void test_unimplemented_functions_fail() {
    int count = 0;
    const std::string text = stderr_of([&] {
        for (const auto& [symbol, kind] : conventions()) {
            if (kind == "not_supported") {
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
    const auto text_of = [](const char* symbol, int code) {
        return std::string_view(reinterpret_cast<const char* (*)(int)>(function(symbol))(code));
    };
    CHECK(text_of("cudaGetErrorName", 2) == "cudaErrorMemoryAllocation");
    CHECK(text_of("cudaGetErrorName", 801) == "cudaErrorNotSupported");
    CHECK(text_of("cudaGetErrorString", 2) == "out of memory");
    CHECK(text_of("cudaGetErrorString", 35) == "CUDA driver version is insufficient for CUDA runtime version");
    CHECK(text_of("cudaGetErrorName", 5555) == "unrecognized error code");
    CHECK(text_of("cudaGetErrorString", -1) == "unrecognized error code");
}

} // namespace

int main() {
    test_exports_match_contract();
    test_unimplemented_functions_fail();
    test_errors_have_names_and_texts();
}
