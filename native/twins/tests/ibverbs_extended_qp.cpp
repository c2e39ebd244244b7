// Tests of the software twin of libibverbs: extended queue pairs, to which the ibv_wr_* functions post requests.
#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

constexpr std::uint64_t all_operations = 0ULL | IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM |
                                         IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ |
                                         IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD |
                                         IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_BIND_MW |
                                         IBV_QP_EX_WITH_SEND_WITH_INV;

ibv_qp* create_extended_queue_pair(Endpoint* endpoint, std::uint64_t operations, ibv_qp_type type = IBV_QPT_RC) {
    ibv_qp_init_attr_ex attr{};
    attr.send_cq = attr.recv_cq = endpoint->cq;
    attr.cap = {4, 4, 2, 2, 16};
    attr.qp_type = type;
    attr.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    attr.pd = endpoint->pd;
    attr.send_ops_flags = operations;
    errno = 0;
    return ibv_create_qp_ex(endpoint->context, &attr);
}

// Two connected endpoints. The queue pair of the requester is extended.
struct ExtendedPair {
    Endpoint requester{0};
    Endpoint responder{1};
    Buffer source{requester.pd, 4096};
    Buffer target{responder.pd, 4096};
    ibv_qp_ex* qp = nullptr;

    ExtendedPair() {
        CHECK(ibv_qp_to_qp_ex(requester.qp) == nullptr && ibv_destroy_qp(requester.qp) == 0);
        requester.qp = create_extended_queue_pair(&requester, all_operations);
        CHECK(requester.qp != nullptr);
        qp = ibv_qp_to_qp_ex(requester.qp);
        CHECK(qp != nullptr && &qp->qp_base == requester.qp);
        connect(&requester, &responder);
        fill_pattern(source.bytes, 4096);
    }
    void begin_request(std::uint64_t wr_id, unsigned flags = IBV_SEND_SIGNALED) const {
        qp->wr_id = wr_id;
        qp->wr_flags = flags;
    }
    void set_sge(std::size_t offset, std::size_t length) const {
        ibv_wr_set_sge(qp, source.mr->lkey, source.address_at(offset), static_cast<std::uint32_t>(length));
    }
    bool has_no_completion() {
        ibv_wc wc{};
        usleep(20000);
        return ibv_poll_cq(requester.cq, 1, &wc) == 0;
    }
};

void test_list_of_requests_is_carried_out_in_order() {
    ExtendedPair pair;
    CHECK(pair.responder.post_receive(20, {pair.target.sge(2048, 100)}) == 0);
    ibv_wr_start(pair.qp);
    pair.begin_request(1, 0);
    ibv_wr_rdma_write(pair.qp, pair.target.mr->rkey, pair.target.address_at());
    const ibv_sge sges[2] = {pair.source.sge(0, 100), pair.source.sge(100, 28)};
    ibv_wr_set_sge_list(pair.qp, 2, sges);
    pair.begin_request(2);
    ibv_wr_rdma_read(pair.qp, pair.target.mr->rkey, pair.target.address_at());
    pair.set_sge(1024, 128);
    pair.begin_request(3);
    ibv_wr_send_imm(pair.qp, 0x1234);
    pair.set_sge(0, 100);
    CHECK(ibv_wr_complete(pair.qp) == 0);
    CHECK(pair.requester.expect_completion(2, IBV_WC_SUCCESS).opcode == IBV_WC_RDMA_READ);
    pair.requester.expect_completion(3, IBV_WC_SUCCESS);
    CHECK(has_pattern(pair.target.bytes, 128) && has_pattern(pair.source.bytes + 1024, 128));
    const ibv_wc receive_wc = pair.responder.expect_completion(20, IBV_WC_SUCCESS);
    CHECK(receive_wc.wc_flags == IBV_WC_WITH_IMM && receive_wc.imm_data == 0x1234 && receive_wc.byte_len == 100);
    CHECK(has_pattern(pair.target.bytes + 2048, 100));
}

