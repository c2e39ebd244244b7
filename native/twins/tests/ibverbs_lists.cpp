// Tests of the software twin of libibverbs: lists of RDMA WRITEs that one ibv_post_send posts. The twin executes such a
// list in batches. Every write must arrive at its address. The twin must report an error for the same request as
// without batches.
#include <sys/mman.h>

#include <random>

#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

constexpr std::size_t page_bytes = 4096, page_count = 64;

EndpointSettings make_large_queue_settings() {
    EndpointSettings settings;
    settings.max_send_wr = 256;
    settings.cq_entries = 512;
    return settings;
}

// Memory whose pages can be made inaccessible while the region stays registered.
struct Pages {
    explicit Pages(ibv_pd* pd)
        : bytes(static_cast<std::uint8_t*>(
              mmap(nullptr, page_count * page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))),
          mr(ibv_reg_mr(pd, bytes, page_count * page_bytes, read_write_access)) {
        CHECK(bytes != MAP_FAILED && mr != nullptr);
    }
    ~Pages() {
        CHECK(ibv_dereg_mr(mr) == 0);
        munmap(bytes, page_count * page_bytes);
    }
    Pages(const Pages&) = delete;
    Pages& operator=(const Pages&) = delete;

    std::uint8_t* page_at(std::size_t page_index) const { return bytes + page_index * page_bytes; }
    // Make a page inaccessible. The function does not unmap the page, because another mapping could reuse its address.
    void make_inaccessible(std::size_t page_index) const {
        CHECK(mprotect(page_at(page_index), page_bytes, PROT_NONE) == 0);
    }

    std::uint8_t* bytes;
    ibv_mr* mr;
};

// A list of RDMA WRITEs that one ibv_post_send posts. The id of each request is its index in the list.
struct WriteList {
    std::vector<ibv_send_wr> requests;
    std::vector<ibv_sge> sges;

    void add(const ibv_sge& source, const void* destination, std::uint32_t rkey) {
        requests.push_back(make_request(requests.size(), IBV_WR_RDMA_WRITE, address_of(destination), rkey));
        sges.push_back(source);
    }
    void add(const Pages& source, const Pages& destination, std::size_t page_index,
             std::size_t size_bytes = page_bytes) {
        add(make_sge(source.mr, address_of(source.page_at(page_index)), size_bytes), destination.page_at(page_index),
            destination.mr->rkey);
    }
    void post(Endpoint* endpoint) {
        for (std::size_t index = 0; index < requests.size(); ++index) {
            requests[index].sg_list = &sges[index];
            requests[index].num_sge = 1;
            requests[index].next = index + 1 < requests.size() ? &requests[index + 1] : nullptr;
        }
        ibv_send_wr* bad_wr = nullptr;
        CHECK(ibv_post_send(endpoint->qp, requests.data(), &bad_wr) == 0);
    }
    // Expect these completions: success for the requests before `failed_index`, `status` for the request with this
    // index, and a flush for each later request. If `failed_index` is the number of requests, all must succeed.
    void expect_completions(Endpoint* endpoint, std::size_t failed_index, ibv_wc_status status) const {
        for (std::size_t request_index = 0; request_index < requests.size(); ++request_index) {
            endpoint->expect_completion(request_index, request_index < failed_index    ? IBV_WC_SUCCESS
                                                       : request_index == failed_index ? status
                                                                                       : IBV_WC_WR_FLUSH_ERR);
        }
    }
};

struct TwoEndpoints {
    Endpoint requester{0, make_large_queue_settings()}, responder{1, make_large_queue_settings()};
    Pages source{requester.pd}, destination{responder.pd};

    TwoEndpoints() {
        connect(&requester, &responder);
        fill_pattern(source.bytes, page_count * page_bytes);
    }
    void check_page_arrived(std::size_t page_index) const {
        CHECK(has_pattern(destination.page_at(page_index), page_bytes, page_index * page_bytes));
    }
    void check_page_did_not_arrive(std::size_t page_index) const { CHECK(destination.page_at(page_index)[0] == 0); }
};

void test_every_byte_arrives() {
    TwoEndpoints endpoints;
    std::mt19937 random(5);
    for (int round = 0; round < 20; ++round) {
        std::memset(endpoints.destination.bytes, 0, page_count * page_bytes);
        WriteList list;
        std::vector<std::size_t> sizes;
        for (std::size_t page_index = 0; page_index < page_count; ++page_index) {
            // The list mixes small writes, whose payload is copied, and full pages, which are spliced.
            sizes.push_back(random() % 5 == 0 ? random() % page_bytes : page_bytes);
            list.add(endpoints.source, endpoints.destination, page_index, sizes.back());
        }
        list.post(&endpoints.requester);
        list.expect_completions(&endpoints.requester, page_count, IBV_WC_SUCCESS);
        for (std::size_t page_index = 0; page_index < page_count; ++page_index) {
            CHECK(has_pattern(endpoints.destination.page_at(page_index), sizes[page_index], page_index * page_bytes));
            CHECK(sizes[page_index] == page_bytes || endpoints.destination.page_at(page_index)[sizes[page_index]] == 0);
        }
    }
}

