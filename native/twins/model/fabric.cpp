// The TCP connections between the machines of a fabric, a set of hosts whose verbs twins act as one RDMA network.

#include "model/fabric.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "model/hmac.hpp"

namespace gdrkit::twin {
namespace {

constexpr std::uint32_t hello_magic = 0x4654574e; // "NWTF" in memory
constexpr std::uint32_t hello_version = 1;
// Time limit of a connect, and of each message until both sides are authenticated.
constexpr timeval setup_timeout{2, 0};
constexpr timeval no_timeout{0, 0};

using Nonce = std::array<std::uint8_t, 32>;

// The server begins a connection with ServerHello. The client replies with ClientProof. If its digest is right, the
// server replies with its own digest.
struct ServerHello {
    std::uint32_t magic;
    std::uint32_t version;
    Nonce nonce;
};
static_assert(sizeof(ServerHello) == 40);

struct ClientProof {
    Nonce nonce;
    HmacDigest digest;
};
static_assert(sizeof(ClientProof) == 64);

bool draw_nonce(Nonce* nonce) {
    return getrandom(nonce->data(), nonce->size(), 0) == static_cast<ssize_t>(nonce->size());
}

// The role is part of the digest, so that neither side can return the digest that it has just received.
HmacDigest make_digest(std::string_view role, const Nonce& server_nonce, const Nonce& client_nonce) {
    return hmac_sha256(config().fabric_secret, {role, bytes_of(server_nonce), bytes_of(client_nonce)});
}

void set_option(int socket, int level, int name, int value) {
    setsockopt(socket, level, name, &value, sizeof value);
}

void set_time_limits(int socket, const timeval& limit) {
    setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

// Let the kernel send small messages at once, and break the connection if the peer's machine does not acknowledge data
// for `timeout` (0: never). A stopped peer process does not time out, because its kernel still acknowledges data, as a
// NIC does.
void set_peer_timeout(int socket, std::chrono::milliseconds timeout) {
    set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
    if (timeout.count() > 0) {
        set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
        set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, 1);
        set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, 1);
        set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(timeout.count()));
    }
}

bool authenticate_to_server(int socket) {
    ServerHello hello{};
    ClientProof proof{};
    HmacDigest server_digest{};
    if (!recv_all(socket, &hello, sizeof hello) || hello.magic != hello_magic || hello.version != hello_version ||
        !draw_nonce(&proof.nonce)) {
        return false;
    }
    proof.digest = make_digest("client", hello.nonce, proof.nonce);
    return send_all(socket, &proof, sizeof proof) && recv_all(socket, &server_digest, sizeof server_digest) &&
           is_equal_digest(server_digest, make_digest("server", hello.nonce, proof.nonce));
}

HmacDigest make_datagram_digest(const iovec& header, const iovec& payload, std::size_t payload_bytes) {
    const auto* const payload_begin = static_cast<const char*>(payload.iov_base);
    return hmac_sha256(
        config().fabric_secret,
        {"datagram", {static_cast<const char*>(header.iov_base), header.iov_len}, {payload_begin, payload_bytes}});
}

// Open a socket of this type at a free port of the address. Return the socket or -errno, and store the port.
int bind_to_free_port(const FabricAddress& address, int type, std::uint16_t* port) {
    SocketAddress socket_address(address, 0);
    Fd socket(::socket(socket_address.family(), type | SOCK_CLOEXEC, 0));
    if (!socket || bind(socket.get(), socket_address.get(), socket_address.size_bytes) != 0 ||
        getsockname(socket.get(), socket_address.get(), &socket_address.size_bytes) != 0) {
        return -errno;
    }
    *port = socket_address.port();
    return socket.release();
}

} // namespace

bool is_on_other_machine(const FabricAddress& address) {
    const auto& own_addresses = config().fabric_addresses;
    return !own_addresses.empty() &&
           std::find(own_addresses.begin(), own_addresses.end(), address) == own_addresses.end();
}

