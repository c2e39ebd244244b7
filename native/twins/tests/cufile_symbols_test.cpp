// Tests of the functions that the software twin of libcufile (GPUDirect Storage) exports, and of opening and closing
// its driver. The exports match the contract. Unsupported functions and calls before cuFileDriverOpen fail as
// documented. The last close closes the driver, and parameters take effect at the open. Injected failures happen once.
#include <algorithm>
#include <map>
#include <set>

#include "contract.hpp"
#include "cufile_library.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cufile;

namespace {

// Each pair has a function of the twin, and the convention by which it reports an error (contracts/cufile.conventions).
constexpr std::pair<const char*, const char*> functions[] = {
#define X(symbol, convention) {#symbol, #convention},
#include "cufile/functions.def"
#undef X
};

void test_exports_match_contract() {
    std::map<std::string, std::string> conventions;
    std::set<std::string> contract_symbols;
    for (const auto& [symbol, convention] : read_table(GDRKIT_CONTRACTS "/cufile.conventions")) {
        CHECK(contract_symbols.insert(symbol).second);
        conventions[symbol] = convention;
    }
    CHECK(contract_symbols == read_exported_symbols(GDRKIT_CUFILE_TWIN));
    for (const auto& [symbol, convention] : functions) {
        CHECK(conventions[symbol] == convention);
        conventions.erase(symbol);
    }
    // The control functions of the twin are not in functions.def.
    CHECK(conventions.size() == 2 && conventions.contains("gdrkit_twin_ledger") &&
          conventions.contains("gdrkit_twin_faults"));
}

void test_symbols_of_bindings_exist() {
    std::ifstream file(GDRKIT_CONTRACTS "/cufile.symbols");
    int name_count = 0;
    for (std::string line; std::getline(file, line);) {
        if (!line.empty() && line[0] != '#') {
            CHECK(dlsym(twin_library(), line.c_str()) != nullptr);
            ++name_count;
        }
    }
    CHECK(name_count == 45); // the number of names in cufile.symbols
}

void test_unsupported_functions_fail() {
    int unsupported_function_count = 0;
    for (const auto& [symbol, convention] : functions) {
        if (std::string_view(convention) == "unsupported") {
            EXPECT_STATUS(platform_not_supported, symbol);
            ++unsupported_function_count;
        }
    }
    CHECK(unsupported_function_count == 5);
}

void test_calls_before_open_fail() {
    StatsLevel3 statistics{};
    BatchHandle batch = nullptr;
    std::size_t size_kb = 0;
    EXPECT_STATUS(driver_not_initialized, "cuFileDriverClose");
    EXPECT_STATUS(driver_not_initialized, "cuFileStatsStart");
    EXPECT_STATUS(driver_not_initialized, "cuFileGetStatsL3", &statistics);
    EXPECT_STATUS(driver_not_initialized, "cuFileBatchIOSetUp", &batch, 4U);
    EXPECT_STATUS(driver_not_initialized, "cuFileStreamRegister", u64{0}, 0U);
    EXPECT_STATUS(driver_not_initialized, "cuFileGetBARSizeInKB", 0, &size_kb);
    // The real cuFileBufDeregister returns driver_closing if the driver is not open.
    EXPECT_STATUS(driver_closing, "cuFileBufDeregister", static_cast<const void*>(&size_kb));
    CHECK(read_file(nullptr, 4096, 4096) == -driver_not_initialized);
    CHECK(call<long>("cuFileUseCount") == 0);
    int version = 0;
    EXPECT_STATUS(success, "cuFileGetVersion", &version);
    CHECK(version == 1200);
    EXPECT_STATUS(invalid_value, "cuFileGetVersion", static_cast<int*>(nullptr));
}

void test_driver_closes_with_last_use() {
    EXPECT_STATUS(success, "cuFileDriverOpen");
    EXPECT_STATUS(success, "cuFileDriverOpen");
    CHECK(call<long>("cuFileUseCount") == 2);
    EXPECT_STATUS(success, "cuFileDriverClose_v2");
    EXPECT_STATUS(success, "cuFileDriverClose");
    CHECK(call<long>("cuFileUseCount") == 0);
    EXPECT_STATUS(driver_not_initialized, "cuFileDriverClose");
}

// Parameters that a program sets take effect at cuFileDriverOpen, and cannot be changed while the driver is open. The
// parameter 9 is CUFILE_PARAM_PROPERTIES_IO_BATCHSIZE, the maximum number of entries of a batch, and 11 is
// CUFILE_PARAM_PROPERTIES_BATCH_IO_TIMEOUT_MS.
void test_parameters_apply_at_open() {
    EXPECT_STATUS(success, "cuFileSetParameterSizeT", 9, std::size_t{16});
    // cuFileGetParameterMinMaxValue reports a maximum of 1000 ms for the time-out of a batch, but
    // cuFileSetParameterSizeT accepts a larger value.
    EXPECT_STATUS(success, "cuFileSetParameterSizeT", 11, std::size_t{5000});
    EXPECT_STATUS(success, "cuFileDriverOpen");
    DriverProperties properties{};
    EXPECT_STATUS(success, "cuFileDriverGetProperties", &properties);
    CHECK(properties.max_batch_io == 16 && properties.nvfs.major_version == 0);
    EXPECT_STATUS(driver_already_open, "cuFileSetParameterSizeT", 9, std::size_t{32});
    BatchHandle batch = nullptr;
    EXPECT_STATUS(invalid_value, "cuFileBatchIOSetUp", &batch, 17U);
    EXPECT_STATUS(success, "cuFileDriverClose");
}

void test_injected_failure_happens_once() {
    set_fault_plan("cuFileDriverOpen call=1 status=5011"); // CU_FILE_CUDA_DRIVER_ERROR
    EXPECT_STATUS(cuda_driver_error, "cuFileDriverOpen");
    EXPECT_STATUS(success, "cuFileDriverOpen");
    EXPECT_STATUS(success, "cuFileDriverClose");
}

void test_invalid_fault_plan_is_refused() {
    // 9999 is not a status of cuFile, and cufile.nothing is not a fault point.
    CHECK(call<int>("gdrkit_twin_faults", "gdrkit-faults 1\ncuFileDriverOpen call=1 status=9999\n") == EINVAL);
    CHECK(call<int>("gdrkit_twin_faults", "gdrkit-faults 1\ncufile.nothing call=1 status=5011\n") == EINVAL);
}

} // namespace

int main() {
    test_exports_match_contract();
    test_symbols_of_bindings_exist();
    test_unsupported_functions_fail();
    test_calls_before_open_fail();
    test_driver_closes_with_last_use();
    test_parameters_apply_at_open();
    test_injected_failure_happens_once();
    test_invalid_fault_plan_is_refused();
}
