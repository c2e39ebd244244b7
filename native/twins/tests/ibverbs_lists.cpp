// Tests of lists of writes, which the twin carries out in batches: each write arrives at its address, and errors are
// reported for the same request as if each were carried out alone.
#include <sys/mman.h>

#include <random>

#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

constexpr std::size_t page = 4096, pages = 64;

Settings settings() {
    Settings chosen;
    chosen.send_wr = 256;
    chosen.completions = 512;
    return chosen;
}

// Memory whose pages can be made inaccessible while the region stays registered.
struct Pages {
    explicit Pages(ibv_pd* pd)
        : bytes(static_cast<std::uint8_t*>(
              mmap(nullptr, pages * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))),
          mr(ibv_reg_mr(pd, bytes, pages * page, all_access)) {
        CHECK(bytes != MAP_FAILED && mr != nullptr);
    }
    ~Pages() {
        CHECK(ibv_dereg_mr(mr) == 0);
        munmap(bytes, pages * page);
    }
    Pages(const Pages&) = delete;
    Pages& operator=(const Pages&) = delete;

    std::uint8_t* at(std::size_t number) const { return bytes + number * page; }
    // Make a page inaccessible. Unlike munmap this keeps the address from being reused.
    void make_inaccessible(std::size_t number) const { CHECK(mprotect(at(number), page, PROT_NONE) == 0); }

    std::uint8_t* bytes;
    ibv_mr* mr;
};

// A list of requests posted by one call.
struct List {
    std::vector<ibv_send_wr> requests;
    std::vector<ibv_sge> sges;

    void add(const ibv_sge& local, const void* remote, std::uint32_t rkey) {
        requests.push_back(request(requests.size(), IBV_WR_RDMA_WRITE, number_of(remote), rkey));
        sges.push_back(local);
    }
    void add(const Pages& from, const Pages& to, std::size_t number, std::size_t size = page) {
        add(make_sge(from.mr, number_of(from.at(number)), size), to.at(number), to.mr->rkey);
    }
    void post(Endpoint* side) {
        for (std::size_t index = 0; index < requests.size(); ++index) {
            requests[index].sg_list = &sges[index];
            requests[index].num_sge = 1;
            requests[index].next = index + 1 < requests.size() ? &requests[index + 1] : nullptr;
        }
        ibv_send_wr* stale_list = nullptr;
        CHECK(ibv_post_send(side->qp, requests.data(), &stale_list) == 0);
    }
    // Expect that all requests before `failed` succeed and all after it are flushed.
    void expect_completion(Endpoint* side, std::size_t failed, ibv_wc_status status) const {
        for (std::size_t id = 0; id < requests.size(); ++id) {
            side->expect_completion(id, id < failed ? IBV_WC_SUCCESS : id == failed ? status : IBV_WC_WR_FLUSH_ERR);
        }
    }
};

struct TwoEndpoints {
    Endpoint left{0, settings()}, right{1, settings()};
    Pages from{left.pd}, to{right.pd};

    TwoEndpoints() {
        connect(&left, &right);
        fill_pattern(from.bytes, pages * page);
    }
    void check_arrived(std::size_t number, bool arrived) const {
        CHECK(arrived ? has_pattern(to.at(number), page, number * page) : to.at(number)[0] == 0);
    }
};

void test_every_byte_arrives() {
    TwoEndpoints endpoints;
    std::mt19937 random(5);
    for (int round = 0; round < 20; ++round) {
        std::memset(endpoints.to.bytes, 0, pages * page);
        List list;
        std::vector<std::size_t> sizes;
        for (std::size_t number = 0; number < pages; ++number) {
            // Small writes, which are copied, between writes that are spliced.
            sizes.push_back(random() % 5 == 0 ? random() % page : page);
            list.add(endpoints.from, endpoints.to, number, sizes.back());
        }
        list.post(&endpoints.left);
        list.expect_completion(&endpoints.left, pages, IBV_WC_SUCCESS);
        for (std::size_t number = 0; number < pages; ++number) {
            CHECK(has_pattern(endpoints.to.at(number), sizes[number], number * page));
            CHECK(sizes[number] == page || endpoints.to.at(number)[sizes[number]] == 0);
        }
    }
}

