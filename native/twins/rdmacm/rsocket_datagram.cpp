// Datagram rsockets: an unreliable datagram queue pair, whose number other rsockets get from the connection manager.
// Each datagram begins with the address of its sender.

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <string>

#include "rdmacm/address.hpp"
#include "rdmacm/identifier.hpp"
#include "rdmacm/rsocket.hpp"

namespace gdrkit::twin::rdmacm {
namespace {

constexpr std::size_t grh_bytes = 40; // before each received datagram, for the global routing header
constexpr std::size_t datagram_bytes = 4096;
constexpr unsigned receive_slot_count = 128, send_slot_count = 32;
constexpr std::size_t receive_slot_bytes = grh_bytes + datagram_bytes;
constexpr std::uint64_t receive_mark = 1ULL << 32; // set in wr_id of a receive; the low 32 bits are the slot
constexpr int resolve_timeout_ms = 2000;

struct DatagramHeader {
    std::uint32_t magic;
    std::uint16_t family; // AF_INET or AF_INET6
    std::uint16_t port;   // host byte order
    std::array<std::uint8_t, 16> address;
};
constexpr std::uint32_t header_magic = 0x52534431;

class DatagramSocket final : public RdmaSocket {
public:
    explicit DatagramSocket(int domain) : RdmaSocket(domain, SOCK_DGRAM) {}
    ~DatagramSocket() override;

    int listen(int) override { return EOPNOTSUPP; }
    int accept(std::shared_ptr<RdmaSocket>*) override { return EOPNOTSUPP; }
    int connect(sockaddr* address, socklen_t length) override;
    int send(std::span<const iovec> parts, int flags, sockaddr* destination, std::size_t* moved) override;
    int receive(std::span<const iovec> parts, int flags, sockaddr_storage* source, std::size_t* moved) override;
    int shut_down(int) override { return is_connected() ? 0 : ENOTCONN; }
    int close() override;
    short ready_events() override;

private:
    struct Peer {
        ibv_ah* handle;
        std::uint32_t qp_num, qkey;
    };
    struct Datagram {
        unsigned slot;
        std::size_t size;
        sockaddr_storage source;
    };

    bool is_connected() override { return peer_ != nullptr; }
    void progress() override;
    int make_ready();
    int post_receive(unsigned slot);
    void on_received(const ibv_wc& wc);
    int find_peer(sockaddr* address, const Peer** peer);
    int resolve_peer(sockaddr* address, rdma_ud_param* parameters);
    [[nodiscard]] DatagramHeader make_header() const;

