// Tests of the software twin of libibverbs: the errors with which a request can complete, and their effect on both
// queue pairs.
#include <sys/mman.h>
#include <sys/time.h>

#include <chrono>
#include <memory>

#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

double read_monotonic_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Check a write that the responder refuses: both queue pairs enter the error state, the responder gets an asynchronous
// event, and the queued requests of both are flushed in order. `rkey_xor_mask` changes bits of the rkey.
void check_write_refused(const char* description, std::uint64_t remote_offset, std::size_t length,
                         std::uint32_t rkey_xor_mask, int region_access, ibv_wc_status expected_status,
                         ibv_event_type expected_event, unsigned queue_pair_access = read_write_access) {
    std::fprintf(stderr, "refused write: %s\n", description);
    EndpointSettings settings;
    settings.access_flags = queue_pair_access;
    Endpoint requester, responder(1, settings);
    connect(&requester, &responder);
    Buffer source(requester.pd, 256), target(responder.pd, 128, region_access), receive_buffer(responder.pd, 64);
    CHECK(responder.post_receive(20, {receive_buffer.sge(0, 8)}) == 0 &&
          responder.post_receive(21, {receive_buffer.sge(8, 8)}) == 0);
    CHECK(requester.post_receive(30, {}) == 0);
    CHECK(requester.post(
              make_request(1, IBV_WR_RDMA_WRITE, target.address_at(remote_offset), target.mr->rkey ^ rkey_xor_mask, 0),
              {source.sge(0, length)}) == 0);
    CHECK(requester.post(make_request(2, IBV_WR_SEND, 0, 0, 0), {}) == 0);
    requester.expect_completion(1, expected_status);
    requester.expect_completion(2, IBV_WC_WR_FLUSH_ERR);
    requester.expect_completion(30, IBV_WC_WR_FLUSH_ERR);
    CHECK(requester.query_state() == IBV_QPS_ERR);
    const ibv_async_event reported_event = wait_for_event(responder.context);
    CHECK(reported_event.event_type == expected_event && reported_event.element.qp == responder.qp);
    CHECK(responder.query_state() == IBV_QPS_ERR);
    responder.expect_completion(20, IBV_WC_WR_FLUSH_ERR);
    responder.expect_completion(21, IBV_WC_WR_FLUSH_ERR);
    // Requests posted in the error state are flushed too.
    CHECK(requester.post(make_request(3, IBV_WR_SEND), {}) == 0);
    requester.expect_completion(3, IBV_WC_WR_FLUSH_ERR);
    CHECK(!is_readable(responder.context->async_fd, 0) && !is_readable(requester.context->async_fd, 0));
}

void test_write_refused_by_responder() {
    constexpr auto access_error = IBV_WC_REM_ACCESS_ERR;
    constexpr auto access_event = IBV_EVENT_QP_ACCESS_ERR;
    check_write_refused("wrong rkey", 0, 8, 0x10, read_write_access, access_error, access_event);
    check_write_refused("one byte after the region", 121, 8, 0, read_write_access, access_error, access_event);
    check_write_refused("one byte before the region", static_cast<std::uint64_t>(-1), 8, 0, read_write_access,
                        access_error, access_event);
    check_write_refused("longer than the region", 0, 129, 0, read_write_access, access_error, access_event);
    check_write_refused("region not writable", 0, 8, 0, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ, access_error,
                        access_event);
    check_write_refused("queue pair does not allow writes", 0, 8, 0, read_write_access, IBV_WC_REM_INV_REQ_ERR,
                        IBV_EVENT_QP_REQ_ERR, IBV_ACCESS_REMOTE_READ);
}

