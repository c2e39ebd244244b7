// rsockets: sockets whose data moves over queue pairs. The number of an rsocket is the descriptor of its event channel,
// as in librdmacm.
#pragma once

#include <poll.h>
#include <sys/uio.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "rdmacm/functions.hpp"

namespace gdrkit::twin::rdmacm {

// A waiting thread checks its condition again after this time, because another thread may have consumed the
// notification.
inline constexpr int wake_up_interval_ms = 100;

// The wr_id of a request with a slot contains the number of the slot in the low 32 bits. For a receive, this bit is
// also set.
inline constexpr std::uint64_t receive_mark = 1ULL << 32;

using SocketLock = std::unique_lock<std::mutex>;

// The size of a queue pair and of its registered memory. A slot is the part of the receive memory or of the send memory
// that holds the bytes of one request; slots have numbers from 0.
struct QueueSizes {
    ibv_qp_type type;
    unsigned receive_slot_count, send_slot_count;
    std::size_t receive_slot_bytes, send_slot_bytes;
    unsigned control_send_count = 0; // additional sends, which need no slot because they have no payload
};

// The options of an rsocket that a program can set and query. The twin ignores the sizes of buffers and queues.
struct SocketOptions {
    int send_buffer_bytes = 1 << 17, receive_buffer_bytes = 1 << 17;
    int send_queue_size = 384, receive_queue_size = 384, inline_bytes = 64;
    int io_mapping_count = 0;
    bool reuse_address = false, keep_alive = false, no_delay = false, out_of_band_inline = false, ipv6_only = false;
    int linger_on = 0, linger_s = 0;
    int maximum_segment_bytes = 0;
};

class RdmaSocket {
public:
    RdmaSocket(int domain, int type, const QueueSizes& sizes) : address_family_(domain), type_(type), sizes_(sizes) {}
    virtual ~RdmaSocket();
    RdmaSocket(const RdmaSocket&) = delete;
    RdmaSocket& operator=(const RdmaSocket&) = delete;

    // Create the channel and the identifier. Return 0 or an errno.
    int open();
    [[nodiscard]] int number() const { return channel_->fd; }
    [[nodiscard]] int type() const { return type_; }

    // Each function that returns an int returns 0 or an errno, unless its comment says otherwise.
    int bind(sockaddr* address, socklen_t length);
    virtual int listen(int backlog) = 0;
    virtual int accept(std::shared_ptr<RdmaSocket>* accepted_socket) = 0;
    virtual int connect(sockaddr* address, socklen_t length) = 0;
    // Send or receive bytes, and add their number to *moved_bytes. If receive() returns 0 and moves no bytes, the
    // stream has ended.
    virtual int send(std::span<const iovec> parts, int flags, sockaddr* destination, std::size_t* moved_bytes) = 0;
    virtual int receive(std::span<const iovec> parts, int flags, sockaddr_storage* source,
                        std::size_t* moved_bytes) = 0;
    virtual int shut_down(int how) = 0;
    virtual int close() = 0;
    // Return the events among POLLIN, POLLOUT, POLLHUP and POLLERR that are true now.
    virtual short get_ready_events() = 0;
    // Request a notification of the next completion at the completion channel.
    void arm();
    // Read and acknowledge the notifications of completions.
    void drain_notifications();
    // Return the descriptors that become readable at a change: the event channel at a connection event, and the
    // completion channel at a completion after arm().
    std::vector<int> list_wait_descriptors();

    // Carry out riomap, riounmap and riowrite. All rsockets except stream rsockets return EOPNOTSUPP.
    virtual int map(void* buffer, std::size_t length, int protection, off_t* offset);
    virtual int unmap(void* buffer, std::size_t length);
    virtual int write_mapped(const void* buffer, std::size_t count, off_t offset, int flags, std::size_t* moved_bytes);

