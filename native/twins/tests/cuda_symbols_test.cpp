// What the library exports is what the contracts say, every entry that is not implemented says so, and the function
// table that cuda-bindings asks for is served.
#include <algorithm>
#include <map>
#include <set>

#include "contract.hpp"
#include "cuda_driver.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cuda;

namespace {

struct Function {
    const char* name;
    int since;
    const char* symbol;
    const char* kind;
};

constexpr Function functions[] = {
#define X(name, since, symbol, kind) {#name, since, #symbol, #kind},
#include "cuda/functions.def"
#undef X
};

void contract_is_what_is_exported() {
    std::set<std::string> promised;
    std::map<std::string, std::string> conventions;
    for (const auto& [symbol, kind] : read_table(GDRKIT_CONTRACTS "/cuda.conventions")) {
        CHECK(promised.insert(symbol).second);
        conventions[symbol] = kind;
    }
    CHECK(promised == exported(GDRKIT_CUDA_TWIN));
    for (const Function& function : functions) {
        CHECK(conventions[function.symbol] == function.kind);
        conventions.erase(function.symbol);
    }
    CHECK(conventions.size() == 2 && conventions.contains("gdrkit_twin_ledger") &&
          conventions.contains("gdrkit_twin_faults"));
}

void unimplemented_entries_say_so() {
    int count = 0;
    for (const Function& function : functions) {
        if (std::string_view(function.kind) == "not_supported") {
            ANSWERS(not_supported, function.symbol);
            ++count;
        }
    }
    CHECK(count > 300);
}

void function_table_is_served() {
    for (const auto& [name, version_text] : read_table(GDRKIT_CONTRACTS "/cuda.symbols")) {
        const int version = std::stoi(version_text);
        const Function* newest = nullptr;
        bool known = false;
        for (const Function& function : functions) {
            known |= name == function.name;
            if (name == function.name && function.since != 0 && function.since <= version &&
                (newest == nullptr || function.since > newest->since)) {
                newest = &function;
            }
        }
        CHECK(known && newest != nullptr);
        void* entry = nullptr;
        int status = -1;
        for (const u64 flags : {u64{proc_default}, u64{proc_legacy_stream}, u64{proc_per_thread_stream}}) {
            const int answer = cu("cuGetProcAddress_v2", name.c_str(), &entry, version, flags, &status);
            if (version > driver_version) {
                CHECK(answer == invalid_value);
                continue;
            }
            CHECK(answer == success && status == proc_success);
            CHECK(entry != nullptr && entry == dlsym(driver(), newest->symbol));
        }
    }
}

void lookups_fail_as_documented() {
    void* entry = nullptr;
    int status = -1;
    WORKS("cuGetProcAddress_v2", "cuNothing", &entry, 12000, u64{0}, &status);
    CHECK(entry == nullptr && status == proc_symbol_not_found);
    WORKS("cuGetProcAddress_v2", "cuMemAlloc_v2", &entry, 12000, u64{0}, &status);
    CHECK(entry == nullptr && status == proc_symbol_not_found);
    WORKS("cuGetProcAddress_v2", "cuMemAlloc", &entry, 1000, u64{0}, &status);
    CHECK(entry == nullptr && status == proc_version_not_sufficient);
    ANSWERS(invalid_value, "cuGetProcAddress_v2", "cuMemAlloc", &entry, 13010, u64{0}, &status);
    ANSWERS(invalid_value, "cuGetProcAddress_v2", "cuInit", &entry, 12000, u64{8}, &status);
    ANSWERS(not_found, "cuGetProcAddress", "cuNothing", &entry, 12000, u64{0});
    WORKS("cuGetProcAddress", "cuMemAlloc", &entry, 13000, u64{0});
    CHECK(entry == dlsym(driver(), "cuMemAlloc_v2"));
}

void errors_have_names() {
    const char* text = nullptr;
    WORKS("cuGetErrorName", 801, &text);
    CHECK(std::string_view(text) == "CUDA_ERROR_NOT_SUPPORTED");
    WORKS("cuGetErrorString", 1, &text);
    CHECK(std::string_view(text) == "invalid argument");
    ANSWERS(invalid_value, "cuGetErrorName", 5555, &text);
    CHECK(text == nullptr);
}

// cuInit was not called yet: only what needs no driver works.
void nothing_works_before_init() {
    u64 pointer = 0;
    int count = 0, version = 0;
    ANSWERS(not_initialized, "cuMemAlloc_v2", &pointer, u64{1});
    ANSWERS(not_initialized, "cuDeviceGetCount", &count);
    WORKS("cuDriverGetVersion", &version);
    CHECK(version == 13000);
    ANSWERS(invalid_value, "cuInit", 1U);
    WORKS("cuInit", 0U);
    WORKS("cuDeviceGetCount", &count);
    CHECK(count == 2);
    ANSWERS(invalid_context, "cuMemAlloc_v2", &pointer, u64{1});
    ANSWERS(invalid_context, "cuStreamSynchronize", u64{0});
    const int status = status_of_child([] { _exit(cu("cuInit", 0U) == not_initialized ? 0 : 1); });
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

} // namespace

int main() {
    contract_is_what_is_exported();
    unimplemented_entries_say_so();
    function_table_is_served();
    lookups_fail_as_documented();
    errors_have_names();
    nothing_works_before_init();
}
