// Tests of the software twin of libibverbs: the state machine of a reliable-connected queue pair (RC),
// and the arguments of ibv_create_qp and ibv_create_cq.
#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

void test_wrong_masks_and_attributes_are_refused() {
    Endpoint requester, responder;
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = 1;
    constexpr int init_mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    for (const int missing_flag : {IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_ACCESS_FLAGS}) {
        CHECK(ibv_modify_qp(requester.qp, &attr, init_mask & ~missing_flag) == EINVAL);
    }
    CHECK(ibv_modify_qp(requester.qp, &attr, init_mask | IBV_QP_QKEY) == EINVAL);
    CHECK(requester.modify_to(IBV_QPS_ERR) == EINVAL && requester.modify_to_rtr(responder.address()) == EINVAL &&
          requester.modify_to_rts() == EINVAL);
    attr.port_num = 2;
    CHECK(ibv_modify_qp(requester.qp, &attr, init_mask) == EINVAL);
    CHECK(requester.modify_to_init() == 0 && requester.query_state() == IBV_QPS_INIT &&
          requester.qp->state == IBV_QPS_INIT);

    for (const int missing_flag : {IBV_QP_AV, IBV_QP_PATH_MTU, IBV_QP_DEST_QPN, IBV_QP_RQ_PSN,
                                   IBV_QP_MAX_DEST_RD_ATOMIC, IBV_QP_MIN_RNR_TIMER}) {
        attr = requester.make_rtr_attr(responder.address());
        CHECK(ibv_modify_qp(requester.qp, &attr, Endpoint::rtr_mask & ~missing_flag) == EINVAL);
    }
    const auto check_refused = [&](auto change) {
        ibv_qp_attr changed_attr = requester.make_rtr_attr(responder.address());
        change(&changed_attr);
        CHECK(ibv_modify_qp(requester.qp, &changed_attr, Endpoint::rtr_mask) == EINVAL);
    };
    check_refused([](ibv_qp_attr* attr) { attr->ah_attr.is_global = 0; });
    check_refused([](ibv_qp_attr* attr) { attr->ah_attr.grh.sgid_index = 2; }); // there are two GIDs
    check_refused([](ibv_qp_attr* attr) { attr->ah_attr.port_num = 0; });
    check_refused([](ibv_qp_attr* attr) { attr->path_mtu = static_cast<ibv_mtu>(6); }); // IBV_MTU_4096 is 5
    check_refused([](ibv_qp_attr* attr) { attr->dest_qp_num = 1U << 24; });             // more than 24 bits
    check_refused([](ibv_qp_attr* attr) { attr->max_dest_rd_atomic = 17; });            // the limit is 16
    check_refused([](ibv_qp_attr* attr) { attr->min_rnr_timer = 32; });                 // more than 5 bits
    CHECK(requester.modify_to_rtr(responder.address()) == 0 && requester.query_state() == IBV_QPS_RTR);

    for (const int missing_flag :
         {IBV_QP_TIMEOUT, IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY, IBV_QP_SQ_PSN, IBV_QP_MAX_QP_RD_ATOMIC}) {
        attr = {};
        attr.qp_state = IBV_QPS_RTS;
        CHECK(ibv_modify_qp(requester.qp, &attr, Endpoint::rts_mask & ~missing_flag) == EINVAL);
    }
    attr = {};
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = 32; // more than 5 bits
    CHECK(ibv_modify_qp(requester.qp, &attr, Endpoint::rts_mask) == EINVAL);
    CHECK(requester.modify_to_rts() == 0 && requester.query_state() == IBV_QPS_RTS);
    // With IBV_QP_CUR_STATE, the call fails if the queue pair is not in the state cur_qp_state.
    attr = {};
    attr.cur_qp_state = IBV_QPS_RTR;
    attr.min_rnr_timer = 3;
    CHECK(ibv_modify_qp(requester.qp, &attr, IBV_QP_CUR_STATE | IBV_QP_MIN_RNR_TIMER) == EINVAL);
    attr.cur_qp_state = IBV_QPS_RTS;
    CHECK(ibv_modify_qp(requester.qp, &attr, IBV_QP_CUR_STATE | IBV_QP_MIN_RNR_TIMER) == 0);
    // A change to ERR or RESET allows no other attribute, not even IBV_QP_CUR_STATE.
    for (const ibv_qp_state new_state : {IBV_QPS_ERR, IBV_QPS_RESET}) {
        attr.qp_state = new_state;
        CHECK(ibv_modify_qp(requester.qp, &attr, IBV_QP_STATE | IBV_QP_CUR_STATE) == EINVAL);
    }
    CHECK(requester.modify_to(IBV_QPS_ERR) == 0 && requester.modify_to_rts() == EINVAL &&
          requester.modify_to(IBV_QPS_RESET) == 0);
    CHECK(requester.query_state() == IBV_QPS_RESET);
}

