// Tests of the software twin of libibverbs: extended queue pairs, to which the ibv_wr_* functions post requests. A
// program starts a list (ibv_wr_start), adds requests with one function per opcode, and posts the whole list or nothing
// (ibv_wr_complete).
#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

constexpr std::uint64_t supported_operations = 0ULL | IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM |
                                               IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM |
                                               IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP |
                                               IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD | IBV_QP_EX_WITH_LOCAL_INV |
                                               IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_SEND_WITH_INV;

// Create a queue pair that supports the operations of `send_ops_flags` (IBV_QP_EX_WITH_*). Return nullptr and set errno
// on failure.
ibv_qp* create_extended_queue_pair(Endpoint* endpoint, std::uint64_t send_ops_flags, ibv_qp_type type = IBV_QPT_RC) {
    ibv_qp_init_attr_ex attr{};
    attr.send_cq = attr.recv_cq = endpoint->cq;
    attr.cap.max_send_wr = attr.cap.max_recv_wr = 4;
    attr.cap.max_send_sge = attr.cap.max_recv_sge = 2;
    attr.cap.max_inline_data = 16;
    attr.qp_type = type;
    attr.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    attr.pd = endpoint->pd;
    attr.send_ops_flags = send_ops_flags;
    errno = 0;
    return ibv_create_qp_ex(endpoint->context, &attr);
}

// Two connected endpoints. The queue pair of the requester is extended.
struct ExtendedPair {
    Endpoint requester{0};
    Endpoint responder{1};
    Buffer local_buffer{requester.pd, 4096};
    Buffer remote_buffer{responder.pd, 4096};
    ibv_qp_ex* extended_qp = nullptr; // requester.qp as an extended queue pair

    ExtendedPair() {
        CHECK(ibv_qp_to_qp_ex(requester.qp) == nullptr && ibv_destroy_qp(requester.qp) == 0);
        requester.qp = create_extended_queue_pair(&requester, supported_operations);
        CHECK(requester.qp != nullptr);
        extended_qp = ibv_qp_to_qp_ex(requester.qp);
        CHECK(extended_qp != nullptr && &extended_qp->qp_base == requester.qp);
        connect(&requester, &responder);
        fill_pattern(local_buffer.bytes, 4096);
    }
    // Set the id and the flags of the request that the next ibv_wr_* call adds.
    void begin_request(std::uint64_t wr_id, unsigned flags = IBV_SEND_SIGNALED) const {
        extended_qp->wr_id = wr_id;
        extended_qp->wr_flags = flags;
    }
    // Set the data of the request that was added last to a range of the local buffer.
    void set_sge(std::size_t offset, std::size_t length) const {
        ibv_wr_set_sge(extended_qp, local_buffer.mr->lkey, local_buffer.address_at(offset),
                       static_cast<std::uint32_t>(length));
    }
    // Return whether no request of the requester completes within 20 ms.
    bool has_no_completion() {
        ibv_wc wc{};
        usleep(20000);
        return ibv_poll_cq(requester.cq, 1, &wc) == 0;
    }
};

void test_list_of_requests_is_carried_out_in_order() {
    ExtendedPair pair;
    CHECK(pair.responder.post_receive(20, {pair.remote_buffer.sge(2048, 100)}) == 0);
    ibv_wr_start(pair.extended_qp);
    pair.begin_request(1, 0);
    ibv_wr_rdma_write(pair.extended_qp, pair.remote_buffer.mr->rkey, pair.remote_buffer.address_at());
    const ibv_sge sges[2] = {pair.local_buffer.sge(0, 100), pair.local_buffer.sge(100, 28)};
    ibv_wr_set_sge_list(pair.extended_qp, 2, sges);
    pair.begin_request(2);
    ibv_wr_rdma_read(pair.extended_qp, pair.remote_buffer.mr->rkey, pair.remote_buffer.address_at());
    pair.set_sge(1024, 128);
    pair.begin_request(3);
    ibv_wr_send_imm(pair.extended_qp, 0x1234);
    pair.set_sge(0, 100);
    CHECK(ibv_wr_complete(pair.extended_qp) == 0);
    CHECK(pair.requester.expect_completion(2, IBV_WC_SUCCESS).opcode == IBV_WC_RDMA_READ);
    pair.requester.expect_completion(3, IBV_WC_SUCCESS);
    CHECK(has_pattern(pair.remote_buffer.bytes, 128) && has_pattern(pair.local_buffer.bytes + 1024, 128));
    const ibv_wc receive_wc = pair.responder.expect_completion(20, IBV_WC_SUCCESS);
    CHECK(receive_wc.wc_flags == IBV_WC_WITH_IMM && receive_wc.imm_data == 0x1234 && receive_wc.byte_len == 100);
    CHECK(has_pattern(pair.remote_buffer.bytes + 2048, 100));
}

