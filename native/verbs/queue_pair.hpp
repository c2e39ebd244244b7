// Completion queues, and queue pairs of reliable connections that read and write the memory of a peer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "verbs/device.hpp"

namespace gdrkit::verbs {

// A completion queue with a completion channel.
class CompletionQueue {
public:
    // `depth`: number of completions for which the queue has space.
    CompletionQueue(const Device& device, int depth);
    CompletionQueue(const CompletionQueue&) = delete;
    CompletionQueue& operator=(const CompletionQueue&) = delete;
    ~CompletionQueue();

    // Stores completions and returns their number. Throws Error if the queue is broken (overrun).
    int poll(std::span<ibv_wc> completions);
    // Requests an event for the next completion, which makes fd() readable. Completions that arrived before arm() cause
    // no event, so call poll() after arm().
    void arm();
    // Reads all events of fd() without blocking; fd() is then no longer readable.
    void take_events();
    int fd() const noexcept { return channel_->fd; }
    ibv_cq* get() const noexcept { return queue_.get(); }

private:
    Owned<ibv_comp_channel> channel_;
    Owned<ibv_cq> queue_;
    unsigned unacknowledged_count_ = 0; // Number of events that were read and not acknowledged.
};

// One RDMA WRITE into, or READ from, the memory of the peer.
struct Transfer {
    enum class Direction : std::uint8_t { to_peer, from_peer };
    Direction direction;
    bool is_signaled; // If false, the transfer has a completion only if it fails.
    std::uint32_t length_bytes;
    void* local_address; // Address in the memory of this side.
    std::uint32_t local_key;
    std::uint32_t remote_key;
    std::uint64_t remote_address;
    std::uint64_t id; // The wr_id of the completion.
};

class QueuePair {
public:
    // `transfers_max`: largest number of transfers that can be in progress.
    QueuePair(const Device& device, CompletionQueue& completion_queue, std::uint32_t transfers_max);

    Endpoint endpoint() const;
    // Moves the queue pair from RESET over INIT and RTR (ready to receive) to RTS (ready to send). `reads_max`
    // (max_rd_atomic) is the largest number of RDMA READs in progress. Throws Error with the errno of ibv_modify_qp.
    void connect(const Endpoint& peer, std::uint8_t reads_max);
    // Posts the transfers as one list, in order. Returns 0 or an errno (ENOMEM: more than transfers_max() transfers),
    // and sets `posted_count` to the number of posted transfers.
    int post(std::span<const Transfer> transfers, std::size_t& posted_count);
    std::uint32_t transfers_max() const noexcept { return transfers_max_; }

private:
    const Device* device_;
    Owned<ibv_qp> pair_;
    std::uint32_t psn_;
    std::uint32_t transfers_max_;
    // Scratch space of post(), one element for each transfer.
    std::vector<ibv_send_wr> requests_;
    std::vector<ibv_sge> scatter_gather_entries_;
};

} // namespace gdrkit::verbs