void test_query_returns_attributes() {
    Endpoint requester, responder;
    connect(&requester, &responder);
    ibv_qp_attr attr{};
    ibv_qp_init_attr init{};
    CHECK(ibv_query_qp(requester.qp, &attr, IBV_QP_STATE | IBV_QP_AV, &init) == 0);
    // The numbers are the defaults of EndpointSettings and Endpoint.
    CHECK(attr.qp_state == IBV_QPS_RTS && attr.dest_qp_num == responder.qp->qp_num && attr.path_mtu == IBV_MTU_4096);
    CHECK(attr.timeout == 14 && attr.retry_cnt == 7 && attr.rnr_retry == 7 && attr.sq_psn == 0x123);
    CHECK(attr.ah_attr.grh.sgid_index == 1 && attr.qp_access_flags == read_write_atomic_access);
    CHECK(attr.cap.max_send_wr == 16 && init.cap.max_inline_data == 64 && init.send_cq == requester.cq);
    CHECK(init.qp_type == IBV_QPT_RC);
}

// A reset discards queued requests, completions that were not polled, and the connection to the peer.
void test_reset_discards_everything() {
    Endpoint requester, responder;
    connect(&requester, &responder);
    Buffer source(requester.pd, 8), target(responder.pd, 8);
    const auto write = [&](std::uint64_t wr_id) {
        return requester.post(make_request(wr_id, IBV_WR_RDMA_WRITE, target.address_at(), target.mr->rkey),
                              {source.sge(0, 8)});
    };
    CHECK(write(1) == 0);
    CHECK(requester.post_receive(2, {}) == 0);
    CHECK(requester.modify_to(IBV_QPS_RESET) == 0 && responder.modify_to(IBV_QPS_RESET) == 0);
    ibv_wc wc{};
    usleep(5000); // time in which a completion of request 1 would arrive
    CHECK(ibv_poll_cq(requester.cq, 1, &wc) == 0);
    connect(&requester, &responder);
    // The send queue takes max_send_wr requests, so the reset has freed the slot of request 1.
    for (std::uint64_t wr_id = 10; wr_id < 10 + requester.settings.max_send_wr; ++wr_id) {
        CHECK(write(wr_id) == 0);
    }
    CHECK(write(99) == ENOMEM);
    requester.expect_completion(10, IBV_WC_SUCCESS);
}

void test_error_state_flushes_requests_in_order() {
    EndpointSettings settings;
    settings.timeout = 0; // the requester waits for the responder without limit
    Endpoint requester(0, settings), responder;
    requester.connect(responder.address());
    for (std::uint64_t send_id = 1; send_id <= 5; ++send_id) {
        CHECK(requester.post(make_request(send_id, IBV_WR_SEND, 0, 0, 0), {}) == 0);
        CHECK(requester.post_receive(100 + send_id, {}) == 0);
    }
    // The first request waits for a peer that is not ready. The error state ends the wait.
    CHECK(requester.modify_to(IBV_QPS_ERR) == 0);
    std::uint64_t next_send_id = 1, next_receive_id = 101;
    for (int count = 0; count < 10; ++count) {
        const ibv_wc wc = requester.poll_completion();
        CHECK(wc.status == IBV_WC_WR_FLUSH_ERR);
        CHECK(wc.wr_id == (wc.wr_id > 100 ? next_receive_id++ : next_send_id++));
    }
}

void test_invalid_create_arguments_are_refused() {
    Endpoint endpoint;
    ibv_qp_init_attr init{};
    init.send_cq = endpoint.cq;
    init.recv_cq = endpoint.cq;
    init.cap = {1, 1, 1, 1, 0}; // one request and one buffer per queue, no inline data
    const auto check_fails = [&](int expected_error) {
        errno = 0;
        CHECK(ibv_create_qp(endpoint.pd, &init) == nullptr && errno == expected_error);
    };
    for (const ibv_qp_type type : {IBV_QPT_RAW_PACKET, IBV_QPT_DRIVER}) {
        init.qp_type = type;
        check_fails(EOPNOTSUPP);
    }
    init.qp_type = static_cast<ibv_qp_type>(77); // not a type
    check_fails(EINVAL);
    init.qp_type = IBV_QPT_RC;
    init.cap.max_send_wr = 1U << 20; // more than max_qp_wr of the device
    check_fails(EINVAL);
    init.cap.max_send_wr = 1;
    init.send_cq = nullptr;
    check_fails(EINVAL);
    Endpoint endpoint_of_other_nic(1);
    init.send_cq = endpoint_of_other_nic.cq;
    check_fails(EINVAL);
    errno = 0;
    // The last argument is the completion vector; the device has only vector 0.
    CHECK(ibv_create_cq(endpoint.context, 0, nullptr, nullptr, 0) == nullptr && errno == EINVAL);
    CHECK(ibv_create_cq(endpoint.context, 1, nullptr, nullptr, 1) == nullptr && errno == EINVAL);
}

} // namespace

int main() {
    isolate_from_other_processes();
    test_wrong_masks_and_attributes_are_refused();
    test_query_returns_attributes();
    test_reset_discards_everything();
    test_error_state_flushes_requests_in_order();
    test_invalid_create_arguments_are_refused();
    return 0;
}
