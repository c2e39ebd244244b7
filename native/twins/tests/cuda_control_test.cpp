// Faults and the look inside.
#include <cerrno>
#include <fstream>

#include "cuda_driver.hpp"

using namespace gdrkit::twin::cuda;

namespace {

std::string ledger() {
    const int length = cu("gdrkit_twin_ledger", static_cast<char*>(nullptr), u64{0});
    std::vector<char> text(static_cast<std::size_t>(length) + 1);
    CHECK(cu("gdrkit_twin_ledger", text.data(), u64{text.size()}) == length);
    return text.data();
}

bool holds(const std::string& part) {
    return ledger().find(part) != std::string::npos;
}

// A plan in a file, read when the library is first called.
void plan_of_the_environment(const char* text, int answer_of_init) {
    char path[] = "/tmp/gdrkit-faults-XXXXXX";
    const int fd = mkstemp(path);
    CHECK(fd >= 0);
    close(fd);
    std::ofstream(path) << text;
    const int status = status_of_child([&] {
        setenv("GDRKIT_TWINS_FAULTS", path, 1);
        ANSWERS(answer_of_init, "cuInit", 0U);
    });
    unlink(path);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void plans_are_read() {
    plan_of_the_environment("gdrkit-faults 1\ncuInit call=1 status=999\n", unknown_error);
    plan_of_the_environment("gdrkit-faults 1\n# rules of others are left to them\nibv_reg_mr call=* errno=14\n",
                            success);
    plan_of_the_environment("gdrkit-faults 1\ncuNothing call=1 status=1\n", invalid_value);
    plan_of_the_environment("gdrkit-faults 1\ncuInit call=1 errno=5\n", invalid_value);
    plan_of_the_environment("gdrkit-faults 1\ncuModuleLoad call=1 status=1\n", invalid_value); // always fails
    plan_of_the_environment("something else\n", invalid_value);
}

void faults_have_no_effect_below() {
    const u64 before = free_memory();
    CHECK(cu("gdrkit_twin_faults",
             "gdrkit-faults 1\ncuMemAlloc_v2 call=2-3 status=2\ncuCtxSynchronize call=* status=719\n") == 0);
    u64 pointer = 0, other = 0;
    WORKS("cuMemAlloc_v2", &pointer, u64{4096});
    ANSWERS(out_of_memory, "cuMemAlloc_v2", &other, u64{4096});
    ANSWERS(out_of_memory, "cuMemAlloc_v2", &other, u64{4096});
    CHECK(other == 0);
    WORKS("cuMemAlloc_v2", &other, u64{4096});
    ANSWERS(719, "cuCtxSynchronize");
    CHECK(cu("gdrkit_twin_faults", "gdrkit-faults 1\ncuNonsense\n") == EINVAL);
    ANSWERS(719, "cuCtxSynchronize");
    CHECK(cu("gdrkit_twin_faults", "gdrkit-faults 1\n") == 0);
    WORKS("cuCtxSynchronize");
    CHECK(holds("\"cuMemAlloc_v2\":4"));
    WORKS("cuMemFree_v2", pointer);
    WORKS("cuMemFree_v2", other);
    CHECK(free_memory() == before);
}

void the_ledger_names_what_is_held() {
    CHECK(holds("{\"library\":\"cuda\",\"handles\":{\"cuda_primary_context\":1},") && holds("\"seed\":42}"));
    const u64 pointer = allocate(1);
    Handle stream = 0, event = 0;
    void* host = nullptr;
    WORKS("cuStreamCreate", &stream, 0U);
    WORKS("cuEventCreate", &event, 0U);
    WORKS("cuMemHostAlloc", &host, u64{1}, 0U);
    CHECK(holds("\"cuda_event\":1") && holds("\"cuda_host_memory\":1") && holds("\"cuda_memory\":1") &&
          holds("\"cuda_stream\":1"));
    WORKS("cuMemFreeHost", host);
    WORKS("cuEventDestroy_v2", event);
    WORKS("cuStreamDestroy_v2", stream);
    WORKS("cuMemFree_v2", pointer);
    CHECK(holds("\"handles\":{\"cuda_primary_context\":1},"));
    WORKS("cuDevicePrimaryCtxRelease_v2", 0);
    CHECK(holds("\"handles\":{},"));
}

} // namespace

int main() {
    setenv("GDRKIT_TWINS_SEED", "42", 1);
    plans_are_read();
    begin();
    faults_have_no_effect_below();
    the_ledger_names_what_is_held();
}
