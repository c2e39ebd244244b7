// The devices of a server, and the queue pairs of one session on them.
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

// The server's RDMA devices. They outlive its sessions.
class Fabric {
public:
    // Opens these devices, or with an empty list every device with an active port. Throws verbs::Error.
    explicit Fabric(const std::vector<std::string>& names);

    const std::vector<std::unique_ptr<verbs::Device>>& devices() const noexcept { return devices_; }
    // Returns the index of the device for the next queue pair; the devices are used in turn.
    std::size_t next() noexcept { return next_.fetch_add(1, std::memory_order_relaxed) % devices_.size(); }

private:
    std::vector<std::unique_ptr<verbs::Device>> devices_;
    std::atomic<std::size_t> next_{0};
};

// The end of a transfer. A transfer that does not succeed breaks its queue pair.
enum class TransferStatus : std::uint8_t {
    succeeded,
    refused, // The client's NIC refused it: the key or range is invalid, or the memory is gone. It broke the queue
             // pair.
    flushed, // The queue pair broke by another transfer, or by itself.
};

// One queue pair per queue pair of the client, on the server's devices in turn. Only the last transfer of a list is
// signaled. Its completion covers all transfers before it on that queue pair.
class QueuePairs {
public:
    QueuePairs(Fabric& fabric, const std::vector<verbs::Endpoint>& peers);

    std::size_t size() const noexcept { return entries_.size(); }
    std::vector<verbs::Endpoint> endpoints() const;
    std::uint8_t reads_max() const;
    // Returns the device of a queue pair, as an index into the fabric.
    std::size_t device_of(std::size_t index) const { return entries_[index]->device; }

    // Returns whether the queue pair has space for `transfers` more transfers.
    bool has_space(std::size_t index, std::size_t transfers) const;
    // Stores a transfer until flush(), or posts it if there are many. poll() reports its `id`.
    void add(std::size_t index, const verbs::Transfer& transfer);
    // Posts the stored transfers. Returns false if a queue pair failed.
    bool flush();
    // Calls done(id, status) for each transfer that completed. Returns true if there were any.
    bool poll(const std::function<void(std::uint32_t, TransferStatus)>& done);
    bool in_progress() const;
    // Makes descriptors() readable with the next completion. Earlier completions need another poll().
    void arm();
    void take_events();
    void descriptors(std::vector<int>& into) const;

private:
    struct Entry {
        Entry(verbs::Device& device_of_pair, std::size_t number);
        std::size_t device;
        std::uint8_t reads_max;
        verbs::CompletionQueue completions;
        verbs::QueuePair pair;
        std::vector<verbs::Transfer> unposted;
        std::deque<std::uint32_t> in_progress;   // Ids in the order of posting.
        std::uint64_t posted = 0, completed = 0; // Transfers, counted from the start.
        bool is_broken = false;
    };
    bool post(Entry& entry);

    std::vector<std::unique_ptr<Entry>> entries_;
};

} // namespace gdrkit::storage
