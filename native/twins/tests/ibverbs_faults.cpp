// The fault plan and the control interface.
#include <dlfcn.h>

#include "control/control.h"
#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

std::string ledger() {
    std::string text(static_cast<std::size_t>(gdrkit_twin_ledger(nullptr, 0)) + 4096, '\0');
    text.resize(static_cast<std::size_t>(gdrkit_twin_ledger(text.data(), text.size())));
    return text;
}

bool says(const std::string& what) {
    return ledger().find(what) != std::string::npos;
}

void plan(const std::string& rules) {
    CHECK(gdrkit_twin_faults(("gdrkit-faults 1\n" + rules).c_str()) == 0);
}

void functions_fail_as_planned() {
    Side a;
    plan("ibv_alloc_pd call=2 errno=ENOMEM\nibv_query_gid call=* errno=EIO\nibv_dealloc_pd call=1 errno=EBUSY\n"
         "ibv_query_port call=1 errno=5\ncuMemAlloc_v2 call=1 status=2\n");
    ibv_pd* const first = ibv_alloc_pd(a.context);
    CHECK(first != nullptr);
    errno = 0;
    CHECK(ibv_alloc_pd(a.context) == nullptr && errno == ENOMEM);
    CHECK(ibv_dealloc_pd(first) == EBUSY && ibv_dealloc_pd(first) == 0);
    ibv_gid gid;
    errno = 0;
    CHECK(ibv_query_gid(a.context, 1, 0, &gid) == -1 && errno == EIO);
    ibv_port_attr port{};
    CHECK(ibv_query_port(a.context, 1, &port) == 5 && ibv_query_port(a.context, 1, &port) == 0);
    plan("ibv_reg_mr call=1 errno=EFAULT\n");
    // Whichever function the header makes of it, the plan names what is written here.
    volatile int access = all_access;
    errno = 0;
    CHECK(ibv_reg_mr(a.pd, &gid, sizeof gid, access) == nullptr && errno == EFAULT);
    plan("ibv_reg_mr call=1 errno=EFAULT\n");
    errno = 0;
    CHECK(ibv_reg_mr(a.pd, &gid, sizeof gid, IBV_ACCESS_LOCAL_WRITE) == nullptr && errno == EFAULT);
    plan("ibv_poll_cq call=1 errno=EIO\n");
    ibv_wc wc{};
    CHECK(ibv_poll_cq(a.cq, 1, &wc) == -EIO && ibv_poll_cq(a.cq, 1, &wc) == 0);
    plan("");
}

// The request of a planned completion is not carried out, and the pair is in error as after any failure.
void completions_fail_as_planned() {
    Side a, b;
    connect(&a, &b);
    Buffer from(a.pd, 8), to(b.pd, 8);
    fill_pattern(from.bytes, 8);
    plan("wc.rdma_write call=2 status=12\n");
    CHECK(a.post(request(1, IBV_WR_RDMA_WRITE, to.at(), to.mr->rkey), {from.part(0, 4)}) == 0);
    a.expect(1, IBV_WC_SUCCESS);
    CHECK(a.post(request(2, IBV_WR_RDMA_WRITE, to.at(4), to.mr->rkey), {from.part(4, 4)}) == 0);
    a.expect(2, IBV_WC_RETRY_EXC_ERR);
    CHECK(to.bytes[4] == 0 && a.state() == IBV_QPS_ERR);
    plan("");
}

void bad_plans_change_nothing() {
    Side a;
    plan("ibv_alloc_pd call=* errno=EIO\n");
    for (const char* bad :
         {"", "gdrkit-faults 2\n", "gdrkit-faults 1\nibv_no_such call=1 errno=1\n",
          "gdrkit-faults 1\nibv_alloc_pd call=0 errno=1\n", "gdrkit-faults 1\nibv_alloc_pd call=1\n",
          "gdrkit-faults 1\nibv_free_device_list call=1 errno=1\n", "gdrkit-faults 1\nwc.send call=1 status=24\n"}) {
        CHECK(gdrkit_twin_faults(bad) == EINVAL);
    }
    CHECK(ibv_alloc_pd(a.context) == nullptr);
    plan("");
}

void the_ledger_tells() {
    CHECK(says("\"library\":\"ibverbs\",\"handles\":{}") && says("\"seed\":77,"));
    {
        Side a(0), b(1);
        connect(&a, &b);
        Buffer from(a.pd, 100), to(b.pd, 100);
        CHECK(says("\"ibv_mr\":2") && says("\"ibv_qp\":2") && says("\"ibv_pd\":2") && says("\"ibv_context\":2"));
        CHECK(a.post(request(1, IBV_WR_RDMA_WRITE, to.at(), to.mr->rkey), {from.part(0, 60)}) == 0);
        CHECK(a.post(request(2, IBV_WR_RDMA_READ, to.at(), to.mr->rkey), {from.part(0, 50)}) == 0);
        a.expect(1, IBV_WC_SUCCESS);
        a.expect(2, IBV_WC_SUCCESS);
        CHECK(says("\"twin0\":{\"write_bytes\":60,\"read_bytes\":50,\"send_bytes\":0,\"requests\":2,"));
        CHECK(says("\"twin1\":{\"write_bytes\":0,\"read_bytes\":0,\"send_bytes\":0,\"requests\":0,"
                   "\"served_write_bytes\":60,\"served_read_bytes\":50,"));
    }
    CHECK(says("\"handles\":{}") && says("\"ibv_reg_mr\":2"));
    char little[10];
    CHECK(gdrkit_twin_ledger(little, sizeof little) > 10 && std::string(little) == "{\"library");
}

} // namespace

int main() {
    use_own_domain();
    setenv("GDRKIT_TWINS_SEED", "77", 1);
    the_ledger_tells();
    functions_fail_as_planned();
    completions_fail_as_planned();
    bad_plans_change_nothing();
    return 0;
}
