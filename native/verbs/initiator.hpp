// An RDMA initiator that measures throughput and latency. It posts RDMA WRITEs and READs between its own memory and the
// memory of a passive peer, as fast as possible. The calling thread posts to all queue pairs and polls their
// completions.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "verbs/device.hpp"
#include "verbs/queue_pair.hpp"
#include "verbs/staging.hpp"

namespace gdrkit::verbs {

// The operations of a measurement. The memory of both sides is divided into slots of length_bytes. Operation i moves
// slot i % slot_count, so the caller can check the data of every slot afterwards.
struct Burst {
    Transfer::Direction direction = Transfer::Direction::to_peer;
    std::uint32_t length_bytes = 0;
    std::uint32_t slot_count = 1;
    std::uint64_t operation_count = 0;
    std::uint32_t depth = 1;       // Number of operations in progress at the same time, over all queue pairs.
    std::uint32_t list_length = 1; // Number of operations per ibv_post_send. Only the last one is signaled.
    std::uint64_t remote_address = 0;
    std::uint32_t remote_key = 0;
    std::chrono::nanoseconds time_limit{0}; // Longest time without a completion.
};

// The result of a measurement. After a status other than IBV_WC_SUCCESS, the queue pairs are broken.
struct Outcome {
    std::uint64_t elapsed_ns = 0;
    std::uint64_t completed_count = 0; // Number of completed operations.
    ibv_wc_status status = IBV_WC_SUCCESS;
    std::uint32_t vendor_error = 0;
    bool timed_out = false;
};

class Initiator {
public:
    // `depth_max`: largest number of operations in progress on each queue pair. Throws Error with the errno of the
    // failed call.
    Initiator(const std::string& device_name, std::size_t memory_bytes, std::size_t queue_pairs_count,
              std::uint32_t depth_max);

    std::vector<Endpoint> endpoints() const;
    // Connects each queue pair to one peer, in the order of endpoints(). Each queue pair has at most `reads_max` RDMA
    // READs in progress, or fewer if the device allows fewer. Throws Error: EINVAL if there are more or fewer peers
    // than queue pairs, or the errno of ibv_modify_qp.
    void connect(std::span<const Endpoint> peers, std::uint8_t reads_max);
    std::uint8_t reads_max() const noexcept { return device_.reads_max(); }
    std::span<std::byte> memory() const noexcept { return {buffer_.data, memory_bytes_}; }
    const std::string& name() const noexcept { return device_.name(); }

    // Runs all operations of the burst, unless one fails or the time limit passes. Throws Error: EINVAL for an invalid
    // burst, the errno of ibv_post_send, or EIO if ibv_poll_cq fails.
    Outcome run(const Burst& burst);
    // Runs the operations one after another on the first queue pair, and writes the time of each operation to
    // `times_ns`. This span must have burst.operation_count elements.
    Outcome run_singly(const Burst& burst, std::span<std::uint64_t> times_ns);

private:
    void check_burst(const Burst& burst) const;
    // Posts `count` operations as one list, of which the first is operation number `first_operation_index` of the
    // burst.
    void post(const Burst& burst, std::size_t pair_index, std::uint64_t first_operation_index, std::uint32_t count);
    // Waits for at least one completion and adds the completed operations to `outcome`. Returns false if a completion
    // has failed or none has arrived in time; `outcome` then has the reason.
    bool poll_completions(const Burst& burst, Outcome& outcome);

    Device device_;
    std::size_t memory_bytes_;
    Staging staging_;
    Staging::Buffer buffer_;
    std::uint32_t depth_max_;
    CompletionQueue completion_queue_;
    std::vector<std::unique_ptr<QueuePair>> queue_pairs_;
    std::vector<std::uint32_t> in_progress_counts_; // Number of operations in progress on each queue pair.
    std::vector<Transfer> transfers_;               // The list that post() fills and posts.
    std::vector<ibv_wc> polled_completions_;
};

} // namespace gdrkit::verbs
