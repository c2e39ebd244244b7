// An RDMA initiator that measures the throughput of bursts over all queue pairs, and the latency of single operations.
#include "verbs/initiator.hpp"

#include <sched.h>

#include <algorithm>
#include <array>

#include "verbs/error.hpp"

namespace gdrkit::verbs {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t completions_per_poll = 64;
// Number of polls without a completion between two checks of the time limit. After each check, this thread yields the
// processor.
constexpr unsigned polls_per_time_check = 256;
// The wr_id of the last operation of a list has two halves: the upper half is the index of the queue pair, and the
// lower half is the number of operations in the list.
constexpr unsigned count_bits = 32;

std::uint64_t count_elapsed_ns(Clock::time_point begin_time) {
    return static_cast<std::uint64_t>(std::chrono::nanoseconds(Clock::now() - begin_time).count());
}

// Returns the layout of staging memory that consists of one buffer.
Staging::Layout make_single_buffer_layout(std::size_t memory_bytes) {
    Staging::Layout layout{};
    layout.small_bytes = 0;
    layout.small_count = 0;
    layout.large_bytes = memory_bytes;
    layout.large_count = 1;
    return layout;
}

} // namespace

Initiator::Initiator(const std::string& device_name, std::size_t memory_bytes, std::size_t queue_pairs_count,
                     std::uint32_t depth_max)
    : device_(device_name), memory_bytes_(memory_bytes),
      staging_(std::array<Device*, 1>{&device_}, make_single_buffer_layout(memory_bytes)),
      buffer_(staging_.take(memory_bytes)), depth_max_(depth_max),
      completion_queue_(device_, static_cast<int>(depth_max * queue_pairs_count)), transfers_(depth_max),
      polled_completions_(completions_per_poll) {
    for (std::size_t index = 0; index < queue_pairs_count; ++index) {
        queue_pairs_.push_back(std::make_unique<QueuePair>(device_, completion_queue_, depth_max));
    }
    in_progress_counts_.resize(queue_pairs_count);
}

std::vector<Endpoint> Initiator::endpoints() const {
    std::vector<Endpoint> endpoints;
    for (const auto& pair : queue_pairs_) {
        endpoints.push_back(pair->endpoint());
    }
    return endpoints;
}

void Initiator::connect(std::span<const Endpoint> peers, std::uint8_t reads_max) {
    if (peers.size() != queue_pairs_.size()) {
        throw Error("connect", EINVAL, "the number of peers must be the number of queue pairs");
    }
    for (std::size_t index = 0; index < peers.size(); ++index) {
        queue_pairs_[index]->connect(peers[index], std::min(reads_max, device_.reads_max()));
    }
}

void Initiator::check_burst(const Burst& burst) const {
    const auto refuse = [](const char* reason) { throw Error("burst", EINVAL, reason); };
    if (burst.length_bytes == 0 || burst.slot_count == 0 || burst.operation_count == 0 || burst.depth == 0 ||
        burst.list_length == 0) {
        refuse("length_bytes, slots, operations, depth and list_length must be at least 1");
    }
    if (burst.slot_count > memory_bytes_ / burst.length_bytes) {
        refuse("slots * length_bytes must be at most memory_bytes");
    }
    if (burst.depth > depth_max_ * queue_pairs_.size() || burst.list_length > burst.depth ||
        burst.list_length > depth_max_) {
        refuse("depth must be at most depth_max * queue_pairs, and list_length at most depth and depth_max");
    }
}

void Initiator::post(const Burst& burst, std::size_t pair_index, std::uint64_t first_operation_index,
                     std::uint32_t count) {
    for (std::uint32_t index = 0; index < count; ++index) {
        const std::uint64_t slot_offset = (first_operation_index + index) % burst.slot_count * burst.length_bytes;
        Transfer& transfer = transfers_[index];
        transfer.direction = burst.direction;
        transfer.is_signaled = index + 1 == count;
        transfer.length_bytes = burst.length_bytes;
        transfer.local_address = buffer_.data + slot_offset;
        transfer.local_key = staging_.local_key(0);
        transfer.remote_key = burst.remote_key;
        transfer.remote_address = burst.remote_address + slot_offset;
        transfer.id = static_cast<std::uint64_t>(pair_index) << count_bits | count;
    }
    std::size_t posted_count = 0;
    if (const int error_number = queue_pairs_[pair_index]->post({transfers_.data(), count}, posted_count);
        error_number != 0) {
        throw Error("ibv_post_send", error_number, device_.name());
    }
    in_progress_counts_[pair_index] += count;
}

