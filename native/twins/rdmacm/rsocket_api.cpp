// The exported functions of rsocket.h that act on one rsocket. rpoll and rselect are in rsocket_poll.cpp.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstring>

#include "rdmacm/address.hpp"
#include "rdmacm/rsocket.hpp"
#include "rdmacm/session.hpp"

namespace gdrkit::twin::rdmacm {
namespace {

// Run the body of an exported function on the rsocket of this number. The body returns 0 or an errno. Return 0, or -1
// with errno set.
template <typename Body> int run_socket_call(std::string_view function_name, int socket_number, Body&& body) {
    return run_entry_with_errno(function_name, [&] {
        const auto socket = find_socket(socket_number);
        return socket == nullptr ? EBADF : body(*socket);
    });
}

// Run the body of an exported function that returns a number of bytes. The body stores this number, and returns 0 or an
// errno. Return the number, or -1 with errno set.
template <typename Body> ssize_t run_bytes_call(std::string_view function_name, int socket_number, Body&& body) {
    std::size_t moved_bytes = 0;
    const int result =
        run_socket_call(function_name, socket_number, [&](RdmaSocket& socket) { return body(socket, &moved_bytes); });
    return result == 0 ? static_cast<ssize_t>(moved_bytes) : -1;
}

ssize_t send_parts(std::string_view function_name, int socket_number, std::span<const iovec> parts, int flags,
                   const sockaddr* destination = nullptr) {
    return run_bytes_call(function_name, socket_number, [&](RdmaSocket& socket, std::size_t* moved_bytes) {
        return socket.send(parts, flags, const_cast<sockaddr*>(destination), moved_bytes);
    });
}

ssize_t receive_parts(std::string_view function_name, int socket_number, std::span<const iovec> parts, int flags,
                      sockaddr* source = nullptr, socklen_t* source_length = nullptr) {
    return run_bytes_call(function_name, socket_number, [&](RdmaSocket& socket, std::size_t* moved_bytes) {
        sockaddr_storage source_storage{};
        const int error = socket.receive(parts, flags, source == nullptr ? nullptr : &source_storage, moved_bytes);
        if (error == 0 && source != nullptr && source_length != nullptr) {
            const socklen_t length = get_address_length(reinterpret_cast<const sockaddr*>(&source_storage));
            std::memcpy(source, &source_storage, std::min(*source_length, length));
            *source_length = length;
        }
        return error;
    });
}

iovec make_iovec(const void* buffer, std::size_t length) {
    return {const_cast<void*>(buffer), length};
}

} // namespace

extern "C" {

int rsocket(int domain, int type, int protocol) {
    int socket_number = -1;
    const int result = run_entry_with_errno("rsocket", [&] {
        const bool is_stream = type == SOCK_STREAM && (protocol == 0 || protocol == IPPROTO_TCP);
        const bool is_datagram = type == SOCK_DGRAM && (protocol == 0 || protocol == IPPROTO_UDP);
        if ((domain != AF_INET && domain != AF_INET6) || (!is_stream && !is_datagram)) {
            return ENOTSUP;
        }
        const auto socket = is_stream ? make_stream_socket(domain) : make_datagram_socket(domain);
        const int error = socket->open();
        if (error == 0) {
            socket_number = socket->number();
            add_socket(socket);
        }
        return error;
    });
    return result == 0 ? socket_number : -1;
}

int rbind(int socket, const sockaddr* addr, socklen_t addrlen) {
    return run_socket_call("rbind", socket, [&](RdmaSocket& rdma_socket) {
        return rdma_socket.bind(const_cast<sockaddr*>(addr), addrlen);
    });
}

int rlisten(int socket, int backlog) {
    return run_socket_call("rlisten", socket, [&](RdmaSocket& rdma_socket) { return rdma_socket.listen(backlog); });
}

int raccept(int socket, sockaddr* addr, socklen_t* addrlen) {
    int socket_number = -1;
    const int result = run_socket_call("raccept", socket, [&](RdmaSocket& rdma_socket) {
        std::shared_ptr<RdmaSocket> accepted_socket;
        const int error = rdma_socket.accept(&accepted_socket);
        if (error != 0) {
            return error;
        }
        if (addr != nullptr && addrlen != nullptr) {
            accepted_socket->get_remote_address(addr, addrlen);
        }
        socket_number = accepted_socket->number();
        add_socket(accepted_socket);
        return 0;
    });
    return result == 0 ? socket_number : -1;
}

int rconnect(int socket, const sockaddr* addr, socklen_t addrlen) {
    return run_socket_call("rconnect", socket, [&](RdmaSocket& rdma_socket) {
        return rdma_socket.connect(const_cast<sockaddr*>(addr), addrlen);
    });
}

int rshutdown(int socket, int how) {
    return run_socket_call("rshutdown", socket, [&](RdmaSocket& rdma_socket) {
        return how == SHUT_RD || how == SHUT_WR || how == SHUT_RDWR ? rdma_socket.shut_down(how) : EINVAL;
    });
}

int rclose(int socket) {
    return run_socket_call("rclose", socket, [&](RdmaSocket& rdma_socket) {
        const int error = rdma_socket.close();
        remove_socket(socket);
        return error;
    });
}

ssize_t rrecv(int socket, void* buf, size_t len, int flags) {
    const iovec part = make_iovec(buf, len);
    return receive_parts("rrecv", socket, {&part, 1}, flags);
}

ssize_t rrecvfrom(int socket, void* buf, size_t len, int flags, sockaddr* src_addr, socklen_t* addrlen) {
    const iovec part = make_iovec(buf, len);
    return receive_parts("rrecvfrom", socket, {&part, 1}, flags, src_addr, addrlen);
}

ssize_t rrecvmsg(int socket, msghdr* msg, int flags) {
    if (msg->msg_control != nullptr && msg->msg_controllen != 0) {
        errno = ENOTSUP;
        return -1;
    }
    return receive_parts("rrecvmsg", socket, {msg->msg_iov, msg->msg_iovlen}, flags,
                         static_cast<sockaddr*>(msg->msg_name), &msg->msg_namelen);
}

ssize_t rread(int socket, void* buf, size_t count) {
    const iovec part = make_iovec(buf, count);
    return receive_parts("rread", socket, {&part, 1}, 0);
}

ssize_t rreadv(int socket, const iovec* iov, int iovcnt) {
    return receive_parts("rreadv", socket, {iov, static_cast<std::size_t>(iovcnt)}, 0);
}

ssize_t rsend(int socket, const void* buf, size_t len, int flags) {
    const iovec part = make_iovec(buf, len);
    return send_parts("rsend", socket, {&part, 1}, flags);
}

ssize_t rsendto(int socket, const void* buf, size_t len, int flags, const sockaddr* dest_addr, socklen_t) {
    const iovec part = make_iovec(buf, len);
    return send_parts("rsendto", socket, {&part, 1}, flags, dest_addr);
}

ssize_t rsendmsg(int socket, const msghdr* msg, int flags) {
    if (msg->msg_control != nullptr && msg->msg_controllen != 0) {
        errno = ENOTSUP;
        return -1;
    }
    return send_parts("rsendmsg", socket, {msg->msg_iov, msg->msg_iovlen}, flags,
                      static_cast<const sockaddr*>(msg->msg_name));
}

ssize_t rwrite(int socket, const void* buf, size_t count) {
    const iovec part = make_iovec(buf, count);
    return send_parts("rwrite", socket, {&part, 1}, 0);
}

ssize_t rwritev(int socket, const iovec* iov, int iovcnt) {
    return send_parts("rwritev", socket, {iov, static_cast<std::size_t>(iovcnt)}, 0);
}

int rgetpeername(int socket, sockaddr* addr, socklen_t* addrlen) {
    return run_socket_call("rgetpeername", socket,
                           [&](RdmaSocket& rdma_socket) { return rdma_socket.get_peer_address(addr, addrlen); });
}

int rgetsockname(int socket, sockaddr* addr, socklen_t* addrlen) {
    return run_socket_call("rgetsockname", socket,
                           [&](RdmaSocket& rdma_socket) { return rdma_socket.get_local_address(addr, addrlen); });
}

int rsetsockopt(int socket, int level, int optname, const void* optval, socklen_t optlen) {
    return run_socket_call("rsetsockopt", socket, [&](RdmaSocket& rdma_socket) {
        return rdma_socket.set_option(level, optname, optval, optlen);
    });
}

int rgetsockopt(int socket, int level, int optname, void* optval, socklen_t* optlen) {
    return run_socket_call("rgetsockopt", socket, [&](RdmaSocket& rdma_socket) {
        return rdma_socket.get_option(level, optname, optval, optlen);
    });
}

int rfcntl(int socket, int cmd, ...) {
    va_list arguments;
    va_start(arguments, cmd);
    const int argument = cmd == F_SETFL ? va_arg(arguments, int) : 0;
    va_end(arguments);
    int status_flags = 0;
    const int result = run_socket_call(
        "rfcntl", socket, [&](RdmaSocket& rdma_socket) { return rdma_socket.control(cmd, argument, &status_flags); });
    return result == 0 ? status_flags : -1;
}

off_t riomap(int socket, void* buf, size_t len, int prot, int, off_t offset) {
    const int result = run_socket_call(
        "riomap", socket, [&](RdmaSocket& rdma_socket) { return rdma_socket.map(buf, len, prot, &offset); });
    return result == 0 ? offset : -1;
}

int riounmap(int socket, void* buf, size_t len) {
    return run_socket_call("riounmap", socket, [&](RdmaSocket& rdma_socket) { return rdma_socket.unmap(buf, len); });
}

size_t riowrite(int socket, const void* buf, size_t count, off_t offset, int flags) {
    return static_cast<size_t>(
        run_bytes_call("riowrite", socket, [&](RdmaSocket& rdma_socket, std::size_t* moved_bytes) {
            return rdma_socket.write_mapped(buf, count, offset, flags, moved_bytes);
        }));
}

} // extern "C"
} // namespace gdrkit::twin::rdmacm
