// Tests of the software twin of libcuda: the fault plan, which makes chosen calls fail, and the ledger, which counts
// calls and live handles.
#include <cerrno>
#include <fstream>

#include "cuda_driver.hpp"

using namespace gdrkit::twin::cuda;

namespace {

std::string read_ledger() {
    // A call without a buffer returns the length of the text.
    const int length_bytes = call_driver("gdrkit_twin_ledger", static_cast<char*>(nullptr), u64{0});
    std::vector<char> json(static_cast<std::size_t>(length_bytes) + 1);
    CHECK(call_driver("gdrkit_twin_ledger", json.data(), u64{json.size()}) == length_bytes);
    return json.data();
}

bool ledger_contains(const std::string& text) {
    return read_ledger().find(text) != std::string::npos;
}

// Run cuInit in a child process that reads this fault plan from a file, and check the result. The first line of a plan
// names the format. Each other line is a rule: a function, the numbers of its calls (the first is 1, and * means all
// calls), and the result of these calls as status= or errno=.
void check_plan_from_environment(const char* plan_text, int expected_result) {
    char plan_path[] = "/tmp/gdrkit-faults-XXXXXX";
    const int fd = mkstemp(plan_path);
    CHECK(fd >= 0);
    close(fd);
    std::ofstream(plan_path) << plan_text;
    const int status = run_in_child([&] {
        setenv("GDRKIT_TWINS_FAULTS", plan_path, 1);
        EXPECT_RESULT(expected_result, "cuInit", 0U);
    });
    unlink(plan_path);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void test_plans_from_environment() {
    // The status 999 is CUDA_ERROR_UNKNOWN.
    check_plan_from_environment("gdrkit-faults 1\ncuInit call=1 status=999\n", unknown_error);
    check_plan_from_environment("gdrkit-faults 1\n# rules of other twins are ignored\nibv_reg_mr call=* errno=14\n",
                                success);
    // A plan is refused if it names an unknown function, or sets errno= for a function that returns a status.
    check_plan_from_environment("gdrkit-faults 1\ncuNothing call=1 status=1\n", invalid_value);
    check_plan_from_environment("gdrkit-faults 1\ncuInit call=1 errno=5\n", invalid_value);
    // cuModuleLoad is not implemented, so a plan cannot make it fail.
    check_plan_from_environment("gdrkit-faults 1\ncuModuleLoad call=1 status=1\n", invalid_value);
    // A plan without the first line is refused.
    check_plan_from_environment("something else\n", invalid_value);
}

void test_injected_failure_has_no_effect() {
    const u64 free_bytes_before = query_free_memory();
    // The status 2 is CUDA_ERROR_OUT_OF_MEMORY, and 719 is CUDA_ERROR_LAUNCH_FAILED.
    CHECK(call_driver("gdrkit_twin_faults",
                      "gdrkit-faults 1\ncuMemAlloc_v2 call=2-3 status=2\ncuCtxSynchronize call=* status=719\n") == 0);
    u64 pointer = 0, second_pointer = 0;
    // The calls 2 and 3 of cuMemAlloc_v2 fail, and store no pointer.
    EXPECT_SUCCESS("cuMemAlloc_v2", &pointer, u64{4096});
    EXPECT_RESULT(out_of_memory, "cuMemAlloc_v2", &second_pointer, u64{4096});
    EXPECT_RESULT(out_of_memory, "cuMemAlloc_v2", &second_pointer, u64{4096});
    CHECK(second_pointer == 0);
    EXPECT_SUCCESS("cuMemAlloc_v2", &second_pointer, u64{4096});
    EXPECT_RESULT(719, "cuCtxSynchronize");
    // A plan that is refused leaves the previous plan in force. A plan without rules makes no call fail.
    CHECK(call_driver("gdrkit_twin_faults", "gdrkit-faults 1\ncuNonsense\n") == EINVAL);
    EXPECT_RESULT(719, "cuCtxSynchronize");
    CHECK(call_driver("gdrkit_twin_faults", "gdrkit-faults 1\n") == 0);
    EXPECT_SUCCESS("cuCtxSynchronize");
    // The ledger also counts the calls that a plan made fail.
    CHECK(ledger_contains("\"cuMemAlloc_v2\":4"));
    EXPECT_SUCCESS("cuMemFree_v2", pointer);
    EXPECT_SUCCESS("cuMemFree_v2", second_pointer);
    CHECK(query_free_memory() == free_bytes_before);
}

void test_ledger_lists_live_handles() {
    CHECK(ledger_contains("{\"library\":\"cuda\",\"handles\":{\"cuda_primary_context\":1},") &&
          ledger_contains("\"seed\":42}"));
    const u64 pointer = allocate(1);
    Handle stream = 0, event = 0;
    void* host_memory = nullptr;
    EXPECT_SUCCESS("cuStreamCreate", &stream, 0U);
    EXPECT_SUCCESS("cuEventCreate", &event, 0U);
    EXPECT_SUCCESS("cuMemHostAlloc", &host_memory, u64{1}, 0U);
    CHECK(ledger_contains("\"cuda_event\":1") && ledger_contains("\"cuda_host_memory\":1") &&
          ledger_contains("\"cuda_memory\":1") && ledger_contains("\"cuda_stream\":1"));
    EXPECT_SUCCESS("cuMemFreeHost", host_memory);
    EXPECT_SUCCESS("cuEventDestroy_v2", event);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
    EXPECT_SUCCESS("cuMemFree_v2", pointer);
    CHECK(ledger_contains("\"handles\":{\"cuda_primary_context\":1},"));
    EXPECT_SUCCESS("cuDevicePrimaryCtxRelease_v2", 0);
    CHECK(ledger_contains("\"handles\":{},"));
}

} // namespace

int main() {
    setenv("GDRKIT_TWINS_SEED", "42", 1);
    test_plans_from_environment();
    use_primary_context();
    test_injected_failure_has_no_effect();
    test_ledger_lists_live_handles();
}
