// Tests of every way in which a request can fail, and of the effect on both queue pairs.
#include <sys/mman.h>
#include <sys/time.h>

#include <chrono>
#include <memory>

#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

double monotonic_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// After a write that the target refuses, both pairs are in the error state, the target gets an event, and queued
// requests are flushed in order.
void refused_write(const char* what, std::uint64_t remote_offset, std::size_t length, std::uint32_t key_change,
                   int target_access, ibv_wc_status status, ibv_event_type event, unsigned pair_access = all_access) {
    std::fprintf(stderr, "refused write: %s\n", what);
    Settings settings;
    settings.access = pair_access;
    Endpoint a, b(1, settings);
    connect(&a, &b);
    Buffer from(a.pd, 256), to(b.pd, 128, target_access), other(b.pd, 64);
    CHECK(b.post_receive(20, {other.part(0, 8)}) == 0 && b.post_receive(21, {other.part(8, 8)}) == 0);
    CHECK(a.post_receive(30, {}) == 0);
    CHECK(a.post(request(1, IBV_WR_RDMA_WRITE, to.at(remote_offset), to.mr->rkey ^ key_change, 0),
                 {from.part(0, length)}) == 0);
    CHECK(a.post(request(2, IBV_WR_SEND, 0, 0, 0), {}) == 0);
    a.expect_completion(1, status);
    a.expect_completion(2, IBV_WC_WR_FLUSH_ERR);
    a.expect_completion(30, IBV_WC_WR_FLUSH_ERR);
    CHECK(a.state() == IBV_QPS_ERR);
    const ibv_async_event received = next_event(b.context);
    CHECK(received.event_type == event && received.element.qp == b.qp);
    CHECK(b.state() == IBV_QPS_ERR);
    b.expect_completion(20, IBV_WC_WR_FLUSH_ERR);
    b.expect_completion(21, IBV_WC_WR_FLUSH_ERR);
    // Requests posted in the error state are flushed too.
    CHECK(a.post(request(3, IBV_WR_SEND), {}) == 0);
    a.expect_completion(3, IBV_WC_WR_FLUSH_ERR);
    CHECK(!readable(b.context->async_fd, 0) && !readable(a.context->async_fd, 0));
}

