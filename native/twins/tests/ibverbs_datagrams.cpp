// Tests of the software twin of libibverbs: datagram queue pairs (UD) and address handles in one process.
#include <arpa/inet.h>

#include <cerrno>

#include "tests/ibverbs_datagram_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

void test_datagram_arrives_behind_its_network_header() {
    DatagramEndpoint sender(0), receiver(1);
    const ibv_gid source = query_gid(sender.context), destination = query_gid(receiver.context);
    ibv_ah_attr path = make_path(destination);
    path.grh.flow_label = 0xfffabcde; // the upper 12 bits do not fit into the header
    path.grh.traffic_class = 0x5c;
    path.sl = 3;
    ibv_ah* const ah = sender.create_address_handle(path);
    fill_pattern(sender.buffer->bytes, 1000);
    CHECK(receiver.post_receive(7, 100, grh_bytes + 1000) == 0);
    CHECK(sender.send(1, ah, receiver.qp->qp_num, 0, 997, IBV_SEND_SIGNALED, test_qkey, IBV_WR_SEND_WITH_IMM) == 0);
    CHECK(sender.expect_completion(1).opcode == IBV_WC_SEND);
    const ibv_wc wc = receiver.expect_completion(7);
    CHECK(wc.opcode == IBV_WC_RECV && wc.byte_len == grh_bytes + 997 && wc.src_qp == sender.qp->qp_num && wc.sl == 3);
    CHECK(wc.wc_flags == (IBV_WC_GRH | IBV_WC_WITH_IMM) && wc.imm_data == 0x12345678);
    CHECK(has_pattern(receiver.buffer->bytes + 100 + grh_bytes, 997));
    CHECK(receiver.buffer->bytes[100 + grh_bytes + 997] == 0);
    ibv_grh grh{};
    std::memcpy(&grh, receiver.buffer->bytes + 100, sizeof grh);
    CHECK(ntohl(grh.version_tclass_flow) == (6U << 28 | 0x5cU << 20 | 0xabcdeU));
    // The length is the sum of the UDP header, the transport headers BTH and DETH, the immediate data, the payload
    // padded to a multiple of 4 bytes, and the checksum (ICRC). The next header 17 is UDP.
    CHECK(ntohs(grh.paylen) == 8 + 12 + 8 + 4 + 1000 + 4 && grh.next_hdr == 17 && grh.hop_limit == 64);
    CHECK(std::memcmp(&grh.sgid, &source, 16) == 0 && std::memcmp(&grh.dgid, &destination, 16) == 0);
    CHECK(ibv_destroy_ah(ah) == 0);
}

// A receiver replies to a datagram. It makes the address handle from the completion and the network header of the
// datagram, for RoCE v1 and RoCE v2.
void test_reply_by_address_of_completion() {
    DatagramEndpoint first_endpoint(0), second_endpoint(1);
    for (std::uint8_t gid_index = 0; gid_index < 2; ++gid_index) {
        ibv_ah* const ah =
            first_endpoint.create_address_handle(make_path(query_gid(second_endpoint.context), gid_index));
        CHECK(second_endpoint.post_receive(1, 0, 2048) == 0 && first_endpoint.post_receive(2, 0, 2048) == 0);
        CHECK(first_endpoint.send(3, ah, second_endpoint.qp->qp_num, 4096, 8) == 0);
        first_endpoint.expect_completion(3);
        ibv_wc wc = second_endpoint.expect_completion(1);
        auto* const grh = reinterpret_cast<ibv_grh*>(second_endpoint.buffer->bytes);
        CHECK(grh->next_hdr == (gid_index == 0 ? 0x1b : 17)); // RoCE v1 : UDP (RoCE v2)
        ibv_ah_attr path{};
        CHECK(ibv_init_ah_from_wc(second_endpoint.context, 1, &wc, grh, &path) == 0);
        CHECK(path.is_global == 1 && path.grh.sgid_index == gid_index && path.grh.hop_limit == 64 &&
              path.port_num == 1);
        ibv_ah* const return_ah = ibv_create_ah_from_wc(second_endpoint.pd, &wc, grh, 1);
        CHECK(return_ah != nullptr && second_endpoint.send(4, return_ah, wc.src_qp, 4096, 0) == 0);
        second_endpoint.expect_completion(4);
        CHECK(first_endpoint.expect_completion(2).byte_len == grh_bytes);
        CHECK(ibv_destroy_ah(ah) == 0 && ibv_destroy_ah(return_ah) == 0);
    }
}

