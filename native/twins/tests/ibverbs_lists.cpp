// Lists of writes, which the twin carries out several at a time: each arrives at its place, and one that fails is the
// first that failed, as when each is carried out alone.
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

// Memory of which parts can go while the region stays.
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
    // Out of reach, and nobody else gets the place, as it would be after munmap.
    void take_away(std::size_t number) const { CHECK(mprotect(at(number), page, PROT_NONE) == 0); }

    std::uint8_t* bytes;
    ibv_mr* mr;
};

// A list that is posted by one call.
struct List {
    std::vector<ibv_send_wr> requests;
    std::vector<ibv_sge> pieces;

    void add(const ibv_sge& local, const void* remote, std::uint32_t rkey) {
        requests.push_back(request(requests.size(), IBV_WR_RDMA_WRITE, number_of(remote), rkey));
        pieces.push_back(local);
    }
    void add(const Pages& from, const Pages& to, std::size_t number, std::size_t size = page) {
        add(piece(from.mr, number_of(from.at(number)), size), to.at(number), to.mr->rkey);
    }
    void post(Side* side) {
        for (std::size_t index = 0; index < requests.size(); ++index) {
            requests[index].sg_list = &pieces[index];
            requests[index].num_sge = 1;
            requests[index].next = index + 1 < requests.size() ? &requests[index + 1] : nullptr;
        }
        ibv_send_wr* bad = nullptr;
        CHECK(ibv_post_send(side->qp, requests.data(), &bad) == 0);
    }
    // All before `failed` succeed, and all behind it are flushed.
    void expect(Side* side, std::size_t failed, ibv_wc_status status) const {
        for (std::size_t id = 0; id < requests.size(); ++id) {
            side->expect(id, id < failed ? IBV_WC_SUCCESS : id == failed ? status : IBV_WC_WR_FLUSH_ERR);
        }
    }
};

struct Two {
    Side left{0, settings()}, right{1, settings()};
    Pages from{left.pd}, to{right.pd};

    Two() {
        connect(&left, &right);
        fill_pattern(from.bytes, pages * page);
    }
    void check_arrived(std::size_t number, bool arrived) const {
        CHECK(arrived ? has_pattern(to.at(number), page, number * page) : to.at(number)[0] == 0);
    }
};

void every_byte_arrives() {
    Two two;
    std::mt19937 random(5);
    for (int round = 0; round < 20; ++round) {
        std::memset(two.to.bytes, 0, pages * page);
        List list;
        std::vector<std::size_t> sizes;
        for (std::size_t number = 0; number < pages; ++number) {
            // Some are small, and go another way, between those that do not.
            sizes.push_back(random() % 5 == 0 ? random() % page : page);
            list.add(two.from, two.to, number, sizes.back());
        }
        list.post(&two.left);
        list.expect(&two.left, pages, IBV_WC_SUCCESS);
        for (std::size_t number = 0; number < pages; ++number) {
            CHECK(has_pattern(two.to.at(number), sizes[number], number * page));
            CHECK(sizes[number] == page || two.to.at(number)[sizes[number]] == 0);
        }
    }
}

void several_regions() {
    Two two;
    const Pages other(two.left.pd), far(two.right.pd);
    fill_pattern(other.bytes, pages * page, 7);
    List list;
    for (std::size_t number = 0; number < pages; ++number) {
        list.add(number / 3 % 2 == 0 ? two.from : other, number / 4 % 2 == 0 ? two.to : far, number);
    }
    list.post(&two.left);
    list.expect(&two.left, pages, IBV_WC_SUCCESS);
    for (std::size_t number = 0; number < pages; ++number) {
        const Pages& there = number / 4 % 2 == 0 ? two.to : far;
        CHECK(has_pattern(there.at(number), page, number * page + (number / 3 % 2 == 0 ? 0 : 7)));
    }
}

// Without the memory of one of them, on one side or the other.
void memory_that_went(bool of_target, std::size_t gone) {
    Two two;
    (of_target ? two.to : two.from).take_away(gone);
    List list;
    for (std::size_t number = 0; number < pages; ++number) {
        list.add(two.from, two.to, number);
    }
    list.post(&two.left);
    list.expect(&two.left, gone, of_target ? IBV_WC_REM_OP_ERR : IBV_WC_LOC_PROT_ERR);
    for (std::size_t number = 0; number < gone; ++number) {
        two.check_arrived(number, true);
    }
    // What the target had taken when the requester failed may be there; nothing is behind what it failed at itself.
    for (std::size_t number = gone + 1; number < pages; ++number) {
        two.check_arrived(number, false);
    }
}

// Two fail: the first one does.
void a_key_that_is_none() {
    Two two;
    two.from.take_away(3);
    List list;
    for (std::size_t number = 0; number < 8; ++number) {
        list.add(two.from, two.to, number);
    }
    list.pieces[5].lkey ^= 1;
    list.post(&two.left);
    list.expect(&two.left, 3, IBV_WC_LOC_PROT_ERR);
    two.check_arrived(2, true);
    two.check_arrived(4, false);
}

void outside_of_the_region() {
    Two two;
    List list;
    for (std::size_t number = 0; number < 24; ++number) {
        list.add(two.from, two.to, number);
    }
    list.requests[17].wr.rdma.remote_addr = number_of(two.to.at(pages)) - page + 1;
    list.post(&two.left);
    list.expect(&two.left, 17, IBV_WC_REM_ACCESS_ERR);
    two.check_arrived(16, true);
    two.check_arrived(18, false);
    CHECK(two.to.at(pages - 1)[1] == 0);
}

// A key that named a region once names it no more, whatever was remembered.
void a_region_that_was_deregistered() {
    Two two;
    ibv_mr* const second = ibv_reg_mr(two.left.pd, two.from.bytes, pages * page, all_access);
    CHECK(second != nullptr);
    List good, bad;
    for (std::size_t number = 0; number < 4; ++number) {
        good.add(piece(second, number_of(two.from.at(number)), page), two.to.at(number), two.to.mr->rkey);
        bad.add(piece(second, number_of(two.from.at(number)), page), two.to.at(number + 8), two.to.mr->rkey);
    }
    good.post(&two.left);
    good.expect(&two.left, 4, IBV_WC_SUCCESS);
    CHECK(ibv_dereg_mr(second) == 0);
    bad.post(&two.left);
    bad.expect(&two.left, 0, IBV_WC_LOC_PROT_ERR);
    two.check_arrived(8, false);
}

} // namespace

int main() {
    use_own_domain();
    every_byte_arrives();
    several_regions();
    for (const std::size_t gone : {0, 5, 15, 16, 63}) {
        memory_that_went(false, gone);
        memory_that_went(true, gone);
    }
    a_key_that_is_none();
    outside_of_the_region();
    a_region_that_was_deregistered();
    return 0;
}
