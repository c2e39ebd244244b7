// Tests of many requests in flight: mixed payload paths, order, and requests that an error interrupts.
#include <algorithm>
#include <random>

#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

constexpr std::size_t memory_bytes = 8UL << 20;

Settings large_queue_settings() {
    Settings settings;
    settings.send_wr = 256;
    settings.completions = 1024;
    settings.inline_bytes = 256;
    settings.rd_atomic = 16;
    return settings;
}

// Writes and reads of random sizes and offsets, with two entries, inline or empty, compared with a model of the target.
void test_mixed_requests() {
    Endpoint left(0, large_queue_settings()), right(1, large_queue_settings());
    Buffer local(left.pd, memory_bytes), back(left.pd, memory_bytes), remote(right.pd, memory_bytes);
    connect(&left, &right);
    fill_pattern(local.bytes, memory_bytes);
    std::vector<std::uint8_t> model(memory_bytes, 0);
    std::mt19937 random(11);
    for (int round = 0; round < 15; ++round) {
        struct Read {
            std::size_t at, size;
            std::vector<std::uint8_t> expected;
        };
        std::vector<Read> reads;
        constexpr std::size_t read_place_bytes = memory_bytes / 64;
        for (std::uint64_t id = 0; id < 64; ++id) {
            constexpr std::size_t sizes[] = {0, 1, 64, 4095, 4096, 4097, 65537, 300000, 700001};
            const bool is_read = random() % 3 == 0;
            const std::size_t most = is_read ? read_place_bytes : memory_bytes;
            const std::size_t size = std::min(sizes[random() % 9], most);
            const std::size_t from = random() % (memory_bytes - size), to = random() % (memory_bytes - size);
            if (is_read) {
                reads.push_back({id * read_place_bytes, size, {&model[to], &model[to] + size}});
                CHECK(left.post(request(id, IBV_WR_RDMA_READ, remote.at(to), remote.mr->rkey),
                                {back.part(reads.back().at, size)}) == 0);
                continue;
            }
            std::memcpy(&model[to], local.bytes + from, size);
            const std::size_t first = size / 3;
            const bool is_inline = size <= 256 && random() % 2 == 0;
            const unsigned flags = is_inline ? IBV_SEND_SIGNALED | IBV_SEND_INLINE : IBV_SEND_SIGNALED;
            CHECK(left.post(request(id, IBV_WR_RDMA_WRITE, remote.at(to), remote.mr->rkey, flags),
                            {local.part(from, first), local.part(from + first, size - first)}) == 0);
        }
        for (std::uint64_t id = 0; id < 64; ++id) {
            left.expect_completion(id, IBV_WC_SUCCESS);
        }
        for (const Read& read : reads) {
            CHECK(std::equal(read.expected.begin(), read.expected.end(), back.bytes + read.at));
        }
    }
    CHECK(std::memcmp(remote.bytes, model.data(), memory_bytes) == 0);
}

// A fenced write waits for the read that fetches its data.
void test_fenced_write() {
    Endpoint left(0, large_queue_settings()), right(1, large_queue_settings());
    Buffer local(left.pd, memory_bytes), remote(right.pd, memory_bytes);
    connect(&left, &right);
    constexpr std::size_t half = memory_bytes / 2;
    for (int round = 0; round < 10; ++round) {
        fill_pattern(remote.bytes, half, static_cast<std::size_t>(round) + 1);
        CHECK(left.post(request(1, IBV_WR_RDMA_READ, remote.at(), remote.mr->rkey), {local.part(0, half)}) == 0);
        CHECK(left.post(
                  request(2, IBV_WR_RDMA_WRITE, remote.at(half), remote.mr->rkey, IBV_SEND_SIGNALED | IBV_SEND_FENCE),
                  {local.part(0, half)}) == 0);
        left.expect_completion(1, IBV_WC_SUCCESS);
        left.expect_completion(2, IBV_WC_SUCCESS);
        CHECK(has_pattern(remote.bytes + half, half, static_cast<std::size_t>(round) + 1));
    }
}

// In the error state the application may reuse its buffers: new content never reaches the peer.
void test_buffers_after_error() {
    for (int round = 0; round < 15; ++round) {
        Endpoint left(0, large_queue_settings()), right(1, large_queue_settings());
        Buffer local(left.pd, memory_bytes), remote(right.pd, memory_bytes);
        connect(&left, &right);
        std::memset(local.bytes, 1, memory_bytes);
        constexpr std::size_t each = memory_bytes / 16;
        for (std::uint64_t id = 0; id < 16; ++id) {
            CHECK(left.post(request(id, IBV_WR_RDMA_WRITE, remote.at(id * each), remote.mr->rkey),
                            {local.part(id * each, each)}) == 0);
        }
        usleep(static_cast<useconds_t>(round) * 100);
        CHECK(left.to(IBV_QPS_ERR) == 0);
        std::memset(local.bytes, 2, memory_bytes);
        std::size_t done = 0;
        for (std::uint64_t id = 0; id < 16; ++id) {
            const ibv_wc wc = left.poll_one();
            CHECK(wc.wr_id == id && (wc.status == IBV_WC_SUCCESS || wc.status == IBV_WC_WR_FLUSH_ERR));
            // Completions are in order: no success after the first flushed request.
            CHECK(wc.status != IBV_WC_SUCCESS || done == id);
            done += wc.status == IBV_WC_SUCCESS ? 1 : 0;
        }
        CHECK(right.to(IBV_QPS_ERR) == 0);
        CHECK(std::memchr(remote.bytes, 2, memory_bytes) == nullptr);
        CHECK(std::memchr(remote.bytes, 0, done * each) == nullptr || done == 0);
    }
}

// A refused request stops the requests after it, and none of them has an effect.
void test_refused_in_the_middle() {
    Endpoint left(0, large_queue_settings()), right(1, large_queue_settings());
    Buffer local(left.pd, memory_bytes), remote(right.pd, memory_bytes);
    connect(&left, &right);
    std::memset(local.bytes, 1, memory_bytes);
    for (std::uint64_t id = 0; id < 64; ++id) {
        const std::uint32_t rkey = id == 20 ? remote.mr->rkey ^ 1 : remote.mr->rkey;
        CHECK(left.post(request(id, IBV_WR_RDMA_WRITE, remote.at(id * 8192), rkey), {local.part(0, 8192)}) == 0);
    }
    for (std::uint64_t id = 0; id < 64; ++id) {
        left.expect_completion(id, id < 20 ? IBV_WC_SUCCESS : id == 20 ? IBV_WC_REM_ACCESS_ERR : IBV_WC_WR_FLUSH_ERR);
    }
    CHECK(std::memchr(remote.bytes, 0, 20UL * 8192) == nullptr);
    CHECK(std::memchr(remote.bytes + 20UL * 8192, 1, memory_bytes - 20UL * 8192) == nullptr);
    CHECK(next_event(right.context).event_type == IBV_EVENT_QP_ACCESS_ERR);
}

} // namespace

int main() {
    use_own_domain();
    test_mixed_requests();
    test_fenced_write();
    test_buffers_after_error();
    test_refused_in_the_middle();
    return 0;
}
