// The measuring initiator against a passive peer in this process, for the sanitizers. It uses the libibverbs.so.1 that
// the loader finds.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "tests/check.hpp"
#include "verbs/error.hpp"
#include "verbs/initiator.hpp"

using namespace gdrkit::verbs;
using Direction = Transfer::Direction;

namespace {

constexpr std::size_t memory_bytes = 1 << 20;
constexpr std::byte untouched{0xa5};
// Only a hang takes this long.
constexpr std::chrono::seconds patience{60};

// One queue pair per queue pair of the initiator, and the memory that they may access.
class Peer {
public:
    Peer(const std::string& name, std::size_t pairs) : memory(memory_bytes, untouched), device_(name) {
        queue_.reset(ibv_create_cq(device_.context(), 16, nullptr, nullptr, 0));
        CHECK(queue_ != nullptr);
        region.reset(ibv_reg_mr(device_.domain(), memory.data(), memory.size(), access));
        CHECK(region != nullptr);
        for (std::size_t index = 0; index < pairs; ++index) {
            ibv_qp_init_attr attributes{};
            attributes.send_cq = attributes.recv_cq = queue_.get();
            attributes.cap = {1, 1, 1, 1, 0};
            attributes.qp_type = IBV_QPT_RC;
            pairs_.emplace_back(ibv_create_qp(device_.domain(), &attributes));
            CHECK(pairs_.back() != nullptr);
        }
    }

    std::vector<Endpoint> endpoints() const {
        std::vector<Endpoint> found;
        for (const auto& pair : pairs_) {
            found.push_back({pair->qp_num, 0, device_.gid(), device_.port_attributes().lid, 1024});
        }
        return found;
    }

