// Tests of the software twin of libibverbs: grants. Under a grant, the requester itself copies the bytes of writes and
// reads to or from a region of the responder, without a thread of the responder. The grant ends when the region, its
// permissions or the state of the queue pair change.
#include <signal.h>
#include <sys/mman.h>

#include <atomic>
#include <thread>

#include "control/control.h"
#include "tests/ibverbs_support.hpp"
#include "tests/peer_process.hpp"

using namespace gdrkit::twin::tests;

namespace {

constexpr std::size_t region_bytes = 4UL << 20;

// The target process sends these data about its queue pair and its memory to the test.
struct Target {
    QueuePairAddress qp_address;
    std::uint64_t memory_address;
    std::uint32_t rkey;
};

// The target process runs this function. It stops itself with SIGSTOP. Meanwhile the test accesses the memory of the
// target, and then continues the target. The processes send each other one character for each step: r (ready), s
// (stop), k (the memory has the pattern) and e (end).
int run_target(int socket) {
    Endpoint endpoint(1);
    Buffer memory(endpoint.pd, region_bytes);
    send_value(socket, Target{endpoint.address(), memory.address_at(), memory.mr->rkey});
    endpoint.connect(receive_value<QueuePairAddress>(socket));
    send_value(socket, 'r');
    CHECK(receive_value<char>(socket) == 's');
    CHECK(raise(SIGSTOP) == 0);
    CHECK(has_pattern(memory.bytes, region_bytes));
    send_value(socket, 'k');
    return receive_value<char>(socket) == 'e' ? 0 : 1;
}

// Write `size_bytes` bytes and wait for the completion. The size is also the id of the request.
void write_and_wait(Endpoint* requester, const Buffer& source, std::uint64_t remote_address, std::uint32_t rkey,
                    std::size_t size_bytes) {
    CHECK(requester->post(make_request(size_bytes, IBV_WR_RDMA_WRITE, remote_address, rkey),
                          {source.sge(0, size_bytes)}) == 0);
    requester->expect_completion(size_bytes, IBV_WC_SUCCESS);
}

// Like a real device, the twin accesses the memory of a stopped process.
void test_stopped_process_is_accessed() {
    const PeerProcess peer;
    Endpoint endpoint(0);
    const auto target = receive_value<Target>(peer.socket.get());
    send_value(peer.socket.get(), endpoint.address());
    endpoint.connect(target.qp_address);
    receive_value<char>(peer.socket.get());
    Buffer source(endpoint.pd, region_bytes), readback(endpoint.pd, region_bytes);
    fill_pattern(source.bytes, region_bytes);
    // A thread of the responder serves this first request, and then grants the region to the requester.
    write_and_wait(&endpoint, source, target.memory_address, target.rkey, 8);
    send_value(peer.socket.get(), 's');
    int status = 0;
    CHECK(waitpid(peer.pid, &status, WUNTRACED) == peer.pid && WIFSTOPPED(status));
    write_and_wait(&endpoint, source, target.memory_address, target.rkey, 16);
    write_and_wait(&endpoint, source, target.memory_address, target.rkey, region_bytes);
    CHECK(endpoint.post(make_request(1, IBV_WR_RDMA_READ, target.memory_address, target.rkey),
                        {readback.sge(0, region_bytes)}) == 0);
    endpoint.expect_completion(1, IBV_WC_SUCCESS);
    CHECK(has_pattern(readback.bytes, region_bytes));
    CHECK(kill(peer.pid, SIGCONT) == 0);
    CHECK(receive_value<char>(peer.socket.get()) == 'k');
    send_value(peer.socket.get(), 'e');
    CHECK(peer.wait() == 0);
}

// Two connected queue pairs of this process, and memory of the responder that is granted to the requester.
struct GrantedPair {
    Endpoint requester{0}, responder{1};
    Buffer source{requester.pd, region_bytes}, destination{responder.pd, region_bytes};

