// Implements stream rsockets: connection, and the messages on the queue pair.

#include "rdmacm/rsocket_stream.hpp"

#include <arpa/inet.h>
#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "rdmacm/address.hpp"

namespace gdrkit::twin::rdmacm {
namespace {

constexpr std::uint32_t greeting_magic = 0x52534b31;
constexpr std::uint16_t greeting_version = 1;
constexpr int resolve_timeout_ms = 2000;
// Only this many data buffers or more are returned in a message without data, so at most four such messages at a time
// occupy buffers of the peer.
constexpr unsigned credit_batch = data_slot_count / 4;
constexpr int close_timeout_ms = 10'000;
// The wr_id of a send is its slot, or no_slot for a control message without payload. That of a receive is its slot with
// this mark.
constexpr std::uint64_t no_slot = UINT64_MAX;
constexpr std::uint64_t receive_mark = 1ULL << 32;
constexpr unsigned max_control_sends = 64;

std::uint32_t immediate_data(unsigned kind, unsigned credits) {
    return htonl(kind << 24 | credits);
}

} // namespace

StreamSocket::~StreamSocket() {
    if (id_ != nullptr) {
        for (const LocalMapping& mapping : local_mappings_) {
            ibv_dereg_mr(mapping.mr);
        }
        rdma_destroy_qp(id_);
        for (ibv_mr* mr : {receive_mr_, send_mr_}) {
            if (mr != nullptr) {
                ibv_dereg_mr(mr);
            }
        }
        rdma_destroy_id(id_);
    }
    if (channel_ != nullptr) {
        rdma_destroy_event_channel(channel_);
    }
}

int StreamSocket::make_queue_pair() {
    ibv_qp_init_attr attributes{};
    attributes.cap.max_send_wr = send_slot_count + max_control_sends;
    attributes.cap.max_recv_wr = receive_slot_count;
    attributes.cap.max_send_sge = attributes.cap.max_recv_sge = 1;
    attributes.qp_type = IBV_QPT_RC;
    attributes.sq_sig_all = 1;
    if (const int error = make_queues(&attributes); error != 0) {
        return error;
    }
    receive_memory_.resize(receive_slot_count * slot_bytes);
    send_memory_.resize(send_slot_count * slot_bytes);
    receive_mr_ = ibv_reg_mr(id_->pd, receive_memory_.data(), receive_memory_.size(), IBV_ACCESS_LOCAL_WRITE);
    send_mr_ = ibv_reg_mr(id_->pd, send_memory_.data(), send_memory_.size(), IBV_ACCESS_LOCAL_WRITE);
    if (receive_mr_ == nullptr || send_mr_ == nullptr) {
        return errno;
    }
    for (unsigned slot = 0; slot < receive_slot_count; ++slot) {
        if (const int error = post_receive(slot); error != 0) {
            return error;
        }
    }
    for (unsigned slot = 0; slot < send_slot_count; ++slot) {
        free_send_slots_.push_back(slot);
    }
    return 0;
}

int StreamSocket::post_receive(unsigned slot) {
    ibv_sge sge{reinterpret_cast<std::uint64_t>(receive_memory_.data()) + slot * slot_bytes, slot_bytes,
                receive_mr_->lkey};
    ibv_recv_wr request{receive_mark | slot, nullptr, &sge, 1};
    ibv_recv_wr* bad_request = nullptr;
    const int error = ibv_post_recv(id_->qp, &request, &bad_request);
    posted_receives_ += error == 0 ? 1 : 0;
    return error;
}

// Post a request with the first `size` bytes of a send buffer.
int StreamSocket::post_slot(unsigned slot, std::size_t size, ibv_send_wr* request) {
    ibv_sge sge{reinterpret_cast<std::uint64_t>(send_memory_.data()) + slot * slot_bytes,
                static_cast<std::uint32_t>(size), send_mr_->lkey};
    request->wr_id = slot;
    request->sg_list = &sge;
    request->num_sge = 1;
    ibv_send_wr* bad_request = nullptr;
    const int error = ibv_post_send(id_->qp, request, &bad_request);
    if (error == 0) {
        ++sends_in_flight_;
    } else {
        free_send_slots_.push_back(slot);
    }
    return error;
}

int StreamSocket::post_message(Kind kind, const void* data, std::size_t size) {
    ibv_send_wr request{};
    request.opcode = IBV_WR_SEND_WITH_IMM;
    request.imm_data = immediate_data(static_cast<unsigned>(kind), credits_to_return_);
    int error = 0;
    if (size == 0) {
        ibv_send_wr* bad_request = nullptr;
        request.wr_id = no_slot;
        error = ibv_post_send(id_->qp, &request, &bad_request);
        sends_in_flight_ += error == 0 ? 1 : 0;
    } else {
        const unsigned slot = free_send_slots_.back();
        free_send_slots_.pop_back();
        std::memcpy(send_memory_.data() + slot * slot_bytes, data, size);
        error = post_slot(slot, size, &request);
    }
    if (error != 0) {
        fail(error);
        return error;
    }
    credits_to_return_ = 0;
    return 0;
}

void StreamSocket::return_credits() {
    if (stage_ == Stage::connected && !is_disconnected_ && credits_to_return_ >= credit_batch) {
        post_message(Kind::credits, nullptr, 0);
    }
}

StreamSocket::Greeting StreamSocket::greeting() const {
    return {greeting_magic, greeting_version, static_cast<std::uint16_t>(std::min(options_.io_mapping_count, 0xffff))};
}

bool StreamSocket::read_greeting(const rdma_conn_param& parameters) {
    Greeting received{};
    if (parameters.private_data == nullptr || parameters.private_data_len < sizeof received) {
        return false;
    }
    std::memcpy(&received, parameters.private_data, sizeof received);
    peer_mapping_count_ = received.io_mapping_count;
    return received.magic == greeting_magic && received.version == greeting_version;
}

int StreamSocket::listen(int backlog) {
    SocketLock lock(mutex_);
    if (rdma_listen(id_, backlog) != 0) {
        return errno;
    }
    stage_ = Stage::listening;
    return 0;
}

int StreamSocket::accept(std::shared_ptr<RdmaSocket>* accepted) {
    SocketLock lock(mutex_);
    if (stage_ != Stage::listening) {
        return EINVAL;
    }
    for (;;) {
        rdma_cm_event* event = nullptr;
        while (rdma_get_cm_event(channel_, &event) != 0) {
            if (errno != EAGAIN || is_nonblocking(0)) {
                return errno;
            }
            lock.unlock();
            pollfd readable{channel_->fd, POLLIN, 0};
            const int error = poll(&readable, 1, -1) < 0 ? errno : 0;
            lock.lock();
            if (error != 0) {
                return error;
            }
        }
        auto socket = std::make_shared<StreamSocket>(domain_);
        rdma_cm_id* const id = event->id;
        const bool is_request = event->event == RDMA_CM_EVENT_CONNECT_REQUEST;
        const bool is_valid = is_request && socket->read_greeting(event->param.conn);
        rdma_ack_cm_event(event);
        if (!is_request) {
            continue;
        }
        socket->channel_ = rdma_create_event_channel();
        if (!is_valid || socket->channel_ == nullptr || rdma_migrate_id(id, socket->channel_) != 0) {
            rdma_reject(id, nullptr, 0);
            rdma_destroy_id(id);
            continue;
        }
        fcntl(socket->channel_->fd, F_SETFL, O_NONBLOCK);
        socket->id_ = id;
        socket->options_ = options_;
        socket->status_flags_ = 0;
        socket->stage_ = Stage::connecting;
        const Greeting reply = socket->greeting();
        rdma_conn_param parameters{};
        parameters.private_data = &reply;
        parameters.private_data_len = sizeof reply;
        parameters.flow_control = 1;
        parameters.rnr_retry_count = 7;
        if (socket->make_queue_pair() != 0 || rdma_accept(id, &parameters) != 0) {
            rdma_reject(id, nullptr, 0);
            continue; // the destructor destroys the identifier
        }
        *accepted = socket;
        return 0;
    }
}

int StreamSocket::connect(sockaddr* address, socklen_t length) {
    SocketLock lock(mutex_);
    if (stage_ == Stage::connected) {
        return EISCONN;
    }
    if (stage_ == Stage::unconnected) {
        if (address == nullptr || length < address_length(address) || address_length(address) == 0) {
            return EINVAL;
        }
        // The twin resolves at once, so only the connection itself is waited for.
        rdma_cm_event* event = nullptr;
        if (rdma_resolve_addr(id_, nullptr, address, resolve_timeout_ms) != 0 ||
            rdma_get_cm_event(channel_, &event) != 0) {
            return errno;
        }
        const int status = event->status;
        rdma_ack_cm_event(event);
        if (status != 0) {
            return -status;
        }
        if (rdma_resolve_route(id_, resolve_timeout_ms) != 0 || rdma_get_cm_event(channel_, &event) != 0) {
            return errno;
        }
        rdma_ack_cm_event(event);
        if (const int error = make_queue_pair(); error != 0) {
            return error;
        }
        const Greeting request = greeting();
        rdma_conn_param parameters{};
        parameters.private_data = &request;
        parameters.private_data_len = sizeof request;
        parameters.flow_control = 1;
        parameters.retry_count = parameters.rnr_retry_count = 7;
        stage_ = Stage::connecting;
        if (rdma_connect(id_, &parameters) != 0) {
            stage_ = Stage::failed;
            return errno;
        }
        if (is_nonblocking(0)) {
            return EINPROGRESS;
        }
    }
    const int error = wait(&lock, is_nonblocking(0), [this] { return stage_ != Stage::connecting; });
    if (error != 0) {
        return error == EAGAIN ? EALREADY : error;
    }
    return stage_ == Stage::connected ? 0 : (error_ != 0 ? take_error() : ECONNREFUSED);
}

void StreamSocket::fail(int error) {
    stage_ = Stage::failed;
    error_ = error_ == 0 ? error : error_;
}

void StreamSocket::on_mapping(const std::uint8_t* bytes, std::size_t size, bool is_removal) {
    Mapping mapping{};
    if (size != sizeof mapping) {
        return fail(EPROTO);
    }
    std::memcpy(&mapping, bytes, sizeof mapping);
    std::erase_if(peer_mappings_, [&](const Mapping& known) { return known.offset == mapping.offset; });
    if (is_removal) {
        return;
    }
    const bool wraps = mapping.offset + mapping.length < mapping.offset;
    if (wraps || peer_mappings_.size() >= static_cast<std::size_t>(options_.io_mapping_count)) {
        return fail(EPROTO);
    }
    peer_mappings_.push_back(mapping);
}

void StreamSocket::on_received(const ibv_wc& wc) {
    const auto slot = static_cast<unsigned>(wc.wr_id & 0xffffffffU);
    const std::uint32_t immediate = ntohl(wc.imm_data);
    const unsigned returned = immediate & 0xffffU;
    if ((wc.wc_flags & IBV_WC_WITH_IMM) == 0 || credits_ + returned > data_slot_count) {
        return fail(EPROTO);
    }
    credits_ += returned;
    const std::uint8_t* const bytes = receive_memory_.data() + slot * slot_bytes;
    switch (static_cast<Kind>(immediate >> 24)) {
    case Kind::data:
        if (wc.byte_len == 0) {
            return fail(EPROTO);
        }
        received_.push_back({slot, 0, wc.byte_len});
        return;
    case Kind::credits:
        break;
    case Kind::end_of_data:
        peer_writes_ended_ = true;
        break;
    case Kind::mapping:
    case Kind::removed_mapping:
        on_mapping(bytes, wc.byte_len, static_cast<Kind>(immediate >> 24) == Kind::removed_mapping);
        break;
    default:
        return fail(EPROTO);
    }
    if (!is_disconnected_) {
        post_receive(slot);
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
                --posted_receives_;
                if (wc.status == IBV_WC_SUCCESS) {
                    on_received(wc);
                }
                continue;
            }
            --sends_in_flight_;
            if (wc.wr_id != no_slot) {
                free_send_slots_.push_back(static_cast<unsigned>(wc.wr_id));
            }
            if (wc.status != IBV_WC_SUCCESS && stage_ == Stage::connected && !is_disconnected_) {
                fail(wc.status == IBV_WC_RETRY_EXC_ERR ? ETIMEDOUT : ECONNRESET);
            }
        }
    }
}

