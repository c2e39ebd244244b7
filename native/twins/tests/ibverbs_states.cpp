// Tests of the state machine of a reliable-connected queue pair.
#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

void test_attribute_masks() {
    Endpoint a, b;
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = 1;
    constexpr int init_mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    for (const int missing : {IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_ACCESS_FLAGS}) {
        CHECK(ibv_modify_qp(a.qp, &attr, init_mask & ~missing) == EINVAL);
    }
    CHECK(ibv_modify_qp(a.qp, &attr, init_mask | IBV_QP_QKEY) == EINVAL);
    CHECK(a.to(IBV_QPS_ERR) == EINVAL && a.to_rtr(b.address()) == EINVAL && a.to_rts() == EINVAL);
    attr.port_num = 2;
    CHECK(ibv_modify_qp(a.qp, &attr, init_mask) == EINVAL);
    CHECK(a.to_init() == 0 && a.state() == IBV_QPS_INIT && a.qp->state == IBV_QPS_INIT);

    for (const int missing : {IBV_QP_AV, IBV_QP_PATH_MTU, IBV_QP_DEST_QPN, IBV_QP_RQ_PSN, IBV_QP_MAX_DEST_RD_ATOMIC,
                              IBV_QP_MIN_RNR_TIMER}) {
        attr = a.rtr_attr(b.address());
        CHECK(ibv_modify_qp(a.qp, &attr, Endpoint::rtr_mask & ~missing) == EINVAL);
    }
    const auto check_refused = [&](auto change) {
        ibv_qp_attr changed = a.rtr_attr(b.address());
        change(&changed);
        CHECK(ibv_modify_qp(a.qp, &changed, Endpoint::rtr_mask) == EINVAL);
    };
    check_refused([](ibv_qp_attr* it) { it->ah_attr.is_global = 0; });
    check_refused([](ibv_qp_attr* it) { it->ah_attr.grh.sgid_index = 2; });
    check_refused([](ibv_qp_attr* it) { it->ah_attr.port_num = 0; });
    check_refused([](ibv_qp_attr* it) { it->path_mtu = static_cast<ibv_mtu>(6); });
    check_refused([](ibv_qp_attr* it) { it->dest_qp_num = 1U << 24; });
    check_refused([](ibv_qp_attr* it) { it->max_dest_rd_atomic = 17; });
    check_refused([](ibv_qp_attr* it) { it->min_rnr_timer = 32; });
    CHECK(a.to_rtr(b.address()) == 0 && a.state() == IBV_QPS_RTR);

    for (const int missing :
         {IBV_QP_TIMEOUT, IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY, IBV_QP_SQ_PSN, IBV_QP_MAX_QP_RD_ATOMIC}) {
        attr = {};
        attr.qp_state = IBV_QPS_RTS;
        CHECK(ibv_modify_qp(a.qp, &attr, Endpoint::rts_mask & ~missing) == EINVAL);
    }
    attr = {};
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = 32;
    CHECK(ibv_modify_qp(a.qp, &attr, Endpoint::rts_mask) == EINVAL);
    CHECK(a.to_rts() == 0 && a.state() == IBV_QPS_RTS);
    attr = {};
    attr.cur_qp_state = IBV_QPS_RTR;
    attr.min_rnr_timer = 3;
    CHECK(ibv_modify_qp(a.qp, &attr, IBV_QP_CUR_STATE | IBV_QP_MIN_RNR_TIMER) == EINVAL);
    attr.cur_qp_state = IBV_QPS_RTS;
    CHECK(ibv_modify_qp(a.qp, &attr, IBV_QP_CUR_STATE | IBV_QP_MIN_RNR_TIMER) == 0);
    // Transitions to ERR and RESET allow no attributes, not even this one.
    for (const ibv_qp_state end : {IBV_QPS_ERR, IBV_QPS_RESET}) {
        attr.qp_state = end;
        CHECK(ibv_modify_qp(a.qp, &attr, IBV_QP_STATE | IBV_QP_CUR_STATE) == EINVAL);
    }
    CHECK(a.to(IBV_QPS_ERR) == 0 && a.to_rts() == EINVAL && a.to(IBV_QPS_RESET) == 0);
    CHECK(a.state() == IBV_QPS_RESET);
}

