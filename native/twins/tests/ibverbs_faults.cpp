// Tests of the software twin of libibverbs: the fault plan, which makes chosen calls and requests fail, and the ledger,
// which counts calls, live handles and bytes.
#include <dlfcn.h>

#include "control/control.h"
#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

// Return the ledger as JSON. The reserve of 4096 bytes is for a ledger that grows between the two calls.
std::string read_ledger() {
    std::string json(static_cast<std::size_t>(gdrkit_twin_ledger(nullptr, 0)) + 4096, '\0');
    json.resize(static_cast<std::size_t>(gdrkit_twin_ledger(json.data(), json.size())));
    return json;
}

bool ledger_contains(const std::string& text) {
    return read_ledger().find(text) != std::string::npos;
}

void set_fault_plan(const std::string& rules) {
    CHECK(gdrkit_twin_faults(("gdrkit-faults 1\n" + rules).c_str()) == 0);
}

void test_plan_injects_function_errors() {
    Endpoint endpoint;
    // The last rule is for the twin of the CUDA driver. This twin skips it.
    set_fault_plan(
        "ibv_alloc_pd call=2 errno=ENOMEM\nibv_query_gid call=* errno=EIO\nibv_dealloc_pd call=1 errno=EBUSY\n"
        "ibv_query_port call=1 errno=5\ncuMemAlloc_v2 call=1 status=2\n");
    ibv_pd* const first_pd = ibv_alloc_pd(endpoint.context);
    CHECK(first_pd != nullptr);
    errno = 0;
    CHECK(ibv_alloc_pd(endpoint.context) == nullptr && errno == ENOMEM);
    CHECK(ibv_dealloc_pd(first_pd) == EBUSY && ibv_dealloc_pd(first_pd) == 0);
    ibv_gid gid;
    errno = 0;
    CHECK(ibv_query_gid(endpoint.context, 1, 0, &gid) == -1 && errno == EIO);
    ibv_port_attr port{};
    CHECK(ibv_query_port(endpoint.context, 1, &port) == 5 && ibv_query_port(endpoint.context, 1, &port) == 0);
    set_fault_plan("ibv_reg_mr call=1 errno=EFAULT\n");
    // ibv_reg_mr is a macro that calls one of two functions, depending on `access`. The rule applies to both.
    // `access` is volatile, so that the compiler cannot choose the function.
    volatile int access = read_write_access;
    errno = 0;
    CHECK(ibv_reg_mr(endpoint.pd, &gid, sizeof gid, access) == nullptr && errno == EFAULT);
    set_fault_plan("ibv_reg_mr call=1 errno=EFAULT\n");
    errno = 0;
    CHECK(ibv_reg_mr(endpoint.pd, &gid, sizeof gid, IBV_ACCESS_LOCAL_WRITE) == nullptr && errno == EFAULT);
    set_fault_plan("ibv_poll_cq call=1 errno=EIO\n");
    ibv_wc wc{};
    CHECK(ibv_poll_cq(endpoint.cq, 1, &wc) == -EIO && ibv_poll_cq(endpoint.cq, 1, &wc) == 0);
    set_fault_plan("");
}

// A request with an injected completion error is not executed, and its queue pair enters the error state, like after
// any failure.
void test_plan_injects_completion_errors() {
    Endpoint requester, responder;
    connect(&requester, &responder);
    Buffer source(requester.pd, 8), target(responder.pd, 8);
    fill_pattern(source.bytes, 8);
    set_fault_plan("wc.rdma_write call=2 status=12\n"); // 12 is IBV_WC_RETRY_EXC_ERR
    CHECK(requester.post(make_request(1, IBV_WR_RDMA_WRITE, target.address_at(), target.mr->rkey),
                         {source.sge(0, 4)}) == 0);
    requester.expect_completion(1, IBV_WC_SUCCESS);
    CHECK(requester.post(make_request(2, IBV_WR_RDMA_WRITE, target.address_at(4), target.mr->rkey),
                         {source.sge(4, 4)}) == 0);
    requester.expect_completion(2, IBV_WC_RETRY_EXC_ERR);
    CHECK(target.bytes[4] == 0 && requester.query_state() == IBV_QPS_ERR);
    set_fault_plan("");
}

void test_malformed_plan_changes_nothing() {
    Endpoint endpoint;
    set_fault_plan("ibv_alloc_pd call=* errno=EIO\n");
    // The errors: no first line, another version, an unknown function, call number 0, no error, a function that cannot
    // fail, and an unknown status.
    for (const char* malformed_plan :
         {"", "gdrkit-faults 2\n", "gdrkit-faults 1\nibv_no_such call=1 errno=1\n",
          "gdrkit-faults 1\nibv_alloc_pd call=0 errno=1\n", "gdrkit-faults 1\nibv_alloc_pd call=1\n",
          "gdrkit-faults 1\nibv_free_device_list call=1 errno=1\n", "gdrkit-faults 1\nwc.send call=1 status=24\n"}) {
        CHECK(gdrkit_twin_faults(malformed_plan) == EINVAL);
    }
    CHECK(ibv_alloc_pd(endpoint.context) == nullptr); // the valid plan still applies
    set_fault_plan("");
}

void test_ledger_counts_handles_and_bytes() {
    CHECK(ledger_contains("\"library\":\"ibverbs\",\"handles\":{}") && ledger_contains("\"seed\":77,"));
    {
        Endpoint requester(0), responder(1);
        connect(&requester, &responder);
        Buffer source(requester.pd, 100), target(responder.pd, 100);
        CHECK(ledger_contains("\"ibv_mr\":2") && ledger_contains("\"ibv_qp\":2") && ledger_contains("\"ibv_pd\":2") &&
              ledger_contains("\"ibv_context\":2"));
        CHECK(requester.post(make_request(1, IBV_WR_RDMA_WRITE, target.address_at(), target.mr->rkey),
                             {source.sge(0, 60)}) == 0);
        CHECK(requester.post(make_request(2, IBV_WR_RDMA_READ, target.address_at(), target.mr->rkey),
                             {source.sge(0, 50)}) == 0);
        requester.expect_completion(1, IBV_WC_SUCCESS);
        requester.expect_completion(2, IBV_WC_SUCCESS);
        CHECK(ledger_contains("\"twin0\":{\"write_bytes\":60,\"read_bytes\":50,\"send_bytes\":0,"
                              "\"atomic_bytes\":0,\"requests\":2,"));
        CHECK(ledger_contains(
            "\"twin1\":{\"write_bytes\":0,\"read_bytes\":0,\"send_bytes\":0,\"atomic_bytes\":0,\"requests\":0,"
            "\"served_write_bytes\":60,\"served_read_bytes\":50,"));
    }
    CHECK(ledger_contains("\"handles\":{}") && ledger_contains("\"ibv_reg_mr\":2"));
    char short_buffer[10];
    CHECK(gdrkit_twin_ledger(short_buffer, sizeof short_buffer) > 10 && std::string(short_buffer) == "{\"library");
}

} // namespace

int main() {
    isolate_from_other_processes();
    setenv("GDRKIT_TWINS_SEED", "77", 1);   // the ledger contains this number
    test_ledger_counts_handles_and_bytes(); // runs first, because the counters start at 0
    test_plan_injects_function_errors();
    test_plan_injects_completion_errors();
    test_malformed_plan_changes_nothing();
    return 0;
}
