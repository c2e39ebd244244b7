// What the library exports is what the contract says, what is not there says so, and nothing works before the driver is
// open.
#include <algorithm>
#include <map>
#include <set>

#include "contract.hpp"
#include "cufile_library.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cufile;

namespace {

constexpr std::pair<const char*, const char*> functions[] = {
#define X(symbol, kind) {#symbol, #kind},
#include "cufile/functions.def"
#undef X
};

void contract_is_what_is_exported() {
    std::map<std::string, std::string> conventions;
    std::set<std::string> promised;
    for (const auto& [symbol, kind] : read_table(GDRKIT_CONTRACTS "/cufile.conventions")) {
        CHECK(promised.insert(symbol).second);
        conventions[symbol] = kind;
    }
    CHECK(promised == exported(GDRKIT_CUFILE_TWIN));
    for (const auto& [symbol, kind] : functions) {
        CHECK(conventions[symbol] == kind);
        conventions.erase(symbol);
    }
    CHECK(conventions.size() == 2 && conventions.contains("gdrkit_twin_ledger") &&
          conventions.contains("gdrkit_twin_faults"));
}

void what_the_bindings_ask_for_is_there() {
    std::ifstream file(GDRKIT_CONTRACTS "/cufile.symbols");
    int count = 0;
    for (std::string line; std::getline(file, line);) {
        if (!line.empty() && line[0] != '#') {
            CHECK(dlsym(library(), line.c_str()) != nullptr);
            ++count;
        }
    }
    CHECK(count == 45);
}

void what_is_not_supported_says_so() {
    int count = 0;
    for (const auto& [symbol, kind] : functions) {
        if (std::string_view(kind) == "unsupported") {
            SAYS(platform_not_supported, symbol);
            ++count;
        }
    }
    CHECK(count == 5);
}

void nothing_works_before_the_driver_is_open() {
    StatsLevel3 statistics{};
    BatchHandle batch = nullptr;
    std::size_t size_kb = 0;
    SAYS(driver_not_initialized, "cuFileDriverClose");
    SAYS(driver_not_initialized, "cuFileStatsStart");
    SAYS(driver_not_initialized, "cuFileGetStatsL3", &statistics);
    SAYS(driver_not_initialized, "cuFileBatchIOSetUp", &batch, 4U);
    SAYS(driver_not_initialized, "cuFileStreamRegister", u64{0}, 0U);
    SAYS(driver_not_initialized, "cuFileGetBARSizeInKB", 0, &size_kb);
    // As the real one answers it.
    SAYS(driver_closing, "cuFileBufDeregister", static_cast<const void*>(&size_kb));
    CHECK(read_file(nullptr, 4096, 4096) == -driver_not_initialized);
    CHECK(call<long>("cuFileUseCount") == 0);
    int version = 0;
    SAYS(success, "cuFileGetVersion", &version);
    CHECK(version == library_version);
    SAYS(invalid_value, "cuFileGetVersion", static_cast<int*>(nullptr));
}

void the_driver_counts_its_uses() {
    SAYS(success, "cuFileDriverOpen");
    SAYS(success, "cuFileDriverOpen");
    CHECK(call<long>("cuFileUseCount") == 2);
    SAYS(success, "cuFileDriverClose_v2");
    SAYS(success, "cuFileDriverClose");
    CHECK(call<long>("cuFileUseCount") == 0);
    SAYS(driver_not_initialized, "cuFileDriverClose");
}

void parameters_are_staged_and_then_kept() {
    SAYS(success, "cuFileSetParameterSizeT", 9, std::size_t{16});
    SAYS(success, "cuFileDriverOpen");
    DriverProperties properties{};
    SAYS(success, "cuFileDriverGetProperties", &properties);
    CHECK(properties.max_batch_io == 16 && properties.nvfs.major_version == 0);
    SAYS(driver_already_open, "cuFileSetParameterSizeT", 9, std::size_t{32});
    BatchHandle batch = nullptr;
    SAYS(invalid_value, "cuFileBatchIOSetUp", &batch, 17U);
    SAYS(success, "cuFileDriverClose");
}

void a_plan_fails_a_call_once() {
    plan("cuFileDriverOpen call=1 status=5011");
    SAYS(cuda_driver_error, "cuFileDriverOpen");
    SAYS(success, "cuFileDriverOpen");
    SAYS(success, "cuFileDriverClose");
    CHECK(call<int>("gdrkit_twin_faults", "gdrkit-faults 1\ncuFileDriverOpen call=1 status=9999\n") == EINVAL);
    CHECK(call<int>("gdrkit_twin_faults", "gdrkit-faults 1\ncufile.nothing call=1 status=5011\n") == EINVAL);
}

} // namespace

int main() {
    contract_is_what_is_exported();
    what_the_bindings_ask_for_is_there();
    what_is_not_supported_says_so();
    nothing_works_before_the_driver_is_open();
    the_driver_counts_its_uses();
    parameters_are_staged_and_then_kept();
    a_plan_fails_a_call_once();
}
