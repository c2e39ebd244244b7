// Implements stream rsockets: the messages on the queue pair, and the calls that move bytes.

#include "rdmacm/rsocket_stream.hpp"

#include <arpa/inet.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace gdrkit::twin::rdmacm {
namespace {

// A Kind::credits message returns at least this number of credits (free data buffers). There are data_slot_count
// credits in all, so at most four such messages are in flight.
constexpr unsigned min_returned_credits = data_slot_count / 4;
// A socket that ends its writes waits at most this time until the peer has received all sent bytes.
constexpr int close_timeout_ms = 10'000;
// If data is still unread when the connection ends, POLLHUP is delayed by this time. On hardware, a program has usually
// read the data before the peer closes, and `rstream -T a` (a test program of librdmacm) depends on that order. With
// the twin, the CPUs also do the work of the NIC, so the program reads later.
constexpr std::chrono::milliseconds hangup_delay{300};
// The wr_id of a control message without payload.
constexpr std::uint64_t no_slot = UINT64_MAX;

std::uint32_t pack_immediate_data(unsigned kind, unsigned credits) {
    return htonl(kind << 24 | credits);
}

} // namespace

StreamSocket::~StreamSocket() {
    for (const LocalMapping& mapping : local_mappings_) {
        ibv_dereg_mr(mapping.mr);
    }
}

// Create the queue pair and post its receives. This comes before the connection is made, because the peer may send at
// once.
int StreamSocket::create_receiving_queue_pair() {
    const int error = make_queue_pair();
    posted_receive_count_ = error == 0 ? receive_slot_count : 0;
    return error;
}

void StreamSocket::repost_receive(unsigned slot) {
    posted_receive_count_ += post_receive(slot) == 0 ? 1 : 0;
}

// Send a message and return the outstanding credits with it. A message without payload needs no send slot.
int StreamSocket::post_message(Kind kind, const void* data, std::size_t size_bytes) {
    ibv_send_wr request{};
    request.opcode = IBV_WR_SEND_WITH_IMM;
    request.imm_data = pack_immediate_data(static_cast<unsigned>(kind), credits_to_return_);
    int error = 0;
    if (size_bytes == 0) {
        ibv_send_wr* bad_request = nullptr;
        request.wr_id = no_slot;
        error = ibv_post_send(id_->qp, &request, &bad_request);
    } else {
        const unsigned slot = take_send_slot();
        std::memcpy(get_send_slot(slot), data, size_bytes);
        error = post_slot(slot, size_bytes, &request);
    }
    if (error != 0) {
        end_connection(Stage::failed, error);
        return error;
    }
    ++in_flight_send_count_;
    credits_to_return_ = 0;
    return 0;
}

void StreamSocket::return_credits() {
    if (stage_ == Stage::connected && !has_peer_left_ && credits_to_return_ >= min_returned_credits) {
        post_message(Kind::credits, nullptr, 0);
    }
}

void StreamSocket::end_connection(Stage stage, int error) {
    stage_ = stage;
    are_reads_ended_ = are_writes_ended_ = true;
    disconnect_time_ = std::chrono::steady_clock::now();
    pending_error_ = pending_error_ == 0 ? error : pending_error_;
}

void StreamSocket::on_received(const ibv_wc& wc) {
    const auto slot = static_cast<unsigned>(wc.wr_id & 0xffffffffU); // without receive_mark
    const std::uint32_t immediate_data = ntohl(wc.imm_data);
    const unsigned returned_credits = immediate_data & 0xffffU;
    if ((wc.wc_flags & IBV_WC_WITH_IMM) == 0 || send_credits_ + returned_credits > data_slot_count) {
        return end_connection(Stage::failed, EPROTO);
    }
    send_credits_ += returned_credits;
    switch (static_cast<Kind>(immediate_data >> 24)) {
    case Kind::data:
        if (wc.byte_len == 0) {
            return end_connection(Stage::failed, EPROTO);
        }
        received_.push_back({slot, 0, wc.byte_len});
        return;
    case Kind::credits:
        break;
    case Kind::end_of_data:
        if (are_writes_ended_) { // now both directions have ended
            return end_connection(Stage::disconnected);
        }
        are_reads_ended_ = true;
        break;
    case Kind::disconnect:
        return end_connection(Stage::disconnected);
    case Kind::mapping:
    case Kind::removed_mapping:
        on_mapping_message(get_receive_slot(slot), wc.byte_len,
                           static_cast<Kind>(immediate_data >> 24) == Kind::removed_mapping);
        break;
    default:
        return end_connection(Stage::failed, EPROTO);
    }
    if ((stage_ == Stage::connecting || stage_ == Stage::connected) && !has_peer_left_) {
        repost_receive(slot);
    }
}