void StreamSocket::on_connection_event(const rdma_cm_event& event) {
    switch (event.event) {
    case RDMA_CM_EVENT_ESTABLISHED:
        // The passive side has read the greeting from the request. Its event has no private data.
        if (stage_ == Stage::connecting) {
            const bool is_active = event.param.conn.private_data_len != 0;
            stage_ = Stage::connected;
            if (is_active && !read_greeting(event.param.conn)) {
                fail(EPROTO);
            }
        }
        return;
    case RDMA_CM_EVENT_REJECTED:
        return fail(ECONNREFUSED);
    case RDMA_CM_EVENT_UNREACHABLE:
    case RDMA_CM_EVENT_CONNECT_ERROR:
        return fail(event.status < 0 ? -event.status : ECONNREFUSED);
    case RDMA_CM_EVENT_DISCONNECTED:
        // rdma_disconnect moves the queue pair to the error state, so that every posted receive completes: is_at_end()
        // waits for these completions, so that no data that has arrived is lost.
        is_disconnected_ = true;
        rdma_disconnect(id_);
        return;
    default:
        return;
    }
}

void StreamSocket::take_events() {
    rdma_cm_event* event = nullptr;
    while (stage_ != Stage::listening && rdma_get_cm_event(channel_, &event) == 0) {
        const rdma_cm_event copy = *event;
        std::array<std::uint8_t, 256> data{};
        rdma_cm_event with_data = copy;
        if (copy.param.conn.private_data != nullptr) {
            std::memcpy(data.data(), copy.param.conn.private_data, copy.param.conn.private_data_len);
            with_data.param.conn.private_data = data.data();
        }
        rdma_ack_cm_event(event); // at once, because rdma_destroy_id in another thread may wait for it
        on_connection_event(with_data);
    }
}