void test_read_and_atomic_refused() {
    {
        Endpoint requester, responder;
        connect(&requester, &responder);
        Buffer read_buffer(requester.pd, 8), target(responder.pd, 8, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
        CHECK(requester.post(make_request(1, IBV_WR_RDMA_READ, target.address_at(), target.mr->rkey),
                             {read_buffer.sge(0, 8)}) == 0);
        requester.expect_completion(1, IBV_WC_REM_ACCESS_ERR);
        CHECK(wait_for_event(responder.context).event_type == IBV_EVENT_QP_ACCESS_ERR);
    }
    Endpoint requester, responder;
    connect(&requester, &responder);
    Buffer read_buffer(requester.pd, 8), target(responder.pd, 16);
    ibv_send_wr wr = make_request(2, IBV_WR_ATOMIC_FETCH_AND_ADD);
    wr.wr.atomic = {target.address_at(4), 1, 0, target.mr->rkey}; // the address is not a multiple of 8
    CHECK(requester.post(wr, {read_buffer.sge(0, 8)}) == 0);
    requester.expect_completion(2, IBV_WC_REM_INV_REQ_ERR);
    CHECK(wait_for_event(responder.context).event_type == IBV_EVENT_QP_REQ_ERR);
}

void test_wrong_domain_and_deregistered_key() {
    {
        Endpoint requester, responder;
        connect(&requester, &responder);
        ibv_pd* const other_domain = ibv_alloc_pd(responder.context);
        Buffer source(requester.pd, 8);
        auto target = std::make_unique<Buffer>(other_domain, 8);
        CHECK(requester.post(make_request(1, IBV_WR_RDMA_WRITE, target->address_at(), target->mr->rkey),
                             {source.sge(0, 8)}) == 0);
        requester.expect_completion(1, IBV_WC_REM_ACCESS_ERR);
        wait_for_event(responder.context);
        target.reset();
        CHECK(ibv_dealloc_pd(other_domain) == 0);
    }
    Endpoint requester, responder;
    connect(&requester, &responder);
    Buffer source(requester.pd, 8), target(responder.pd, 8);
    CHECK(requester.post(make_request(1, IBV_WR_RDMA_WRITE, target.address_at(), target.mr->rkey),
                         {source.sge(0, 8)}) == 0);
    requester.expect_completion(1, IBV_WC_SUCCESS);
    const std::uint32_t old_rkey = target.mr->rkey;
    CHECK(ibv_dereg_mr(target.mr) == 0);
    target.mr = ibv_reg_mr(responder.pd, target.bytes, 8, read_write_access);
    CHECK(target.mr != nullptr && target.mr->rkey != old_rkey);
    CHECK(requester.post(make_request(2, IBV_WR_RDMA_WRITE, target.address_at(), old_rkey), {source.sge(0, 8)}) == 0);
    requester.expect_completion(2, IBV_WC_REM_ACCESS_ERR);
    wait_for_event(responder.context);
}

// An error in the local buffer of a request moves the queue pair of the requester to the error state, but does not
// affect the responder.
void test_local_protection_error() {
    const auto check_fails = [](auto change_sge, ibv_wr_opcode opcode, int local_access) {
        Endpoint requester, responder;
        connect(&requester, &responder);
        Buffer local_buffer(requester.pd, 64, local_access), target(responder.pd, 64);
        ibv_sge sge = local_buffer.sge(0, 64);
        change_sge(&sge);
        CHECK(requester.post(make_request(1, opcode, target.address_at(), target.mr->rkey), {sge}) == 0);
        requester.expect_completion(1, IBV_WC_LOC_PROT_ERR);
        CHECK(requester.query_state() == IBV_QPS_ERR && responder.query_state() == IBV_QPS_RTS &&
              !is_readable(responder.context->async_fd, 0));
    };
    check_fails([](ibv_sge* sge) { sge->lkey ^= 1; }, IBV_WR_RDMA_WRITE, read_write_access);
    check_fails([](ibv_sge* sge) { sge->addr += 1; }, IBV_WR_SEND, read_write_access);
    // A read needs a local buffer with IBV_ACCESS_LOCAL_WRITE.
    check_fails([](ibv_sge*) {}, IBV_WR_RDMA_READ, IBV_ACCESS_REMOTE_READ);
    Endpoint requester, responder;
    connect(&requester, &responder);
    Buffer local_buffer(requester.pd, 64), target(responder.pd, 64);
    // An rkey is not a valid lkey.
    CHECK(requester.post(make_request(1, IBV_WR_RDMA_WRITE, target.address_at(), target.mr->rkey),
                         {{local_buffer.address_at(), 64, local_buffer.mr->rkey}}) == 0);
    requester.expect_completion(1, IBV_WC_LOC_PROT_ERR);
}

void test_send_does_not_fit_receive_buffer() {
    {
        Endpoint requester, responder;
        connect(&requester, &responder);
        Buffer source(requester.pd, 64), target(responder.pd, 64);
        CHECK(responder.post_receive(5, {target.sge(0, 10)}) == 0);
        CHECK(requester.post(make_request(1, IBV_WR_SEND), {source.sge(0, 11)}) == 0);
        requester.expect_completion(1, IBV_WC_REM_INV_REQ_ERR);
        responder.expect_completion(5, IBV_WC_LOC_LEN_ERR);
        CHECK(responder.query_state() == IBV_QPS_ERR);
    }
    // The receive buffer fits, but has no IBV_ACCESS_LOCAL_WRITE.
    Endpoint requester, responder;
    connect(&requester, &responder);
    Buffer source(requester.pd, 64), target(responder.pd, 64, IBV_ACCESS_REMOTE_READ);
    CHECK(responder.post_receive(5, {target.sge(0, 64)}) == 0);
    CHECK(requester.post(make_request(1, IBV_WR_SEND), {source.sge(0, 11)}) == 0);
    requester.expect_completion(1, IBV_WC_REM_OP_ERR);
    responder.expect_completion(5, IBV_WC_LOC_PROT_ERR);
}

void test_write_to_unmapped_memory_fails() {
    Endpoint requester, responder;
    connect(&requester, &responder);
    Buffer source(requester.pd, 8192);
    void* const memory = mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ibv_mr* const mr = ibv_reg_mr(responder.pd, memory, 8192, read_write_access);
    CHECK(mr != nullptr);
    // Make the pages inaccessible instead of unmapping them, because another thread's allocation could reuse the
    // address.
    CHECK(mmap(memory, 8192, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == memory);
    CHECK(requester.post(make_request(1, IBV_WR_RDMA_WRITE, address_of(memory), mr->rkey), {source.sge(0, 8192)}) == 0);
    requester.expect_completion(1, IBV_WC_REM_OP_ERR);
    CHECK(wait_for_event(responder.context).event_type == IBV_EVENT_QP_FATAL);
    CHECK(ibv_dereg_mr(mr) == 0);
    CHECK(munmap(memory, 8192) == 0);
}

void test_receiver_not_ready_is_retried() {
    {
        EndpointSettings settings;
        settings.rnr_retry = 2;
        settings.min_rnr_timer = 14; // 1.28 ms
        Endpoint requester(0, settings), responder(0, settings);
        connect(&requester, &responder);
        const double begin_s = read_monotonic_seconds();
        CHECK(requester.post(make_request(1, IBV_WR_SEND), {}) == 0);
        requester.expect_completion(1, IBV_WC_RNR_RETRY_EXC_ERR);
        CHECK(read_monotonic_seconds() - begin_s > 2 * 0.00128);
        CHECK(responder.query_state() == IBV_QPS_RTS);
    }
    // The rnr_retry value 7, the default of EndpointSettings, means unlimited retries.
    Endpoint requester, responder;
    connect(&requester, &responder);
    CHECK(requester.post(make_request(1, IBV_WR_SEND), {}) == 0);
    usleep(30000);
    CHECK(responder.post_receive(2, {}) == 0);
    requester.expect_completion(1, IBV_WC_SUCCESS);
    responder.expect_completion(2, IBV_WC_SUCCESS);
}

void test_unreachable_peer_exceeds_retries() {
    const auto check_fails = [](auto change_addresses) {
        EndpointSettings settings;
        settings.timeout = 13; // 33.5 ms
        settings.retry_count = 3;
        Endpoint requester(0, settings), responder;
        QueuePairAddress responder_address = responder.address(), requester_address = requester.address();
        change_addresses(&responder_address, &requester_address);
        requester.connect(responder_address);
        responder.connect(requester_address);
        const double begin_s = read_monotonic_seconds();
        CHECK(requester.post(make_request(1, IBV_WR_SEND), {}) == 0);
        requester.expect_completion(1, IBV_WC_RETRY_EXC_ERR);
        CHECK(read_monotonic_seconds() - begin_s >= 0.13); // four tries of 33.5 ms
    };
    // The requester sends to a wrong queue pair or GID, or the responder expects another packet sequence number or
    // another requester.
    check_fails([](QueuePairAddress* responder, QueuePairAddress*) { responder->qp_num ^= 1; });
    check_fails([](QueuePairAddress* responder, QueuePairAddress*) { responder->gid.raw[15] ^= 0x80; });
    check_fails([](QueuePairAddress*, QueuePairAddress* requester) { requester->psn += 1; });
    check_fails([](QueuePairAddress*, QueuePairAddress* requester) { requester->qp_num ^= 1; });
    // The queue pair of the responder exists, but stays in state INIT.
    EndpointSettings settings;
    settings.timeout = 8; // 1.05 ms
    settings.retry_count = 0;
    Endpoint requester(0, settings), responder;
    requester.connect(responder.address());
    CHECK(responder.modify_to_init() == 0);
    CHECK(requester.post(make_request(1, IBV_WR_SEND), {}) == 0);
    requester.expect_completion(1, IBV_WC_RETRY_EXC_ERR);
}

void test_destroyed_peer_exceeds_retries() {
    Endpoint requester;
    auto responder = std::make_unique<Endpoint>();
    connect(&requester, responder.get());
    CHECK(responder->post_receive(1, {}) == 0);
    CHECK(requester.post(make_request(2, IBV_WR_SEND), {}) == 0);
    requester.expect_completion(2, IBV_WC_SUCCESS);
    responder->expect_completion(1, IBV_WC_SUCCESS);
    responder.reset();
    // Like hardware, the twin reports the loss only after the time of the retries, which it limits to 100 ms.
    const double begin_s = read_monotonic_seconds();
    CHECK(requester.post(make_request(3, IBV_WR_SEND), {}) == 0);
    requester.expect_completion(3, IBV_WC_RETRY_EXC_ERR);
    CHECK(read_monotonic_seconds() - begin_s >= 0.1);
}

void test_reads_need_rd_atomic() {
    EndpointSettings settings;
    settings.max_rd_atomic = 0;
    Endpoint requester(0, settings), responder;
    connect(&requester, &responder);
    Buffer read_buffer(requester.pd, 8), target(responder.pd, 8);
    CHECK(requester.post(make_request(1, IBV_WR_RDMA_READ, target.address_at(), target.mr->rkey),
                         {read_buffer.sge(0, 8)}) == 0);
    requester.expect_completion(1, IBV_WC_LOC_QP_OP_ERR);
}

void test_invalid_requests_are_refused() {
    Endpoint requester, responder;
    Buffer source(requester.pd, 512);
    CHECK(requester.post(make_request(1, IBV_WR_SEND), {}) == EINVAL && requester.post_receive(1, {}) == EINVAL);
    connect(&requester, &responder);
    const ibv_sge sge = source.sge(0, 8);
    // EndpointSettings allows four scatter/gather elements and 64 inline bytes.
    CHECK(requester.post(make_request(1, IBV_WR_SEND), {sge, sge, sge, sge, sge}) == EINVAL);
    CHECK(requester.post_receive(1, {sge, sge, sge, sge, sge}) == EINVAL);
    CHECK(requester.post(make_request(1, IBV_WR_SEND, 0, 0, IBV_SEND_INLINE), {source.sge(0, 65)}) == EINVAL);
    CHECK(requester.post(make_request(1, IBV_WR_RDMA_READ, 0, 0, IBV_SEND_INLINE), {sge}) == EINVAL);
    CHECK(requester.post(make_request(1, IBV_WR_ATOMIC_FETCH_AND_ADD), {source.sge(0, 4)}) == EINVAL);
    CHECK(requester.post(make_request(1, IBV_WR_TSO), {}) == EOPNOTSUPP);
    // A request with num_sge, but without sg_list, is refused before the twin reads the list.
    ibv_send_wr request_without_list = make_request(1, IBV_WR_SEND), *bad_wr = nullptr;
    request_without_list.num_sge = 2;
    CHECK(ibv_post_send(requester.qp, &request_without_list, &bad_wr) == EINVAL && bad_wr == &request_without_list);
    for (std::uint32_t count = 0; count < requester.settings.max_receive_wr; ++count) {
        CHECK(requester.post_receive(count, {}) == 0);
    }
    CHECK(requester.post_receive(99, {}) == ENOMEM);
}

} // namespace

int main() {
    isolate_from_other_processes();
    test_write_refused_by_responder();
    test_read_and_atomic_refused();
    test_wrong_domain_and_deregistered_key();
    test_local_protection_error();
    test_send_does_not_fit_receive_buffer();
    test_write_to_unmapped_memory_fails();
    test_receiver_not_ready_is_retried();
    test_unreachable_peer_exceeds_retries();
    test_destroyed_peer_exceeds_retries();
    test_reads_need_rd_atomic();
    test_invalid_requests_are_refused();
    return 0;
}