void StreamSocket::take_completions() {
    if (id_->recv_cq == nullptr) {
        return;
    }
    ibv_wc completions[16];
    int count = 0;
    while ((count = ibv_poll_cq(id_->recv_cq, static_cast<int>(std::size(completions)), completions)) > 0) {
        for (const ibv_wc& wc : std::span(completions, static_cast<std::size_t>(count))) {
            if (wc.wr_id != no_slot && (wc.wr_id & receive_mark) != 0) {
                --posted_receive_count_;
                if (wc.status == IBV_WC_SUCCESS) {
                    on_received(wc);
                }
                continue;
            }
            --in_flight_send_count_;
            if (wc.wr_id != no_slot) {
                free_send_slots_.push_back(static_cast<unsigned>(wc.wr_id));
            }
            if (wc.status != IBV_WC_SUCCESS && stage_ == Stage::connected && !has_peer_left_) {
                end_connection(Stage::failed, EIO);
            }
        }
    }
}

void StreamSocket::progress() {
    take_completions();
    take_events();
    if (!has_peer_left_ || stage_ != Stage::connected) {
        return;
    }
    take_completions(); // take_events() may have moved the queue pair to the error state, which completes the receives
    if (posted_receive_count_ == 0) {
        // The peer left without a disconnect message. The connection ends only after all posted receives have
        // completed, because some of them may hold data that arrived before.
        end_connection(Stage::disconnected);
    }
}

int StreamSocket::wait_for_connection(SocketLock* lock, int flags) {
    if (stage_ != Stage::connecting) {
        return 0;
    }
    const int error = wait(lock, is_nonblocking(flags), [this] { return stage_ != Stage::connecting; });
    if (error != 0 || (stage_ != Stage::refused && stage_ != Stage::failed)) {
        return error;
    }
    return pending_error_ != 0 ? pending_error_ : ECONNREFUSED; // another thread may have taken the error by SO_ERROR
}

bool StreamSocket::can_send() const {
    return send_credits_ > 0 && !free_send_slots_.empty();
}

int StreamSocket::send_bytes(SocketLock* lock, const iovec& part, int flags, std::size_t* moved_bytes) {
    const auto* bytes = static_cast<const std::uint8_t*>(part.iov_base);
    std::size_t remaining_bytes = part.iov_len;
    while (remaining_bytes > 0) {
        const int error =
            wait(lock, is_nonblocking(flags), [this] { return are_writes_ended_ || (can_send() && !has_peer_left_); });
        if (error != 0) {
            return error;
        }
        // Like librdmacm, report ECONNRESET instead of the EPIPE of send(2). librdmacm sometimes accepts the bytes and
        // loses them; the twin never does.
        if (are_writes_ended_) {
            return ECONNRESET;
        }
        const std::size_t message_bytes = std::min(remaining_bytes, slot_bytes);
        --send_credits_;
        if (const int post_error = post_message(Kind::data, bytes, message_bytes); post_error != 0) {
            return post_error;
        }
        bytes += message_bytes;
        remaining_bytes -= message_bytes;
        *moved_bytes += message_bytes;
    }
    return 0;
}

int StreamSocket::send(std::span<const iovec> parts, int flags, sockaddr*, std::size_t* moved_bytes) {
    SocketLock lock(mutex_);
    if (stage_ == Stage::unconnected || stage_ == Stage::listening) {
        return ENOTCONN;
    }
    if (const int error = wait_for_connection(&lock, flags); error != 0) {
        return error;
    }
    // Join the parts, so that each message is as full as possible.
    std::vector<std::uint8_t> joined_bytes;
    iovec whole_data = parts.size() == 1 ? parts.front() : iovec{};
    if (parts.size() > 1) {
        for (const iovec& part : parts) {
            const auto* const bytes = static_cast<const std::uint8_t*>(part.iov_base);
            joined_bytes.insert(joined_bytes.end(), bytes, bytes + part.iov_len);
        }
        whole_data = {joined_bytes.data(), joined_bytes.size()};
    }
    const int error = send_bytes(&lock, whole_data, flags, moved_bytes);
    return *moved_bytes == 0 ? error : 0;
}

// Copy received bytes to the parts, and return their number. Unless the program only peeks (MSG_PEEK), remove the bytes
// and post the emptied buffers again.
std::size_t StreamSocket::copy_out(std::span<const iovec> parts, bool is_peek) {
    std::size_t copied_bytes = 0, message_index = 0;
    ReceivedMessage current_message = received_.empty() ? ReceivedMessage{} : received_.front();
    for (const iovec& part : parts) {
        auto* destination = static_cast<std::uint8_t*>(part.iov_base);
        std::size_t remaining_bytes = part.iov_len;
        while (remaining_bytes > 0 && message_index < received_.size()) {
            const std::size_t chunk_bytes = std::min(remaining_bytes, current_message.end - current_message.begin);
            std::memcpy(destination, get_receive_slot(current_message.slot) + current_message.begin, chunk_bytes);
            destination += chunk_bytes;
            remaining_bytes -= chunk_bytes;
            copied_bytes += chunk_bytes;
            current_message.begin += chunk_bytes;
            if (current_message.begin < current_message.end) {
                continue;
            }
            if (is_peek) {
                ++message_index;
            } else {
                received_.pop_front();
                ++credits_to_return_;
                if (stage_ == Stage::connected && !has_peer_left_) {
                    repost_receive(current_message.slot);
                }
            }
            current_message = message_index < received_.size() ? received_[message_index] : ReceivedMessage{};
        }
    }
    if (!is_peek && !received_.empty()) {
        received_.front() = current_message;
    }
    return copied_bytes;
}

