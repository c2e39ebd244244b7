// Datagram rsockets. Each has an unreliable datagram queue pair. Other rsockets request the number of this queue pair
// from the connection manager of the process that owns it. Each datagram begins with the address of its sender.

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

constexpr std::size_t grh_bytes = 40; // size of the global routing header that precedes each received datagram
constexpr std::size_t max_datagram_bytes = 4096; // with the DatagramHeader
constexpr unsigned datagram_receive_slot_count = 128, datagram_send_slot_count = 32;
constexpr std::size_t receive_slot_bytes = grh_bytes + max_datagram_bytes;
constexpr int datagram_resolve_timeout_ms = 2000;

// The first bytes of each datagram: the address of the sender.
struct DatagramHeader {
    std::uint32_t magic;
    std::uint16_t family; // AF_INET or AF_INET6
    std::uint16_t port;   // host byte order
    std::array<std::uint8_t, 16> address;
};
constexpr std::uint32_t header_magic = 0x52534431; // "1DSR" in memory

class DatagramSocket final : public RdmaSocket {
public:
    explicit DatagramSocket(int domain)
        : RdmaSocket(domain, SOCK_DGRAM,
                     {IBV_QPT_UD, datagram_receive_slot_count, datagram_send_slot_count, receive_slot_bytes,
                      max_datagram_bytes}) {}
    ~DatagramSocket() override;

    int listen(int) override { return EOPNOTSUPP; }
    int accept(std::shared_ptr<RdmaSocket>*) override { return EOPNOTSUPP; }
    int connect(sockaddr* address, socklen_t length) override;
    int send(std::span<const iovec> parts, int flags, sockaddr* destination, std::size_t* moved_bytes) override;
    int receive(std::span<const iovec> parts, int flags, sockaddr_storage* source, std::size_t* moved_bytes) override;
    int shut_down(int) override { return 0; } // librdmacm ignores the call, too
    int close() override;
    short get_ready_events() override;

private:
    struct Peer {
        ibv_ah* address_handle;
        std::uint32_t qp_num, qkey;
    };
    // A received datagram. Its payload is in the receive slot, after the global routing header and the DatagramHeader.
    struct ReceivedDatagram {
        unsigned slot;
        std::size_t payload_bytes;
        sockaddr_storage source;
    };

    bool is_connected() override { return connected_peer_ != nullptr; }
    void progress() override;
    int make_ready();
    void on_received(const ibv_wc& wc);
    int find_peer(sockaddr* address, const Peer** peer);
    int resolve_peer(sockaddr* address, rdma_ud_param* parameters);
    [[nodiscard]] DatagramHeader make_header() const;

    bool is_ready_ = false; // make_ready() has succeeded
    std::deque<ReceivedDatagram> received_datagrams_;
    std::map<std::string, Peer> peers_;    // the resolved peers, by address and port
    const Peer* connected_peer_ = nullptr; // the destination that rconnect has set; nullptr: none
};

DatagramSocket::~DatagramSocket() {
    if (id_ != nullptr) {
        destroy_queue_pair();
    }
    for (const auto& [address, peer] : peers_) {
        ibv_destroy_ah(peer.address_handle);
    }
}

