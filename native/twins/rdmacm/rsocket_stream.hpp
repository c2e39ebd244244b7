// A stream rsocket: a reliable queue pair with fixed buffers (slots). A sender has one credit for each free data buffer
// of the receiver, and each data message uses one credit. When the program has read a buffer, the receiver returns its
// credit.
#pragma once

#include <deque>

#include "rdmacm/rsocket.hpp"

namespace gdrkit::twin::rdmacm {

inline constexpr std::size_t slot_bytes = 32768;
// The number of receive buffers for data messages, which need credits, and for all other messages, which need none.
inline constexpr unsigned data_slot_count = 32, control_slot_count = 16;
inline constexpr unsigned receive_slot_count = data_slot_count + control_slot_count;
// The number of send buffers, and the number of additional send queue entries for messages without payload, which need
// no buffer.
inline constexpr unsigned send_slot_count = 32, control_send_count = 64;

class StreamSocket final : public RdmaSocket {
public:
    explicit StreamSocket(int domain)
        : RdmaSocket(domain, SOCK_STREAM,
                     {IBV_QPT_RC, receive_slot_count, send_slot_count, slot_bytes, slot_bytes, control_send_count}) {}
    ~StreamSocket() override;

    int listen(int backlog) override;
    int accept(std::shared_ptr<RdmaSocket>* accepted_socket) override;
    int connect(sockaddr* address, socklen_t length) override;
    int send(std::span<const iovec> parts, int flags, sockaddr* destination, std::size_t* moved_bytes) override;
    int receive(std::span<const iovec> parts, int flags, sockaddr_storage* source, std::size_t* moved_bytes) override;
    int shut_down(int how) override;
    int close() override;
    short get_ready_events() override;
    int map(void* buffer, std::size_t length, int protection, off_t* offset) override;
    int unmap(void* buffer, std::size_t length) override;
    int write_mapped(const void* buffer, std::size_t count, off_t offset, int flags, std::size_t* moved_bytes) override;

private:
    // A refused socket never got a connection. A disconnected socket ended its connection without an error. A failed
    // socket lost its connection because of an error, which SO_ERROR reports.
    enum class Stage { unconnected, listening, connecting, connected, disconnected, refused, failed };

    // The private data of the connection request and of the reply.
    struct Greeting {
        std::uint32_t magic;
        std::uint16_t version;
        std::uint16_t io_mapping_count; // number of mappings of the peer that the sender of the greeting can store
    };
    // The kind of a message is in bits 24 to 31 of its immediate data. Bits 0 to 15 are the number of credits (free
    // data buffers) that the sender of the message returns.
    enum class Kind : std::uint8_t { data = 1, credits, end_of_data, mapping, removed_mapping, disconnect };
    // A buffer that one side has mapped with riomap. As the payload of a mapping or removed_mapping message, it tells
    // the peer which offsets riowrite can use: from `offset` up to `offset` + `length_bytes`.
    struct Mapping {
        std::uint64_t offset, address, length_bytes;
        std::uint32_t rkey;
        std::uint32_t reserved;
    };
    struct ReceivedMessage {
        unsigned slot;
        std::size_t begin, end; // the unread bytes are slot bytes [begin, end)
    };
    struct LocalMapping {
        ibv_mr* mr;
        Mapping mapping;
        bool is_peer_writable; // if true, a mapping message has described the buffer to the peer
    };

    bool is_connected() override { return stage_ == Stage::connected; }
    int create_receiving_queue_pair();
    int request_connection(sockaddr* address);
    void repost_receive(unsigned slot);
    int post_message(Kind kind, const void* data, std::size_t size_bytes);
    void return_credits();
    [[nodiscard]] Greeting make_greeting() const;
    // Store the mapping limit of the peer from its greeting, and return whether the greeting is valid.
    bool read_greeting(const rdma_conn_param& parameters);
    void progress() override;
    void take_completions();
    void take_events();
    void on_received(const ibv_wc& wc);
    void on_mapping_message(const std::uint8_t* bytes, std::size_t size_bytes, bool is_removal);
    void on_connection_event(const rdma_cm_event& event);
    // Enter a stage without a connection, which also ends reads and writes. `error` is the errno that the next query of
    // SO_ERROR reports, or 0. An earlier error that is not queried yet is kept instead.
    void end_connection(Stage stage, int error = 0);
    // End reads, writes or both, as shutdown(2) does with `how`. If this ends the writes, tell the peer.
    void end_directions(SocketLock* lock, int how);
    // If the socket is connecting, wait until the connection is made or refused. Return 0, EAGAIN, EINTR or the errno
    // of the refusal. In every other stage, return 0 at once.
    int wait_for_connection(SocketLock* lock, int flags);
    [[nodiscard]] bool has_data() const { return !received_.empty(); }
    [[nodiscard]] bool can_send() const;
    std::size_t copy_out(std::span<const iovec> parts, bool is_peek);
    int send_bytes(SocketLock* lock, const iovec& part, int flags, std::size_t* moved_bytes);

    Stage stage_ = Stage::unconnected;
    bool are_reads_ended_ = false;  // no more data comes, except what is in received_
    bool are_writes_ended_ = false; // the program may send no more data
    bool has_peer_left_ = false;    // the connection ended without a disconnect message of the peer
    std::chrono::steady_clock::time_point disconnect_time_; // the time of end_connection()
    unsigned posted_receive_count_ = 0;
    unsigned send_credits_ = data_slot_count; // free data buffers of the peer
    unsigned credits_to_return_ = 0;
    unsigned in_flight_send_count_ = 0;
    std::deque<ReceivedMessage> received_;
    std::vector<LocalMapping> local_mappings_;
    std::vector<Mapping> peer_mappings_;
    unsigned peer_mapping_limit_ = 0; // number of mappings that the peer can store
};

} // namespace gdrkit::twin::rdmacm
