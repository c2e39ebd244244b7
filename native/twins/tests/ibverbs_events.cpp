// Tests of completion channels and asynchronous events.
#include <fcntl.h>

#include <atomic>
#include <thread>

#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

Settings with_channel() {
    Settings settings;
    settings.channel = true;
    return settings;
}

void take_event(Endpoint* side) {
    ibv_cq* cq = nullptr;
    void* cq_context = nullptr;
    CHECK(ibv_get_cq_event(side->channel, &cq, &cq_context) == 0);
    CHECK(cq == side->cq && cq_context == side);
    ibv_ack_cq_events(cq, 1);
}

void test_one_event_per_arming() {
    Endpoint a(0, with_channel()), b(0, with_channel());
    connect(&a, &b);
    CHECK(b.post_receive(1, {}) == 0 && b.post_receive(2, {}) == 0 && b.post_receive(3, {}) == 0);
    CHECK(ibv_req_notify_cq(b.cq, 0) == 0);
    CHECK(a.post(request(1, IBV_WR_SEND), {}) == 0);
    CHECK(readable(b.channel->fd, 10000));
    take_event(&b);
    b.expect_completion(1, IBV_WC_SUCCESS);
    a.expect_completion(1, IBV_WC_SUCCESS);
    // Without another ibv_req_notify_cq a completion raises no event.
    CHECK(a.post(request(2, IBV_WR_SEND), {}) == 0);
    b.expect_completion(2, IBV_WC_SUCCESS);
    CHECK(!readable(b.channel->fd, 0));
    CHECK(!readable(a.channel->fd, 0));
    // Without O_NONBLOCK, ibv_get_cq_event waits for an event.
    CHECK(ibv_req_notify_cq(b.cq, 0) == 0);
    std::thread sender([&] {
        usleep(20000);
        CHECK(a.post(request(3, IBV_WR_SEND), {}) == 0);
    });
    take_event(&b);
    sender.join();
    b.expect_completion(3, IBV_WC_SUCCESS);
    CHECK(fcntl(b.channel->fd, F_SETFL, O_NONBLOCK) == 0);
    ibv_cq* cq = nullptr;
    void* cq_context = nullptr;
    errno = 0;
    CHECK(ibv_get_cq_event(b.channel, &cq, &cq_context) == -1 && errno == EAGAIN);
}

void test_solicited_events_only() {
    Endpoint a, b(0, with_channel());
    connect(&a, &b);
    for (std::uint64_t id = 1; id <= 3; ++id) {
        CHECK(b.post_receive(id, {}) == 0);
    }
    CHECK(ibv_req_notify_cq(b.cq, 1) == 0);
    CHECK(a.post(request(1, IBV_WR_SEND), {}) == 0);
    b.expect_completion(1, IBV_WC_SUCCESS);
    CHECK(!readable(b.channel->fd, 0));
    CHECK(a.post(request(2, IBV_WR_SEND, 0, 0, IBV_SEND_SIGNALED | IBV_SEND_SOLICITED), {}) == 0);
    b.expect_completion(2, IBV_WC_SUCCESS);
    CHECK(readable(b.channel->fd, 10000));
    take_event(&b);
    CHECK(ibv_req_notify_cq(b.cq, 1) == 0);
    CHECK(b.to(IBV_QPS_ERR) == 0);
    CHECK(readable(b.channel->fd, 10000));
    take_event(&b);
    b.expect_completion(3, IBV_WC_WR_FLUSH_ERR);
}

void test_destroy_waits_for_acknowledgement() {
    Endpoint a, b(0, with_channel());
    connect(&a, &b);
    CHECK(b.post_receive(1, {}) == 0);
    CHECK(ibv_req_notify_cq(b.cq, 0) == 0);
    CHECK(a.post(request(1, IBV_WR_SEND), {}) == 0);
    ibv_cq* cq = nullptr;
    void* cq_context = nullptr;
    CHECK(ibv_get_cq_event(b.channel, &cq, &cq_context) == 0);
    CHECK(ibv_destroy_comp_channel(b.channel) == EBUSY && ibv_destroy_cq(b.cq) == EBUSY);
    CHECK(ibv_destroy_qp(b.qp) == 0);
    b.qp = nullptr;
    std::atomic<bool> destroyed{false};
    ibv_cq* const second = ibv_create_cq(b.context, 1, &b, b.channel, 0);
    std::thread destroyer([&] {
        CHECK(ibv_destroy_cq(b.cq) == 0);
        destroyed = true;
    });
    usleep(50000);
    CHECK(!destroyed);
    ibv_ack_cq_events(cq, 1);
    destroyer.join();
    b.cq = second;
}

// Destroying a queue removes its untaken events.
void test_destroy_drops_untaken_events() {
    Endpoint a, b(0, with_channel());
    connect(&a, &b);
    CHECK(b.post_receive(1, {}) == 0);
    CHECK(ibv_req_notify_cq(b.cq, 0) == 0);
    CHECK(a.post(request(1, IBV_WR_SEND), {}) == 0);
    CHECK(readable(b.channel->fd, 10000));
    CHECK(ibv_destroy_qp(b.qp) == 0);
    b.qp = nullptr;
    CHECK(ibv_destroy_cq(b.cq) == 0);
    CHECK(!readable(b.channel->fd, 0));
    b.cq = ibv_create_cq(b.context, 1, &b, b.channel, 0);
}

void test_cq_overrun() {
    Settings small;
    small.completions = 2;
    Endpoint a, b(0, small);
    connect(&a, &b);
    for (std::uint64_t id = 1; id <= 3; ++id) {
        CHECK(b.post_receive(id, {}) == 0);
        CHECK(a.post(request(id, IBV_WR_SEND, 0, 0, 0), {}) == 0);
    }
    bool queue_told = false, pair_told = false;
    for (int count = 0; count < 2; ++count) {
        const ibv_async_event event = next_event(b.context);
        queue_told |= event.event_type == IBV_EVENT_CQ_ERR && event.element.cq == b.cq;
        pair_told |= event.event_type == IBV_EVENT_QP_FATAL && event.element.qp == b.qp;
    }
    CHECK(queue_told && pair_told);
    ibv_wc wc{};
    CHECK(ibv_poll_cq(b.cq, 1, &wc) < 0);
}

void test_send_queue_drained() {
    Endpoint a, b;
    connect(&a, &b);
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_SQD;
    attr.en_sqd_async_notify = 1;
    CHECK(ibv_modify_qp(a.qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY) == 0);
    const ibv_async_event event = next_event(a.context);
    CHECK(event.event_type == IBV_EVENT_SQ_DRAINED && event.element.qp == a.qp);
    // The request is queued but does not start before the queue may send again.
    CHECK(b.post_receive(1, {}) == 0);
    CHECK(a.post(request(1, IBV_WR_SEND), {}) == 0);
    ibv_wc wc{};
    usleep(20000);
    CHECK(ibv_poll_cq(a.cq, 1, &wc) == 0);
    CHECK(a.to(IBV_QPS_RTS) == 0);
    a.expect_completion(1, IBV_WC_SUCCESS);
}

} // namespace

int main() {
    use_own_domain();
    test_one_event_per_arming();
    test_solicited_events_only();
    test_destroy_waits_for_acknowledgement();
    test_destroy_drops_untaken_events();
    test_cq_overrun();
    test_send_queue_drained();
    return 0;
}
