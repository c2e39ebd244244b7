#include "verbs/initiator.hpp"

#include <sched.h>

#include <algorithm>
#include <array>

#include "verbs/error.hpp"

namespace gdrkit::verbs {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t polled_at_once = 64;
// Empty polls between two reads of the clock, after which another thread may get the processor.
constexpr unsigned polls_between_looks = 256;
// A completion contains its queue pair and the number of operations that it ends.
constexpr unsigned count_bits = 32;

std::uint64_t elapsed_ns(Clock::time_point since) {
    return static_cast<std::uint64_t>(std::chrono::nanoseconds(Clock::now() - since).count());
}

Staging::Layout layout(std::size_t memory_bytes) {
    Staging::Layout sizes{};
    sizes.small_bytes = 0;
    sizes.small_count = 0;
    sizes.large_bytes = memory_bytes;
    sizes.large_count = 1;
    return sizes;
}

} // namespace

Initiator::Initiator(const std::string& device, std::size_t memory_bytes, std::size_t queue_pairs,
                     std::uint32_t depth_max)
    : device_(device), memory_bytes_(memory_bytes), staging_(std::array<Device*, 1>{&device_}, layout(memory_bytes)),
      buffer_(staging_.take(memory_bytes)), depth_max_(depth_max),
      completions_(device_, static_cast<int>(depth_max * queue_pairs)), list_(depth_max), polled_(polled_at_once) {
    for (std::size_t index = 0; index < queue_pairs; ++index) {
        pairs_.push_back(std::make_unique<QueuePair>(device_, completions_, depth_max));
    }
    under_way_.resize(queue_pairs);
}

std::vector<Endpoint> Initiator::endpoints() const {
    std::vector<Endpoint> found;
    for (const auto& pair : pairs_) {
        found.push_back(pair->endpoint());
    }
    return found;
}

void Initiator::connect(std::span<const Endpoint> peers, std::uint8_t reads_max) {
    if (peers.size() != pairs_.size()) {
        throw Error("connect", EINVAL, "another number of peers than of queue pairs");
    }
    for (std::size_t index = 0; index < peers.size(); ++index) {
        pairs_[index]->connect(peers[index], std::min(reads_max, device_.reads_max()));
    }
}

void Initiator::check(const Burst& burst) const {
    const auto refuse = [](const char* what) { throw Error("burst", EINVAL, what); };
    if (burst.length_bytes == 0 || burst.slots == 0 || burst.operations == 0 || burst.depth == 0 ||
        burst.list_length == 0) {
        refuse("a number is 0");
    }
    if (burst.slots > memory_bytes_ / burst.length_bytes) {
        refuse("the slots are more than the memory");
    }
    if (burst.depth > depth_max_ * pairs_.size() || burst.list_length > burst.depth || burst.list_length > depth_max_) {
        refuse("depth or list_length");
    }
}

void Initiator::post(const Burst& burst, std::size_t pair, std::uint64_t first, std::uint32_t count) {
    for (std::uint32_t index = 0; index < count; ++index) {
        const std::uint64_t at = (first + index) % burst.slots * burst.length_bytes;
        Transfer& each = list_[index];
        each.direction = burst.direction;
        each.signaled = index + 1 == count;
        each.length_bytes = burst.length_bytes;
        each.local = buffer_.data + at;
        each.local_key = staging_.local_key(0);
        each.remote_key = burst.remote_key;
        each.remote_address = burst.remote_address + at;
        each.id = static_cast<std::uint64_t>(pair) << count_bits | count;
    }
    std::size_t posted = 0;
    if (const int number = pairs_[pair]->post({list_.data(), count}, posted); number != 0) {
        throw Error("ibv_post_send", number, device_.name());
    }
    under_way_[pair] += count;
}

bool Initiator::reap(const Burst& burst, Outcome& outcome) {
    const auto begin = Clock::now();
    for (unsigned empty = 1;; ++empty) {
        const int count = completions_.poll(polled_);
        for (int index = 0; index < count; ++index) {
            const ibv_wc& each = polled_[static_cast<std::size_t>(index)];
            if (each.status != IBV_WC_SUCCESS) {
                outcome.status = each.status;
                outcome.vendor_error = each.vendor_err;
                return false;
            }
            const auto operations = static_cast<std::uint32_t>(each.wr_id);
            under_way_[each.wr_id >> count_bits] -= operations;
            outcome.done += operations;
        }
        if (count > 0) {
            return true;
        }
        if (empty % polls_between_looks == 0) {
            if (Clock::now() - begin > burst.time_limit) {
                outcome.timed_out = true;
                return false;
            }
            sched_yield();
        }
    }
}

Outcome Initiator::run(const Burst& burst) {
    check(burst);
    Outcome outcome;
    std::uint64_t posted = 0;
    std::size_t turn = 0;
    std::fill(under_way_.begin(), under_way_.end(), 0);
    const auto begin = Clock::now();
    while (outcome.done < burst.operations) {
        std::size_t refused = 0; // Consecutive queue pairs without space.
        while (posted < burst.operations && posted - outcome.done < burst.depth && refused < pairs_.size()) {
            const auto postable = std::min<std::uint64_t>(
                {burst.list_length, burst.operations - posted, burst.depth - (posted - outcome.done)});
            const auto count = static_cast<std::uint32_t>(postable);
            // A list that would be cut short waits for space, unless it is the last.
            if (count < burst.list_length && posted + count < burst.operations) {
                break;
            }
            if (under_way_[turn] + count > depth_max_) {
                ++refused;
            } else {
                refused = 0;
                post(burst, turn, posted, count);
                posted += count;
            }
            turn = (turn + 1) % pairs_.size();
        }
        if (!reap(burst, outcome)) {
            break;
        }
    }
    outcome.elapsed_ns = elapsed_ns(begin);
    return outcome;
}

Outcome Initiator::run_singly(const Burst& burst, std::span<std::uint64_t> times_ns) {
    check(burst);
    if (times_ns.size() != burst.operations) {
        throw Error("burst", EINVAL, "another number of times than of operations");
    }
    Outcome outcome;
    std::fill(under_way_.begin(), under_way_.end(), 0);
    const auto begin = Clock::now();
    for (std::uint64_t index = 0; index < burst.operations; ++index) {
        const auto each = Clock::now();
        post(burst, 0, index, 1);
        if (!reap(burst, outcome)) {
            break;
        }
        times_ns[index] = elapsed_ns(each);
    }
    outcome.elapsed_ns = elapsed_ns(begin);
    return outcome;
}

} // namespace gdrkit::verbs