// At the first call, bind the identifier if the program has not bound it, create the queue pair, and listen. From then
// on, the connection manager answers requests with the number of the queue pair. Return 0 or an errno.
int DatagramSocket::make_ready() {
    if (is_ready_) {
        return 0;
    }
    if (get_address_length(&id_->route.addr.src_addr) == 0) {
        sockaddr_storage any_address{};
        any_address.ss_family = static_cast<sa_family_t>(address_family_);
        if (rdma_bind_addr(id_, reinterpret_cast<sockaddr*>(&any_address)) != 0) {
            return errno;
        }
    }
    Identifier* const identifier = get_identifier(id_);
    if (id_->verbs == nullptr) {
        // An rsocket that is bound to no address uses the device of the loopback address.
        std::lock_guard lock(manager_mutex());
        const auto local_gid = find_local_gid(make_loopback_address(address_family_));
        if (!local_gid) {
            return ENODEV;
        }
        set_local_gid(identifier, *local_gid);
    }
    if (const int error = make_queue_pair(); error != 0) {
        return error;
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

void DatagramSocket::on_received(const ibv_wc& wc) {
    const auto slot = static_cast<unsigned>(wc.wr_id & 0xffffffffU);
    DatagramHeader header{};
    // If the header is missing or invalid, the sender does not use rsockets. Drop its datagram.
    if (wc.byte_len >= grh_bytes + sizeof header) {
        std::memcpy(&header, get_receive_slot(slot) + grh_bytes, sizeof header);
    }
    if (header.magic != header_magic || (header.family != AF_INET && header.family != AF_INET6)) {
        post_receive(slot);
        return;
    }
    IpAddress source;
    source.family = header.family;
    std::memcpy(source.bytes.raw, header.address.data(), header.address.size());
    received_datagrams_.push_back({slot, wc.byte_len - grh_bytes - sizeof header, {}});
    store_address(&received_datagrams_.back().source, source, header.port);
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

// Request the parameters of the destination's queue pair from its connection manager: the number, the queue key and the
// path. Return 0 or an errno.
int DatagramSocket::resolve_peer(sockaddr* address, rdma_ud_param* parameters) {
    rdma_cm_id* id = nullptr;
    if (rdma_create_id(nullptr, &id, nullptr, RDMA_PS_UDP) != 0) {
        return errno;
    }
    rdma_conn_param request{};
    const bool has_reply = rdma_resolve_addr(id, nullptr, address, datagram_resolve_timeout_ms) == 0 &&
                           rdma_resolve_route(id, datagram_resolve_timeout_ms) == 0 && rdma_connect(id, &request) == 0;
    // rdma_connect sets errno to the status of the reply: 1 (IB_SIDR_UNSUPPORTED) means that there is no listener.
    const int error = has_reply ? 0 : (errno == 1 ? ECONNREFUSED : errno);
    if (has_reply) {
        *parameters = id->event->param.ud;
    }
    rdma_destroy_id(id);
    return error;
}

// Find the peer with this address. If it is unknown, resolve it. Return 0 or an errno.
int DatagramSocket::find_peer(sockaddr* address, const Peer** peer) {
    if (get_address_length(address) == 0 || address->sa_family != address_family_) {
        return EINVAL;
    }
    const std::string peer_key = format_gid(get_ip(address).bytes) + std::to_string(get_port(address));
    auto entry = peers_.find(peer_key);
    if (entry == peers_.end()) {
        rdma_ud_param parameters{};
        if (const int error = resolve_peer(address, &parameters); error != 0) {
            return error;
        }
        ibv_ah* const address_handle = ibv_create_ah(id_->pd, &parameters.ah_attr);
        if (address_handle == nullptr) {
            return errno;
        }
        entry = peers_.emplace(peer_key, Peer{address_handle, parameters.qp_num, parameters.qkey}).first;
    }
    *peer = &entry->second;
    return 0;
}

int DatagramSocket::connect(sockaddr* address, socklen_t) {
    SocketLock lock(mutex_);
    int error = make_ready();
    error = error != 0 ? error : find_peer(address, &connected_peer_);
    if (error == 0) {
        std::memcpy(&id_->route.addr.dst_storage, address, get_address_length(address));
    }
    return error;
}

DatagramHeader DatagramSocket::make_header() const {
    DatagramHeader header{
        header_magic, static_cast<std::uint16_t>(address_family_), get_port(&id_->route.addr.src_addr), {}};
    IpAddress source = get_ip(&id_->route.addr.src_addr);
    if (source.is_any()) {
        source = make_loopback_address(address_family_);
    }
    std::memcpy(header.address.data(), source.bytes.raw, header.address.size());
    return header;
}

int DatagramSocket::send(std::span<const iovec> parts, int flags, sockaddr* destination, std::size_t* moved_bytes) {
    SocketLock lock(mutex_);
    const Peer* peer = connected_peer_;
    int error = make_ready();
    if (error == 0 && destination != nullptr) {
        error = find_peer(destination, &peer);
    }
    if (error != 0 || peer == nullptr) {
        return error != 0 ? error : EDESTADDRREQ;
    }
    std::size_t size_bytes = sizeof(DatagramHeader);
    for (const iovec& part : parts) {
        size_bytes += part.iov_len;
    }
    if (size_bytes > max_datagram_bytes) {
        return EMSGSIZE;
    }
    error = wait(&lock, is_nonblocking(flags), [this] { return !free_send_slots_.empty(); });
    if (error != 0) {
        return error;
    }
    const unsigned slot = take_send_slot();
    std::uint8_t* const slot_memory = get_send_slot(slot);
    const DatagramHeader header = make_header();
    std::memcpy(slot_memory, &header, sizeof header);
    std::size_t slot_offset = sizeof header;
    for (const iovec& part : parts) {
        std::memcpy(slot_memory + slot_offset, part.iov_base, part.iov_len);
        slot_offset += part.iov_len;
    }
    ibv_send_wr request{};
    request.opcode = IBV_WR_SEND;
    request.wr.ud.ah = peer->address_handle;
    request.wr.ud.remote_qpn = peer->qp_num;
    request.wr.ud.remote_qkey = peer->qkey;
    error = post_slot(slot, size_bytes, &request);
    if (error == 0) {
        *moved_bytes = size_bytes - sizeof header;
    }
    return error;
}

int DatagramSocket::receive(std::span<const iovec> parts, int flags, sockaddr_storage* source,
                            std::size_t* moved_bytes) {
    SocketLock lock(mutex_);
    int error = make_ready();
    error = error != 0 ? error : wait(&lock, is_nonblocking(flags), [this] { return !received_datagrams_.empty(); });
    if (error != 0) {
        return error;
    }
    const ReceivedDatagram datagram = received_datagrams_.front();
    const std::uint8_t* payload = get_receive_slot(datagram.slot) + grh_bytes + sizeof(DatagramHeader);
    for (const iovec& part : parts) {
        const std::size_t part_bytes = std::min(part.iov_len, datagram.payload_bytes - *moved_bytes);
        std::memcpy(part.iov_base, payload + *moved_bytes, part_bytes);
        *moved_bytes += part_bytes;
    }
    if (source != nullptr) {
        *source = datagram.source;
    }
    if ((flags & MSG_PEEK) == 0) {
        received_datagrams_.pop_front();
        post_receive(datagram.slot);
    }
    return 0;
}

int DatagramSocket::close() {
    constexpr int close_timeout_ms = 1000;
    SocketLock lock(mutex_);
    // Wait a short time until all datagrams are sent, because the destructor then destroys the queue pair.
    wait(
        &lock, false, [this] { return !is_ready_ || free_send_slots_.size() == datagram_send_slot_count; },
        close_timeout_ms);
    return 0;
}

short DatagramSocket::get_ready_events() {
    SocketLock lock(mutex_);
    make_ready();
    progress();
    return static_cast<short>((received_datagrams_.empty() ? 0 : POLLIN) | (free_send_slots_.empty() ? 0 : POLLOUT));
}

} // namespace

std::shared_ptr<RdmaSocket> make_datagram_socket(int domain) {
    return std::make_shared<DatagramSocket>(domain);
}

} // namespace gdrkit::twin::rdmacm
