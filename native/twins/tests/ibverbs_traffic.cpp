// Tests of the software twin of libibverbs: sends, RDMA writes, RDMA reads and atomic requests between two queue pairs
// of one process, and the behaviour of posts and polls.
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

void test_written_data_is_read_back() {
    Endpoint requester(0), responder(1);
    connect(&requester, &responder);
    // The data begins at another odd offset in each buffer, and each size has another part of the pattern.
    for (const std::size_t size_bytes : {1UL, 4095UL, 65536UL, (1UL << 20) + 3, 3UL << 20}) {
        Buffer source(requester.pd, size_bytes + 7), target(responder.pd, size_bytes + 13),
            readback(requester.pd, size_bytes + 5);
        fill_pattern(source.bytes + 7, size_bytes, size_bytes);
        CHECK(requester.post(make_request(1, IBV_WR_RDMA_WRITE, target.address_at(13), target.mr->rkey),
                             {source.sge(7, size_bytes)}) == 0);
        CHECK(requester.expect_completion(1, IBV_WC_SUCCESS).opcode == IBV_WC_RDMA_WRITE);
        CHECK(has_pattern(target.bytes + 13, size_bytes, size_bytes) && target.bytes[12] == 0);
        CHECK(requester.post(make_request(2, IBV_WR_RDMA_READ, target.address_at(13), target.mr->rkey),
                             {readback.sge(5, size_bytes)}) == 0);
        const ibv_wc wc = requester.expect_completion(2, IBV_WC_SUCCESS);
        CHECK(wc.opcode == IBV_WC_RDMA_READ && wc.byte_len == size_bytes);
        CHECK(has_pattern(readback.bytes + 5, size_bytes, size_bytes) && readback.bytes[4] == 0);
    }
}

void test_sent_data_is_received() {
    Endpoint requester(0), responder(0);
    connect(&requester, &responder);
    Buffer source(requester.pd, 700000), target(responder.pd, 700000);
    fill_pattern(source.bytes, source.size_bytes);
    // A receive request may have an empty scatter/gather entry.
    CHECK(responder.post_receive(10, {target.sge(0, 100), target.sge(100, 0), target.sge(100, 599900)}) == 0);
    CHECK(requester.post(make_request(11, IBV_WR_SEND), {source.sge(0, 300000), source.sge(300000, 250001)}) == 0);
    const ibv_wc receive_wc = responder.expect_completion(10, IBV_WC_SUCCESS);
    CHECK(receive_wc.opcode == IBV_WC_RECV && receive_wc.byte_len == 550001 &&
          receive_wc.src_qp == requester.qp->qp_num);
    CHECK((receive_wc.wc_flags & IBV_WC_WITH_IMM) == 0);
    CHECK(requester.expect_completion(11, IBV_WC_SUCCESS).opcode == IBV_WC_SEND);
    CHECK(has_pattern(target.bytes, 550001) && target.bytes[550001] == 0);

    // Immediate data arrives with an empty send, and with an RDMA write. Each consumes a receive request.
    CHECK(responder.post_receive(12, {}) == 0 && responder.post_receive(13, {}) == 0);
    ibv_send_wr wr = make_request(14, IBV_WR_SEND_WITH_IMM);
    wr.imm_data = htobe32(0xdecade);
    CHECK(requester.post(wr, {}) == 0);
    const ibv_wc empty_send_wc = responder.expect_completion(12, IBV_WC_SUCCESS);
    CHECK((empty_send_wc.wc_flags & IBV_WC_WITH_IMM) != 0 && empty_send_wc.imm_data == htobe32(0xdecade));
    CHECK(empty_send_wc.byte_len == 0);
    requester.expect_completion(14, IBV_WC_SUCCESS);
    wr = make_request(15, IBV_WR_RDMA_WRITE_WITH_IMM, target.address_at(600000), target.mr->rkey);
    wr.imm_data = htobe32(7);
    CHECK(requester.post(wr, {source.sge(0, 1000)}) == 0);
    const ibv_wc write_wc = responder.expect_completion(13, IBV_WC_SUCCESS);
    CHECK(write_wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM && write_wc.byte_len == 1000 && write_wc.imm_data == htobe32(7));
    CHECK(has_pattern(target.bytes + 600000, 1000));
    requester.expect_completion(15, IBV_WC_SUCCESS);
}