void test_inline_data_is_copied_when_it_is_set() {
    ExtendedPair pair;
    std::uint8_t first_data[4] = {1, 2, 3, 4};
    std::uint8_t second_data[4] = {5, 6, 7, 8};
    ibv_wr_start(pair.extended_qp);
    pair.begin_request(1);
    ibv_wr_rdma_write(pair.extended_qp, pair.remote_buffer.mr->rkey, pair.remote_buffer.address_at());
    const ibv_data_buf buffers[2] = {{first_data, 4}, {second_data, 4}};
    ibv_wr_set_inline_data_list(pair.extended_qp, 2, buffers);
    std::memset(first_data, 0, sizeof first_data);
    pair.begin_request(2);
    ibv_wr_rdma_write(pair.extended_qp, pair.remote_buffer.mr->rkey, pair.remote_buffer.address_at(8));
    ibv_wr_set_inline_data(pair.extended_qp, second_data, 4);
    std::memset(second_data, 0, sizeof second_data);
    CHECK(ibv_wr_complete(pair.extended_qp) == 0);
    pair.requester.expect_completion(1, IBV_WC_SUCCESS);
    pair.requester.expect_completion(2, IBV_WC_SUCCESS);
    const std::uint8_t expected[12] = {1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7, 8};
    CHECK(std::memcmp(pair.remote_buffer.bytes, expected, sizeof expected) == 0);
}

void test_atomic_requests_return_the_old_value() {
    ExtendedPair pair;
    std::uint64_t remote_value = 40;
    std::memcpy(pair.remote_buffer.bytes, &remote_value, sizeof remote_value);
    ibv_wr_start(pair.extended_qp);
    pair.begin_request(1);
    ibv_wr_atomic_fetch_add(pair.extended_qp, pair.remote_buffer.mr->rkey, pair.remote_buffer.address_at(), 2);
    pair.set_sge(0, 8);
    pair.begin_request(2);
    ibv_wr_atomic_cmp_swp(pair.extended_qp, pair.remote_buffer.mr->rkey, pair.remote_buffer.address_at(), 42, 7);
    pair.set_sge(8, 8);
    CHECK(ibv_wr_complete(pair.extended_qp) == 0);
    pair.requester.expect_completion(1, IBV_WC_SUCCESS);
    pair.requester.expect_completion(2, IBV_WC_SUCCESS);
    std::uint64_t old_values[2];
    std::memcpy(old_values, pair.local_buffer.bytes, sizeof old_values);
    std::memcpy(&remote_value, pair.remote_buffer.bytes, sizeof remote_value);
    CHECK(old_values[0] == 40 && old_values[1] == 42 && remote_value == 7);
}