void test_inline_data_is_copied_when_it_is_set() {
    ExtendedPair pair;
    std::uint8_t first_data[4] = {1, 2, 3, 4};
    std::uint8_t second_data[4] = {5, 6, 7, 8};
    ibv_wr_start(pair.qp);
    pair.begin_request(1);
    ibv_wr_rdma_write(pair.qp, pair.target.mr->rkey, pair.target.address_at());
    const ibv_data_buf buffers[2] = {{first_data, 4}, {second_data, 4}};
    ibv_wr_set_inline_data_list(pair.qp, 2, buffers);
    std::memset(first_data, 0, sizeof first_data);
    pair.begin_request(2);
    ibv_wr_rdma_write(pair.qp, pair.target.mr->rkey, pair.target.address_at(8));
    ibv_wr_set_inline_data(pair.qp, second_data, 4);
    std::memset(second_data, 0, sizeof second_data);
    CHECK(ibv_wr_complete(pair.qp) == 0);
    pair.requester.expect_completion(1, IBV_WC_SUCCESS);
    pair.requester.expect_completion(2, IBV_WC_SUCCESS);
    const std::uint8_t expected[12] = {1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7, 8};
    CHECK(std::memcmp(pair.target.bytes, expected, sizeof expected) == 0);
}

void test_atomic_requests_return_the_old_value() {
    ExtendedPair pair;
    std::uint64_t value = 40;
    std::memcpy(pair.target.bytes, &value, sizeof value);
    ibv_wr_start(pair.qp);
    pair.begin_request(1);
    ibv_wr_atomic_fetch_add(pair.qp, pair.target.mr->rkey, pair.target.address_at(), 2);
    pair.set_sge(0, 8);
    pair.begin_request(2);
    ibv_wr_atomic_cmp_swp(pair.qp, pair.target.mr->rkey, pair.target.address_at(), 42, 7);
    pair.set_sge(8, 8);
    CHECK(ibv_wr_complete(pair.qp) == 0);
    pair.requester.expect_completion(1, IBV_WC_SUCCESS);
    pair.requester.expect_completion(2, IBV_WC_SUCCESS);
    std::uint64_t values[2];
    std::memcpy(values, pair.source.bytes, sizeof values);
    std::memcpy(&value, pair.target.bytes, sizeof value);
    CHECK(values[0] == 40 && values[1] == 42 && value == 7);
}

