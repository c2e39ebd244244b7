// Tests of the software twin of libibverbs: many requests in flight at once. They are writes and reads of many sizes;
// some writes are inline. The tests also check the order of requests and the effect of an error on later requests.
#include <algorithm>
#include <random>

#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

constexpr std::size_t memory_bytes = 8UL << 20;

EndpointSettings make_large_queue_settings() {
    EndpointSettings settings;
    settings.max_send_wr = 256;
    settings.cq_entries = 1024;
    settings.max_inline_bytes = 256;
    settings.max_rd_atomic = 16;
    return settings;
}

// Writes and reads have random sizes and offsets. A write has two scatter/gather entries, and may be inline or empty.
// The array `expected_content` has the content that the responder's memory must have after the requests that were
// posted so far.
void test_mixed_requests() {
    Endpoint requester(0, make_large_queue_settings()), responder(1, make_large_queue_settings());
    Buffer local_buffer(requester.pd, memory_bytes), readback(requester.pd, memory_bytes),
        remote_buffer(responder.pd, memory_bytes);
    connect(&requester, &responder);
    fill_pattern(local_buffer.bytes, memory_bytes);
    std::vector<std::uint8_t> expected_content(memory_bytes, 0);
    std::mt19937 random(11);
    for (int round = 0; round < 15; ++round) {
        struct Read {
            std::size_t readback_offset, size_bytes;
            std::vector<std::uint8_t> expected_bytes;
        };
        std::vector<Read> reads;
        constexpr std::size_t read_slot_bytes = memory_bytes / 64;
        for (std::uint64_t wr_id = 0; wr_id < 64; ++wr_id) {
            constexpr std::size_t sizes[] = {0, 1, 64, 4095, 4096, 4097, 65537, 300000, 700001};
            const bool is_read = random() % 3 == 0;
            const std::size_t max_bytes = is_read ? read_slot_bytes : memory_bytes;
            const std::size_t size_bytes = std::min(sizes[random() % 9], max_bytes);
            const std::size_t local_offset = random() % (memory_bytes - size_bytes);
            const std::size_t remote_offset = random() % (memory_bytes - size_bytes);
            if (is_read) {
                reads.push_back({wr_id * read_slot_bytes,
                                 size_bytes,
                                 {&expected_content[remote_offset], &expected_content[remote_offset] + size_bytes}});
                CHECK(requester.post(make_request(wr_id, IBV_WR_RDMA_READ, remote_buffer.address_at(remote_offset),
                                                  remote_buffer.mr->rkey),
                                     {readback.sge(reads.back().readback_offset, size_bytes)}) == 0);
                continue;
            }
            std::memcpy(&expected_content[remote_offset], local_buffer.bytes + local_offset, size_bytes);
            const std::size_t first_entry_bytes = size_bytes / 3;
            const bool is_inline = size_bytes <= 256 && random() % 2 == 0;
            const unsigned flags = is_inline ? IBV_SEND_SIGNALED | IBV_SEND_INLINE : IBV_SEND_SIGNALED;
            CHECK(requester.post(
                      make_request(wr_id, IBV_WR_RDMA_WRITE, remote_buffer.address_at(remote_offset),
                                   remote_buffer.mr->rkey, flags),
                      {local_buffer.sge(local_offset, first_entry_bytes),
                       local_buffer.sge(local_offset + first_entry_bytes, size_bytes - first_entry_bytes)}) == 0);
        }
        for (std::uint64_t wr_id = 0; wr_id < 64; ++wr_id) {
            requester.expect_completion(wr_id, IBV_WC_SUCCESS);
        }
        for (const Read& read : reads) {
            CHECK(std::equal(read.expected_bytes.begin(), read.expected_bytes.end(),
                             readback.bytes + read.readback_offset));
        }
    }
    CHECK(std::memcmp(remote_buffer.bytes, expected_content.data(), memory_bytes) == 0);
}

// A fenced write waits for the read that fetches its data.
void test_fenced_write() {
    Endpoint requester(0, make_large_queue_settings()), responder(1, make_large_queue_settings());
    Buffer local_buffer(requester.pd, memory_bytes), remote_buffer(responder.pd, memory_bytes);
    connect(&requester, &responder);
    constexpr std::size_t half_bytes = memory_bytes / 2;
    for (int round = 0; round < 10; ++round) {
        fill_pattern(remote_buffer.bytes, half_bytes, static_cast<std::size_t>(round) + 1);
        CHECK(requester.post(make_request(1, IBV_WR_RDMA_READ, remote_buffer.address_at(), remote_buffer.mr->rkey),
                             {local_buffer.sge(0, half_bytes)}) == 0);
        CHECK(requester.post(make_request(2, IBV_WR_RDMA_WRITE, remote_buffer.address_at(half_bytes),
                                          remote_buffer.mr->rkey, IBV_SEND_SIGNALED | IBV_SEND_FENCE),
                             {local_buffer.sge(0, half_bytes)}) == 0);
        requester.expect_completion(1, IBV_WC_SUCCESS);
        requester.expect_completion(2, IBV_WC_SUCCESS);
        CHECK(has_pattern(remote_buffer.bytes + half_bytes, half_bytes, static_cast<std::size_t>(round) + 1));
    }
}