void test_address_of_ipv4_header() {
    DatagramEndpoint endpoint;
    // The last 20 of the 40 bytes are an IPv4 header, but its destination 0.0.0.0 is not an address of this device.
    std::uint8_t header[grh_bytes] = {};
    header[20] = 0x45; // version 4, five words
    header[30] = 0xba;
    header[31] = 0xff; // the checksum 0xbaff, which is right because all other bytes are zero
    ibv_wc wc{};
    wc.wc_flags = IBV_WC_GRH;
    ibv_ah_attr path{};
    errno = 0;
    auto* const grh = reinterpret_cast<ibv_grh*>(header);
    CHECK(ibv_init_ah_from_wc(endpoint.context, 1, &wc, grh, &path) == -1 && errno == EINVAL);
    header[31] = 0; // with a wrong checksum, the bytes are neither an IPv4 header nor an IPv6 header
    CHECK(ibv_init_ah_from_wc(endpoint.context, 1, &wc, grh, &path) == -1 && errno == EPROTONOSUPPORT);
}

void test_invalid_address_handles_are_refused() {
    DatagramEndpoint endpoint;
    const ibv_gid gid = query_gid(endpoint.context);
    const auto check_refused = [&](ibv_ah_attr path) {
        errno = 0;
        CHECK(ibv_create_ah(endpoint.pd, &path) == nullptr && errno == EINVAL);
    };
    ibv_ah_attr path = make_path(gid);
    path.is_global = 0; // Ethernet needs a global route
    check_refused(path);
    path = make_path(gid);
    path.port_num = 2;
    check_refused(path);
    check_refused(make_path(gid, 2));    // entry 2 of the GID table is empty
    check_refused(make_path(ibv_gid{})); // the destination GID is zero
    // A protection domain with an address handle is busy.
    ibv_pd* const pd = ibv_alloc_pd(endpoint.context);
    path = make_path(gid);
    ibv_ah* const ah = ibv_create_ah(pd, &path);
    CHECK(ah != nullptr && ah->pd == pd && ah->context == endpoint.context && ibv_dealloc_pd(pd) == EBUSY);
    // The send fails, because the address handle and the queue pair belong to different protection domains.
    CHECK(endpoint.send(1, ah, endpoint.qp->qp_num, 0, 8) == 0);
    endpoint.expect_completion(1, IBV_WC_LOC_QP_OP_ERR);
    CHECK(ibv_destroy_ah(ah) == 0 && ibv_dealloc_pd(pd) == 0);
}