void test_inline_data_is_copied_when_posted() {
    Endpoint requester, responder;
    connect(&requester, &responder);
    Buffer target(responder.pd, 64);
    char payload[] = "taken at once";
    // The twin copies the payload of an inline request at the post, so the entry needs no lkey.
    const ibv_sge unregistered_sge{address_of(payload), sizeof payload, 0};
    CHECK(requester.post(make_request(1, IBV_WR_RDMA_WRITE, target.address_at(), target.mr->rkey,
                                      IBV_SEND_INLINE | IBV_SEND_SIGNALED),
                         {unregistered_sge}) == 0);
    std::memset(payload, 'x', sizeof payload);
    requester.expect_completion(1, IBV_WC_SUCCESS);
    CHECK(std::strcmp(reinterpret_cast<char*>(target.bytes), "taken at once") == 0);
}

void test_atomics_return_old_value() {
    Endpoint requester, responder;
    connect(&requester, &responder);
    Buffer source(requester.pd, 8), target(responder.pd, 16);
    const std::uint64_t initial_value = 40;
    std::uint64_t old_value = 0, final_value = 0;
    std::memcpy(target.bytes + 8, &initial_value, 8);
    // The fields of `atomic` are the remote address, the number to add or compare, the number to swap in, and the rkey.
    ibv_send_wr wr = make_request(1, IBV_WR_ATOMIC_FETCH_AND_ADD);
    wr.wr.atomic = {target.address_at(8), 2, 0, target.mr->rkey};
    CHECK(requester.post(wr, {source.sge(0, 8)}) == 0);
    CHECK(requester.expect_completion(1, IBV_WC_SUCCESS).opcode == IBV_WC_FETCH_ADD);
    std::memcpy(&old_value, source.bytes, 8);
    CHECK(old_value == 40);
    wr = make_request(2, IBV_WR_ATOMIC_CMP_AND_SWP);
    wr.wr.atomic = {target.address_at(8), 42, 1000, target.mr->rkey};
    CHECK(requester.post(wr, {source.sge(0, 8)}) == 0);
    CHECK(requester.expect_completion(2, IBV_WC_SUCCESS).opcode == IBV_WC_COMP_SWAP);
    std::memcpy(&old_value, source.bytes, 8);
    CHECK(old_value == 42);
    std::memcpy(&final_value, target.bytes + 8, 8);
    CHECK(final_value == 1000);
}

// A full send queue stays full until the program polls a completion. The completion of a signaled request frees its
// slot and the slots of the unsignaled requests before it.
void test_queue_slots_are_freed_by_completions() {
    EndpointSettings settings;
    settings.max_send_wr = 3;
    Endpoint requester(0, settings), responder;
    connect(&requester, &responder);
    Buffer source(requester.pd, 16), target(responder.pd, 16);
    const auto post_write = [&](std::uint64_t wr_id, unsigned send_flags) {
        return requester.post(make_request(wr_id, IBV_WR_RDMA_WRITE, target.address_at(), target.mr->rkey, send_flags),
                              {source.sge(0, 16)});
    };
    CHECK(post_write(1, 0) == 0 && post_write(2, 0) == 0 && post_write(3, IBV_SEND_SIGNALED) == 0);
    CHECK(post_write(4, 0) == ENOMEM);
    requester.expect_completion(3, IBV_WC_SUCCESS);
    CHECK(post_write(5, 0) == 0 && post_write(6, 0) == 0 && post_write(7, IBV_SEND_FENCE | IBV_SEND_SIGNALED) == 0);
    requester.expect_completion(7, IBV_WC_SUCCESS);
}

void test_sq_sig_all_signals_every_request() {
    EndpointSettings settings;
    settings.sq_sig_all = 1;
    Endpoint requester(0, settings), responder;
    connect(&requester, &responder);
    Buffer source(requester.pd, 16), target(responder.pd, 16);
    CHECK(requester.post(make_request(1, IBV_WR_RDMA_WRITE, target.address_at(), target.mr->rkey, 0),
                         {source.sge(0, 16)}) == 0);
    requester.expect_completion(1, IBV_WC_SUCCESS);
}

// Requests address a region by its iova, which may differ from the address of the region in the process.
void test_iova_is_remote_address() {
    Endpoint requester, responder;
    connect(&requester, &responder);
    Buffer source(requester.pd, 100);
    fill_pattern(source.bytes, 100);
    alignas(4096) static std::uint8_t region_memory[8192];
    const std::uint64_t iova = 0x70000010; // must have the offset of the address within its page
    ibv_mr* const mr = ibv_reg_mr_iova(responder.pd, region_memory + 16, 100, iova, read_write_access);
    CHECK(mr != nullptr);
    CHECK(requester.post(make_request(1, IBV_WR_RDMA_WRITE, iova, mr->rkey), {source.sge(0, 100)}) == 0);
    requester.expect_completion(1, IBV_WC_SUCCESS);
    CHECK(has_pattern(region_memory + 16, 100));
    CHECK(ibv_dereg_mr(mr) == 0);
}