// After a queue pair has entered the error state, the application may reuse its buffers. The new content of the buffers
// must never reach the peer.
void test_buffers_after_error() {
    for (int round = 0; round < 15; ++round) {
        Endpoint requester(0, make_large_queue_settings()), responder(1, make_large_queue_settings());
        Buffer local_buffer(requester.pd, memory_bytes), remote_buffer(responder.pd, memory_bytes);
        connect(&requester, &responder);
        std::memset(local_buffer.bytes, 1, memory_bytes);
        constexpr std::size_t write_bytes = memory_bytes / 16;
        for (std::uint64_t wr_id = 0; wr_id < 16; ++wr_id) {
            CHECK(requester.post(make_request(wr_id, IBV_WR_RDMA_WRITE, remote_buffer.address_at(wr_id * write_bytes),
                                              remote_buffer.mr->rkey),
                                 {local_buffer.sge(wr_id * write_bytes, write_bytes)}) == 0);
        }
        usleep(static_cast<useconds_t>(round) * 100); // so that the error comes at another point of the writes
        CHECK(requester.modify_to(IBV_QPS_ERR) == 0);
        std::memset(local_buffer.bytes, 2, memory_bytes);
        std::size_t success_count = 0;
        for (std::uint64_t wr_id = 0; wr_id < 16; ++wr_id) {
            const ibv_wc wc = requester.poll_completion();
            CHECK(wc.wr_id == wr_id && (wc.status == IBV_WC_SUCCESS || wc.status == IBV_WC_WR_FLUSH_ERR));
            // Completions are in order, so no request succeeds after the first flushed request.
            CHECK(wc.status != IBV_WC_SUCCESS || success_count == wr_id);
            success_count += wc.status == IBV_WC_SUCCESS ? 1 : 0;
        }
        CHECK(responder.modify_to(IBV_QPS_ERR) == 0);
        CHECK(std::memchr(remote_buffer.bytes, 2, memory_bytes) == nullptr);
        CHECK(std::memchr(remote_buffer.bytes, 0, success_count * write_bytes) == nullptr || success_count == 0);
    }
}

// The responder refuses request 20 of 64, because its key is wrong. The later requests are flushed, and none of them
// has an effect.
void test_refused_in_the_middle() {
    Endpoint requester(0, make_large_queue_settings()), responder(1, make_large_queue_settings());
    Buffer local_buffer(requester.pd, memory_bytes), remote_buffer(responder.pd, memory_bytes);
    connect(&requester, &responder);
    std::memset(local_buffer.bytes, 1, memory_bytes);
    constexpr std::size_t write_bytes = 8192;
    for (std::uint64_t wr_id = 0; wr_id < 64; ++wr_id) {
        const std::uint32_t rkey = wr_id == 20 ? remote_buffer.mr->rkey ^ 1 : remote_buffer.mr->rkey;
        CHECK(
            requester.post(make_request(wr_id, IBV_WR_RDMA_WRITE, remote_buffer.address_at(wr_id * write_bytes), rkey),
                           {local_buffer.sge(0, write_bytes)}) == 0);
    }
    for (std::uint64_t wr_id = 0; wr_id < 64; ++wr_id) {
        requester.expect_completion(wr_id, wr_id < 20    ? IBV_WC_SUCCESS
                                           : wr_id == 20 ? IBV_WC_REM_ACCESS_ERR
                                                         : IBV_WC_WR_FLUSH_ERR);
    }
    CHECK(std::memchr(remote_buffer.bytes, 0, 20UL * write_bytes) == nullptr);
    CHECK(std::memchr(remote_buffer.bytes + 20UL * write_bytes, 1, memory_bytes - 20UL * write_bytes) == nullptr);
    CHECK(wait_for_event(responder.context).event_type == IBV_EVENT_QP_ACCESS_ERR);
}

} // namespace

int main() {
    isolate_from_other_processes();
    test_mixed_requests();
    test_fenced_write();
    test_buffers_after_error();
    test_refused_in_the_middle();
    return 0;
}
