// Every way in which a request can fail, and what the failure does to both queue pairs.
#include <sys/mman.h>
#include <sys/time.h>

#include <chrono>
#include <memory>

#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A write that the target refuses: both pairs are in error, the target is told by an event, and what was queued is
// flushed in order.
void refused_write(const char* what, std::uint64_t remote_offset, std::size_t length, std::uint32_t key_change,
                   int target_access, ibv_wc_status status, ibv_event_type event, unsigned pair_access = all_access) {
    std::fprintf(stderr, "refused write: %s\n", what);
    Settings settings;
    settings.access = pair_access;
    Side a, b(1, settings);
    connect(&a, &b);
    Buffer from(a.pd, 256), to(b.pd, 128, target_access), other(b.pd, 64);
    CHECK(b.post_receive(20, {other.part(0, 8)}) == 0 && b.post_receive(21, {other.part(8, 8)}) == 0);
    CHECK(a.post_receive(30, {}) == 0);
    CHECK(a.post(request(1, IBV_WR_RDMA_WRITE, to.at(remote_offset), to.mr->rkey ^ key_change, 0),
                 {from.part(0, length)}) == 0);
    CHECK(a.post(request(2, IBV_WR_SEND, 0, 0, 0), {}) == 0);
    a.expect(1, status);
    a.expect(2, IBV_WC_WR_FLUSH_ERR);
    a.expect(30, IBV_WC_WR_FLUSH_ERR);
    CHECK(a.state() == IBV_QPS_ERR);
    const ibv_async_event told = next_event(b.context);
    CHECK(told.event_type == event && told.element.qp == b.qp);
    CHECK(b.state() == IBV_QPS_ERR);
    b.expect(20, IBV_WC_WR_FLUSH_ERR);
    b.expect(21, IBV_WC_WR_FLUSH_ERR);
    // What is posted in error is flushed too.
    CHECK(a.post(request(3, IBV_WR_SEND), {}) == 0);
    a.expect(3, IBV_WC_WR_FLUSH_ERR);
    CHECK(!readable(b.context->async_fd, 0) && !readable(a.context->async_fd, 0));
}

void refused_by_the_target() {
    constexpr auto access = IBV_WC_REM_ACCESS_ERR;
    constexpr auto access_event = IBV_EVENT_QP_ACCESS_ERR;
    refused_write("key", 0, 8, 0x10, all_access, access, access_event);
    refused_write("one byte behind", 121, 8, 0, all_access, access, access_event);
    refused_write("one byte before", static_cast<std::uint64_t>(-1), 8, 0, all_access, access, access_event);
    refused_write("longer than the region", 0, 129, 0, all_access, access, access_event);
    refused_write("region not writable", 0, 8, 0, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ, access,
                  access_event);
    refused_write("pair takes no writes", 0, 8, 0, all_access, IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR,
                  IBV_ACCESS_REMOTE_READ);
}