void test_list_may_use_several_regions() {
    TwoEndpoints endpoints;
    const Pages other_source(endpoints.requester.pd), other_destination(endpoints.responder.pd);
    constexpr std::size_t other_first_index = 7; // so that the two sources differ
    fill_pattern(other_source.bytes, page_count * page_bytes, other_first_index);
    WriteList list;
    // The source region changes after every three pages, and the destination region after every four.
    for (std::size_t page_index = 0; page_index < page_count; ++page_index) {
        list.add(page_index / 3 % 2 == 0 ? endpoints.source : other_source,
                 page_index / 4 % 2 == 0 ? endpoints.destination : other_destination, page_index);
    }
    list.post(&endpoints.requester);
    list.expect_completions(&endpoints.requester, page_count, IBV_WC_SUCCESS);
    for (std::size_t page_index = 0; page_index < page_count; ++page_index) {
        const Pages& destination = page_index / 4 % 2 == 0 ? endpoints.destination : other_destination;
        CHECK(has_pattern(destination.page_at(page_index), page_bytes,
                          page_index * page_bytes + (page_index / 3 % 2 == 0 ? 0 : other_first_index)));
    }
}

// The memory of one write is inaccessible, either at the responder or at the requester.
void test_inaccessible_memory(bool is_responder_memory, std::size_t failing_page) {
    TwoEndpoints endpoints;
    (is_responder_memory ? endpoints.destination : endpoints.source).make_inaccessible(failing_page);
    WriteList list;
    for (std::size_t page_index = 0; page_index < page_count; ++page_index) {
        list.add(endpoints.source, endpoints.destination, page_index);
    }
    list.post(&endpoints.requester);
    list.expect_completions(&endpoints.requester, failing_page,
                            is_responder_memory ? IBV_WC_REM_OP_ERR : IBV_WC_LOC_PROT_ERR);
    for (std::size_t page_index = 0; page_index < failing_page; ++page_index) {
        endpoints.check_page_arrived(page_index);
    }
    // Writes after the failed one must not arrive.
    for (std::size_t page_index = failing_page + 1; page_index < page_count; ++page_index) {
        endpoints.check_page_did_not_arrive(page_index);
    }
}

// If two requests of a list fail, the first failure is reported.
void test_first_of_two_failures_is_reported() {
    TwoEndpoints endpoints;
    endpoints.source.make_inaccessible(3);
    WriteList list;
    for (std::size_t page_index = 0; page_index < 8; ++page_index) {
        list.add(endpoints.source, endpoints.destination, page_index);
    }
    list.sges[5].lkey ^= 1; // the second failure: an invalid key
    list.post(&endpoints.requester);
    list.expect_completions(&endpoints.requester, 3, IBV_WC_LOC_PROT_ERR);
    endpoints.check_page_arrived(2);
    endpoints.check_page_did_not_arrive(4);
}

void test_write_beyond_region_is_refused() {
    TwoEndpoints endpoints;
    WriteList list;
    for (std::size_t page_index = 0; page_index < 24; ++page_index) {
        list.add(endpoints.source, endpoints.destination, page_index);
    }
    // The last byte of this write is outside the region.
    list.requests[17].wr.rdma.remote_addr = address_of(endpoints.destination.page_at(page_count)) - page_bytes + 1;
    list.post(&endpoints.requester);
    list.expect_completions(&endpoints.requester, 17, IBV_WC_REM_ACCESS_ERR);
    endpoints.check_page_arrived(16);
    endpoints.check_page_did_not_arrive(18);
    CHECK(endpoints.destination.page_at(page_count - 1)[1] == 0);
}

// The key of a deregistered region is invalid, even if the twin has used the region for an earlier list.
void test_key_of_deregistered_region_is_invalid() {
    TwoEndpoints endpoints;
    ibv_mr* const extra_region =
        ibv_reg_mr(endpoints.requester.pd, endpoints.source.bytes, page_count * page_bytes, read_write_access);
    CHECK(extra_region != nullptr);
    WriteList valid_list, stale_list;
    for (std::size_t page_index = 0; page_index < 4; ++page_index) {
        valid_list.add(make_sge(extra_region, address_of(endpoints.source.page_at(page_index)), page_bytes),
                       endpoints.destination.page_at(page_index), endpoints.destination.mr->rkey);
        stale_list.add(make_sge(extra_region, address_of(endpoints.source.page_at(page_index)), page_bytes),
                       endpoints.destination.page_at(page_index + 8), endpoints.destination.mr->rkey);
    }
    valid_list.post(&endpoints.requester);
    valid_list.expect_completions(&endpoints.requester, 4, IBV_WC_SUCCESS);
    CHECK(ibv_dereg_mr(extra_region) == 0);
    stale_list.post(&endpoints.requester);
    stale_list.expect_completions(&endpoints.requester, 0, IBV_WC_LOC_PROT_ERR);
    endpoints.check_page_did_not_arrive(8);
}

} // namespace

int main() {
    isolate_from_other_processes();
    test_every_byte_arrives();
    test_list_may_use_several_regions();
    // The failing page is at an end of the list, or beside the border between two batches (64 KiB, which are 16 pages).
    for (const std::size_t failing_page : {0, 5, 15, 16, 63}) {
        test_inaccessible_memory(false, failing_page);
        test_inaccessible_memory(true, failing_page);
    }
    test_first_of_two_failures_is_reported();
    test_write_beyond_region_is_refused();
    test_key_of_deregistered_region_is_invalid();
    return 0;
}