int StreamSocket::receive(std::span<const iovec> parts, int flags, sockaddr_storage* source, std::size_t* moved_bytes) {
    SocketLock lock(mutex_);
    if (stage_ == Stage::unconnected || stage_ == Stage::listening) {
        return ENOTCONN;
    }
    if (const int error = wait_for_connection(&lock, flags); error != 0) {
        return error;
    }
    if (source != nullptr) {
        *source = id_->route.addr.dst_storage;
    }
    std::size_t requested_bytes = 0;
    for (const iovec& part : parts) {
        requested_bytes += part.iov_len;
    }
    const bool is_peek = (flags & MSG_PEEK) != 0;
    std::vector<iovec> unfilled_parts(parts.begin(), parts.end());
    while (*moved_bytes < requested_bytes) {
        const int error = wait(&lock, is_nonblocking(flags), [this] { return has_data() || are_reads_ended_; });
        if (error != 0) {
            return *moved_bytes == 0 ? error : 0;
        }
        if (!has_data()) {
            return 0; // end of data, also after a failure: rpoll and SO_ERROR report the failure
        }
        std::size_t copied_bytes = copy_out(unfilled_parts, is_peek);
        return_credits();
        *moved_bytes += copied_bytes;
        if (is_peek || (flags & MSG_WAITALL) == 0) {
            return 0;
        }
        for (iovec& part : unfilled_parts) {
            const std::size_t filled_bytes = std::min(copied_bytes, part.iov_len);
            part = {static_cast<char*>(part.iov_base) + filled_bytes, part.iov_len - filled_bytes};
            copied_bytes -= filled_bytes;
        }
    }
    return 0;
}

void StreamSocket::end_directions(SocketLock* lock, int how) {
    are_reads_ended_ = are_reads_ended_ || how != SHUT_WR;
    are_writes_ended_ = are_writes_ended_ || how != SHUT_RD;
    // No message tells the peer that only the reads have ended.
    if (!are_writes_ended_ || has_peer_left_) {
        return;
    }
    const bool ends_connection = are_reads_ended_;
    if (post_message(ends_connection ? Kind::disconnect : Kind::end_of_data, nullptr, 0) != 0) {
        return;
    }
    // Before the connection ends, wait until the peer has received all sent bytes. A disconnect message of the peer
    // does not end this wait, because sent bytes may still be on the way to the peer.
    wait(
        lock, false, [this] { return in_flight_send_count_ == 0 || stage_ == Stage::failed || has_peer_left_; },
        close_timeout_ms);
    if (ends_connection && stage_ == Stage::connected) {
        end_connection(Stage::disconnected);
    }
}

int StreamSocket::shut_down(int how) {
    SocketLock lock(mutex_);
    // The program may call this directly after raccept, before the event RDMA_CM_EVENT_ESTABLISHED has arrived. Wait a
    // short time for that event.
    wait(
        &lock, false, [this] { return stage_ != Stage::connecting; }, wake_up_interval_ms);
    if (stage_ == Stage::connected) {
        end_directions(&lock, how);
    }
    if (stage_ == Stage::disconnected) {
        rdma_disconnect(id_);
    }
    return 0; // also without a connection, as in librdmacm
}

int StreamSocket::close() {
    shut_down(SHUT_RDWR);
    return 0;
}

// As in librdmacm, POLLHUP can come while there is still data to read, and POLLOUT can come after the end of the
// connection, because POLLOUT depends only on free buffers.
short StreamSocket::get_ready_events() {
    SocketLock lock(mutex_);
    if (stage_ == Stage::listening) {
        pollfd readable{channel_->fd, POLLIN, 0};
        return poll(&readable, 1, 0) == 1 ? POLLIN : static_cast<short>(0);
    }
    progress();
    switch (stage_) {
    case Stage::unconnected:
    case Stage::listening:
    case Stage::connecting:
        return 0;
    case Stage::refused:
        return POLLIN | POLLOUT | POLLERR;
    case Stage::connected:
    case Stage::disconnected:
    case Stage::failed:
        break;
    }
    int events = (has_data() || are_reads_ended_ ? POLLIN : 0) | (can_send() ? POLLOUT : 0);
    if (stage_ == Stage::failed) {
        events |= POLLERR;
    } else if (stage_ == Stage::disconnected &&
               (!has_data() || std::chrono::steady_clock::now() - disconnect_time_ >= hangup_delay)) {
        events |= POLLHUP;
    }
    return static_cast<short>(events);
}

std::shared_ptr<RdmaSocket> make_stream_socket(int domain) {
    return std::make_shared<StreamSocket>(domain);
}

} // namespace gdrkit::twin::rdmacm
