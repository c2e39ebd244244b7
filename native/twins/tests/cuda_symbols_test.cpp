// Tests that the software twin of libcuda exports the functions of its contract (a list in native/twins/contracts),
// that unimplemented functions fail as documented, and that cuGetProcAddress finds every function that cuda-bindings
// requests. Other tests check error names, calls before cuInit, and a forked child.
#include <algorithm>
#include <map>
#include <set>

#include "contract.hpp"
#include "cuda_driver.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cuda;

namespace {

// A line of functions.def: one form of a function, such as cuMemAlloc_v2 of cuMemAlloc.
struct Function {
    const char* name;
    int since; // CUDA version that introduced this form of the function, or 0 if cuGetProcAddress does not return it
    const char* symbol;
    const char* convention; // how an unimplemented function fails, as in cuda.conventions
};

constexpr Function functions[] = {
#define X(name, since, symbol, convention) {#name, since, #symbol, #convention},
#include "cuda/functions.def"
#undef X
};

void test_exports_match_contract() {
    std::set<std::string> contract_symbols;
    std::map<std::string, std::string> conventions;
    for (const auto& [symbol, convention] : read_table(GDRKIT_CONTRACTS "/cuda.conventions")) {
        CHECK(contract_symbols.insert(symbol).second);
        conventions[symbol] = convention;
    }
    CHECK(contract_symbols == read_exported_symbols(GDRKIT_CUDA_TWIN));
    for (const Function& function : functions) {
        CHECK(conventions[function.symbol] == function.convention);
        conventions.erase(function.symbol);
    }
    // functions.def lacks only the functions of the control interface.
    CHECK(conventions.size() == 3 && conventions.contains("gdrkit_twin_ledger") &&
          conventions.contains("gdrkit_twin_faults") && conventions.contains("gdrkit_twin_gpu_usage"));
}

void test_unimplemented_functions_fail() {
    int unimplemented_count = 0;
    for (const Function& function : functions) {
        if (std::string_view(function.convention) == "not_supported") {
            EXPECT_RESULT(not_supported, function.symbol);
            ++unimplemented_count;
        }
    }
    CHECK(unimplemented_count > 300);
}

// The twin has no export tables. cuGetExportTable stores null, so that the CUDA runtime does not use an old value.
void test_export_table_is_null() {
    int placeholder = 0;
    const void* export_table = &placeholder;
    EXPECT_RESULT(not_supported, "cuGetExportTable", &export_table, static_cast<const void*>(&placeholder));
    CHECK(export_table == nullptr);
}

void test_proc_address_returns_newest_form() {
    for (const auto& [requested_name, version_text] : read_table(GDRKIT_CONTRACTS "/cuda.symbols")) {
        const int version = std::stoi(version_text);
        // The newest form of the function that the requested version of CUDA already had.
        const Function* newest_form = nullptr;
        bool is_known = false;
        for (const Function& function : functions) {
            is_known |= requested_name == function.name;
            if (requested_name == function.name && function.since != 0 && function.since <= version &&
                (newest_form == nullptr || function.since > newest_form->since)) {
                newest_form = &function;
            }
        }
        CHECK(is_known && newest_form != nullptr);
        void* function_address = nullptr;
        int lookup_status = -1;
        for (const u64 flags : {u64{proc_default}, u64{proc_legacy_stream}, u64{proc_per_thread_stream}}) {
            const int result = call_driver("cuGetProcAddress_v2", requested_name.c_str(), &function_address, version,
                                           flags, &lookup_status);
            if (version > driver_version) {
                CHECK(result == invalid_value);
                continue;
            }
            CHECK(result == success && lookup_status == proc_success);
            CHECK(function_address != nullptr && function_address == dlsym(driver_library(), newest_form->symbol));
        }
    }
}

void test_proc_address_reports_unknown_functions() {
    void* function_address = nullptr;
    int lookup_status = -1;
    EXPECT_SUCCESS("cuGetProcAddress_v2", "cuNothing", &function_address, 12000, u64{0}, &lookup_status);
    CHECK(function_address == nullptr && lookup_status == proc_symbol_not_found);
    // cuGetProcAddress expects names without the suffix _v2, and a version that is not newer than the driver (13000).
    EXPECT_SUCCESS("cuGetProcAddress_v2", "cuMemAlloc_v2", &function_address, 12000, u64{0}, &lookup_status);
    CHECK(function_address == nullptr && lookup_status == proc_symbol_not_found);
    EXPECT_SUCCESS("cuGetProcAddress_v2", "cuMemAlloc", &function_address, 1000, u64{0}, &lookup_status);
    CHECK(function_address == nullptr && lookup_status == proc_version_not_sufficient);
    EXPECT_RESULT(invalid_value, "cuGetProcAddress_v2", "cuMemAlloc", &function_address, 13010, u64{0}, &lookup_status);
    EXPECT_RESULT(invalid_value, "cuGetProcAddress_v2", "cuInit", &function_address, 12000, u64{8},
                  &lookup_status); // 8 is not a flag
    EXPECT_RESULT(not_found, "cuGetProcAddress", "cuNothing", &function_address, 12000, u64{0});
    EXPECT_SUCCESS("cuGetProcAddress", "cuMemAlloc", &function_address, 13000, u64{0});
    CHECK(function_address == dlsym(driver_library(), "cuMemAlloc_v2"));
}

void test_error_names() {
    const char* error_text = nullptr;
    EXPECT_SUCCESS("cuGetErrorName", 801, &error_text);
    CHECK(std::string_view(error_text) == "CUDA_ERROR_NOT_SUPPORTED");
    EXPECT_SUCCESS("cuGetErrorString", 1, &error_text);
    CHECK(std::string_view(error_text) == "invalid argument");
    EXPECT_RESULT(invalid_value, "cuGetErrorName", 5555, &error_text);
    CHECK(error_text == nullptr);
}

// Before cuInit only functions that do not need the driver succeed. In a forked child even cuInit fails.
void test_calls_before_init_fail() {
    u64 pointer = 0;
    int count = 0, version = 0;
    EXPECT_RESULT(not_initialized, "cuMemAlloc_v2", &pointer, u64{1});
    EXPECT_RESULT(not_initialized, "cuDeviceGetCount", &count);
    EXPECT_SUCCESS("cuDriverGetVersion", &version);
    CHECK(version == 13000);
    EXPECT_RESULT(invalid_value, "cuInit", 1U);
    EXPECT_SUCCESS("cuInit", 0U);
    EXPECT_SUCCESS("cuDeviceGetCount", &count);
    CHECK(count == 2);
    EXPECT_RESULT(invalid_context, "cuMemAlloc_v2", &pointer, u64{1});
    EXPECT_RESULT(invalid_context, "cuStreamSynchronize", u64{0});
    const int status = run_in_child([] { _exit(call_driver("cuInit", 0U) == not_initialized ? 0 : 1); });
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

} // namespace

int main() {
    test_exports_match_contract();
    test_unimplemented_functions_fail();
    test_export_table_is_null();
    test_proc_address_returns_newest_form();
    test_proc_address_reports_unknown_functions();
    test_error_names();
    test_calls_before_init_fail();
}
