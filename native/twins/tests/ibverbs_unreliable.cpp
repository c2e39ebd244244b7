// Tests of the software twin of libibverbs: unreliable connections (UC). Messages arrive as on reliable connections,
// but a message that the peer cannot receive is lost without an error.
#include "tests/ibverbs_support.hpp"
#include "tests/peer_process.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::tests;

namespace {

// Size of the large messages. It is not a multiple of the MTU or of the page size.
constexpr std::size_t large_message_bytes = (1U << 20) + 77;

// One-byte messages from the receiver process.
constexpr char receiver_is_ready = 'r', data_is_correct = 'k', data_is_wrong = 'x';

EndpointSettings make_unreliable_settings() {
    EndpointSettings settings;
    settings.type = IBV_QPT_UC;
    return settings;
}

// An endpoint with a UC queue pair. Such a pair has no attributes for timeouts, retries, reads and atomic requests.
struct UnreliableEndpoint : Endpoint {
    explicit UnreliableEndpoint(int device_index = 0) : Endpoint(device_index, make_unreliable_settings()) {}
    static constexpr int rtr_mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;

    void connect(const QueuePairAddress& peer) {
        CHECK(modify_to_init() == 0);
        ibv_qp_attr attr = make_rtr_attr(peer);
        CHECK(ibv_modify_qp(qp, &attr, rtr_mask) == 0);
        attr.qp_state = IBV_QPS_RTS;
        attr.sq_psn = psn;
        CHECK(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0);
    }
    void expect_no_completion() const {
        ibv_wc wc{};
        CHECK(ibv_poll_cq(cq, 1, &wc) == 0);
    }
};

void connect_pair(UnreliableEndpoint* first, UnreliableEndpoint* second) {
    first->connect(second->address());
    second->connect(first->address());
}

void test_transitions_refuse_reliable_attributes() {
    UnreliableEndpoint first_endpoint, second_endpoint;
    CHECK(first_endpoint.modify_to_init() == 0);
    // modify_to_rtr() and modify_to_rts() also set attributes that only reliable pairs have.
    CHECK(first_endpoint.modify_to_rtr(second_endpoint.address()) == EINVAL);
    ibv_qp_attr attr = first_endpoint.make_rtr_attr(second_endpoint.address());
    CHECK(ibv_modify_qp(first_endpoint.qp, &attr, UnreliableEndpoint::rtr_mask) == 0);
    CHECK(first_endpoint.modify_to_rts() == EINVAL);
    attr.qp_state = IBV_QPS_RTS;
    CHECK(ibv_modify_qp(first_endpoint.qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0);
}

void test_messages_arrive() {
    UnreliableEndpoint sender(1), receiver;
    connect_pair(&sender, &receiver);
    Buffer source(sender.pd, large_message_bytes), receive_buffer(receiver.pd, large_message_bytes),
        target(receiver.pd, large_message_bytes);
    fill_pattern(source.bytes, large_message_bytes);
    CHECK(receiver.post_receive(1, {receive_buffer.sge(0, large_message_bytes)}) == 0 &&
          receiver.post_receive(2, {}) == 0);
    ibv_send_wr wr = make_request(1, IBV_WR_SEND_WITH_IMM);
    wr.imm_data = 0x1234;
    CHECK(sender.post(wr, {source.sge(0, large_message_bytes)}) == 0);
    wr = make_request(2, IBV_WR_RDMA_WRITE_WITH_IMM, target.address_at(), target.mr->rkey);
    CHECK(sender.post(wr, {source.sge(0, large_message_bytes)}) == 0);
    sender.expect_completion(1, IBV_WC_SUCCESS);
    sender.expect_completion(2, IBV_WC_SUCCESS);
    const ibv_wc wc = receiver.expect_completion(1, IBV_WC_SUCCESS);
    CHECK(wc.opcode == IBV_WC_RECV && wc.imm_data == 0x1234 && wc.byte_len == large_message_bytes);
    CHECK(receiver.expect_completion(2, IBV_WC_SUCCESS).opcode == IBV_WC_RECV_RDMA_WITH_IMM);
    CHECK(has_pattern(receive_buffer.bytes, large_message_bytes) && has_pattern(target.bytes, large_message_bytes));
}

void test_reads_and_atomics_are_refused() {
    UnreliableEndpoint first_endpoint, second_endpoint;
    connect_pair(&first_endpoint, &second_endpoint);
    Buffer buffer(first_endpoint.pd, 8);
    for (const ibv_wr_opcode opcode : {IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_CMP_AND_SWP}) {
        CHECK(first_endpoint.post(make_request(1, opcode), {buffer.sge(0, 8)}) == EINVAL);
    }
}

// The receiver drops a message without a receive request, a message that is longer than its receive request, and a
// write with a wrong key. Neither side gets an error. The receive request stays posted until a message fits into it.
void test_dropped_messages_are_not_noticed() {
    UnreliableEndpoint sender(1), receiver;
    connect_pair(&sender, &receiver);
    Buffer source(sender.pd, large_message_bytes), receive_buffer(receiver.pd, large_message_bytes);
    fill_pattern(source.bytes, large_message_bytes);
    CHECK(sender.post(make_request(1, IBV_WR_SEND), {source.sge(0, large_message_bytes)}) == 0);
    sender.expect_completion(1, IBV_WC_SUCCESS);
    CHECK(receiver.post_receive(10, {receive_buffer.sge(0, 100)}) == 0);
    CHECK(sender.post(make_request(2, IBV_WR_SEND), {source.sge(0, large_message_bytes)}) == 0);
    CHECK(sender.post(make_request(3, IBV_WR_RDMA_WRITE, receive_buffer.address_at(), receive_buffer.mr->rkey ^ 1),
                      {source.sge(0, large_message_bytes)}) == 0);
    CHECK(sender.post(make_request(4, IBV_WR_SEND), {source.sge(0, 100)}) == 0);
    for (std::uint64_t wr_id = 2; wr_id <= 4; ++wr_id) {
        sender.expect_completion(wr_id, IBV_WC_SUCCESS);
    }
    CHECK(receiver.expect_completion(10, IBV_WC_SUCCESS).byte_len == 100);
    CHECK(has_pattern(receive_buffer.bytes, 100) && receive_buffer.bytes[100] == 0);
    CHECK(receiver.query_state() == IBV_QPS_RTS && sender.query_state() == IBV_QPS_RTS);
    CHECK(!is_readable(receiver.context->async_fd, 0));
}

void test_absent_peer_is_not_noticed() {
    UnreliableEndpoint sender(1), receiver;
    Buffer source(sender.pd, 64), receive_buffer(receiver.pd, 64);
    sender.connect(receiver.address());
    CHECK(sender.post(make_request(1, IBV_WR_SEND), {source.sge(0, 64)}) == 0);
    sender.expect_completion(1, IBV_WC_SUCCESS);
    // The receiver connects, receives a message, and resets its queue pair.
    receiver.connect(sender.address());
    CHECK(receiver.post_receive(10, {receive_buffer.sge(0, 64)}) == 0);
    CHECK(sender.post(make_request(2, IBV_WR_SEND), {source.sge(0, 64)}) == 0);
    sender.expect_completion(2, IBV_WC_SUCCESS);
    receiver.expect_completion(10, IBV_WC_SUCCESS);
    CHECK(receiver.modify_to(IBV_QPS_RESET) == 0);
    for (std::uint64_t wr_id = 3; wr_id < 10; ++wr_id) {
        CHECK(sender.post(make_request(wr_id, IBV_WR_SEND), {source.sge(0, 64)}) == 0);
        sender.expect_completion(wr_id, IBV_WC_SUCCESS);
    }
    receiver.expect_no_completion();
    CHECK(sender.query_state() == IBV_QPS_RTS);
}

// A message from an unreliable queue pair to a reliable queue pair is lost.
void test_other_transport_gets_nothing() {
    UnreliableEndpoint sender(1);
    Endpoint receiver;
    sender.connect(receiver.address());
    receiver.connect(sender.address());
    CHECK(receiver.post_receive(10, {}) == 0);
    CHECK(sender.post(make_request(1, IBV_WR_SEND), {}) == 0);
    sender.expect_completion(1, IBV_WC_SUCCESS);
    ibv_wc wc{};
    CHECK(ibv_poll_cq(receiver.cq, 1, &wc) == 0);
}

// The receiver process runs this function. It receives one message, and reports whether the message has the pattern.
int run_receiver(int socket) {
    UnreliableEndpoint receiver;
    send_value(socket, receiver.address());
    receiver.connect(receive_value<QueuePairAddress>(socket));
    Buffer receive_buffer(receiver.pd, large_message_bytes);
    CHECK(receiver.post_receive(1, {receive_buffer.sge(0, large_message_bytes)}) == 0);
    send_value(socket, receiver_is_ready);
    CHECK(receiver.expect_completion(1, IBV_WC_SUCCESS).byte_len == large_message_bytes);
    send_value(socket, has_pattern(receive_buffer.bytes, large_message_bytes) ? data_is_correct : data_is_wrong);
    return 0;
}

void test_other_process_receives() {
    const PeerProcess peer;
    UnreliableEndpoint sender(1);
    const auto receiver_address = receive_value<QueuePairAddress>(peer.socket.get());
    send_value(peer.socket.get(), sender.address());
    sender.connect(receiver_address);
    CHECK(receive_value<char>(peer.socket.get()) == receiver_is_ready);
    Buffer source(sender.pd, large_message_bytes);
    fill_pattern(source.bytes, large_message_bytes);
    CHECK(sender.post(make_request(1, IBV_WR_SEND), {source.sge(0, large_message_bytes)}) == 0);
    sender.expect_completion(1, IBV_WC_SUCCESS);
    CHECK(receive_value<char>(peer.socket.get()) == data_is_correct);
    CHECK(peer.wait() == 0);
    // The receiver process has ended, but the sender gets no error.
    CHECK(sender.post(make_request(2, IBV_WR_SEND), {source.sge(0, large_message_bytes)}) == 0);
    sender.expect_completion(2, IBV_WC_SUCCESS);
}

} // namespace

int main(int argument_count, char** arguments) {
    isolate_from_other_processes();
    if (argument_count > 1) { // PeerProcess has started this program with a socket as its argument
        return run_receiver(std::atoi(arguments[1]));
    }
    test_transitions_refuse_reliable_attributes();
    test_messages_arrive();
    test_reads_and_atomics_are_refused();
    test_dropped_messages_are_not_noticed();
    test_absent_peer_is_not_noticed();
    test_other_transport_gets_nothing();
    test_other_process_receives();
    return 0;
}