    void connect(const std::vector<Endpoint>& peers) {
        for (std::size_t index = 0; index < pairs_.size(); ++index) {
            ibv_qp_attr first{};
            first.qp_state = IBV_QPS_INIT;
            first.port_num = device_.port();
            first.qp_access_flags = access;
            modify(index, first, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
            ibv_qp_attr ready{};
            ready.qp_state = IBV_QPS_RTR;
            ready.path_mtu = IBV_MTU_1024;
            ready.dest_qp_num = peers[index].qp_number;
            ready.rq_psn = peers[index].psn;
            ready.max_dest_rd_atomic = device_.reads_max();
            ready.min_rnr_timer = 12;
            ready.ah_attr.is_global = 1;
            ready.ah_attr.port_num = device_.port();
            ready.ah_attr.grh.dgid = peers[index].gid;
            ready.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(device_.gid_index());
            ready.ah_attr.grh.hop_limit = 1;
            modify(index, ready,
                   IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                       IBV_QP_MIN_RNR_TIMER);
        }
    }

    std::uint64_t address() const { return reinterpret_cast<std::uintptr_t>(memory.data()); }

    std::vector<std::byte> memory;

private:
    static constexpr int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
    void modify(std::size_t index, ibv_qp_attr& attributes, int mask) {
        CHECK(ibv_modify_qp(pairs_[index].get(), &attributes, mask | IBV_QP_STATE) == 0);
    }
    Device device_;
    Owned<ibv_cq> queue_;
    std::vector<Owned<ibv_qp>> pairs_;

public:
    Owned<ibv_mr> region; // Deregistered before its domain and its memory are freed.
};

struct Pair {
    Pair(std::size_t pairs, std::uint32_t depth_max)
        : name(Device::names().front()), peer(name, pairs), initiator(name, memory_bytes, pairs, depth_max) {
        peer.connect(initiator.endpoints());
        initiator.connect(peer.endpoints(), initiator.reads_max());
        std::mt19937 chance(1);
        std::generate(initiator.memory().begin(), initiator.memory().end(), [&] { return std::byte(chance() & 255); });
    }
    Burst burst(Direction direction, std::uint32_t length, std::uint32_t slots, std::uint64_t operations) const {
        Burst burst;
        burst.direction = direction;
        burst.length_bytes = length;
        burst.slots = slots;
        burst.operations = operations;
        burst.remote_address = peer.address();
        burst.remote_key = peer.region->rkey;
        burst.time_limit = patience;
        return burst;
    }
    std::string name;
    Peer peer;
    Initiator initiator;
};

bool all_done(const Outcome& outcome, const Burst& burst) {
    return outcome.status == IBV_WC_SUCCESS && !outcome.timed_out && outcome.done == burst.operations &&
           outcome.elapsed_ns > 0;
}

template <typename Action> int refused_with(const Action& action) {
    try {
        action();
    } catch (const Error& error) {
        return error.number();
    }
    return 0;
}

// All depths and list lengths that fit, also those that do not divide each other, with one and three queue pairs.
void a_burst_moves_every_slot_and_nothing_else() {
    constexpr std::uint32_t length = 1021, slots = 37;
    for (const std::size_t pairs : {1, 3}) {
        Pair both(pairs, 8);
        for (std::uint32_t depth = 1; depth <= 8 * pairs; depth += 3) {
            for (std::uint32_t list = 1; list <= std::min(depth, 8U); list += 2) {
                std::fill(both.peer.memory.begin(), both.peer.memory.end(), untouched);
                Burst burst = both.burst(Direction::to_peer, length, slots, 100);
                burst.depth = depth;
                burst.list_length = list;
                CHECK(all_done(both.initiator.run(burst), burst));
                constexpr std::size_t moved = std::size_t{length} * slots;
                CHECK(std::memcmp(both.peer.memory.data(), both.initiator.memory().data(), moved) == 0);
                CHECK(std::all_of(both.peer.memory.begin() + moved, both.peer.memory.end(),
                                  [](std::byte each) { return each == untouched; }));
            }
        }
    }
}

// With fewer operations than slots, the other slots stay unchanged.
void a_read_brings_what_was_wanted() {
    Pair both(2, 16);
    both.peer.memory.assign(both.initiator.memory().begin(), both.initiator.memory().end());
    std::fill(both.initiator.memory().begin(), both.initiator.memory().end(), untouched);
    Burst burst = both.burst(Direction::from_peer, 4096, 64, 20);
    burst.depth = 16;
    burst.list_length = 4;
    CHECK(all_done(both.initiator.run(burst), burst));
    CHECK(std::memcmp(both.initiator.memory().data(), both.peer.memory.data(), std::size_t{20} * 4096) == 0);
    CHECK(both.initiator.memory()[std::size_t{20} * 4096] == untouched);
}

void each_single_operation_has_its_time() {
    Pair both(1, 4);
    const Burst burst = both.burst(Direction::to_peer, 8, 3, 50);
    std::vector<std::uint64_t> times(50);
    const Outcome outcome = both.initiator.run_singly(burst, times);
    CHECK(all_done(outcome, burst));
    std::uint64_t total = 0;
    for (const std::uint64_t each : times) {
        CHECK(each > 0);
        total += each;
    }
    CHECK(total <= outcome.elapsed_ns);
    times.resize(49);
    CHECK(refused_with([&] { both.initiator.run_singly(burst, times); }) == EINVAL);
}

void what_does_not_fit_is_refused_and_the_next_goes_on() {
    Pair both(2, 4);
    const Burst good = both.burst(Direction::to_peer, 4096, 256, 10);
    std::vector<Burst> wrong(7, good);
    wrong[0].length_bytes = 0;
    wrong[1].slots = 0;
    wrong[2].operations = 0;
    wrong[3].depth = 0;
    wrong[4].slots = 257;
    wrong[5].depth = 9;
    wrong[6].depth = 3;
    wrong[6].list_length = 4;
    for (const Burst& each : wrong) {
        CHECK(refused_with([&] { both.initiator.run(each); }) == EINVAL);
    }
    CHECK(all_done(both.initiator.run(good), good));
    CHECK(refused_with([&] { both.initiator.connect({}, 1); }) == EINVAL);
    CHECK(refused_with([&] { Initiator(both.name + "_not", 64, 1, 1); }) == ENODEV);
}

void what_the_peer_refuses_is_a_status() {
    for (const bool is_single : {false, true}) {
        Pair both(1, 8);
        Burst burst = both.burst(Direction::to_peer, 64, 4, 20);
        burst.remote_address += memory_bytes - 64; // The second slot is behind the end of the memory.
        std::vector<std::uint64_t> times(20);
        const Outcome outcome = is_single ? both.initiator.run_singly(burst, times) : both.initiator.run(burst);
        CHECK(outcome.status == IBV_WC_REM_ACCESS_ERR && !outcome.timed_out && outcome.done == 1);
    }
}

// The key is invalidated while thousands of operations are in progress. The burst would not end by itself.
void a_key_that_is_taken_back_ends_a_burst() {
    Pair both(3, 32);
    Burst burst = both.burst(Direction::from_peer, 512, 64, std::uint64_t{1} << 40);
    burst.depth = 96;
    burst.list_length = 8;
    Outcome outcome;
    std::thread running([&] { outcome = both.initiator.run(burst); });
    both.peer.region.reset();
    running.join();
    CHECK(outcome.status == IBV_WC_REM_ACCESS_ERR && outcome.done < burst.operations);
}

} // namespace

int main() {
    for (const auto test : {a_burst_moves_every_slot_and_nothing_else, a_read_brings_what_was_wanted,
                            each_single_operation_has_its_time, what_does_not_fit_is_refused_and_the_next_goes_on,
                            what_the_peer_refuses_is_a_status, a_key_that_is_taken_back_ends_a_burst}) {
        test();
    }
    std::puts("6 tests passed");
    return 0;
}
