// The devices of a server, and the queue pairs of one session over them.
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

// The server's RDMA devices; outlives its sessions.
class Fabric {
public:
    // These devices, or with an empty list every one that has an active port. Throws verbs::Error.
    explicit Fabric(const std::vector<std::string>& names);

    const std::vector<std::unique_ptr<verbs::Device>>& devices() const noexcept { return devices_; }
    // Each session begins with another one.
    std::size_t next() noexcept { return next_.fetch_add(1, std::memory_order_relaxed) % devices_.size(); }

private:
    std::vector<std::unique_ptr<verbs::Device>> devices_;
    std::atomic<std::size_t> next_{0};
};

// How a transfer ended. A transfer that does not succeed breaks its lane.
enum class Ended : std::uint8_t {
    succeeded,
    refused,     // By the client's NIC: no such key or range, or its memory is gone. This transfer broke the lane.
    not_carried, // The lane broke by another transfer, or by itself.
};

// One queue pair for each of the client's, on the server's devices in turn. A list of transfers asks for one
// completion, which speaks for all before it on that queue pair.
class Lanes {
public:
    Lanes(Fabric& fabric, const std::vector<verbs::Endpoint>& peers);

    std::size_t size() const noexcept { return lanes_.size(); }
    std::vector<verbs::Endpoint> endpoints() const;
    std::uint8_t reads_max() const;
    // The device of a lane, by its place in the fabric.
    std::size_t device_of(std::size_t lane) const { return lanes_[lane]->device; }

    // Whether so many transfers more fit now.
    bool has_room(std::size_t lane, std::size_t transfers) const;
    // Kept until flush(), or posted when there are many. `id` comes back through poll().
    void add(std::size_t lane, const verbs::Transfer& transfer);
    // Posts what was added. False: a queue pair refused.
    bool flush();
    // Calls done(id, how) for each transfer that ended; true when there were any.
    bool poll(const std::function<void(std::uint32_t, Ended)>& done);
    bool under_way() const;
    // Has descriptors() become readable with the next completion; what came before needs another poll().
    void arm();
    void take_events();
    void descriptors(std::vector<int>& into) const;

private:
    struct Lane {
        Lane(verbs::Device& owner, std::size_t number);
        std::size_t device;
        std::uint8_t reads_max;
        verbs::CompletionQueue completions;
        verbs::QueuePair pair;
        std::vector<verbs::Transfer> added;
        std::deque<std::uint32_t> under_way; // Ids in the order of posting.
        std::uint64_t posted = 0, ended = 0; // Transfers, counted from the beginning.
        bool is_broken = false;
    };
    bool post(Lane& lane);

    std::vector<std::unique_ptr<Lane>> lanes_;
};

} // namespace gdrkit::storage