// A datagram is lost if its Q_Key differs from the Q_Key of the receiver, if the destination queue pair is unknown or
// not ready, or if there is no receive request. The send still completes with success.
void test_undeliverable_datagrams_are_lost() {
    DatagramEndpoint sender(0), receiver(0);
    ibv_ah* const ah = sender.create_address_handle(make_path(query_gid(sender.context)));
    CHECK(sender.send(1, ah, receiver.qp->qp_num, 0, 8) == 0); // no receive request is posted
    sender.expect_completion(1);
    receiver.expect_no_completion();
    CHECK(receiver.post_receive(9, 0, 100) == 0);
    receiver.expect_no_completion();
    CHECK(sender.send(2, ah, receiver.qp->qp_num, 0, 8, IBV_SEND_SIGNALED, test_qkey + 1) == 0);
    sender.expect_completion(2);
    CHECK(sender.send(3, ah, receiver.qp->qp_num ^ 1, 0, 8) == 0); // no such queue pair
    sender.expect_completion(3);
    CHECK(sender.send(4, ah, multicast_qpn, 0, 8) == 0); // the GID of `ah` is not a multicast group
    sender.expect_completion(4);
    receiver.expect_no_completion();
    CHECK(receiver.modify_to(IBV_QPS_RESET) == 0 && receiver.modify_to_init(test_qkey) == 0);
    CHECK(receiver.post_receive(10, 0, 100) == 0);
    CHECK(sender.send(5, ah, receiver.qp->qp_num, 0, 8) == 0); // the queue pair is not in RTR
    sender.expect_completion(5);
    receiver.expect_no_completion();
    CHECK(receiver.modify_to(IBV_QPS_RTR) == 0);
    CHECK(sender.send(6, ah, receiver.qp->qp_num, 0, 8) == 0);
    sender.expect_completion(6);
    receiver.expect_completion(10);
    CHECK(ibv_destroy_ah(ah) == 0);
}

// If bit 31 of the Q_Key in a send request is set (a controlled Q_Key), the datagram has the Q_Key of the sending queue
// pair instead.
void test_controlled_qkey_selects_own_qkey() {
    DatagramEndpoint sender(0), receiver(0);
    ibv_ah* const ah = sender.create_address_handle(make_path(query_gid(sender.context)));
    CHECK(receiver.post_receive(1, 0, 100) == 0);
    CHECK(sender.send(2, ah, receiver.qp->qp_num, 0, 8, IBV_SEND_SIGNALED | IBV_SEND_INLINE, 0x80000000U) == 0);
    sender.expect_completion(2);
    receiver.expect_completion(1);
    CHECK(ibv_destroy_ah(ah) == 0);
}

void test_failed_send_leads_to_send_queue_error() {
    DatagramEndpoint endpoint;
    ibv_ah* ah = endpoint.create_address_handle(make_path(query_gid(endpoint.context)));
    const auto check_fails = [&](std::size_t length, ibv_wc_status status) {
        CHECK(endpoint.send(1, ah, endpoint.qp->qp_num, 0, length) == 0);
        endpoint.expect_completion(1, status);
        CHECK(endpoint.query_state() == IBV_QPS_SQE && endpoint.send(2, ah, endpoint.qp->qp_num, 0, 8, 0) == 0);
        endpoint.expect_completion(2, IBV_WC_WR_FLUSH_ERR);
        CHECK(endpoint.modify_to(IBV_QPS_RTS) == 0);
    };
    CHECK(endpoint.post_receive(3, 0, 8192) == 0);
    check_fails(mtu_bytes + 1, IBV_WC_LOC_LEN_ERR);
    endpoint.buffer->mr->lkey ^= 1;
    check_fails(8, IBV_WC_LOC_PROT_ERR);
    endpoint.buffer->mr->lkey ^= 1;
    // The failed sends did not use up the receive request. The queue pair sends the longest datagram to itself.
    CHECK(endpoint.send(4, ah, endpoint.qp->qp_num, 8192, mtu_bytes, 0) == 0);
    CHECK(endpoint.expect_completion(3).byte_len == grh_bytes + mtu_bytes);
    // In the state SQD, a request waits. If its address handle is destroyed meanwhile, the request fails in RTS.
    CHECK(endpoint.modify_to(IBV_QPS_SQD) == 0 && endpoint.send(5, ah, endpoint.qp->qp_num, 0, 8) == 0);
    CHECK(ibv_destroy_ah(ah) == 0 && endpoint.modify_to(IBV_QPS_RTS) == 0);
    endpoint.expect_completion(5, IBV_WC_LOC_QP_OP_ERR);
}