    bool is_ready_ = false;
    std::vector<std::uint8_t> receive_memory_, send_memory_;
    ibv_mr* receive_mr_ = nullptr;
    ibv_mr* send_mr_ = nullptr;
    std::vector<unsigned> free_send_slots_;
    std::deque<Datagram> received_;
    std::map<std::string, Peer> peers_; // by address and port
    const Peer* peer_ = nullptr;        // of a connected rsocket
};

DatagramSocket::~DatagramSocket() {
    if (id_ != nullptr) {
        rdma_destroy_qp(id_);
        for (const auto& [address, peer] : peers_) {
            ibv_destroy_ah(peer.handle);
        }
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

// Bind, if the program has not done it, create the queue pair, and let the connection manager answer requests with its
// number.
int DatagramSocket::make_ready() {
    if (is_ready_) {
        return 0;
    }
    if (address_length(&id_->route.addr.src_addr) == 0) {
        sockaddr_storage any{};
        any.ss_family = static_cast<sa_family_t>(domain_);
        if (rdma_bind_addr(id_, reinterpret_cast<sockaddr*>(&any)) != 0) {
            return errno;
        }
    }
    Identifier* const identifier = id_of(id_);
    if (id_->verbs == nullptr) {
        // An rsocket that is bound to no address uses the device of the loopback address.
        std::lock_guard lock(manager_mutex());
        const auto local = find_local_port(loopback_address(domain_));
        if (!local) {
            return ENODEV;
        }
        set_local(identifier, *local);
    }
    ibv_qp_init_attr attributes{};
    attributes.cap.max_send_wr = send_slot_count;
    attributes.cap.max_recv_wr = receive_slot_count;
    attributes.cap.max_send_sge = attributes.cap.max_recv_sge = 1;
    attributes.qp_type = IBV_QPT_UD;
    attributes.sq_sig_all = 1;
    if (const int error = make_queues(&attributes); error != 0) {
        return error;
    }
    receive_memory_.resize(receive_slot_count * receive_slot_bytes);
    send_memory_.resize(send_slot_count * datagram_bytes);
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
    {
        std::lock_guard lock(manager_mutex());
        identifier->automatic_qp_num = id_->qp->qp_num;
    }
    if (rdma_listen(id_, 0) != 0) {
        return errno;
    }
    is_ready_ = true;
    return 0;
}

int DatagramSocket::post_receive(unsigned slot) {
    ibv_sge sge{reinterpret_cast<std::uint64_t>(receive_memory_.data()) + slot * receive_slot_bytes,
                static_cast<std::uint32_t>(receive_slot_bytes), receive_mr_->lkey};
    ibv_recv_wr request{receive_mark | slot, nullptr, &sge, 1};
    ibv_recv_wr* bad_request = nullptr;
    return ibv_post_recv(id_->qp, &request, &bad_request);
}

void DatagramSocket::on_received(const ibv_wc& wc) {
    const auto slot = static_cast<unsigned>(wc.wr_id & 0xffffffffU);
    DatagramHeader header{};
    // A datagram of a program that does not use rsockets is dropped.
    if (wc.byte_len >= grh_bytes + sizeof header) {
        std::memcpy(&header, receive_memory_.data() + slot * receive_slot_bytes + grh_bytes, sizeof header);
    }
    if (header.magic != header_magic || (header.family != AF_INET && header.family != AF_INET6)) {
        post_receive(slot);
        return;
    }
    IpAddress source;
    source.family = header.family;
    std::memcpy(source.bytes.raw, header.address.data(), header.address.size());
    received_.push_back({slot, wc.byte_len - grh_bytes - sizeof header, {}});
    store_address(&received_.back().source, source, header.port);
}

void DatagramSocket::progress() {
    ibv_wc wc{};
    while (id_->recv_cq != nullptr && ibv_poll_cq(id_->recv_cq, 1, &wc) > 0) {
        if ((wc.wr_id & receive_mark) == 0) {
            free_send_slots_.push_back(static_cast<unsigned>(wc.wr_id));
        } else if (wc.status == IBV_WC_SUCCESS) {
            on_received(wc);
        }
    }
}

// Ask the connection manager of the destination for its queue pair.
int DatagramSocket::resolve_peer(sockaddr* address, rdma_ud_param* parameters) {
    rdma_cm_id* id = nullptr;
    if (rdma_create_id(nullptr, &id, nullptr, RDMA_PS_UDP) != 0) {
        return errno;
    }
    rdma_conn_param request{};
    const bool is_resolved = rdma_resolve_addr(id, nullptr, address, resolve_timeout_ms) == 0 &&
                             rdma_resolve_route(id, resolve_timeout_ms) == 0 && rdma_connect(id, &request) == 0;
    // rdma_connect sets errno to the status of the reply: 1 (IB_SIDR_UNSUPPORTED) means that there is no listener.
    const int error = is_resolved ? 0 : (errno == 1 ? ECONNREFUSED : errno);
    if (is_resolved) {
        *parameters = id->event->param.ud;
    }
    rdma_destroy_id(id);
    return error;
}

int DatagramSocket::find_peer(sockaddr* address, const Peer** peer) {
    if (address_length(address) == 0 || address->sa_family != domain_) {
        return EINVAL;
    }
    const std::string key = gid_text(ip_of(address).bytes) + std::to_string(port_of(address));
    auto found = peers_.find(key);
    if (found == peers_.end()) {
        rdma_ud_param parameters{};
        if (const int error = resolve_peer(address, &parameters); error != 0) {
            return error;
        }
        ibv_ah* const handle = ibv_create_ah(id_->pd, &parameters.ah_attr);
        if (handle == nullptr) {
            return errno;
        }
        found = peers_.emplace(key, Peer{handle, parameters.qp_num, parameters.qkey}).first;
    }
    *peer = &found->second;
    return 0;
}

int DatagramSocket::connect(sockaddr* address, socklen_t) {
    SocketLock lock(mutex_);
    int error = make_ready();
    error = error != 0 ? error : find_peer(address, &peer_);
    if (error == 0) {
        std::memcpy(&id_->route.addr.dst_storage, address, address_length(address));
    }
    return error;
}

DatagramHeader DatagramSocket::make_header() const {
    DatagramHeader header{header_magic, static_cast<std::uint16_t>(domain_), port_of(&id_->route.addr.src_addr), {}};
    IpAddress source = ip_of(&id_->route.addr.src_addr);
    if (source.is_any()) {
        source = loopback_address(domain_);
    }
    std::memcpy(header.address.data(), source.bytes.raw, header.address.size());
    return header;
}

int DatagramSocket::send(std::span<const iovec> parts, int flags, sockaddr* destination, std::size_t* moved) {
    SocketLock lock(mutex_);
    const Peer* peer = peer_;
    int error = make_ready();
    if (error == 0 && destination != nullptr) {
        error = find_peer(destination, &peer);
    }
    if (error != 0 || peer == nullptr) {
        return error != 0 ? error : EDESTADDRREQ;
    }
    std::size_t size = sizeof(DatagramHeader);
    for (const iovec& part : parts) {
        size += part.iov_len;
    }
    if (size > datagram_bytes) {
        return EMSGSIZE;
    }
    error = wait(&lock, is_nonblocking(flags), [this] { return !free_send_slots_.empty(); });
    if (error != 0) {
        return error;
    }
    const unsigned slot = free_send_slots_.back();
    std::uint8_t* const begin = send_memory_.data() + slot * datagram_bytes;
    const DatagramHeader header = make_header();
    std::memcpy(begin, &header, sizeof header);
    std::size_t position = sizeof header;
    for (const iovec& part : parts) {
        std::memcpy(begin + position, part.iov_base, part.iov_len);
        position += part.iov_len;
    }
    ibv_sge sge{reinterpret_cast<std::uint64_t>(begin), static_cast<std::uint32_t>(size), send_mr_->lkey};
    ibv_send_wr request{};
    request.wr_id = slot;
    request.sg_list = &sge;
    request.num_sge = 1;
    request.opcode = IBV_WR_SEND;
    request.wr.ud.ah = peer->handle;
    request.wr.ud.remote_qpn = peer->qp_num;
    request.wr.ud.remote_qkey = peer->qkey;
    ibv_send_wr* bad_request = nullptr;
    error = ibv_post_send(id_->qp, &request, &bad_request);
    if (error == 0) {
        free_send_slots_.pop_back();
        *moved = size - sizeof header;
    }
    return error;
}

int DatagramSocket::receive(std::span<const iovec> parts, int flags, sockaddr_storage* source, std::size_t* moved) {
    SocketLock lock(mutex_);
    int error = make_ready();
    error = error != 0 ? error : wait(&lock, is_nonblocking(flags), [this] { return !received_.empty(); });
    if (error != 0) {
        return error;
    }
    const Datagram datagram = received_.front();
    const std::uint8_t* bytes =
        receive_memory_.data() + datagram.slot * receive_slot_bytes + grh_bytes + sizeof(DatagramHeader);
    for (const iovec& part : parts) {
        const std::size_t size = std::min(part.iov_len, datagram.size - *moved);
        std::memcpy(part.iov_base, bytes + *moved, size);
        *moved += size;
    }
    if (source != nullptr) {
        *source = datagram.source;
    }
    if ((flags & MSG_PEEK) == 0) {
        received_.pop_front();
        post_receive(datagram.slot);
    }
    return 0;
}

int DatagramSocket::close() {
    constexpr int close_timeout_ms = 1000;
    SocketLock lock(mutex_);
    // Wait until the sent datagrams have left, before the queue pair is destroyed.
    wait(
        &lock, false, [this] { return !is_ready_ || free_send_slots_.size() == send_slot_count; }, close_timeout_ms);
    return 0;
}

short DatagramSocket::ready_events() {
    SocketLock lock(mutex_);
    make_ready();
    progress();
    return static_cast<short>((received_.empty() ? 0 : POLLIN) | (free_send_slots_.empty() ? 0 : POLLOUT));
}

} // namespace

std::shared_ptr<RdmaSocket> make_datagram_socket(int domain) {
    return std::make_shared<DatagramSocket>(domain);
}

} // namespace gdrkit::twin::rdmacm