void test_several_regions() {
    TwoEndpoints endpoints;
    const Pages other(endpoints.left.pd), far(endpoints.right.pd);
    fill_pattern(other.bytes, pages * page, 7);
    List list;
    for (std::size_t number = 0; number < pages; ++number) {
        list.add(number / 3 % 2 == 0 ? endpoints.from : other, number / 4 % 2 == 0 ? endpoints.to : far, number);
    }
    list.post(&endpoints.left);
    list.expect_completion(&endpoints.left, pages, IBV_WC_SUCCESS);
    for (std::size_t number = 0; number < pages; ++number) {
        const Pages& there = number / 4 % 2 == 0 ? endpoints.to : far;
        CHECK(has_pattern(there.at(number), page, number * page + (number / 3 % 2 == 0 ? 0 : 7)));
    }
}

// The memory of one write is inaccessible, at the target or the initiator.
void test_inaccessible_memory(bool at_target, std::size_t failing_page) {
    TwoEndpoints endpoints;
    (at_target ? endpoints.to : endpoints.from).make_inaccessible(failing_page);
    List list;
    for (std::size_t number = 0; number < pages; ++number) {
        list.add(endpoints.from, endpoints.to, number);
    }
    list.post(&endpoints.left);
    list.expect_completion(&endpoints.left, failing_page, at_target ? IBV_WC_REM_OP_ERR : IBV_WC_LOC_PROT_ERR);
    for (std::size_t number = 0; number < failing_page; ++number) {
        endpoints.check_arrived(number, true);
    }
    // Writes that the target had read before the requester failed may have arrived; writes after the failed one must
    // not.
    for (std::size_t number = failing_page + 1; number < pages; ++number) {
        endpoints.check_arrived(number, false);
    }
}

// If two requests of a list fail, the first failure is reported.
void test_invalid_key() {
    TwoEndpoints endpoints;
    endpoints.from.make_inaccessible(3);
    List list;
    for (std::size_t number = 0; number < 8; ++number) {
        list.add(endpoints.from, endpoints.to, number);
    }
    list.sges[5].lkey ^= 1;
    list.post(&endpoints.left);
    list.expect_completion(&endpoints.left, 3, IBV_WC_LOC_PROT_ERR);
    endpoints.check_arrived(2, true);
    endpoints.check_arrived(4, false);
}

void test_out_of_bounds() {
    TwoEndpoints endpoints;
    List list;
    for (std::size_t number = 0; number < 24; ++number) {
        list.add(endpoints.from, endpoints.to, number);
    }
    list.requests[17].wr.rdma.remote_addr = number_of(endpoints.to.at(pages)) - page + 1;
    list.post(&endpoints.left);
    list.expect_completion(&endpoints.left, 17, IBV_WC_REM_ACCESS_ERR);
    endpoints.check_arrived(16, true);
    endpoints.check_arrived(18, false);
    CHECK(endpoints.to.at(pages - 1)[1] == 0);
}

// The key of a deregistered region is invalid, even if the region was cached.
void test_deregistered_region() {
    TwoEndpoints endpoints;
    ibv_mr* const second = ibv_reg_mr(endpoints.left.pd, endpoints.from.bytes, pages * page, all_access);
    CHECK(second != nullptr);
    List valid_list, stale_list;
    for (std::size_t number = 0; number < 4; ++number) {
        valid_list.add(make_sge(second, number_of(endpoints.from.at(number)), page), endpoints.to.at(number),
                       endpoints.to.mr->rkey);
        stale_list.add(make_sge(second, number_of(endpoints.from.at(number)), page), endpoints.to.at(number + 8),
                       endpoints.to.mr->rkey);
    }
    valid_list.post(&endpoints.left);
    valid_list.expect_completion(&endpoints.left, 4, IBV_WC_SUCCESS);
    CHECK(ibv_dereg_mr(second) == 0);
    stale_list.post(&endpoints.left);
    stale_list.expect_completion(&endpoints.left, 0, IBV_WC_LOC_PROT_ERR);
    endpoints.check_arrived(8, false);
}

} // namespace

int main() {
    use_own_domain();
    test_every_byte_arrives();
    test_several_regions();
    for (const std::size_t failing_page : {0, 5, 15, 16, 63}) {
        test_inaccessible_memory(false, failing_page);
        test_inaccessible_memory(true, failing_page);
    }
    test_invalid_key();
    test_out_of_bounds();
    test_deregistered_region();
    return 0;
}