void test_short_receive_is_a_local_length_error() {
    DatagramEndpoint sender(0), receiver(0);
    ibv_ah* const ah = sender.create_address_handle(make_path(query_gid(sender.context)));
    CHECK(receiver.post_receive(1, 0, grh_bytes + 7) == 0 && receiver.post_receive(2, 0, 100) == 0);
    CHECK(sender.send(3, ah, receiver.qp->qp_num, 0, 8) == 0);
    sender.expect_completion(3);
    receiver.expect_completion(1, IBV_WC_LOC_LEN_ERR);
    receiver.expect_completion(2, IBV_WC_WR_FLUSH_ERR);
    CHECK(receiver.query_state() == IBV_QPS_ERR && ibv_destroy_ah(ah) == 0);
}

void test_wrong_requests_are_refused() {
    DatagramEndpoint endpoint;
    ibv_ah* const ah = endpoint.create_address_handle(make_path(query_gid(endpoint.context)));
    const auto send = [&](ibv_ah* address_handle, std::uint32_t remote_qpn, std::size_t length, unsigned flags,
                          ibv_wr_opcode opcode) {
        return endpoint.send(1, address_handle, remote_qpn, 0, length, flags, test_qkey, opcode);
    };
    for (const ibv_wr_opcode opcode : {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_READ,
                                       IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_FETCH_AND_ADD}) {
        CHECK(send(ah, 5, 8, 0, opcode) == EINVAL);
    }
    CHECK(send(ah, 5, 8, 0, IBV_WR_LOCAL_INV) == EOPNOTSUPP);
    CHECK(send(nullptr, 5, 8, 0, IBV_WR_SEND) == EINVAL);
    CHECK(send(ah, 0x1000000, 8, 0, IBV_WR_SEND) == EINVAL); // queue pair numbers have 24 bits
    CHECK(send(ah, 5, 8, IBV_SEND_FENCE, IBV_WR_SEND) == EINVAL);
    CHECK(send(ah, 5, 257, IBV_SEND_INLINE, IBV_WR_SEND) == EINVAL); // max_inline_data is 256
    // Without completions, 16 unsignaled requests fill the send queue.
    for (int count = 0; count < 16; ++count) {
        CHECK(send(ah, 5, 8, 0, IBV_WR_SEND) == 0);
    }
    CHECK(send(ah, 5, 8, 0, IBV_WR_SEND) == ENOMEM);
    CHECK(ibv_destroy_ah(ah) == 0);
}

void test_state_transitions_and_their_attributes() {
    DatagramEndpoint endpoint;
    CHECK(endpoint.modify_to(IBV_QPS_INIT) == EINVAL && endpoint.modify_to(IBV_QPS_RTS, IBV_QP_SQ_PSN) == EINVAL);
    CHECK(endpoint.modify_to(IBV_QPS_RESET) == 0 && endpoint.modify_to(IBV_QPS_RTR) == EINVAL);
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = 1;
    attr.qkey = 5;
    CHECK(ibv_modify_qp(endpoint.qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT) == EINVAL);
    CHECK(ibv_modify_qp(endpoint.qp, &attr,
                        IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY | IBV_QP_ACCESS_FLAGS) == EINVAL);
    CHECK(endpoint.modify_to_init(5) == 0);
    CHECK(endpoint.modify_to(IBV_QPS_RTR, IBV_QP_AV) == EINVAL && endpoint.modify_to(IBV_QPS_RTR) == 0);
    CHECK(endpoint.send(1, nullptr, 5, 0, 8) == EINVAL && endpoint.modify_to(IBV_QPS_RTS) == EINVAL);
    CHECK(endpoint.modify_to(IBV_QPS_RTS, IBV_QP_SQ_PSN) == 0);
    attr.qkey = 6;
    CHECK(ibv_modify_qp(endpoint.qp, &attr, IBV_QP_QKEY) == 0);
    ibv_qp_attr queried_attr{};
    ibv_qp_init_attr init{};
    CHECK(ibv_query_qp(endpoint.qp, &queried_attr, IBV_QP_QKEY, &init) == 0);
    CHECK(queried_attr.qkey == 6 && queried_attr.sq_psn == 0x123 && queried_attr.port_num == 1 &&
          init.qp_type == IBV_QPT_UD);
    CHECK(endpoint.post_receive(1, 0, 8) == 0 && endpoint.modify_to(IBV_QPS_ERR) == 0);
    endpoint.expect_completion(1, IBV_WC_WR_FLUSH_ERR);
}

