// Tests of the software twin of libibverbs: shared receive queues (SRQ). Queue pairs take receive requests from such a
// queue, and the program can change its size and get an event when few requests are left.
#include <memory>

#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

// Two queue pairs of one responder that share a receive queue, each connected to a requester of its own.
struct SharedReceiver {
    Endpoint first_sender{1}, second_sender{1}, receiver;
    std::unique_ptr<Buffer> buffer;
    ibv_qp* first_qp;
    ibv_qp* second_qp;

    explicit SharedReceiver(std::uint32_t max_wr) {
        receiver.use_shared_receive_queue(max_wr);
        buffer = std::make_unique<Buffer>(receiver.pd, 4096);
        connect(&first_sender, &receiver);
        first_qp = receiver.qp;
        receiver.create_queue_pair();
        connect(&second_sender, &receiver);
        second_qp = receiver.qp;
    }
    ~SharedReceiver() { CHECK(ibv_destroy_qp(first_qp) == 0); }
    SharedReceiver(const SharedReceiver&) = delete;
    SharedReceiver& operator=(const SharedReceiver&) = delete;

    // Post a receive request for the 64 bytes at offset 64 * wr_id of the buffer.
    [[nodiscard]] int post_receive(std::uint64_t wr_id) const {
        return receiver.post_shared_receive(wr_id, buffer->sge(wr_id * 64, 64));
    }
};

void test_creation_checks_limits() {
    const Endpoint endpoint;
    ibv_device_attr device_attr{};
    CHECK(ibv_query_device(endpoint.context, &device_attr) == 0);
    CHECK(device_attr.max_srq > 0 && device_attr.max_srq_wr > 0 && device_attr.max_srq_sge > 0);
    // The fields are max_wr, max_sge and srq_limit.
    const ibv_srq_attr refused_attrs[] = {{0, 1, 0},
                                          {static_cast<std::uint32_t>(device_attr.max_srq_wr) + 1, 1, 0},
                                          {1, static_cast<std::uint32_t>(device_attr.max_srq_sge) + 1, 0}};
    for (const ibv_srq_attr& attr : refused_attrs) {
        ibv_srq_init_attr init{nullptr, attr};
        CHECK(ibv_create_srq(endpoint.pd, &init) == nullptr && errno == EINVAL);
    }
}

void test_used_objects_cannot_be_destroyed() {
    Endpoint endpoint;
    endpoint.use_shared_receive_queue(4);
    CHECK(ibv_destroy_srq(endpoint.srq) == EBUSY);
    CHECK(endpoint.qp->srq == endpoint.srq);
    CHECK(endpoint.modify_to_init() == 0);
    // The queue pair has only the shared receive queue.
    CHECK(endpoint.post_receive(1, {}) == EINVAL);
    CHECK(ibv_destroy_qp(endpoint.qp) == 0);
    endpoint.qp = nullptr;
    CHECK(ibv_dealloc_pd(endpoint.pd) == EBUSY);
}

void test_two_queue_pairs_consume_in_order() {
    SharedReceiver shared_receiver(3);
    Buffer first_source(shared_receiver.first_sender.pd, 64), second_source(shared_receiver.second_sender.pd, 64);
    fill_pattern(first_source.bytes, 64);
    fill_pattern(second_source.bytes, 64, 100);
    for (std::uint64_t wr_id = 1; wr_id <= 3; ++wr_id) {
        CHECK(shared_receiver.post_receive(wr_id) == 0);
    }
    CHECK(shared_receiver.post_receive(4) == ENOMEM);
    CHECK(shared_receiver.first_sender.post(make_request(1, IBV_WR_SEND), {first_source.sge(0, 64)}) == 0);
    shared_receiver.first_sender.expect_completion(1, IBV_WC_SUCCESS);
    ibv_wc wc = shared_receiver.receiver.poll_completion();
    CHECK(wc.wr_id == 1 && wc.status == IBV_WC_SUCCESS && wc.qp_num == shared_receiver.first_qp->qp_num);
    CHECK(shared_receiver.second_sender.post(make_request(2, IBV_WR_SEND), {second_source.sge(0, 64)}) == 0);
    shared_receiver.second_sender.expect_completion(2, IBV_WC_SUCCESS);
    wc = shared_receiver.receiver.poll_completion();
    CHECK(wc.wr_id == 2 && wc.qp_num == shared_receiver.second_qp->qp_num);
    CHECK(has_pattern(shared_receiver.buffer->bytes + 64, 64) &&
          has_pattern(shared_receiver.buffer->bytes + 128, 64, 100));
    // The two polled completions have freed two slots of the shared queue.
    CHECK(shared_receiver.post_receive(4) == 0 && shared_receiver.post_receive(5) == 0 &&
          shared_receiver.post_receive(6) == ENOMEM);
}

