// The RDMA devices of a storage server, and the queue pairs on them that a session (one client) uses.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "verbs/device.hpp"
#include "verbs/queue_pair.hpp"

namespace gdrkit::storage {

// The server's RDMA devices. All sessions of the server share them.
class Fabric {
public:
    // Opens the devices with these names, or every device with an active port if `device_names` is empty. Throws
    // verbs::Error.
    explicit Fabric(const std::vector<std::string>& device_names);

    const std::vector<std::unique_ptr<verbs::Device>>& devices() const noexcept { return devices_; }
    // Returns the index of the device for the next queue pair. Sessions use the devices in turn.
    std::size_t take_device_index() noexcept {
        return taken_count_.fetch_add(1, std::memory_order_relaxed) % devices_.size();
    }

private:
    std::vector<std::unique_ptr<verbs::Device>> devices_;
    std::atomic<std::size_t> taken_count_{0}; // Number of calls of take_device_index().
};

// The result of a transfer. A transfer that does not succeed breaks its queue pair.
enum class TransferStatus : std::uint8_t {
    succeeded,
    refused, // The client's NIC refused the transfer, because its rkey or range is invalid or the memory is gone.
    flushed, // The queue pair was already broken, or the transfer broke it for a reason other than a refusal.
};

// The queue pairs of one session, one for each queue pair of the client. They use the devices of the server in turn.
// Transfers are posted in lists, and only the last transfer of a list is signaled. Its completion covers all transfers
// before it on that queue pair.
class QueuePairs {
public:
    // Creates a queue pair for each of the client's queue pairs, and connects it. Throws verbs::Error.
    QueuePairs(Fabric& fabric, const std::vector<verbs::Endpoint>& client_endpoints);

    std::size_t size() const noexcept { return connections_.size(); }
    std::vector<verbs::Endpoint> endpoints() const;
    // Returns the number of RDMA READs that each queue pair may have in progress, the smallest of the devices' limits.
    std::uint8_t reads_max() const;
    // Returns the index of a queue pair's device in Fabric::devices().
    std::size_t get_device_index(std::size_t pair_index) const { return connections_[pair_index]->device_index; }

    // Returns whether the queue pair has space for this many more transfers.
    bool has_space(std::size_t pair_index, std::size_t transfers_count) const;
    // Stores a transfer for the next list of its queue pair. flush() posts the list, or add() itself when the list is
    // full. poll() reports the transfer by its `id`.
    void add(std::size_t pair_index, const verbs::Transfer& transfer);
    // Posts the stored transfers. Returns false if a queue pair failed.
    bool flush();
    // Calls report_transfer(id, status) for each transfer that completed. Returns true if there were any.
    bool poll(const std::function<void(std::uint32_t, TransferStatus)>& report_transfer);
    bool has_transfers_in_progress() const;
    // Requests an event for the next completion, which makes a file descriptor of event_fds() readable. Completions
    // that arrived before arm() cause no event, so call poll() after arm().
    void arm();
    // Reads the events, so that the file descriptors are no longer readable.
    void take_events();
    std::vector<int> event_fds() const;

private:
    // A queue pair of the server, with its completion queue and its transfers.
    struct Connection {
        Connection(verbs::Device& device, std::size_t index_of_device);
        std::size_t device_index;
        std::uint8_t reads_max;
        verbs::CompletionQueue completion_queue;
        verbs::QueuePair queue_pair;
        std::vector<verbs::Transfer> unposted_transfers; // Transfers that add() stored for the next list.
        std::deque<std::uint32_t> ids_in_progress; // The callers' ids of the posted transfers, in the order of posting.
        // Numbers of transfers since the queue pair was created.
        std::uint64_t posted_count = 0, completed_count = 0;
        bool is_broken = false;
    };
    // Posts the stored transfers of a queue pair as one list. Returns false if the queue pair is broken.
    bool post(Connection& connection);

    std::vector<std::unique_ptr<Connection>> connections_;
};

} // namespace gdrkit::storage
