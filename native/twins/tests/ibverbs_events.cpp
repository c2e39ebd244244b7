// Tests of the software twin of libibverbs: completion channels and asynchronous events.
#include <fcntl.h>

#include <atomic>
#include <thread>

#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

EndpointSettings make_channel_settings() {
    EndpointSettings settings;
    settings.has_channel = true;
    return settings;
}

void get_and_ack_event(Endpoint* endpoint) {
    ibv_cq* cq = nullptr;
    void* cq_context = nullptr;
    CHECK(ibv_get_cq_event(endpoint->channel, &cq, &cq_context) == 0);
    CHECK(cq == endpoint->cq && cq_context == endpoint);
    ibv_ack_cq_events(cq, 1);
}

void test_one_event_per_arming() {
    Endpoint requester(0, make_channel_settings()), responder(0, make_channel_settings());
    connect(&requester, &responder);
    CHECK(responder.post_receive(1, {}) == 0 && responder.post_receive(2, {}) == 0 &&
          responder.post_receive(3, {}) == 0);
    CHECK(ibv_req_notify_cq(responder.cq, 0) == 0);
    CHECK(requester.post(make_request(1, IBV_WR_SEND), {}) == 0);
    CHECK(is_readable(responder.channel->fd, 10000));
    get_and_ack_event(&responder);
    responder.expect_completion(1, IBV_WC_SUCCESS);
    requester.expect_completion(1, IBV_WC_SUCCESS);
    // Without another ibv_req_notify_cq a completion raises no event.
    CHECK(requester.post(make_request(2, IBV_WR_SEND), {}) == 0);
    responder.expect_completion(2, IBV_WC_SUCCESS);
    CHECK(!is_readable(responder.channel->fd, 0));
    CHECK(!is_readable(requester.channel->fd, 0));
    // Without O_NONBLOCK, ibv_get_cq_event waits for an event.
    CHECK(ibv_req_notify_cq(responder.cq, 0) == 0);
    std::thread sender([&] {
        usleep(20000);
        CHECK(requester.post(make_request(3, IBV_WR_SEND), {}) == 0);
    });
    get_and_ack_event(&responder);
    sender.join();
    responder.expect_completion(3, IBV_WC_SUCCESS);
    CHECK(fcntl(responder.channel->fd, F_SETFL, O_NONBLOCK) == 0);
    ibv_cq* cq = nullptr;
    void* cq_context = nullptr;
    errno = 0;
    CHECK(ibv_get_cq_event(responder.channel, &cq, &cq_context) == -1 && errno == EAGAIN);
}

void test_solicited_events_only() {
    Endpoint requester, responder(0, make_channel_settings());
    connect(&requester, &responder);
    for (std::uint64_t wr_id = 1; wr_id <= 3; ++wr_id) {
        CHECK(responder.post_receive(wr_id, {}) == 0);
    }
    CHECK(ibv_req_notify_cq(responder.cq, 1) == 0); // 1 requests only solicited completions
    CHECK(requester.post(make_request(1, IBV_WR_SEND), {}) == 0);
    responder.expect_completion(1, IBV_WC_SUCCESS);
    CHECK(!is_readable(responder.channel->fd, 0));
    CHECK(requester.post(make_request(2, IBV_WR_SEND, 0, 0, IBV_SEND_SIGNALED | IBV_SEND_SOLICITED), {}) == 0);
    responder.expect_completion(2, IBV_WC_SUCCESS);
    CHECK(is_readable(responder.channel->fd, 10000));
    get_and_ack_event(&responder);
    // A completion with an error counts as solicited.
    CHECK(ibv_req_notify_cq(responder.cq, 1) == 0);
    CHECK(responder.modify_to(IBV_QPS_ERR) == 0);
    CHECK(is_readable(responder.channel->fd, 10000));
    get_and_ack_event(&responder);
    responder.expect_completion(3, IBV_WC_WR_FLUSH_ERR);
}