void StreamSocket::progress() {
    take_completions();
    take_events();
    if (is_disconnected_) {
        take_completions();
    }
}

bool StreamSocket::is_at_end() const {
    if (!received_.empty()) {
        return false;
    }
    return reads_ended_ || peer_writes_ended_ || stage_ == Stage::failed || (is_disconnected_ && posted_receives_ == 0);
}

bool StreamSocket::can_send() const {
    return credits_ > 0 && !free_send_slots_.empty();
}

int StreamSocket::send_bytes(SocketLock* lock, const iovec& part, int flags, std::size_t* moved) {
    const auto* bytes = static_cast<const std::uint8_t*>(part.iov_base);
    std::size_t left = part.iov_len;
    while (left > 0) {
        const int error = wait(lock, is_nonblocking(flags), [this] {
            return stage_ == Stage::failed || is_disconnected_ || writes_ended_ ||
                   (stage_ == Stage::connected && can_send());
        });
        if (error != 0) {
            return error;
        }
        if (writes_ended_ || is_disconnected_) {
            return EPIPE;
        }
        if (stage_ == Stage::failed) {
            return error_ != 0 ? take_error() : ECONNRESET;
        }
        const std::size_t size = std::min(left, slot_bytes);
        --credits_;
        if (const int post_error = post_message(Kind::data, bytes, size); post_error != 0) {
            return post_error;
        }
        bytes += size;
        left -= size;
        *moved += size;
    }
    return 0;
}