void refused_read_and_atomic() {
    {
        Side a, b;
        connect(&a, &b);
        Buffer into(a.pd, 8), to(b.pd, 8, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
        CHECK(a.post(request(1, IBV_WR_RDMA_READ, to.at(), to.mr->rkey), {into.part(0, 8)}) == 0);
        a.expect(1, IBV_WC_REM_ACCESS_ERR);
        CHECK(next_event(b.context).event_type == IBV_EVENT_QP_ACCESS_ERR);
    }
    Side a, b;
    connect(&a, &b);
    Buffer into(a.pd, 8), to(b.pd, 16);
    ibv_send_wr wr = request(2, IBV_WR_ATOMIC_FETCH_AND_ADD);
    wr.wr.atomic = {to.at(4), 1, 0, to.mr->rkey};
    CHECK(a.post(wr, {into.part(0, 8)}) == 0);
    a.expect(2, IBV_WC_REM_INV_REQ_ERR);
    CHECK(next_event(b.context).event_type == IBV_EVENT_QP_REQ_ERR);
}

void other_domain_and_deregistered() {
    {
        Side a, b;
        connect(&a, &b);
        ibv_pd* const stranger = ibv_alloc_pd(b.context);
        Buffer from(a.pd, 8);
        auto to = std::make_unique<Buffer>(stranger, 8);
        CHECK(a.post(request(1, IBV_WR_RDMA_WRITE, to->at(), to->mr->rkey), {from.part(0, 8)}) == 0);
        a.expect(1, IBV_WC_REM_ACCESS_ERR);
        next_event(b.context);
        to.reset();
        CHECK(ibv_dealloc_pd(stranger) == 0);
    }
    Side a, b;
    connect(&a, &b);
    Buffer from(a.pd, 8), to(b.pd, 8);
    CHECK(a.post(request(1, IBV_WR_RDMA_WRITE, to.at(), to.mr->rkey), {from.part(0, 8)}) == 0);
    a.expect(1, IBV_WC_SUCCESS);
    const std::uint32_t key = to.mr->rkey;
    CHECK(ibv_dereg_mr(to.mr) == 0);
    to.mr = ibv_reg_mr(b.pd, to.bytes, 8, all_access);
    CHECK(to.mr != nullptr && to.mr->rkey != key);
    CHECK(a.post(request(2, IBV_WR_RDMA_WRITE, to.at(), key), {from.part(0, 8)}) == 0);
    a.expect(2, IBV_WC_REM_ACCESS_ERR);
    next_event(b.context);
}

// What the requester itself does wrong never reaches the target, which stays as it was.
void local_protection() {
    const auto fails = [](auto change, ibv_wr_opcode opcode, int access) {
        Side a, b;
        connect(&a, &b);
        Buffer local(a.pd, 64, access), to(b.pd, 64);
        ibv_sge one = local.part(0, 64);
        change(&one);
        CHECK(a.post(request(1, opcode, to.at(), to.mr->rkey), {one}) == 0);
        a.expect(1, IBV_WC_LOC_PROT_ERR);
        CHECK(a.state() == IBV_QPS_ERR && b.state() == IBV_QPS_RTS && !readable(b.context->async_fd, 0));
    };
    fails([](ibv_sge* one) { one->lkey ^= 1; }, IBV_WR_RDMA_WRITE, all_access);
    fails([](ibv_sge* one) { one->addr += 1; }, IBV_WR_SEND, all_access);
    fails([](ibv_sge*) {}, IBV_WR_RDMA_READ, IBV_ACCESS_REMOTE_READ);
    Side a, b;
    connect(&a, &b);
    Buffer local(a.pd, 64), to(b.pd, 64);
    // The remote key is no local key.
    CHECK(a.post(request(1, IBV_WR_RDMA_WRITE, to.at(), to.mr->rkey), {{local.at(), 64, local.mr->rkey}}) == 0);
    a.expect(1, IBV_WC_LOC_PROT_ERR);
}

void messages_that_do_not_fit() {
    {
        Side a, b;
        connect(&a, &b);
        Buffer from(a.pd, 64), to(b.pd, 64);
        CHECK(b.post_receive(5, {to.part(0, 10)}) == 0);
        CHECK(a.post(request(1, IBV_WR_SEND), {from.part(0, 11)}) == 0);
        a.expect(1, IBV_WC_REM_INV_REQ_ERR);
        b.expect(5, IBV_WC_LOC_LEN_ERR);
        CHECK(b.state() == IBV_QPS_ERR);
    }
    Side a, b;
    connect(&a, &b);
    Buffer from(a.pd, 64), to(b.pd, 64, IBV_ACCESS_REMOTE_READ);
    CHECK(b.post_receive(5, {to.part(0, 64)}) == 0);
    CHECK(a.post(request(1, IBV_WR_SEND), {from.part(0, 11)}) == 0);
    a.expect(1, IBV_WC_REM_OP_ERR);
    b.expect(5, IBV_WC_LOC_PROT_ERR);
}

void memory_that_went_away() {
    Side a, b;
    connect(&a, &b);
    Buffer from(a.pd, 8192);
    void* const memory = mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ibv_mr* const mr = ibv_reg_mr(b.pd, memory, 8192, all_access);
    CHECK(mr != nullptr);
    // Its pages go, its place stays taken: an allocation of another thread there would be written to.
    CHECK(mmap(memory, 8192, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == memory);
    CHECK(a.post(request(1, IBV_WR_RDMA_WRITE, number_of(memory), mr->rkey), {from.part(0, 8192)}) == 0);
    a.expect(1, IBV_WC_REM_OP_ERR);
    CHECK(next_event(b.context).event_type == IBV_EVENT_QP_FATAL);
    CHECK(ibv_dereg_mr(mr) == 0);
    CHECK(munmap(memory, 8192) == 0);
}

void receiver_not_ready() {
    {
        Settings settings;
        settings.rnr_retry = 2;
        settings.min_rnr_timer = 14; // 1.28 ms
        Side a(0, settings), b(0, settings);
        connect(&a, &b);
        const double begin = seconds_now();
        CHECK(a.post(request(1, IBV_WR_SEND), {}) == 0);
        a.expect(1, IBV_WC_RNR_RETRY_EXC_ERR);
        CHECK(seconds_now() - begin > 2 * 0.00128);
        CHECK(b.state() == IBV_QPS_RTS);
    }
    // 7 stands for no limit.
    Side a, b;
    connect(&a, &b);
    CHECK(a.post(request(1, IBV_WR_SEND), {}) == 0);
    usleep(30000);
    CHECK(b.post_receive(2, {}) == 0);
    a.expect(1, IBV_WC_SUCCESS);
    b.expect(2, IBV_WC_SUCCESS);
}

void nobody_there() {
    const auto fails = [](auto change) {
        Settings settings;
        settings.timeout = 13; // 33.5 ms
        settings.retry_count = 3;
        Side a(0, settings), b;
        Address to_b = b.address(), to_a = a.address();
        change(&to_b, &to_a);
        a.connect(to_b);
        b.connect(to_a);
        const double begin = seconds_now();
        CHECK(a.post(request(1, IBV_WR_SEND), {}) == 0);
        a.expect(1, IBV_WC_RETRY_EXC_ERR);
        CHECK(seconds_now() - begin >= 0.13);
    };
    fails([](Address* b, Address*) { b->qp_num ^= 1; });
    fails([](Address* b, Address*) { b->gid.raw[15] ^= 0x80; });
    fails([](Address*, Address* a) { a->psn += 1; });
    fails([](Address*, Address* a) { a->qp_num ^= 1; });
    // There, but not ready to receive.
    Settings settings;
    settings.timeout = 8;
    settings.retry_count = 0;
    Side a(0, settings), b;
    a.connect(b.address());
    CHECK(b.to_init() == 0);
    CHECK(a.post(request(1, IBV_WR_SEND), {}) == 0);
    a.expect(1, IBV_WC_RETRY_EXC_ERR);
}

void peer_that_went_away() {
    Side a;
    auto b = std::make_unique<Side>();
    connect(&a, b.get());
    CHECK(b->post_receive(1, {}) == 0);
    CHECK(a.post(request(2, IBV_WR_SEND), {}) == 0);
    a.expect(2, IBV_WC_SUCCESS);
    b->expect(1, IBV_WC_SUCCESS);
    b.reset();
    CHECK(a.post(request(3, IBV_WR_SEND), {}) == 0);
    a.expect(3, IBV_WC_RETRY_EXC_ERR);
}

void outstanding_reads_need_room() {
    Settings settings;
    settings.rd_atomic = 0;
    Side a(0, settings), b;
    connect(&a, &b);
    Buffer into(a.pd, 8), to(b.pd, 8);
    CHECK(a.post(request(1, IBV_WR_RDMA_READ, to.at(), to.mr->rkey), {into.part(0, 8)}) == 0);
    a.expect(1, IBV_WC_LOC_QP_OP_ERR);
}

void refused_when_posted() {
    Side a, b;
    Buffer from(a.pd, 512);
    CHECK(a.post(request(1, IBV_WR_SEND), {}) == EINVAL && a.post_receive(1, {}) == EINVAL);
    connect(&a, &b);
    const ibv_sge one = from.part(0, 8);
    CHECK(a.post(request(1, IBV_WR_SEND), {one, one, one, one, one}) == EINVAL);
    CHECK(a.post_receive(1, {one, one, one, one, one}) == EINVAL);
    CHECK(a.post(request(1, IBV_WR_SEND, 0, 0, IBV_SEND_INLINE), {from.part(0, 65)}) == EINVAL);
    CHECK(a.post(request(1, IBV_WR_RDMA_READ, 0, 0, IBV_SEND_INLINE), {one}) == EINVAL);
    CHECK(a.post(request(1, IBV_WR_ATOMIC_FETCH_AND_ADD), {from.part(0, 4)}) == EINVAL);
    CHECK(a.post(request(1, IBV_WR_LOCAL_INV), {}) == EOPNOTSUPP);
    // A count without a list behind it is refused before anybody looks at the list.
    ibv_send_wr no_list = request(1, IBV_WR_SEND), *bad = nullptr;
    no_list.num_sge = 2;
    CHECK(ibv_post_send(a.qp, &no_list, &bad) == EINVAL && bad == &no_list);
    for (std::uint32_t count = 0; count < a.settings.receive_wr; ++count) {
        CHECK(a.post_receive(count, {}) == 0);
    }
    CHECK(a.post_receive(99, {}) == ENOMEM);
}

} // namespace

int main() {
    use_own_domain();
    refused_by_the_target();
    refused_read_and_atomic();
    other_domain_and_deregistered();
    local_protection();
    messages_that_do_not_fit();
    memory_that_went_away();
    receiver_not_ready();
    nobody_there();
    peer_that_went_away();
    outstanding_reads_need_room();
    refused_when_posted();
    return 0;
}