void test_windows_are_bound_and_invalidated() {
    ExtendedPair pair;
    Buffer bindable_buffer(pair.requester.pd, 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
    ibv_mw* const mw = ibv_alloc_mw(pair.requester.pd, IBV_MW_TYPE_2);
    CHECK(mw != nullptr && pair.responder.post_receive(9, {}) == 0);
    const std::uint32_t window_rkey = ibv_inc_rkey(mw->rkey);
    ibv_mw_bind_info bind_info{bindable_buffer.mr, bindable_buffer.address_at(), 4096, IBV_ACCESS_REMOTE_WRITE};
    ibv_wr_start(pair.extended_qp);
    pair.begin_request(1);
    ibv_wr_bind_mw(pair.extended_qp, mw, window_rkey, &bind_info);
    pair.begin_request(2);
    ibv_wr_local_inv(pair.extended_qp, window_rkey);
    pair.begin_request(3);
    ibv_wr_send(pair.extended_qp);
    CHECK(ibv_wr_complete(pair.extended_qp) == 0);
    CHECK(pair.requester.expect_completion(1, IBV_WC_SUCCESS).opcode == IBV_WC_BIND_MW);
    CHECK(pair.requester.expect_completion(2, IBV_WC_SUCCESS).opcode == IBV_WC_LOCAL_INV);
    pair.requester.expect_completion(3, IBV_WC_SUCCESS);
    pair.responder.expect_completion(9, IBV_WC_SUCCESS);
    CHECK(ibv_dealloc_mw(mw) == 0);
}

void test_failed_or_aborted_list_posts_nothing() {
    ExtendedPair pair;
    const auto add_write = [&](std::uint64_t wr_id, std::size_t length) {
        pair.begin_request(wr_id);
        ibv_wr_rdma_write(pair.extended_qp, pair.remote_buffer.mr->rkey, pair.remote_buffer.address_at());
        pair.set_sge(0, length);
    };
    ibv_wr_start(pair.extended_qp);
    add_write(1, 8);
    ibv_wr_abort(pair.extended_qp);
    ibv_wr_start(pair.extended_qp);
    for (std::uint64_t wr_id = 1; wr_id <= 5; ++wr_id) {
        add_write(wr_id, 8); // the send queue has only four slots
    }
    CHECK(ibv_wr_complete(pair.extended_qp) == ENOMEM);
    ibv_wr_start(pair.extended_qp);
    add_write(1, 8);
    // create_extended_queue_pair() requests 16 bytes of inline data. The twin permits at least 16 bytes for each of the
    // two scatter-gather entries, so 32 bytes fit and 33 bytes do not.
    std::uint8_t large_data[33] = {};
    ibv_wr_set_inline_data(pair.extended_qp, large_data, sizeof large_data);
    CHECK(ibv_wr_complete(pair.extended_qp) == ENOMEM);
    ibv_wr_start(pair.extended_qp);
    add_write(1, 8);
    const ibv_sge sges[3] = {}; // a request can have only two scatter/gather elements
    ibv_wr_set_sge_list(pair.extended_qp, 3, sges);
    CHECK(ibv_wr_complete(pair.extended_qp) == ENOMEM);
    ibv_wr_start(pair.extended_qp);
    pair.set_sge(0, 8); // there is no request yet
    CHECK(ibv_wr_complete(pair.extended_qp) == EINVAL);
    ibv_wr_start(pair.extended_qp);
    add_write(1, 8);
    pair.begin_request(2);
    ibv_wr_atomic_fetch_add(pair.extended_qp, pair.remote_buffer.mr->rkey, pair.remote_buffer.address_at(), 1);
    pair.set_sge(0, 4); // an atomic request needs 8 bytes
    CHECK(ibv_wr_complete(pair.extended_qp) == EINVAL);
    ibv_wr_start(pair.extended_qp);
    CHECK(ibv_wr_complete(pair.extended_qp) == 0); // an empty list is valid
    CHECK(pair.has_no_completion() && pair.remote_buffer.bytes[0] == 0);
    ibv_wr_start(pair.extended_qp);
    add_write(6, 8);
    CHECK(ibv_wr_complete(pair.extended_qp) == 0);
    pair.requester.expect_completion(6, IBV_WC_SUCCESS);
}

void test_unsupported_operations_are_refused() {
    Endpoint endpoint;
    CHECK(create_extended_queue_pair(&endpoint, IBV_QP_EX_WITH_TSO) == nullptr && errno == EOPNOTSUPP);
    CHECK(create_extended_queue_pair(&endpoint, IBV_QP_EX_WITH_ATOMIC_WRITE) == nullptr && errno == EOPNOTSUPP);
    CHECK(create_extended_queue_pair(&endpoint, 1ULL << 40) == nullptr && errno == EOPNOTSUPP); // an undefined flag
    // An unreliable connection (UC) has no reads.
    CHECK(create_extended_queue_pair(&endpoint, IBV_QP_EX_WITH_RDMA_READ, IBV_QPT_UC) == nullptr &&
          errno == EOPNOTSUPP);
    ibv_qp* const qp = create_extended_queue_pair(&endpoint, IBV_QP_EX_WITH_SEND);
    CHECK(qp != nullptr);
    const ibv_qp_ex* const extended_qp = ibv_qp_to_qp_ex(qp);
    CHECK(extended_qp->wr_send != nullptr && extended_qp->wr_rdma_read == nullptr &&
          extended_qp->wr_set_ud_addr == nullptr);
    CHECK(ibv_destroy_qp(qp) == 0);
}

void test_ibv_post_send_works_on_an_extended_queue_pair() {
    ExtendedPair pair;
    CHECK(pair.requester.post(
              make_request(1, IBV_WR_RDMA_WRITE, pair.remote_buffer.address_at(), pair.remote_buffer.mr->rkey),
              {pair.local_buffer.sge(0, 64)}) == 0);
    pair.requester.expect_completion(1, IBV_WC_SUCCESS);
    CHECK(has_pattern(pair.remote_buffer.bytes, 64));
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
