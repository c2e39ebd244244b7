// The link to a queue pair on another machine of the TCP fabric. Requests and responses have the same layout as in
// shared memory. On the socket, the payload follows its request or response. The rings are in memory of this process
// only: the requester sends from them, and a thread stores the responses there.
#pragma once

#include <atomic>
#include <memory>
#include <thread>

#include "ibverbs/link.hpp"

namespace gdrkit::twin::verbs {

class TcpLink final : public Link {
public:
    // Make the requester's link on a connected socket, and start the thread that receives responses. Return nullptr on
    // failure.
    static std::unique_ptr<Link> make_requester(int socket);
    // Make the responder's link. Return nullptr on failure.
    static std::unique_ptr<Link> make_responder();
    ~TcpLink() override;

    bool publish_requests(std::uint32_t published_count, int socket) override;
    void mark_ended() override;
    [[nodiscard]] int wake_fd(int socket) const override;
    [[nodiscard]] bool may_wait_for_peer() const override { return true; }
    bool consume_wakes(int socket) override;
    void publish_responses(std::uint32_t published_count, int socket) override;
    bool wait_for_request(std::uint32_t served_count, int socket) override;

private:
    explicit TcpLink(std::unique_ptr<BounceBuffer> memory) : Link(std::move(memory), nullptr) {}
    void run_receiver();
    bool receive_response(std::uint32_t request_number);

    // Number of requests (requester) or responses (responder) that were sent.
    std::uint32_t sent_count_ = 0;
    // The requester has its own descriptor of the connection, an event descriptor that wakes it, and a receiving
    // thread.
    Fd socket_, wake_eventfd_;
    std::atomic<bool> is_peer_gone_{false};
    std::thread receiver_thread_;
};

} // namespace gdrkit::twin::verbs