int StreamSocket::send(std::span<const iovec> parts, int flags, sockaddr*, std::size_t* moved) {
    SocketLock lock(mutex_);
    if (stage_ == Stage::unconnected || stage_ == Stage::listening) {
        return ENOTCONN;
    }
    // Several parts are sent as one, so that a message holds as many of them as fit.
    std::vector<std::uint8_t> joined;
    iovec whole = parts.size() == 1 ? parts.front() : iovec{};
    if (parts.size() > 1) {
        for (const iovec& part : parts) {
            const auto* const bytes = static_cast<const std::uint8_t*>(part.iov_base);
            joined.insert(joined.end(), bytes, bytes + part.iov_len);
        }
        whole = {joined.data(), joined.size()};
    }
    const int error = send_bytes(&lock, whole, flags, moved);
    return *moved == 0 ? error : 0;
}

std::size_t StreamSocket::copy_out(std::span<const iovec> parts, bool keep) {
    std::size_t copied = 0, index = 0;
    Received head = received_.empty() ? Received{} : received_.front();
    for (const iovec& part : parts) {
        auto* bytes = static_cast<std::uint8_t*>(part.iov_base);
        std::size_t left = part.iov_len;
        while (left > 0 && index < received_.size()) {
            const std::size_t size = std::min(left, head.end - head.begin);
            std::memcpy(bytes, receive_memory_.data() + head.slot * slot_bytes + head.begin, size);
            bytes += size;
            left -= size;
            copied += size;
            head.begin += size;
            if (head.begin < head.end) {
                continue;
            }
            if (keep) {
                ++index;
            } else {
                received_.pop_front();
                ++credits_to_return_;
                if (!is_disconnected_ && stage_ == Stage::connected) {
                    post_receive(head.slot);
                }
            }
            head = index < received_.size() ? received_[index] : Received{};
        }
    }
    if (!keep && !received_.empty()) {
        received_.front() = head;
    }
    return copied;
}

