// The common parts of all rsockets (sockets over RDMA, man 7 rsocket): their numbers, addresses and options.

#include "rdmacm/rsocket.hpp"

#include <fcntl.h>
#include <netinet/tcp.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <utility>

#include "rdmacm/address.hpp"

namespace gdrkit::twin::rdmacm {
namespace {

// The level SOL_RDMA of rsocket.h, and its options RDMA_SQSIZE, RDMA_RQSIZE, RDMA_INLINE and RDMA_IOMAPSIZE.
constexpr int rdma_level = 0x10000;
enum RdmaOption { rdma_send_queue_size, rdma_receive_queue_size, rdma_inline, rdma_io_mappings };

struct SocketTable {
    std::mutex mutex;
    std::map<int, std::shared_ptr<RdmaSocket>> sockets;
};

SocketTable& socket_table() {
    static auto* const instance = new SocketTable;
    return *instance;
}

// An option that holds an int: the level and the name of setsockopt, and the member that stores it.
struct NumberOption {
    int level, name;
    int SocketOptions::*member;
};

constexpr NumberOption number_options[] = {
    {SOL_SOCKET, SO_SNDBUF, &SocketOptions::send_buffer_bytes},
    {SOL_SOCKET, SO_RCVBUF, &SocketOptions::receive_buffer_bytes},
    {IPPROTO_TCP, TCP_MAXSEG, &SocketOptions::maximum_segment_bytes},
    {rdma_level, rdma_send_queue_size, &SocketOptions::send_queue_size},
    {rdma_level, rdma_receive_queue_size, &SocketOptions::receive_queue_size},
    {rdma_level, rdma_inline, &SocketOptions::inline_bytes},
    {rdma_level, rdma_io_mappings, &SocketOptions::io_mapping_count},
};

// An option that is on or off. In setsockopt its value is an int, too.
struct FlagOption {
    int level, name;
    bool SocketOptions::*member;
};

constexpr FlagOption flag_options[] = {
    {SOL_SOCKET, SO_REUSEADDR, &SocketOptions::reuse_address},
    {SOL_SOCKET, SO_KEEPALIVE, &SocketOptions::keep_alive},
    {SOL_SOCKET, SO_OOBINLINE, &SocketOptions::out_of_band_inline},
    {IPPROTO_TCP, TCP_NODELAY, &SocketOptions::no_delay},
    {IPPROTO_IPV6, IPV6_V6ONLY, &SocketOptions::ipv6_only},
};

// Copy an address into the program's buffer. *length is first the size of the buffer, which may be too small, and then
// the size of the whole address.
int copy_address(const sockaddr_storage& stored_address, sockaddr* address, socklen_t* length) {
    const socklen_t source_length = get_address_length(reinterpret_cast<const sockaddr*>(&stored_address));
    if (address == nullptr || length == nullptr) {
        return EFAULT;
    }
    std::memcpy(address, &stored_address, std::min(*length, source_length));
    *length = source_length;
    return 0;
}

// Copy the value of an option into the program's buffer. *length is first the size of the buffer, and then the size of
// the value.
template <typename Value> int copy_value(const Value& option_value, void* buffer, socklen_t* length) {
    if (*length < sizeof option_value) {
        return EINVAL;
    }
    std::memcpy(buffer, &option_value, sizeof option_value);
    *length = sizeof option_value;
    return 0;
}

} // namespace

std::shared_ptr<RdmaSocket> find_socket(int socket_number) {
    SocketTable& table = socket_table();
    std::lock_guard lock(table.mutex);
    const auto entry = table.sockets.find(socket_number);
    if (entry == table.sockets.end()) {
        errno = EBADF;
        return nullptr;
    }
    return entry->second;
}

void add_socket(const std::shared_ptr<RdmaSocket>& socket) {
    SocketTable& table = socket_table();
    std::lock_guard lock(table.mutex);
    table.sockets[socket->number()] = socket;
}

void remove_socket(int socket_number) {
    SocketTable& table = socket_table();
    std::lock_guard lock(table.mutex);
    table.sockets.erase(socket_number);
}

int RdmaSocket::open() {
    channel_ = rdma_create_event_channel();
    if (channel_ == nullptr) {
        return errno;
    }
    // Blocking calls wait in poll(). rdma_get_cm_event itself must not block: after poll() returns, another thread may
    // take the event first.
    fcntl(channel_->fd, F_SETFL, O_NONBLOCK);
    return rdma_create_id(channel_, &id_, this, type_ == SOCK_STREAM ? RDMA_PS_TCP : RDMA_PS_UDP) == 0 ? 0 : errno;
}

int RdmaSocket::bind(sockaddr* address, socklen_t length) {
    if (address == nullptr || length < get_address_length(address) || address->sa_family != address_family_) {
        return EINVAL;
    }
    return rdma_bind_addr(id_, address) == 0 ? 0 : errno;
}

int RdmaSocket::map(void*, std::size_t, int, off_t*) {
    return EOPNOTSUPP;
}

int RdmaSocket::unmap(void*, std::size_t) {
    return EOPNOTSUPP;
}

int RdmaSocket::write_mapped(const void*, std::size_t, off_t, int, std::size_t*) {
    return EOPNOTSUPP;
}

int RdmaSocket::get_local_address(sockaddr* address, socklen_t* length) {
    sockaddr_storage storage = id_->route.addr.src_storage;
    storage.ss_family = static_cast<sa_family_t>(address_family_); // an unbound identifier has no address family
    return copy_address(storage, address, length);
}

int RdmaSocket::get_peer_address(sockaddr* address, socklen_t* length) {
    return is_connected() ? get_remote_address(address, length) : ENOTCONN;
}

int RdmaSocket::get_remote_address(sockaddr* address, socklen_t* length) {
    return copy_address(id_->route.addr.dst_storage, address, length);
}

bool RdmaSocket::is_nonblocking(int flags) const {
    return (status_flags_ & O_NONBLOCK) != 0 || (flags & MSG_DONTWAIT) != 0;
}

int RdmaSocket::take_error() {
    return std::exchange(pending_error_, 0);
}

int RdmaSocket::set_option(int level, int name, const void* value, socklen_t length) {
    if (level == SOL_SOCKET && name == SO_LINGER) {
        linger linger_option{};
        if (value == nullptr || length < sizeof linger_option) {
            return EINVAL;
        }
        std::memcpy(&linger_option, value, sizeof linger_option);
        options_.linger_on = linger_option.l_onoff;
        options_.linger_s = linger_option.l_linger;
        return 0;
    }
    int option_value = 0;
    if (value == nullptr || length < sizeof option_value) {
        return EINVAL;
    }
    std::memcpy(&option_value, value, sizeof option_value);
    for (const NumberOption& option : number_options) {
        if (option.level == level && option.name == name) {
            if (option_value < 0) {
                return EINVAL;
            }
            options_.*option.member = option_value;
            return 0;
        }
    }
    for (const FlagOption& option : flag_options) {
        if (option.level == level && option.name == name) {
            options_.*option.member = option_value != 0;
            // SO_REUSEADDR and IPV6_V6ONLY are also options of the identifier.
            const int id_option = name == SO_REUSEADDR && level == SOL_SOCKET ? option_reuseaddr
                                  : level == IPPROTO_IPV6                     ? option_afonly
                                                                              : -1;
            return id_option < 0 ||
                           rdma_set_option(id_, option_level_id, id_option, &option_value, sizeof option_value) == 0
                       ? 0
                       : errno;
        }
    }
    return ENOTSUP;
}

int RdmaSocket::get_option(int level, int name, void* value, socklen_t* length) {
    if (value == nullptr || length == nullptr) {
        return EFAULT;
    }
    if (level == SOL_SOCKET && name == SO_ERROR) {
        get_ready_events(); // processes the events that have arrived; they may set the error
        SocketLock lock(mutex_);
        return copy_value(take_error(), value, length);
    }
    if (level == SOL_SOCKET && name == SO_LINGER) {
        return copy_value(linger{options_.linger_on, options_.linger_s}, value, length);
    }
    for (const NumberOption& option : number_options) {
        if (option.level == level && option.name == name) {
            return copy_value(options_.*option.member, value, length);
        }
    }
    for (const FlagOption& option : flag_options) {
        if (option.level == level && option.name == name) {
            return copy_value(options_.*option.member ? 1 : 0, value, length);
        }
    }
    return ENOTSUP;
}

int RdmaSocket::control(int command, int argument, int* result) {
    *result = 0;
    if (command == F_GETFL) {
        *result = O_RDWR | status_flags_;
        return 0;
    }
    if (command == F_SETFL) {
        status_flags_ = argument & O_NONBLOCK;
        return 0;
    }
    return ENOTSUP;
}

} // namespace gdrkit::twin::rdmacm