void test_write_refused_by_target() {
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

void test_read_and_atomic_refused() {
    {
        Endpoint a, b;
        connect(&a, &b);
        Buffer into(a.pd, 8), to(b.pd, 8, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
        CHECK(a.post(request(1, IBV_WR_RDMA_READ, to.at(), to.mr->rkey), {into.part(0, 8)}) == 0);
        a.expect_completion(1, IBV_WC_REM_ACCESS_ERR);
        CHECK(next_event(b.context).event_type == IBV_EVENT_QP_ACCESS_ERR);
    }
    Endpoint a, b;
    connect(&a, &b);
    Buffer into(a.pd, 8), to(b.pd, 16);
    ibv_send_wr wr = request(2, IBV_WR_ATOMIC_FETCH_AND_ADD);
    wr.wr.atomic = {to.at(4), 1, 0, to.mr->rkey};
    CHECK(a.post(wr, {into.part(0, 8)}) == 0);
    a.expect_completion(2, IBV_WC_REM_INV_REQ_ERR);
    CHECK(next_event(b.context).event_type == IBV_EVENT_QP_REQ_ERR);
}

void test_wrong_domain_and_deregistered_key() {
    {
        Endpoint a, b;
        connect(&a, &b);
        ibv_pd* const stranger = ibv_alloc_pd(b.context);
        Buffer from(a.pd, 8);
        auto to = std::make_unique<Buffer>(stranger, 8);
        CHECK(a.post(request(1, IBV_WR_RDMA_WRITE, to->at(), to->mr->rkey), {from.part(0, 8)}) == 0);
        a.expect_completion(1, IBV_WC_REM_ACCESS_ERR);
        next_event(b.context);
        to.reset();
        CHECK(ibv_dealloc_pd(stranger) == 0);
    }
    Endpoint a, b;
    connect(&a, &b);
    Buffer from(a.pd, 8), to(b.pd, 8);
    CHECK(a.post(request(1, IBV_WR_RDMA_WRITE, to.at(), to.mr->rkey), {from.part(0, 8)}) == 0);
    a.expect_completion(1, IBV_WC_SUCCESS);
    const std::uint32_t key = to.mr->rkey;
    CHECK(ibv_dereg_mr(to.mr) == 0);
    to.mr = ibv_reg_mr(b.pd, to.bytes, 8, all_access);
    CHECK(to.mr != nullptr && to.mr->rkey != key);
    CHECK(a.post(request(2, IBV_WR_RDMA_WRITE, to.at(), key), {from.part(0, 8)}) == 0);
    a.expect_completion(2, IBV_WC_REM_ACCESS_ERR);
    next_event(b.context);
}

// Local errors of the requester never affect the target.
void test_local_protection_error() {
    const auto check_fails = [](auto change, ibv_wr_opcode opcode, int access) {
        Endpoint a, b;
        connect(&a, &b);
        Buffer local(a.pd, 64, access), to(b.pd, 64);
        ibv_sge sge = local.part(0, 64);
        change(&sge);
        CHECK(a.post(request(1, opcode, to.at(), to.mr->rkey), {sge}) == 0);
        a.expect_completion(1, IBV_WC_LOC_PROT_ERR);
        CHECK(a.state() == IBV_QPS_ERR && b.state() == IBV_QPS_RTS && !readable(b.context->async_fd, 0));
    };
    check_fails([](ibv_sge* sge) { sge->lkey ^= 1; }, IBV_WR_RDMA_WRITE, all_access);
    check_fails([](ibv_sge* sge) { sge->addr += 1; }, IBV_WR_SEND, all_access);
    check_fails([](ibv_sge*) {}, IBV_WR_RDMA_READ, IBV_ACCESS_REMOTE_READ);
    Endpoint a, b;
    connect(&a, &b);
    Buffer local(a.pd, 64), to(b.pd, 64);
    // An rkey is not a valid lkey.
    CHECK(a.post(request(1, IBV_WR_RDMA_WRITE, to.at(), to.mr->rkey), {{local.at(), 64, local.mr->rkey}}) == 0);
    a.expect_completion(1, IBV_WC_LOC_PROT_ERR);
}

void test_message_too_long() {
    {
        Endpoint a, b;
        connect(&a, &b);
        Buffer from(a.pd, 64), to(b.pd, 64);
        CHECK(b.post_receive(5, {to.part(0, 10)}) == 0);
        CHECK(a.post(request(1, IBV_WR_SEND), {from.part(0, 11)}) == 0);
        a.expect_completion(1, IBV_WC_REM_INV_REQ_ERR);
        b.expect_completion(5, IBV_WC_LOC_LEN_ERR);
        CHECK(b.state() == IBV_QPS_ERR);
    }
    Endpoint a, b;
    connect(&a, &b);
    Buffer from(a.pd, 64), to(b.pd, 64, IBV_ACCESS_REMOTE_READ);
    CHECK(b.post_receive(5, {to.part(0, 64)}) == 0);
    CHECK(a.post(request(1, IBV_WR_SEND), {from.part(0, 11)}) == 0);
    a.expect_completion(1, IBV_WC_REM_OP_ERR);
    b.expect_completion(5, IBV_WC_LOC_PROT_ERR);
}

void test_unmapped_memory() {
    Endpoint a, b;
    connect(&a, &b);
    Buffer from(a.pd, 8192);
    void* const memory = mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ibv_mr* const mr = ibv_reg_mr(b.pd, memory, 8192, all_access);
    CHECK(mr != nullptr);
    // Make the pages inaccessible instead of unmapping them: another thread's allocation could reuse the address.
    CHECK(mmap(memory, 8192, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == memory);
    CHECK(a.post(request(1, IBV_WR_RDMA_WRITE, number_of(memory), mr->rkey), {from.part(0, 8192)}) == 0);
    a.expect_completion(1, IBV_WC_REM_OP_ERR);
    CHECK(next_event(b.context).event_type == IBV_EVENT_QP_FATAL);
    CHECK(ibv_dereg_mr(mr) == 0);
    CHECK(munmap(memory, 8192) == 0);
}

void test_receiver_not_ready() {
    {
        Settings settings;
        settings.rnr_retry = 2;
        settings.min_rnr_timer = 14; // 1.28 ms
        Endpoint a(0, settings), b(0, settings);
        connect(&a, &b);
        const double begin = monotonic_seconds();
        CHECK(a.post(request(1, IBV_WR_SEND), {}) == 0);
        a.expect_completion(1, IBV_WC_RNR_RETRY_EXC_ERR);
        CHECK(monotonic_seconds() - begin > 2 * 0.00128);
        CHECK(b.state() == IBV_QPS_RTS);
    }
    // The value 7 means unlimited retries.
    Endpoint a, b;
    connect(&a, &b);
    CHECK(a.post(request(1, IBV_WR_SEND), {}) == 0);
    usleep(30000);
    CHECK(b.post_receive(2, {}) == 0);
    a.expect_completion(1, IBV_WC_SUCCESS);
    b.expect_completion(2, IBV_WC_SUCCESS);
}

void test_unreachable_peer() {
    const auto check_fails = [](auto change) {
        Settings settings;
        settings.timeout = 13; // 33.5 ms
        settings.retry_count = 3;
        Endpoint a(0, settings), b;
        Address to_b = b.address(), to_a = a.address();
        change(&to_b, &to_a);
        a.connect(to_b);
        b.connect(to_a);
        const double begin = monotonic_seconds();
        CHECK(a.post(request(1, IBV_WR_SEND), {}) == 0);
        a.expect_completion(1, IBV_WC_RETRY_EXC_ERR);
        CHECK(monotonic_seconds() - begin >= 0.13);
    };
    check_fails([](Address* b, Address*) { b->qp_num ^= 1; });
    check_fails([](Address* b, Address*) { b->gid.raw[15] ^= 0x80; });
    check_fails([](Address*, Address* a) { a->psn += 1; });
    check_fails([](Address*, Address* a) { a->qp_num ^= 1; });
    // The peer exists but is not ready to receive.
    Settings settings;
    settings.timeout = 8;
    settings.retry_count = 0;
    Endpoint a(0, settings), b;
    a.connect(b.address());
    CHECK(b.to_init() == 0);
    CHECK(a.post(request(1, IBV_WR_SEND), {}) == 0);
    a.expect_completion(1, IBV_WC_RETRY_EXC_ERR);
}

void test_destroyed_peer() {
    Endpoint a;
    auto b = std::make_unique<Endpoint>();
    connect(&a, b.get());
    CHECK(b->post_receive(1, {}) == 0);
    CHECK(a.post(request(2, IBV_WR_SEND), {}) == 0);
    a.expect_completion(2, IBV_WC_SUCCESS);
    b->expect_completion(1, IBV_WC_SUCCESS);
    b.reset();
    CHECK(a.post(request(3, IBV_WR_SEND), {}) == 0);
    a.expect_completion(3, IBV_WC_RETRY_EXC_ERR);
}

void test_reads_need_rd_atomic() {
    Settings settings;
    settings.rd_atomic = 0;
    Endpoint a(0, settings), b;
    connect(&a, &b);
    Buffer into(a.pd, 8), to(b.pd, 8);
    CHECK(a.post(request(1, IBV_WR_RDMA_READ, to.at(), to.mr->rkey), {into.part(0, 8)}) == 0);
    a.expect_completion(1, IBV_WC_LOC_QP_OP_ERR);
}

void test_invalid_requests_are_refused() {
    Endpoint a, b;
    Buffer from(a.pd, 512);
    CHECK(a.post(request(1, IBV_WR_SEND), {}) == EINVAL && a.post_receive(1, {}) == EINVAL);
    connect(&a, &b);
    const ibv_sge sge = from.part(0, 8);
    CHECK(a.post(request(1, IBV_WR_SEND), {sge, sge, sge, sge, sge}) == EINVAL);
    CHECK(a.post_receive(1, {sge, sge, sge, sge, sge}) == EINVAL);
    CHECK(a.post(request(1, IBV_WR_SEND, 0, 0, IBV_SEND_INLINE), {from.part(0, 65)}) == EINVAL);
    CHECK(a.post(request(1, IBV_WR_RDMA_READ, 0, 0, IBV_SEND_INLINE), {sge}) == EINVAL);
    CHECK(a.post(request(1, IBV_WR_ATOMIC_FETCH_AND_ADD), {from.part(0, 4)}) == EINVAL);
    CHECK(a.post(request(1, IBV_WR_LOCAL_INV), {}) == EOPNOTSUPP);
    // A count without a list is refused before the list is read.
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
    test_write_refused_by_target();
    test_read_and_atomic_refused();
    test_wrong_domain_and_deregistered_key();
    test_local_protection_error();
    test_message_too_long();
    test_unmapped_memory();
    test_receiver_not_ready();
    test_unreachable_peer();
    test_destroyed_peer();
    test_reads_need_rd_atomic();
    test_invalid_requests_are_refused();
    return 0;
}