    int get_local_address(sockaddr* address, socklen_t* length);
    int get_peer_address(sockaddr* address, socklen_t* length);   // ENOTCONN if there is no connection
    int get_remote_address(sockaddr* address, socklen_t* length); // the peer's address, also before it is connected
    int set_option(int level, int name, const void* value, socklen_t length);
    int get_option(int level, int name, void* value, socklen_t* length);
    // Carry out rfcntl for F_GETFL and F_SETFL. *result is the value that rfcntl returns.
    int control(int command, int argument, int* result);

protected:
    // Return whether a call with these MSG_* flags must not block.
    [[nodiscard]] bool is_nonblocking(int flags) const;
    // Return the error that SO_ERROR reports, and reset it to 0.
    int take_error();
    virtual bool is_connected() = 0;
    // Process the completions and the connection events that have arrived. The caller holds mutex_.
    virtual void progress() = 0;
    // Create the queue pair and its buffers, and post all receives. Return 0 or an errno.
    int make_queue_pair();
    // Destroy the queue pair and its buffers, if they exist. A derived class calls this before it releases objects that
    // the queue pair uses.
    void destroy_queue_pair();
    int post_receive(unsigned slot);
    // Post a request with the first `size_bytes` bytes of a send slot. If that fails, the slot is free again.
    int post_slot(unsigned slot, std::size_t size_bytes, ibv_send_wr* request);
    std::uint8_t* get_receive_slot(unsigned slot) { return receive_memory_.data() + slot * sizes_.receive_slot_bytes; }
    std::uint8_t* get_send_slot(unsigned slot) { return send_memory_.data() + slot * sizes_.send_slot_bytes; }
    // Remove a slot from free_send_slots_, which must not be empty, and return its number.
    unsigned take_send_slot();

    // Wait until the condition is met. Return 0, EAGAIN if the call must not block or the timeout has passed, or EINTR.
    // A timeout of -1 means no limit. The caller holds `lock` on mutex_, which is released during the wait.
    template <typename Condition>
    int wait(SocketLock* lock, bool must_not_block, Condition is_met, int timeout_ms = -1) {
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
        for (;;) {
            progress();
            if (is_met()) {
                return 0;
            }
            if (must_not_block || (timeout_ms >= 0 && std::chrono::steady_clock::now() >= deadline)) {
                return EAGAIN;
            }
            if (const int error = wait_for_change(lock, is_met); error != 0) {
                return error;
            }
        }
    }

    // Wait for a change of the rsocket, but at most wake_up_interval_ms. One thread polls the descriptors. The other
    // waiting threads sleep until it ends its poll.
    template <typename Condition> int wait_for_change(SocketLock* lock, Condition is_met) {
        if (is_polling_) {
            poll_ended_.wait_for(*lock, std::chrono::milliseconds(wake_up_interval_ms));
            return 0;
        }
        is_polling_ = true;
        lock->unlock();
        arm();
        lock->lock();
        progress(); // takes the completions that arrived before arm(), because they cause no notification
        int error = 0;
        if (!is_met()) {
            lock->unlock();
            error = poll_descriptors();
            lock->lock();
        }
        is_polling_ = false;
        poll_ended_.notify_all();
        return error;
    }
    int poll_descriptors();

    const int address_family_, type_;
    const QueueSizes sizes_;
    rdma_event_channel* channel_ = nullptr;
    rdma_cm_id* id_ = nullptr;
    std::vector<unsigned> free_send_slots_;
    SocketOptions options_;
    int status_flags_ = 0; // O_NONBLOCK or 0, set by rfcntl
    int pending_error_ = 0;
    std::mutex mutex_;
    bool is_polling_ = false;
    std::condition_variable poll_ended_;

private:
    int create_qp_and_cq();

    std::vector<std::uint8_t> receive_memory_, send_memory_;
    ibv_mr* receive_mr_ = nullptr;
    ibv_mr* send_mr_ = nullptr;
};

// Return the rsocket of this number, or nullptr with errno EBADF. add_socket and remove_socket change the table in
// which find_socket searches.
std::shared_ptr<RdmaSocket> find_socket(int socket_number);
void add_socket(const std::shared_ptr<RdmaSocket>& socket);
void remove_socket(int socket_number);

std::shared_ptr<RdmaSocket> make_stream_socket(int domain);
std::shared_ptr<RdmaSocket> make_datagram_socket(int domain);

} // namespace gdrkit::twin::rdmacm
