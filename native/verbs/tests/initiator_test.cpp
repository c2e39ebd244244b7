// Tests of the RDMA initiator against a passive peer in the same process. They use the libibverbs.so.1 that the loader
// finds, and also run with the sanitizers.
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
constexpr std::byte untouched_byte{0xa5};
// This time limit is much longer than any burst takes, so that only a hang reaches the limit.
constexpr std::chrono::seconds completion_timeout{60};

// The passive peer: one queue pair for each queue pair of the initiator, and the memory that the initiator accesses.
class Peer {
public:
    Peer(const std::string& device_name, std::size_t queue_pairs_count)
        : memory(memory_bytes, untouched_byte), device_(device_name) {
        completion_queue_.reset(ibv_create_cq(device_.context(), 16, nullptr, nullptr, 0));
        CHECK(completion_queue_ != nullptr);
        region.reset(ibv_reg_mr(device_.domain(), memory.data(), memory.size(), access_flags));
        CHECK(region != nullptr);
        for (std::size_t index = 0; index < queue_pairs_count; ++index) {
            ibv_qp_init_attr attributes{};
            attributes.send_cq = attributes.recv_cq = completion_queue_.get();
            attributes.cap = {
                .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
            attributes.qp_type = IBV_QPT_RC;
            queue_pairs_.emplace_back(ibv_create_qp(device_.domain(), &attributes));
            CHECK(queue_pairs_.back() != nullptr);
        }
    }

    std::vector<Endpoint> endpoints() const {
        std::vector<Endpoint> endpoints;
        for (const auto& pair : queue_pairs_) {
            // The first packet sequence number is 0, and the MTU is 1024 bytes.
            endpoints.push_back({pair->qp_num, 0, device_.gid(), device_.port_attributes().lid, 1024});
        }
        return endpoints;
    }

    // Moves each queue pair to RTR (ready to receive). A passive peer sends no requests, so RTS is not needed.
    void connect(const std::vector<Endpoint>& initiator_endpoints) {
        for (std::size_t pair_index = 0; pair_index < queue_pairs_.size(); ++pair_index) {
            ibv_qp_attr init_attributes{};
            init_attributes.qp_state = IBV_QPS_INIT;
            init_attributes.port_num = device_.port();
            init_attributes.qp_access_flags = access_flags;
            modify(pair_index, init_attributes, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
            ibv_qp_attr rtr_attributes{};
            rtr_attributes.qp_state = IBV_QPS_RTR;
            rtr_attributes.path_mtu = IBV_MTU_1024;
            rtr_attributes.dest_qp_num = initiator_endpoints[pair_index].qp_number;
            rtr_attributes.rq_psn = initiator_endpoints[pair_index].psn;
            rtr_attributes.max_dest_rd_atomic = device_.reads_max();
            rtr_attributes.min_rnr_timer = 12; // 0.64 ms
            rtr_attributes.ah_attr.is_global = 1;
            rtr_attributes.ah_attr.port_num = device_.port();
            rtr_attributes.ah_attr.grh.dgid = initiator_endpoints[pair_index].gid;
            rtr_attributes.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(device_.gid_index());
            rtr_attributes.ah_attr.grh.hop_limit = 1;
            modify(pair_index, rtr_attributes,
                   IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                       IBV_QP_MIN_RNR_TIMER);
        }
    }

    std::uint64_t address() const { return reinterpret_cast<std::uintptr_t>(memory.data()); }

    std::vector<std::byte> memory;

private:
    static constexpr int access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
    void modify(std::size_t pair_index, ibv_qp_attr& attributes, int mask) {
        CHECK(ibv_modify_qp(queue_pairs_[pair_index].get(), &attributes, mask | IBV_QP_STATE) == 0);
    }
    Device device_;
    Owned<ibv_cq> completion_queue_;
    std::vector<Owned<ibv_qp>> queue_pairs_;

public:
    Owned<ibv_mr> region; // As the last member, the region is deregistered before its domain and its memory are freed.
};

// An initiator and a peer that are connected to each other. The memory of the initiator has random bytes.
struct ConnectedSides {
    ConnectedSides(std::size_t queue_pairs_count, std::uint32_t depth_max)
        : device_name(Device::list_names().front()), peer(device_name, queue_pairs_count),
          initiator(device_name, memory_bytes, queue_pairs_count, depth_max) {
        peer.connect(initiator.endpoints());
        initiator.connect(peer.endpoints(), initiator.reads_max());
        std::mt19937 random_generator(1);
        std::generate(initiator.memory().begin(), initiator.memory().end(),
                      [&] { return std::byte(random_generator() & 255); });
    }
    Burst make_burst(Direction direction, std::uint32_t length_bytes, std::uint32_t slots,
                     std::uint64_t operations) const {
        Burst burst;
        burst.direction = direction;
        burst.length_bytes = length_bytes;
        burst.slot_count = slots;
        burst.operation_count = operations;
        burst.remote_address = peer.address();
        burst.remote_key = peer.region->rkey;
        burst.time_limit = completion_timeout;
        return burst;
    }
    std::string device_name;
    Peer peer;
    Initiator initiator;
};

bool is_complete(const Outcome& outcome, const Burst& burst) {
    return outcome.status == IBV_WC_SUCCESS && !outcome.timed_out && outcome.completed_count == burst.operation_count &&
           outcome.elapsed_ns > 0;
}

// Returns the errno of the Error that the action throws, or 0 if it throws none.
template <typename Action> int get_errno(const Action& action) {
    try {
        action();
    } catch (const Error& error) {
        return error.error_number();
    }
    return 0;
}

// Tries many valid combinations of depth and list length, with one and with three queue pairs. In some combinations,
// neither number divides the other.
void test_burst_moves_every_slot_and_nothing_else() {
    constexpr std::uint32_t length_bytes = 1021, slots = 37;
    for (const std::size_t queue_pairs_count : {1, 3}) {
        ConnectedSides sides(queue_pairs_count, 8);
        for (std::uint32_t depth = 1; depth <= 8 * queue_pairs_count; depth += 3) {
            for (std::uint32_t list_length = 1; list_length <= std::min(depth, 8U); list_length += 2) {
                std::fill(sides.peer.memory.begin(), sides.peer.memory.end(), untouched_byte);
                Burst burst = sides.make_burst(Direction::to_peer, length_bytes, slots, 100);
                burst.depth = depth;
                burst.list_length = list_length;
                CHECK(is_complete(sides.initiator.run(burst), burst));
                constexpr std::size_t moved_bytes = std::size_t{length_bytes} * slots;
                CHECK(std::memcmp(sides.peer.memory.data(), sides.initiator.memory().data(), moved_bytes) == 0);
                CHECK(std::all_of(sides.peer.memory.begin() + moved_bytes, sides.peer.memory.end(),
                                  [](std::byte byte) { return byte == untouched_byte; }));
            }
        }
    }
}

// With fewer operations than slots, the remaining slots stay unchanged.
void test_read_burst_moves_the_first_slots() {
    ConnectedSides sides(2, 16);
    sides.peer.memory.assign(sides.initiator.memory().begin(), sides.initiator.memory().end());
    std::fill(sides.initiator.memory().begin(), sides.initiator.memory().end(), untouched_byte);
    Burst burst = sides.make_burst(Direction::from_peer, 4096, 64, 20);
    burst.depth = 16;
    burst.list_length = 4;
    CHECK(is_complete(sides.initiator.run(burst), burst));
    CHECK(std::memcmp(sides.initiator.memory().data(), sides.peer.memory.data(), std::size_t{20} * 4096) == 0);
    CHECK(sides.initiator.memory()[std::size_t{20} * 4096] == untouched_byte);
}

void test_single_operations_are_timed() {
    ConnectedSides sides(1, 4);
    const Burst burst = sides.make_burst(Direction::to_peer, 8, 3, 50);
    std::vector<std::uint64_t> times_ns(50);
    const Outcome outcome = sides.initiator.run_singly(burst, times_ns);
    CHECK(is_complete(outcome, burst));
    std::uint64_t total_ns = 0;
    for (const std::uint64_t time_ns : times_ns) {
        CHECK(time_ns > 0);
        total_ns += time_ns;
    }
    CHECK(total_ns <= outcome.elapsed_ns);
    times_ns.resize(49);
    CHECK(get_errno([&] { sides.initiator.run_singly(burst, times_ns); }) == EINVAL);
}

void test_invalid_burst_is_refused() {
    ConnectedSides sides(2, 4);
    const Burst valid_burst = sides.make_burst(Direction::to_peer, 4096, 256, 10);
    std::vector<Burst> invalid_bursts(7, valid_burst);
    invalid_bursts[0].length_bytes = 0;
    invalid_bursts[1].slot_count = 0;
    invalid_bursts[2].operation_count = 0;
    invalid_bursts[3].depth = 0;
    invalid_bursts[4].slot_count = 257; // The slots need more bytes than the memory has.
    invalid_bursts[5].depth = 9;        // Two queue pairs with depth_max 4 have at most 8 operations in progress.
    invalid_bursts[6].depth = 3;        // The list is longer than the depth.
    invalid_bursts[6].list_length = 4;
    for (const Burst& burst : invalid_bursts) {
        CHECK(get_errno([&] { sides.initiator.run(burst); }) == EINVAL);
    }
    CHECK(is_complete(sides.initiator.run(valid_burst), valid_burst)); // The queue pairs still work.
    CHECK(get_errno([&] { sides.initiator.connect({}, 1); }) == EINVAL);
    CHECK(get_errno([&] { Initiator(sides.device_name + "_missing", 64, 1, 1); }) == ENODEV);
}

void test_access_beyond_the_peer_memory_is_a_status() {
    for (const bool is_single : {false, true}) {
        ConnectedSides sides(1, 8);
        Burst burst = sides.make_burst(Direction::to_peer, 64, 4, 20);
        burst.remote_address += memory_bytes - 64; // The second slot is beyond the end of the memory.
        std::vector<std::uint64_t> times_ns(20);
        const Outcome outcome = is_single ? sides.initiator.run_singly(burst, times_ns) : sides.initiator.run(burst);
        CHECK(outcome.status == IBV_WC_REM_ACCESS_ERR && !outcome.timed_out && outcome.completed_count == 1);
    }
}

// The peer deregisters its region while the burst is in progress. The burst has so many operations that only the
// deregistration ends it.
void test_deregistered_region_ends_a_burst() {
    ConnectedSides sides(3, 32);
    Burst burst = sides.make_burst(Direction::from_peer, 512, 64, std::uint64_t{1} << 40);
    burst.depth = 96;
    burst.list_length = 8;
    Outcome outcome;
    std::thread burst_thread([&] { outcome = sides.initiator.run(burst); });
    sides.peer.region.reset();
    burst_thread.join();
    CHECK(outcome.status == IBV_WC_REM_ACCESS_ERR && outcome.completed_count < burst.operation_count);
}

} // namespace

int main() {
    for (const auto test : {test_burst_moves_every_slot_and_nothing_else, test_read_burst_moves_the_first_slots,
                            test_single_operations_are_timed, test_invalid_burst_is_refused,
                            test_access_beyond_the_peer_memory_is_a_status, test_deregistered_region_ends_a_burst}) {
        test();
    }
    std::puts("6 tests passed");
    return 0;
}