void test_windows_are_bound_and_invalidated() {
    ExtendedPair pair;
    Buffer bindable(pair.requester.pd, 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
    ibv_mw* const mw = ibv_alloc_mw(pair.requester.pd, IBV_MW_TYPE_2);
    CHECK(mw != nullptr && pair.responder.post_receive(9, {}) == 0);
    const std::uint32_t rkey = ibv_inc_rkey(mw->rkey);
    ibv_mw_bind_info info{bindable.mr, bindable.address_at(), 4096, IBV_ACCESS_REMOTE_WRITE};
    ibv_wr_start(pair.qp);
    pair.begin_request(1);
    ibv_wr_bind_mw(pair.qp, mw, rkey, &info);
    pair.begin_request(2);
    ibv_wr_local_inv(pair.qp, rkey);
    pair.begin_request(3);
    ibv_wr_send(pair.qp);
    CHECK(ibv_wr_complete(pair.qp) == 0);
    CHECK(pair.requester.expect_completion(1, IBV_WC_SUCCESS).opcode == IBV_WC_BIND_MW);
    CHECK(pair.requester.expect_completion(2, IBV_WC_SUCCESS).opcode == IBV_WC_LOCAL_INV);
    pair.requester.expect_completion(3, IBV_WC_SUCCESS);
    pair.responder.expect_completion(9, IBV_WC_SUCCESS);
    CHECK(ibv_dealloc_mw(mw) == 0);
}

void test_failed_or_aborted_list_posts_nothing() {
    ExtendedPair pair;
    const auto write = [&](std::uint64_t wr_id, std::size_t length) {
        pair.begin_request(wr_id);
        ibv_wr_rdma_write(pair.qp, pair.target.mr->rkey, pair.target.address_at());
        pair.set_sge(0, length);
    };
    ibv_wr_start(pair.qp);
    write(1, 8);
    ibv_wr_abort(pair.qp);
    ibv_wr_start(pair.qp);
    for (std::uint64_t wr_id = 1; wr_id <= 5; ++wr_id) {
        write(wr_id, 8); // the queue has four slots
    }
    CHECK(ibv_wr_complete(pair.qp) == ENOMEM);
    ibv_wr_start(pair.qp);
    write(1, 8);
    // The queue pair requested 16 bytes of inline data. A slot with two scatter-gather entries of 16 bytes has room for
    // 32 bytes, so 33 bytes are too many.
    std::uint8_t large_data[33] = {};
    ibv_wr_set_inline_data(pair.qp, large_data, sizeof large_data);
    CHECK(ibv_wr_complete(pair.qp) == ENOMEM);
    ibv_wr_start(pair.qp);
    write(1, 8);
    const ibv_sge sges[3] = {};
    ibv_wr_set_sge_list(pair.qp, 3, sges);
    CHECK(ibv_wr_complete(pair.qp) == ENOMEM);
    ibv_wr_start(pair.qp);
    pair.set_sge(0, 8); // there is no request yet
    CHECK(ibv_wr_complete(pair.qp) == EINVAL);
    ibv_wr_start(pair.qp);
    write(1, 8);
    pair.begin_request(2);
    ibv_wr_atomic_fetch_add(pair.qp, pair.target.mr->rkey, pair.target.address_at(), 1);
    pair.set_sge(0, 4);
    CHECK(ibv_wr_complete(pair.qp) == EINVAL);
    ibv_wr_start(pair.qp);
    CHECK(ibv_wr_complete(pair.qp) == 0);
    CHECK(pair.has_no_completion() && pair.target.bytes[0] == 0);
    ibv_wr_start(pair.qp);
    write(6, 8);
    CHECK(ibv_wr_complete(pair.qp) == 0);
    pair.requester.expect_completion(6, IBV_WC_SUCCESS);
}

void test_unsupported_operations_are_refused() {
    Endpoint endpoint;
    CHECK(create_extended_queue_pair(&endpoint, IBV_QP_EX_WITH_TSO) == nullptr && errno == EOPNOTSUPP);
    CHECK(create_extended_queue_pair(&endpoint, IBV_QP_EX_WITH_ATOMIC_WRITE) == nullptr && errno == EOPNOTSUPP);
    CHECK(create_extended_queue_pair(&endpoint, 1ULL << 40) == nullptr && errno == EOPNOTSUPP);
    CHECK(create_extended_queue_pair(&endpoint, IBV_QP_EX_WITH_RDMA_READ, IBV_QPT_UC) == nullptr &&
          errno == EOPNOTSUPP);
    ibv_qp* const qp = create_extended_queue_pair(&endpoint, IBV_QP_EX_WITH_SEND);
    CHECK(qp != nullptr);
    const ibv_qp_ex* const extended = ibv_qp_to_qp_ex(qp);
    CHECK(extended->wr_send != nullptr && extended->wr_rdma_read == nullptr && extended->wr_set_ud_addr == nullptr);
    CHECK(ibv_destroy_qp(qp) == 0);
}

void test_ibv_post_send_works_on_an_extended_queue_pair() {
    ExtendedPair pair;
    CHECK(pair.requester.post(make_request(1, IBV_WR_RDMA_WRITE, pair.target.address_at(), pair.target.mr->rkey),
                              {pair.source.sge(0, 64)}) == 0);
    pair.requester.expect_completion(1, IBV_WC_SUCCESS);
    CHECK(has_pattern(pair.target.bytes, 64));
}

} // namespace

int main() {
    isolate_from_other_processes();
    test_list_of_requests_is_carried_out_in_order();
    test_inline_data_is_copied_when_it_is_set();
    test_atomic_requests_return_the_old_value();
    test_windows_are_bound_and_invalidated();
    test_failed_or_aborted_list_posts_nothing();
    test_unsupported_operations_are_refused();
    test_ibv_post_send_works_on_an_extended_queue_pair();
    return 0;
}