    GrantedPair() {
        connect(&requester, &responder);
        fill_pattern(source.bytes, region_bytes);
        // A thread of the responder serves the first write and grants the region. The second write uses the grant.
        write_and_wait(&requester, source, destination.address_at(), destination.mr->rkey, 8);
        write_and_wait(&requester, source, destination.address_at(), destination.mr->rkey, 16);
    }
    // Post a write. Expect that it fails with this status and changes no byte of the destination.
    void expect_refusal(ibv_wc_status status) {
        std::memset(destination.bytes, 0, destination.size_bytes);
        CHECK(requester.post(make_request(1, IBV_WR_RDMA_WRITE, destination.address_at(), rkey),
                             {source.sge(0, region_bytes)}) == 0);
        requester.expect_completion(1, status);
        CHECK(destination.bytes[0] == 0 && destination.bytes[region_bytes - 1] == 0);
    }
    const std::uint32_t rkey = destination.mr->rkey;
};

void test_deregistered_memory_is_refused() {
    GrantedPair pair;
    CHECK(ibv_dereg_mr(pair.destination.mr) == 0);
    pair.destination.mr = nullptr;
    pair.expect_refusal(IBV_WC_REM_ACCESS_ERR);
}

void test_reregistered_access_is_refused() {
    GrantedPair pair;
    CHECK(ibv_rereg_mr(pair.destination.mr, IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, IBV_ACCESS_REMOTE_READ) ==
          0);
    CHECK(pair.destination.mr->rkey == pair.rkey);
    pair.expect_refusal(IBV_WC_REM_ACCESS_ERR);
}

void test_bytes_outside_the_region_are_refused() {
    GrantedPair pair;
    CHECK(pair.requester.post(
              make_request(1, IBV_WR_RDMA_WRITE, pair.destination.address_at(region_bytes - 7), pair.rkey),
              {pair.source.sge(0, 8)}) == 0);
    pair.requester.expect_completion(1, IBV_WC_REM_ACCESS_ERR);
}

void test_permissions_of_queue_pair_are_followed() {
    GrantedPair pair;
    ibv_qp_attr attr{};
    attr.qp_access_flags = IBV_ACCESS_REMOTE_READ;
    CHECK(ibv_modify_qp(pair.responder.qp, &attr, IBV_QP_ACCESS_FLAGS) == 0);
    Buffer readback(pair.requester.pd, 16);
    CHECK(pair.requester.post(make_request(1, IBV_WR_RDMA_READ, pair.destination.address_at(), pair.rkey),
                              {readback.sge(0, 16)}) == 0);
    pair.requester.expect_completion(1, IBV_WC_SUCCESS);
    CHECK(has_pattern(readback.bytes, 16));
    pair.expect_refusal(IBV_WC_REM_INV_REQ_ERR);
}

void test_queue_pair_in_error_is_not_accessed() {
    GrantedPair pair;
    CHECK(pair.responder.modify_to(IBV_QPS_ERR) == 0);
    pair.expect_refusal(IBV_WC_RETRY_EXC_ERR);
}

void test_unmapped_memory_of_responder_fails() {
    GrantedPair pair;
    void* const memory = mmap(nullptr, region_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    ibv_mr* const mr = ibv_reg_mr(pair.responder.pd, memory, region_bytes, read_write_access);
    CHECK(mr != nullptr);
    write_and_wait(&pair.requester, pair.source, address_of(memory), mr->rkey, 8);
    CHECK(munmap(static_cast<char*>(memory) + region_bytes / 2, region_bytes / 2) == 0);
    CHECK(pair.requester.post(make_request(1, IBV_WR_RDMA_WRITE, address_of(memory), mr->rkey),
                              {pair.source.sge(0, region_bytes)}) == 0);
    pair.requester.expect_completion(1, IBV_WC_REM_OP_ERR);
    CHECK(ibv_dereg_mr(mr) == 0);
    munmap(memory, region_bytes / 2);
}

void test_unmapped_memory_of_requester_fails() {
    GrantedPair pair;
    void* const memory = mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    ibv_mr* const mr = ibv_reg_mr(pair.requester.pd, memory, 8192, read_write_access);
    CHECK(mr != nullptr && munmap(memory, 8192) == 0);
    CHECK(pair.requester.post(make_request(1, IBV_WR_RDMA_WRITE, pair.destination.address_at(), pair.rkey),
                              {make_sge(mr, address_of(memory), 8)}) == 0);
    pair.requester.expect_completion(1, IBV_WC_LOC_PROT_ERR);
    CHECK(ibv_dereg_mr(mr) == 0);
}

// A write must not overtake an earlier send, even if the send waits for a receive request.
void test_write_does_not_overtake_send() {
    GrantedPair pair;
    std::memset(pair.destination.bytes, 0, 64);
    CHECK(pair.requester.post(make_request(1, IBV_WR_SEND), {pair.source.sge(0, 8)}) == 0);
    CHECK(pair.requester.post(make_request(2, IBV_WR_RDMA_WRITE, pair.destination.address_at(32), pair.rkey),
                              {pair.source.sge(0, 8)}) == 0);
    usleep(20000); // enough time for a write that wrongly overtakes the send
    CHECK(pair.destination.bytes[32] == 0);
    CHECK(pair.responder.post_receive(3, {pair.destination.sge(0, 8)}) == 0);
    pair.responder.expect_completion(3, IBV_WC_SUCCESS);
    pair.requester.expect_completion(1, IBV_WC_SUCCESS);
    pair.requester.expect_completion(2, IBV_WC_SUCCESS);
    CHECK(has_pattern(pair.destination.bytes + 32, 8));
}

// The test uses 100 regions, but a connection has only 64 slots for grants (GrantTable::slot_count). Each write must
// still arrive in its region.
void test_many_regions_are_granted_in_turn() {
    GrantedPair pair;
    std::vector<ibv_mr*> regions;
    for (std::size_t index = 0; index < 100; ++index) {
        regions.push_back(
            ibv_reg_mr(pair.responder.pd, pair.destination.bytes + index * 4096, 4096, read_write_access));
        CHECK(regions.back() != nullptr);
    }
    for (int round = 0; round < 3; ++round) {
        std::memset(pair.destination.bytes, 0, pair.destination.size_bytes);
        for (std::size_t index = 0; index < regions.size(); ++index) {
            write_and_wait(&pair.requester, pair.source, pair.destination.address_at(index * 4096),
                           regions[index]->rkey, 64);
            CHECK(has_pattern(pair.destination.bytes + index * 4096, 64) &&
                  pair.destination.bytes[index * 4096 + 64] == 0);
        }
    }
    for (ibv_mr* const mr : regions) {
        CHECK(ibv_dereg_mr(mr) == 0);
    }
}

// Write to the region without pause, in turn from two buffers of different content, until a write is refused. Set
// `has_started` after the first successful completion.
void write_until_refused(GrantedPair* pair, const Buffer& second_source, std::atomic<bool>* has_started) {
    for (std::uint64_t count = 0;; ++count) {
        const Buffer& source = count % 2 == 0 ? pair->source : second_source;
        const ibv_send_wr wr = make_request(count, IBV_WR_RDMA_WRITE, pair->destination.address_at(), pair->rkey);
        CHECK(pair->requester.post(wr, {source.sge(0, region_bytes)}) == 0);
        // Keep eight writes in flight, so that copies run most of the time even if completions are late.
        if (count < 8) {
            continue;
        }
        ibv_wc wc{};
        while (ibv_poll_cq(pair->requester.cq, 1, &wc) == 0) {
        }
        if (wc.status != IBV_WC_SUCCESS) {
            CHECK(wc.status == IBV_WC_REM_ACCESS_ERR);
            return;
        }
        *has_started = true;
    }
}

// ibv_dereg_mr is called while a copy under the grant runs. After ibv_dereg_mr has returned, no byte of the region
// changes.
void test_deregistration_waits_for_copies() {
    for (unsigned round = 0; round < 50; ++round) {
        GrantedPair pair;
        Buffer second_source(pair.requester.pd, region_bytes);
        std::memset(pair.source.bytes, 1, region_bytes);
        std::memset(second_source.bytes, 2, region_bytes);
        std::atomic<bool> has_started{false};
        std::thread writer([&] { write_until_refused(&pair, second_source, &has_started); });
        while (!has_started) {
            std::this_thread::yield();
        }
        usleep(round * 37); // so that the deregistration meets a copy at another point in each round
        CHECK(ibv_dereg_mr(pair.destination.mr) == 0);
        pair.destination.mr = nullptr;
        // Read only the first byte of each page, so that a copy that still runs has little time to end unnoticed.
        std::vector<std::uint8_t> first_bytes;
        for (std::size_t offset = 0; offset < region_bytes; offset += 4096) {
            first_bytes.push_back(pair.destination.bytes[offset]);
        }
        writer.join();
        for (std::size_t page = 0; page < first_bytes.size(); ++page) {
            CHECK(pair.destination.bytes[page * 4096] == first_bytes[page]);
        }
    }
}

// Return the ledger as JSON. The reserve of 4096 bytes is for a ledger that grows between the two calls.
std::string read_ledger() {
    std::string json(static_cast<std::size_t>(gdrkit_twin_ledger(nullptr, 0)) + 4096, '\0');
    json.resize(static_cast<std::size_t>(gdrkit_twin_ledger(json.data(), json.size())));
    return json;
}

// Bytes that the requester copies under a grant count for the devices of both sides.
void test_copied_bytes_are_counted() {
    GrantedPair pair;
    Buffer readback(pair.requester.pd, 100);
    CHECK(pair.requester.post(make_request(1, IBV_WR_RDMA_READ, pair.destination.address_at(), pair.rkey),
                              {readback.sge(0, 100)}) == 0);
    pair.requester.expect_completion(1, IBV_WC_SUCCESS);
    const std::string json = read_ledger();
    // GrantedPair has written 8 and 16 bytes with two requests.
    const std::string expected_bytes = "\"write_bytes\":24,\"read_bytes\":100,";
    CHECK(json.find("\"twin0\":{" + expected_bytes) != std::string::npos &&
          json.find(",\"requests\":3,") != std::string::npos);
    CHECK(json.find("\"served_write_bytes\":24,\"served_read_bytes\":100,") != std::string::npos);
    CHECK(json.find(",\"served_requests\":3}") != std::string::npos);
}

} // namespace

int main(int argument_count, char** arguments) {
    isolate_from_other_processes();
    if (argument_count > 1) {
        return run_target(std::atoi(arguments[1]));
    }
    test_copied_bytes_are_counted(); // runs first, because the counters start at 0
    test_stopped_process_is_accessed();
    test_deregistered_memory_is_refused();
    test_reregistered_access_is_refused();
    test_bytes_outside_the_region_are_refused();
    test_permissions_of_queue_pair_are_followed();
    test_queue_pair_in_error_is_not_accessed();
    test_unmapped_memory_of_responder_fails();
    test_unmapped_memory_of_requester_fails();
    test_write_does_not_overtake_send();
    test_many_regions_are_granted_in_turn();
    test_deregistration_waits_for_copies();
    return 0;
}