int listen_on_fabric(const FabricAddress& address, std::uint16_t* port) {
    const int bound_fd = bind_to_free_port(address, SOCK_STREAM, port);
    if (bound_fd < 0) {
        return bound_fd;
    }
    Fd socket(bound_fd);
    return listen(socket.get(), 128) == 0 ? socket.release() : -errno;
}

int open_fabric_receiver(const FabricAddress& address, std::uint16_t* port) {
    const int socket = bind_to_free_port(address, SOCK_DGRAM, port);
    if (socket >= 0) {
        // The kernel limits the size of the buffer to net.core.rmem_max.
        set_option(socket, SOL_SOCKET, SO_RCVBUF, 4 << 20);
    }
    return socket;
}

int send_fabric_datagram(int socket, const FabricAddress& address, std::uint16_t port, const iovec& header,
                         const iovec& payload) {
    SocketAddress socket_address(address, port);
    HmacDigest digest = make_datagram_digest(header, payload, payload.iov_len);
    iovec parts[] = {{digest.data(), digest.size()}, header, payload};
    msghdr message{};
    message.msg_name = socket_address.get();
    message.msg_namelen = socket_address.size_bytes;
    message.msg_iov = parts;
    message.msg_iovlen = std::size(parts);
    ssize_t sent_bytes = 0;
    do {
        sent_bytes = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (sent_bytes < 0 && errno == EINTR);
    return sent_bytes < 0 ? errno : 0;
}

int receive_fabric_datagram(int socket, const iovec& header, const iovec& payload, std::size_t* size_bytes) {
    HmacDigest digest{};
    iovec parts[] = {{digest.data(), digest.size()}, header, payload};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = std::size(parts);
    ssize_t received_bytes = 0;
    do {
        received_bytes = recvmsg(socket, &message, MSG_DONTWAIT);
    } while (received_bytes < 0 && errno == EINTR);
    if (received_bytes < 0) {
        return errno;
    }
    const std::size_t min_bytes = digest.size() + header.iov_len;
    const auto datagram_bytes = static_cast<std::size_t>(received_bytes);
    if (datagram_bytes < min_bytes || (message.msg_flags & MSG_TRUNC) != 0 ||
        !is_equal_digest(digest, make_datagram_digest(header, payload, datagram_bytes - min_bytes))) {
        return EPERM;
    }
    *size_bytes = datagram_bytes - digest.size();
    return 0;
}

int connect_to_fabric(const FabricAddress& address, std::uint16_t port, std::chrono::milliseconds timeout) {
    SocketAddress socket_address(address, port);
    Fd socket(::socket(socket_address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket) {
        return -errno;
    }
    set_time_limits(socket.get(), setup_timeout);
    if (connect(socket.get(), socket_address.get(), socket_address.size_bytes) != 0) {
        return -errno;
    }
    if (!authenticate_to_server(socket.get())) {
        static std::atomic<bool> is_reported{false};
        if (!is_reported.exchange(true)) {
            std::fprintf(stderr, "gdrkit twin: a peer of GDRKIT_TWINS_FABRIC refused this process: check that "
                                 "GDRKIT_TWINS_FABRIC_SECRET is the same on both machines\n");
        }
        return -EACCES;
    }
    set_time_limits(socket.get(), no_timeout);
    set_peer_timeout(socket.get(), timeout);
    return socket.release();
}

bool authenticate_client(int socket) {
    set_time_limits(socket, setup_timeout);
    ServerHello hello{hello_magic, hello_version, {}};
    ClientProof proof{};
    if (!draw_nonce(&hello.nonce) || !send_all(socket, &hello, sizeof hello) ||
        !recv_all(socket, &proof, sizeof proof) ||
        !is_equal_digest(proof.digest, make_digest("client", hello.nonce, proof.nonce))) {
        return false;
    }
    const HmacDigest server_digest = make_digest("server", hello.nonce, proof.nonce);
    if (!send_all(socket, &server_digest, sizeof server_digest)) {
        return false;
    }
    set_time_limits(socket, no_timeout);
    set_peer_timeout(socket, std::chrono::seconds(30));
    return true;
}

} // namespace gdrkit::twin