// A post never blocks. While the queue pair of the peer is not connected, posted requests wait in the send queue.
void test_requests_wait_for_peer() {
    EndpointSettings settings;
    settings.timeout = 0; // the requester waits for the peer without a limit
    Endpoint requester(0, settings), responder;
    Buffer source(requester.pd, 16), target(responder.pd, 16);
    fill_pattern(source.bytes, 16);
    requester.connect(responder.address());
    CHECK(requester.post(make_request(1, IBV_WR_RDMA_WRITE, target.address_at(), target.mr->rkey),
                         {source.sge(0, 16)}) == 0);
    ibv_wc wc{};
    usleep(20000);
    CHECK(ibv_poll_cq(requester.cq, 1, &wc) == 0);
    responder.connect(requester.address());
    requester.expect_completion(1, IBV_WC_SUCCESS);
    CHECK(has_pattern(target.bytes, 16));
}

// The thread that posts a small request also sends it to the peer. This test does not poll when the responses come, so
// a thread of the twin must handle them. The responses say "receiver not ready", because the receive requests follow
// later.
void test_requests_progress_without_polls() {
    Endpoint requester(0), responder(0);
    connect(&requester, &responder);
    CHECK(responder.post_receive(1, {}) == 0);
    CHECK(requester.post(make_request(2, IBV_WR_SEND), {}) == 0);
    responder.expect_completion(1, IBV_WC_SUCCESS);
    requester.expect_completion(2, IBV_WC_SUCCESS);
    // Let the twin's own thread of the requester go to sleep, so that this thread sends the next requests.
    usleep(2000);
    for (std::uint64_t wr_id = 3; wr_id < 6; ++wr_id) {
        CHECK(requester.post(make_request(wr_id, IBV_WR_SEND), {}) == 0);
    }
    // Let the responses arrive before the receive requests are posted.
    usleep(2000);
    for (std::uint64_t wr_id = 3; wr_id < 6; ++wr_id) {
        CHECK(responder.post_receive(wr_id, {}) == 0);
        responder.expect_completion(wr_id, IBV_WC_SUCCESS);
    }
    for (std::uint64_t wr_id = 3; wr_id < 6; ++wr_id) {
        requester.expect_completion(wr_id, IBV_WC_SUCCESS);
    }
}

// UCX polls while it holds the spin lock of its worker, and another thread may spin for this lock. A poll of the twin
// yields the processor. If both threads share one processor, and only the yields let the spinning thread run, it finds
// the lock held each time. The test checks that the spinning thread gets the lock nevertheless.
void test_polls_do_not_starve_a_spinning_thread() {
    Endpoint endpoint;
    pthread_spinlock_t lock{};
    CHECK(pthread_spin_init(&lock, PTHREAD_PROCESS_PRIVATE) == 0);
    std::atomic<bool> must_end{false};
    cpu_set_t allowed_cpus{}, one_cpu{};
    CHECK(sched_getaffinity(0, sizeof allowed_cpus, &allowed_cpus) == 0);
    for (int cpu = 0; CPU_COUNT(&one_cpu) == 0; ++cpu) {
        if (CPU_ISSET(cpu, &allowed_cpus)) {
            CPU_SET(cpu, &one_cpu);
        }
    }
    CHECK(sched_setaffinity(0, sizeof one_cpu, &one_cpu) == 0);
    std::thread poller([&] {
        while (!must_end) {
            pthread_spin_lock(&lock);
            ibv_wc wc{};
            CHECK(ibv_poll_cq(endpoint.cq, 1, &wc) == 0);
            pthread_spin_unlock(&lock);
        }
    });
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    for (int acquisition_count = 0; acquisition_count < 3; ++acquisition_count) {
        while (pthread_spin_trylock(&lock) != 0) {
            CHECK(std::chrono::steady_clock::now() < deadline);
        }
        pthread_spin_unlock(&lock);
        // Let the poller run before the next attempt.
        usleep(1000);
    }
    must_end = true;
    poller.join();
    CHECK(sched_setaffinity(0, sizeof allowed_cpus, &allowed_cpus) == 0);
}

} // namespace

int main() {
    isolate_from_other_processes();
    test_written_data_is_read_back();
    test_sent_data_is_received();
    test_inline_data_is_copied_when_posted();
    test_atomics_return_old_value();
    test_queue_slots_are_freed_by_completions();
    test_sq_sig_all_signals_every_request();
    test_iova_is_remote_address();
    test_requests_wait_for_peer();
    test_requests_progress_without_polls();
    test_polls_do_not_starve_a_spinning_thread();
    return 0;
}
