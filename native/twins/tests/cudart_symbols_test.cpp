// Tests that a software twin of libcudart (the CUDA runtime) exports the functions of its contract (a list in
// native/twins/contracts) with the symbol version of the library, that unimplemented functions fail as documented, and
// that errors have names and texts.
#include <algorithm>
#include <map>

#include "contract.hpp"
#include "cudart_library.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cudart;

namespace {

constexpr const char* symbol_version = GDRKIT_CUDART_MAJOR == 12 ? "libcudart.so.12" : "libcudart.so.13";

std::map<std::string, std::string> read_error_conventions() {
    std::map<std::string, std::string> error_conventions;
    for (const auto& [symbol, error_convention] : read_table(GDRKIT_CONTRACT)) {
        CHECK(error_conventions.emplace(symbol, error_convention).second);
    }
    return error_conventions;
}

void test_exports_match_contract() {
    std::set<std::string> symbols = read_exported_symbols(GDRKIT_CUDART_TWIN);
    CHECK(symbols.erase(symbol_version) == 1); // the linker also defines a symbol with the name of the version
    for (const auto& [symbol, error_convention] : read_error_conventions()) {
        CHECK(symbols.erase(symbol) == 1);
        CHECK(dlvsym(runtime_library(), symbol.c_str(), symbol_version) == find_function(symbol.c_str()));
    }
    CHECK(symbols.empty());
}

// Each call of an unimplemented function fails, even before the driver is initialized. The first call prints one line.
void test_unimplemented_functions_fail() {
    int unimplemented_count = 0;
    const std::string stderr_text = capture_stderr([&] {
        for (const auto& [symbol, error_convention] : read_error_conventions()) {
            if (error_convention == "not_supported") {
                EXPECT_ERROR(not_supported, symbol.c_str());
                EXPECT_ERROR(not_supported, symbol.c_str());
                ++unimplemented_count;
            }
        }
    });
    CHECK(unimplemented_count > 100 && std::count(stderr_text.begin(), stderr_text.end(), '\n') == unimplemented_count);
    CHECK(stderr_text.find("gdrkit: cudaGraphAddKernelNode fails with cudaErrorNotSupported: ") != std::string::npos);
    EXPECT_ERROR(not_supported, "cudaGetLastError");
    EXPECT_OK("cudaGetLastError");
}

void test_errors_have_names_and_texts() {
    const auto get_error_text = [](const char* symbol, int code) {
        return std::string_view(reinterpret_cast<const char* (*)(int)>(find_function(symbol))(code));
    };
    CHECK(get_error_text("cudaGetErrorName", 2) == "cudaErrorMemoryAllocation");
    CHECK(get_error_text("cudaGetErrorName", 801) == "cudaErrorNotSupported");
    CHECK(get_error_text("cudaGetErrorString", 2) == "out of memory");
    CHECK(get_error_text("cudaGetErrorString", 35) == "CUDA driver version is insufficient for CUDA runtime version");
    CHECK(get_error_text("cudaGetErrorName", 5555) == "unrecognized error code");
    CHECK(get_error_text("cudaGetErrorString", -1) == "unrecognized error code");
}

} // namespace

int main() {
    test_exports_match_contract();
    test_unimplemented_functions_fail();
    test_errors_have_names_and_texts();
}