int StreamSocket::receive(std::span<const iovec> parts, int flags, sockaddr_storage* source, std::size_t* moved) {
    SocketLock lock(mutex_);
    if (stage_ == Stage::unconnected || stage_ == Stage::listening) {
        return ENOTCONN;
    }
    if (source != nullptr) {
        *source = id_->route.addr.dst_storage;
    }
    std::size_t wanted = 0;
    for (const iovec& part : parts) {
        wanted += part.iov_len;
    }
    const bool keep = (flags & MSG_PEEK) != 0;
    std::vector<iovec> rest(parts.begin(), parts.end());
    while (*moved < wanted) {
        const int error = wait(&lock, is_nonblocking(flags), [this] { return has_data() || is_at_end(); });
        if (error != 0) {
            return *moved == 0 ? error : 0;
        }
        if (!has_data()) {
            return *moved == 0 && stage_ == Stage::failed && error_ != 0 ? take_error() : 0;
        }
        std::size_t copied = copy_out(rest, keep);
        return_credits();
        *moved += copied;
        if (keep || (flags & MSG_WAITALL) == 0) {
            return 0;
        }
        for (iovec& part : rest) {
            const std::size_t size = std::min(copied, part.iov_len);
            part = {static_cast<char*>(part.iov_base) + size, part.iov_len - size};
            copied -= size;
        }
    }
    return 0;
}

int StreamSocket::shut_down(int how) {
    SocketLock lock(mutex_);
    progress();
    if (stage_ == Stage::listening && how != SHUT_WR) {
        return 0;
    }
    if (stage_ != Stage::connected && stage_ != Stage::failed) {
        return ENOTCONN;
    }
    reads_ended_ = reads_ended_ || how == SHUT_RD || how == SHUT_RDWR;
    if ((how == SHUT_WR || how == SHUT_RDWR) && !writes_ended_) {
        writes_ended_ = true;
        if (stage_ == Stage::connected && !is_disconnected_) {
            post_message(Kind::end_of_data, nullptr, 0);
        }
    }
    return 0;
}

int StreamSocket::close() {
    SocketLock lock(mutex_);
    progress();
    if (stage_ == Stage::connecting) {
        wait(
            &lock, false, [this] { return stage_ != Stage::connecting; }, wake_up_interval_ms);
    }
    if (stage_ == Stage::connected && !is_disconnected_) {
        if (!writes_ended_) {
            writes_ended_ = true;
            post_message(Kind::end_of_data, nullptr, 0);
        }
        // Wait until the peer has received the bytes that were sent, before the connection ends.
        wait(
            &lock, false, [this] { return sends_in_flight_ == 0 || stage_ != Stage::connected || is_disconnected_; },
            close_timeout_ms);
        if (!is_disconnected_) {
            rdma_disconnect(id_);
        }
    }
    return 0;
}

short StreamSocket::ready_events() {
    SocketLock lock(mutex_);
    if (stage_ == Stage::listening) {
        pollfd readable{channel_->fd, POLLIN, 0};
        return poll(&readable, 1, 0) == 1 ? POLLIN : static_cast<short>(0);
    }
    progress();
    int events = 0;
    if (stage_ == Stage::failed) {
        events |= POLLERR | POLLHUP | POLLIN | POLLOUT;
    }
    if (has_data() || (stage_ != Stage::unconnected && is_at_end())) {
        events |= POLLIN;
    }
    if (stage_ == Stage::connected && (can_send() || is_disconnected_)) {
        events |= POLLOUT;
    }
    if (is_disconnected_ || (peer_writes_ended_ && writes_ended_)) {
        events |= POLLHUP;
    }
    return static_cast<short>(events);
}