void test_destroy_waits_for_acknowledgement() {
    Endpoint requester, responder(0, make_channel_settings());
    connect(&requester, &responder);
    CHECK(responder.post_receive(1, {}) == 0);
    CHECK(ibv_req_notify_cq(responder.cq, 0) == 0);
    CHECK(requester.post(make_request(1, IBV_WR_SEND), {}) == 0);
    ibv_cq* cq = nullptr;
    void* cq_context = nullptr;
    CHECK(ibv_get_cq_event(responder.channel, &cq, &cq_context) == 0);
    CHECK(ibv_destroy_comp_channel(responder.channel) == EBUSY && ibv_destroy_cq(responder.cq) == EBUSY);
    CHECK(ibv_destroy_qp(responder.qp) == 0);
    responder.qp = nullptr;
    std::atomic<bool> is_destroyed{false};
    // The destructor of `responder` destroys a completion queue, so `responder` later gets this one.
    ibv_cq* const second_cq = ibv_create_cq(responder.context, 1, &responder, responder.channel, 0);
    std::thread destroyer([&] {
        CHECK(ibv_destroy_cq(responder.cq) == 0);
        is_destroyed = true;
    });
    usleep(50000);
    CHECK(!is_destroyed);
    ibv_ack_cq_events(cq, 1);
    destroyer.join();
    responder.cq = second_cq;
}

// Destroying a completion queue removes the events that the application has not read.
void test_destroy_drops_unread_events() {
    Endpoint requester, responder(0, make_channel_settings());
    connect(&requester, &responder);
    CHECK(responder.post_receive(1, {}) == 0);
    CHECK(ibv_req_notify_cq(responder.cq, 0) == 0);
    CHECK(requester.post(make_request(1, IBV_WR_SEND), {}) == 0);
    CHECK(is_readable(responder.channel->fd, 10000));
    CHECK(ibv_destroy_qp(responder.qp) == 0);
    responder.qp = nullptr;
    CHECK(ibv_destroy_cq(responder.cq) == 0);
    CHECK(!is_readable(responder.channel->fd, 0));
    responder.cq = ibv_create_cq(responder.context, 1, &responder, responder.channel, 0);
}

// Three completions do not fit in a completion queue of two entries.
void test_cq_overrun_raises_events() {
    EndpointSettings small_queue_settings;
    small_queue_settings.cq_entries = 2;
    Endpoint requester, responder(0, small_queue_settings);
    connect(&requester, &responder);
    for (std::uint64_t wr_id = 1; wr_id <= 3; ++wr_id) {
        CHECK(responder.post_receive(wr_id, {}) == 0);
        CHECK(requester.post(make_request(wr_id, IBV_WR_SEND, 0, 0, 0), {}) == 0);
    }
    bool has_cq_event = false, has_qp_event = false;
    for (int count = 0; count < 2; ++count) {
        const ibv_async_event event = wait_for_event(responder.context);
        has_cq_event |= event.event_type == IBV_EVENT_CQ_ERR && event.element.cq == responder.cq;
        has_qp_event |= event.event_type == IBV_EVENT_QP_FATAL && event.element.qp == responder.qp;
    }
    CHECK(has_cq_event && has_qp_event);
    ibv_wc wc{};
    CHECK(ibv_poll_cq(responder.cq, 1, &wc) < 0);
}

void test_drained_send_queue_raises_event() {
    Endpoint requester, responder;
    connect(&requester, &responder);
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_SQD;
    attr.en_sqd_async_notify = 1;
    CHECK(ibv_modify_qp(requester.qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY) == 0);
    const ibv_async_event event = wait_for_event(requester.context);
    CHECK(event.event_type == IBV_EVENT_SQ_DRAINED && event.element.qp == requester.qp);
    // The request is queued, but it does not start before the queue pair is in RTS again.
    CHECK(responder.post_receive(1, {}) == 0);
    CHECK(requester.post(make_request(1, IBV_WR_SEND), {}) == 0);
    ibv_wc wc{};
    usleep(20000);
    CHECK(ibv_poll_cq(requester.cq, 1, &wc) == 0);
    CHECK(requester.modify_to(IBV_QPS_RTS) == 0);
    requester.expect_completion(1, IBV_WC_SUCCESS);
}

} // namespace

int main() {
    isolate_from_other_processes();
    test_one_event_per_arming();
    test_solicited_events_only();
    test_destroy_waits_for_acknowledgement();
    test_destroy_drops_unread_events();
    test_cq_overrun_raises_events();
    test_drained_send_queue_raises_event();
    return 0;
}