// Two queue pairs take their receive requests from one shared receive queue. When a queue pair fails, the shared queue
// keeps its requests.
void test_pairs_share_a_receive_queue() {
    DatagramEndpoint sender;
    ibv_srq_init_attr srq_init{};
    srq_init.attr = {4, 1, 0}; // max_wr, max_sge, srq_limit
    ibv_srq* const srq = ibv_create_srq(sender.pd, &srq_init);
    CHECK(srq != nullptr);
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = sender.cq;
    init.srq = srq;
    init.cap = {1, 1, 1, 1, 0};
    init.qp_type = IBV_QPT_UD;
    ibv_qp* const original_qp = sender.qp;
    ibv_qp* receiving_qps[2];
    // The functions of the endpoint act on `sender.qp`, so `sender.qp` is set to each new queue pair in turn.
    for (ibv_qp*& receiving_qp : receiving_qps) {
        receiving_qp = sender.qp = ibv_create_qp(sender.pd, &init);
        CHECK(receiving_qp != nullptr && sender.modify_to_init(test_qkey) == 0 && sender.modify_to(IBV_QPS_RTR) == 0);
        CHECK(sender.post_receive(1, 0, 100) == EINVAL); // the queue pair has no receive queue of its own
    }
    sender.qp = original_qp;
    ibv_ah* const ah = sender.create_address_handle(make_path(query_gid(sender.context)));
    for (std::uint64_t wr_id = 1; wr_id <= 4; ++wr_id) {
        ibv_sge sge = sender.buffer->sge(wr_id * 4096, 8192);
        ibv_recv_wr wr{wr_id, nullptr, &sge, 1}, *bad_wr = nullptr;
        sge.length = wr_id == 3 ? 20 : 100; // the third buffer is too short for the network header
        CHECK(ibv_post_srq_recv(srq, &wr, &bad_wr) == 0);
    }
    for (std::uint64_t wr_id = 1; wr_id <= 3; ++wr_id) {
        ibv_qp* const receiving_qp = receiving_qps[wr_id % 2];
        CHECK(sender.send(9, ah, receiving_qp->qp_num, 0, 8, 0) == 0);
        const ibv_wc wc = sender.poll_completion();
        CHECK(wc.wr_id == wr_id && wc.qp_num == receiving_qp->qp_num);
        CHECK(wc.status == (wr_id == 3 ? IBV_WC_LOC_LEN_ERR : IBV_WC_SUCCESS));
    }
    CHECK(wait_for_event(sender.context).event_type == IBV_EVENT_QP_LAST_WQE_REACHED);
    CHECK(sender.send(9, ah, receiving_qps[0]->qp_num, 0, 8, 0) == 0);
    CHECK(sender.poll_completion().wr_id == 4);
    CHECK(ibv_destroy_ah(ah) == 0 && ibv_destroy_qp(receiving_qps[0]) == 0 && ibv_destroy_qp(receiving_qps[1]) == 0);
    CHECK(ibv_destroy_srq(srq) == 0);
}

} // namespace

int main() {
    isolate_from_other_processes();
    test_datagram_arrives_behind_its_network_header();
    test_reply_by_address_of_completion();
    test_address_of_ipv4_header();
    test_invalid_address_handles_are_refused();
    test_undeliverable_datagrams_are_lost();
    test_controlled_qkey_selects_own_qkey();
    test_failed_send_leads_to_send_queue_error();
    test_short_receive_is_a_local_length_error();
    test_wrong_requests_are_refused();
    test_state_transitions_and_their_attributes();
    test_pairs_share_a_receive_queue();
    return 0;
}