void test_empty_queue_is_not_ready() {
    EndpointSettings one_retry_settings;
    one_retry_settings.rnr_retry = 1;
    Endpoint sender(1, one_retry_settings), receiver;
    receiver.use_shared_receive_queue(4);
    connect(&sender, &receiver);
    CHECK(sender.post(make_request(1, IBV_WR_SEND), {}) == 0);
    sender.expect_completion(1, IBV_WC_RNR_RETRY_EXC_ERR);
}

// The queue raises an event when fewer than `srq_limit` requests are left, and then sets the limit to 0.
void test_limit_raises_one_event() {
    SharedReceiver shared_receiver(8);
    for (std::uint64_t wr_id = 1; wr_id <= 4; ++wr_id) {
        CHECK(shared_receiver.post_receive(wr_id) == 0);
    }
    ibv_srq* const srq = shared_receiver.receiver.srq;
    ibv_srq_attr attr{};
    attr.srq_limit = 9; // more than the size of the queue
    CHECK(ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT) == EINVAL);
    attr.srq_limit = 3;
    CHECK(ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT) == 0);
    const auto send_message = [&] {
        CHECK(shared_receiver.first_sender.post(make_request(1, IBV_WR_SEND), {}) == 0);
        shared_receiver.first_sender.expect_completion(1, IBV_WC_SUCCESS);
        shared_receiver.receiver.poll_completion();
    };
    send_message(); // three requests are left
    CHECK(!is_readable(shared_receiver.receiver.context->async_fd, 0));
    send_message(); // two requests are left
    const ibv_async_event event = wait_for_event(shared_receiver.receiver.context);
    CHECK(event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED && event.element.srq == srq);
    CHECK(ibv_query_srq(srq, &attr) == 0 && attr.srq_limit == 0 && attr.max_wr == 8 && attr.max_sge == 4);
    send_message();
    CHECK(!is_readable(shared_receiver.receiver.context->async_fd, 0));
}

void test_resize_keeps_posted_requests() {
    const SharedReceiver shared_receiver(2);
    CHECK(shared_receiver.post_receive(1) == 0 && shared_receiver.post_receive(2) == 0 &&
          shared_receiver.post_receive(3) == ENOMEM);
    ibv_srq_attr attr{};
    attr.max_wr = 1; // fewer than the posted requests
    CHECK(ibv_modify_srq(shared_receiver.receiver.srq, &attr, IBV_SRQ_MAX_WR) == EINVAL);
    attr.max_wr = 3;
    CHECK(ibv_modify_srq(shared_receiver.receiver.srq, &attr, IBV_SRQ_MAX_WR) == 0);
    CHECK(shared_receiver.post_receive(3) == 0 && shared_receiver.post_receive(4) == ENOMEM);
}

void test_error_state_raises_last_wqe_event() {
    SharedReceiver shared_receiver(4);
    CHECK(shared_receiver.post_receive(1) == 0);
    CHECK(shared_receiver.receiver.modify_to(IBV_QPS_ERR) == 0); // changes the second queue pair
    const ibv_async_event event = wait_for_event(shared_receiver.receiver.context);
    CHECK(event.event_type == IBV_EVENT_QP_LAST_WQE_REACHED && event.element.qp == shared_receiver.second_qp);
    // The error state did not flush the posted request, because the first queue pair can still use it.
    CHECK(shared_receiver.first_sender.post(make_request(1, IBV_WR_SEND), {}) == 0);
    const ibv_wc wc = shared_receiver.receiver.poll_completion();
    CHECK(wc.wr_id == 1 && wc.status == IBV_WC_SUCCESS && wc.qp_num == shared_receiver.first_qp->qp_num);
}

void test_destroyed_queue_pair_frees_slots() {
    Endpoint sender(1), receiver;
    receiver.use_shared_receive_queue(1);
    connect(&sender, &receiver);
    const Buffer receive_buffer(receiver.pd, 64);
    CHECK(receiver.post_shared_receive(1, receive_buffer.sge(0, 64)) == 0);
    CHECK(sender.post(make_request(1, IBV_WR_SEND), {}) == 0);
    sender.expect_completion(1, IBV_WC_SUCCESS);
    CHECK(receiver.post_shared_receive(2, receive_buffer.sge(0, 64)) == ENOMEM);
    // Destroying the queue pair removes its completion from the completion queue, which frees the slot.
    CHECK(ibv_destroy_qp(receiver.qp) == 0);
    receiver.qp = nullptr;
    CHECK(receiver.post_shared_receive(3, receive_buffer.sge(0, 64)) == 0);
}

} // namespace

int main() {
    isolate_from_other_processes();
    test_creation_checks_limits();
    test_used_objects_cannot_be_destroyed();
    test_two_queue_pairs_consume_in_order();
    test_empty_queue_is_not_ready();
    test_limit_raises_one_event();
    test_resize_keeps_posted_requests();
    test_error_state_raises_last_wqe_event();
    test_destroyed_queue_pair_frees_slots();
    return 0;
}