void test_query_returns_attributes() {
    Endpoint a, b;
    connect(&a, &b);
    ibv_qp_attr attr{};
    ibv_qp_init_attr init{};
    CHECK(ibv_query_qp(a.qp, &attr, IBV_QP_STATE | IBV_QP_AV, &init) == 0);
    CHECK(attr.qp_state == IBV_QPS_RTS && attr.dest_qp_num == b.qp->qp_num && attr.path_mtu == IBV_MTU_4096);
    CHECK(attr.timeout == 14 && attr.retry_cnt == 7 && attr.rnr_retry == 7 && attr.sq_psn == 0x123);
    CHECK(attr.ah_attr.grh.sgid_index == 1 && attr.qp_access_flags == all_access_atomic);
    CHECK(attr.cap.max_send_wr == 16 && init.cap.max_inline_data == 64 && init.send_cq == a.cq);
    CHECK(init.qp_type == IBV_QPT_RC);
}

// A reset discards requests, unpolled completions, and the peer.
void test_reset_discards_everything() {
    Endpoint a, b;
    connect(&a, &b);
    Buffer from(a.pd, 8), to(b.pd, 8);
    const auto write = [&](std::uint64_t id) {
        return a.post(request(id, IBV_WR_RDMA_WRITE, to.at(), to.mr->rkey), {from.part(0, 8)});
    };
    CHECK(write(1) == 0);
    CHECK(a.post_receive(2, {}) == 0);
    CHECK(a.to(IBV_QPS_RESET) == 0 && b.to(IBV_QPS_RESET) == 0);
    ibv_wc wc{};
    usleep(5000);
    CHECK(ibv_poll_cq(a.cq, 1, &wc) == 0);
    connect(&a, &b);
    for (std::uint64_t id = 10; id < 10 + a.settings.send_wr; ++id) {
        CHECK(write(id) == 0);
    }
    CHECK(write(99) == ENOMEM);
    a.expect_completion(10, IBV_WC_SUCCESS);
}

void test_error_flushes_in_order() {
    Settings settings;
    settings.timeout = 0;
    Endpoint a(0, settings), b;
    a.connect(b.address());
    for (std::uint64_t id = 1; id <= 5; ++id) {
        CHECK(a.post(request(id, IBV_WR_SEND, 0, 0, 0), {}) == 0);
        CHECK(a.post_receive(100 + id, {}) == 0);
    }
    // The first request waits for a peer that is not ready; the error state ends the wait.
    CHECK(a.to(IBV_QPS_ERR) == 0);
    std::uint64_t next_send = 1, next_receive = 101;
    for (int count = 0; count < 10; ++count) {
        const ibv_wc wc = a.poll_one();
        CHECK(wc.status == IBV_WC_WR_FLUSH_ERR);
        CHECK(wc.wr_id == (wc.wr_id > 100 ? next_receive++ : next_send++));
    }
}

void test_invalid_create_arguments() {
    Endpoint a;
    ibv_qp_init_attr init{};
    init.send_cq = a.cq;
    init.recv_cq = a.cq;
    init.cap = {1, 1, 1, 1, 0};
    const auto fails = [&](int error) {
        errno = 0;
        CHECK(ibv_create_qp(a.pd, &init) == nullptr && errno == error);
    };
    for (const ibv_qp_type type : {IBV_QPT_UD, IBV_QPT_UC, IBV_QPT_XRC_SEND, IBV_QPT_RAW_PACKET}) {
        init.qp_type = type;
        fails(EOPNOTSUPP);
    }
    init.qp_type = static_cast<ibv_qp_type>(77);
    fails(EINVAL);
    init.qp_type = IBV_QPT_RC;
    init.cap.max_send_wr = 1U << 20;
    fails(EINVAL);
    init.cap.max_send_wr = 1;
    init.send_cq = nullptr;
    fails(EINVAL);
    Endpoint other(1);
    init.send_cq = other.cq;
    fails(EINVAL);
    errno = 0;
    CHECK(ibv_create_cq(a.context, 0, nullptr, nullptr, 0) == nullptr && errno == EINVAL);
    CHECK(ibv_create_cq(a.context, 1, nullptr, nullptr, 1) == nullptr && errno == EINVAL);
}

} // namespace

int main() {
    use_own_domain();
    test_attribute_masks();
    test_query_returns_attributes();
    test_reset_discards_everything();
    test_error_flushes_in_order();
    test_invalid_create_arguments();
    return 0;
}