std::shared_ptr<RdmaSocket> make_stream_socket(int domain) {
    return std::make_shared<StreamSocket>(domain);
}

// The calls of direct placement (riomap, riounmap, riowrite).

int StreamSocket::map(void* buffer, std::size_t length, int protection, off_t* offset) {
    constexpr int may_write = 2; // PROT_WRITE
    SocketLock lock(mutex_);
    if (const int error = wait(&lock, false, [this] { return stage_ != Stage::connecting; }); error != 0) {
        return error;
    }
    if ((protection & ~may_write) != 0 || stage_ != Stage::connected) {
        return EINVAL;
    }
    const bool is_remote = (protection & may_write) != 0;
    if (is_remote && local_mappings_.size() >= peer_mapping_count_) {
        return ENOMEM;
    }
    const int access = IBV_ACCESS_LOCAL_WRITE | (is_remote ? IBV_ACCESS_REMOTE_WRITE : 0);
    ibv_mr* const mr = ibv_reg_mr(id_->pd, buffer, length, access);
    if (mr == nullptr) {
        return errno;
    }
    const auto address = reinterpret_cast<std::uint64_t>(buffer);
    if (*offset == -1) {
        *offset = static_cast<off_t>(address);
    }
    local_mappings_.push_back({mr, {static_cast<std::uint64_t>(*offset), address, length, mr->rkey, 0}});
    if (!is_remote) {
        return 0;
    }
    const Mapping mapping = local_mappings_.back().mapping;
    const int error = wait(&lock, false, [this] { return !free_send_slots_.empty() || stage_ == Stage::failed; });
    return error != 0 ? error : post_message(Kind::mapping, &mapping, sizeof mapping);
}

int StreamSocket::unmap(void* buffer, std::size_t length) {
    SocketLock lock(mutex_);
    const auto found = std::find_if(local_mappings_.begin(), local_mappings_.end(), [&](const LocalMapping& local) {
        return local.mr->addr == buffer && local.mr->length == length;
    });
    if (found == local_mappings_.end()) {
        return EINVAL;
    }
    const Mapping mapping = found->mapping;
    ibv_dereg_mr(found->mr);
    local_mappings_.erase(found);
    const int error = wait(&lock, false, [this] { return !free_send_slots_.empty() || stage_ == Stage::failed; });
    return error != 0 || stage_ != Stage::connected || is_disconnected_
               ? error
               : post_message(Kind::removed_mapping, &mapping, sizeof mapping);
}

int StreamSocket::write_mapped(const void* buffer, std::size_t count, off_t offset, int flags, std::size_t* moved) {
    SocketLock lock(mutex_);
    const auto* bytes = static_cast<const std::uint8_t*>(buffer);
    while (*moved < count) {
        const auto position = static_cast<std::uint64_t>(offset) + *moved;
        const int error = wait(&lock, is_nonblocking(flags), [this] {
            return !free_send_slots_.empty() || stage_ != Stage::connected || is_disconnected_;
        });
        if (error != 0) {
            return *moved == 0 ? error : 0;
        }
        if (stage_ != Stage::connected || is_disconnected_) {
            return ENOTCONN;
        }
        const auto found = std::find_if(peer_mappings_.begin(), peer_mappings_.end(), [&](const Mapping& mapping) {
            return position >= mapping.offset && position - mapping.offset < mapping.length;
        });
        if (found == peer_mappings_.end()) {
            return *moved == 0 ? EINVAL : 0;
        }
        const std::uint64_t inside = position - found->offset;
        const std::size_t size =
            std::min({count - *moved, slot_bytes, static_cast<std::size_t>(found->length - inside)});
        const unsigned slot = free_send_slots_.back();
        free_send_slots_.pop_back();
        std::memcpy(send_memory_.data() + slot * slot_bytes, bytes + *moved, size);
        ibv_send_wr request{};
        request.opcode = IBV_WR_RDMA_WRITE;
        request.wr.rdma.remote_addr = found->address + inside;
        request.wr.rdma.rkey = found->rkey;
        if (const int post_error = post_slot(slot, size, &request); post_error != 0) {
            return post_error;
        }
        *moved += size;
    }
    return 0;
}

} // namespace gdrkit::twin::rdmacm