bool Initiator::poll_completions(const Burst& burst, Outcome& outcome) {
    const auto begin_time = Clock::now();
    for (unsigned poll_count = 1;; ++poll_count) {
        const int completions_count = completion_queue_.poll(polled_completions_);
        for (int index = 0; index < completions_count; ++index) {
            const ibv_wc& completion = polled_completions_[static_cast<std::size_t>(index)];
            if (completion.status != IBV_WC_SUCCESS) {
                outcome.status = completion.status;
                outcome.vendor_error = completion.vendor_err;
                return false;
            }
            const auto operation_count = static_cast<std::uint32_t>(completion.wr_id);
            in_progress_counts_[completion.wr_id >> count_bits] -= operation_count;
            outcome.completed_count += operation_count;
        }
        if (completions_count > 0) {
            return true;
        }
        if (poll_count % polls_per_time_check == 0) {
            if (Clock::now() - begin_time > burst.time_limit) {
                outcome.timed_out = true;
                return false;
            }
            sched_yield();
        }
    }
}

Outcome Initiator::run(const Burst& burst) {
    check_burst(burst);
    Outcome outcome;
    std::uint64_t posted_count = 0;
    std::size_t pair_index = 0; // Queue pair for the next list. The queue pairs take turns.
    std::fill(in_progress_counts_.begin(), in_progress_counts_.end(), 0);
    const auto begin_time = Clock::now();
    while (outcome.completed_count < burst.operation_count) {
        std::size_t full_pair_count = 0; // Number of consecutive queue pairs without space for the list.
        while (posted_count < burst.operation_count && posted_count - outcome.completed_count < burst.depth &&
               full_pair_count < queue_pairs_.size()) {
            const auto next_list_length =
                std::min<std::uint64_t>({burst.list_length, burst.operation_count - posted_count,
                                         burst.depth - (posted_count - outcome.completed_count)});
            const auto operation_count = static_cast<std::uint32_t>(next_list_length);
            // An incomplete list is posted only if it is the last one. Otherwise, wait for completions until a complete
            // list fits into the depth.
            if (operation_count < burst.list_length && posted_count + operation_count < burst.operation_count) {
                break;
            }
            if (in_progress_counts_[pair_index] + operation_count > depth_max_) {
                ++full_pair_count;
            } else {
                full_pair_count = 0;
                post(burst, pair_index, posted_count, operation_count);
                posted_count += operation_count;
            }
            pair_index = (pair_index + 1) % queue_pairs_.size();
        }
        if (!poll_completions(burst, outcome)) {
            break;
        }
    }
    outcome.elapsed_ns = count_elapsed_ns(begin_time);
    return outcome;
}

Outcome Initiator::run_singly(const Burst& burst, std::span<std::uint64_t> times_ns) {
    check_burst(burst);
    if (times_ns.size() != burst.operation_count) {
        throw Error("burst", EINVAL, "times_ns must have one element per operation");
    }
    Outcome outcome;
    std::fill(in_progress_counts_.begin(), in_progress_counts_.end(), 0);
    const auto begin_time = Clock::now();
    for (std::uint64_t index = 0; index < burst.operation_count; ++index) {
        const auto operation_begin = Clock::now();
        post(burst, 0, index, 1);
        if (!poll_completions(burst, outcome)) {
            break;
        }
        times_ns[index] = count_elapsed_ns(operation_begin);
    }
    outcome.elapsed_ns = count_elapsed_ns(begin_time);
    return outcome;
}

} // namespace gdrkit::verbs
