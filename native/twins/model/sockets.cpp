// Implements the sockets between processes and the control service.

#include "model/sockets.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "model/config.hpp"
#include "model/thread.hpp"

namespace gdrkit::twin {
namespace {

constexpr std::size_t max_fds = 64;
constexpr std::uint32_t message_magic = 0x47444b31; // "1KDG" in memory
// A process that does not respond in this time is considered stopped. Each client that connects and sends nothing
// delays the control service by 2 s, so this time allows for a few such clients.
constexpr timeval connect_timeout{10, 0};
constexpr std::uint32_t max_message_bytes = 1U << 20;

// A request is a MessageHeader and `size_bytes` bytes. The reply is a MessageHeader, one message with `fd_count`
// descriptors if there are any, and `size_bytes` bytes. Then the service closes the connection.
struct MessageHeader {
    std::uint32_t magic;
    std::uint32_t type;
    std::uint32_t size_bytes;
    std::uint32_t fd_count;
};
static_assert(sizeof(MessageHeader) == 16);

// Fill the address with the abstract name of the socket `name`, and set *size_bytes to the length of the address.
// Return false if the name is too long.
bool make_address(std::string_view name, sockaddr_un* address, socklen_t* size_bytes) {
    const std::string abstract_name =
        "gdrkit-twins/" + std::to_string(getuid()) + "/" + config().domain + "/" + std::string(name);
    if (abstract_name.size() + 1 > sizeof address->sun_path) {
        return false;
    }
    std::memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    std::memcpy(address->sun_path + 1, abstract_name.data(), abstract_name.size());
    *size_bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + abstract_name.size());
    return true;
}

struct Service {
    std::mutex mutex;
    std::map<std::uint32_t, Handler> handlers;
    std::uint64_t id = 0;
    bool is_started = false;
};

Service& service() {
    static auto* const instance = new Service;
    return *instance;
}

std::string make_service_socket_name(std::uint64_t service_id) {
    char text[32];
    std::snprintf(text, sizeof text, "control.%016llx", static_cast<unsigned long long>(service_id));
    return text;
}

Handler find_handler(std::uint32_t type) {
    Service& control_service = service();
    std::lock_guard lock(control_service.mutex);
    const auto entry = control_service.handlers.find(type);
    return entry == control_service.handlers.end() ? Handler() : entry->second;
}

// Open a socket of this type and bind it to the name. Return the socket or -errno.
int bind_socket(std::string_view name, int type) {
    sockaddr_un address{};
    socklen_t size_bytes = 0;
    if (!make_address(name, &address, &size_bytes)) {
        return -ENAMETOOLONG;
    }
    Fd socket(::socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
    if (!socket || bind(socket.get(), reinterpret_cast<sockaddr*>(&address), size_bytes) != 0) {
        return -errno;
    }
    return socket.release();
}

bool send_and_close_fds(int socket, std::vector<Fd> fds) {
    std::vector<int> borrowed_fds;
    for (const Fd& fd : fds) {
        borrowed_fds.push_back(fd.get());
    }
    return borrowed_fds.empty() || send_fds(socket, borrowed_fds);
}

void handle_connection(int socket) {
    // A client that connects and sends nothing must not delay other clients for long.
    const timeval request_timeout{2, 0};
    setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &request_timeout, sizeof request_timeout);
    setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &request_timeout, sizeof request_timeout);
    MessageHeader header{};
    if (!is_same_user(socket) || !recv_all(socket, &header, sizeof header) || header.magic != message_magic ||
        header.size_bytes > max_message_bytes || header.fd_count != 0) {
        return;
    }
    std::vector<std::byte> request(header.size_bytes), reply;
    if (!recv_all(socket, request.data(), request.size())) {
        return;
    }
    std::vector<Fd> fds;
    // Call a copy of the handler without holding the service's mutex. A handler may take other locks. A thread that
    // holds one of these locks may call register_handler or read_control_service_id, which take the mutex, so holding
    // the mutex here could cause a deadlock.
    if (const Handler handler = find_handler(header.type)) {
        handler(request, &reply, &fds);
    }
    const MessageHeader reply_header{message_magic, header.type, static_cast<std::uint32_t>(reply.size()),
                                     static_cast<std::uint32_t>(fds.size())};
    // Send and close the descriptors before the data. So when the client has the data, this process has no copy of the
    // descriptors left.
    if (!send_all(socket, &reply_header, sizeof reply_header) || !send_and_close_fds(socket, std::move(fds))) {
        return;
    }
    send_all(socket, reply.data(), reply.size());
}

void run_control_service(int listener) {
    for (;;) {
        const Fd socket(accept_from(listener));
        if (socket) {
            handle_connection(socket.get());
        } else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
            poll(nullptr, 0, 10); // no descriptors or memory left: wait 10 ms and try again
        }
    }
}

// Start the control service unless it is already running. The caller holds the service's mutex.
void start_control_service(Service* control_service) {
    if (control_service->is_started) {
        return;
    }
    int listener = -EADDRINUSE;
    while (listener == -EADDRINUSE) {
        control_service->id = random_u64();
        listener = listen_on(make_service_socket_name(control_service->id));
    }
    if (listener < 0) {
        std::fprintf(stderr, "gdrkit twin: cannot listen on the control socket: %s\n", std::strerror(-listener));
        return;
    }
    start_signal_blocking_thread([listener] { run_control_service(listener); }).detach();
    control_service->is_started = true;
}

} // namespace

Fd& Fd::operator=(Fd&& other) noexcept {
    if (this != &other) {
        reset();
        fd_ = other.release();
    }
    return *this;
}

void Fd::reset() {
    if (fd_ >= 0) {
        const int saved_errno = errno;
        ::close(fd_);
        errno = saved_errno;
        fd_ = -1;
    }
}

int listen_on(std::string_view name) {
    const int bound_fd = bind_socket(name, SOCK_STREAM);
    if (bound_fd < 0) {
        return bound_fd;
    }
    Fd socket(bound_fd);
    return listen(socket.get(), 128) == 0 ? socket.release() : -errno;
}

int reserve_name(std::string_view name) {
    return bind_socket(name, SOCK_STREAM);
}

int open_datagram_receiver(std::string_view name) {
    const int bound_fd = bind_socket(name, SOCK_DGRAM);
    if (bound_fd < 0) {
        return bound_fd;
    }
    Fd socket(bound_fd);
    const int enabled = 1;
    return setsockopt(socket.get(), SOL_SOCKET, SO_PASSCRED, &enabled, sizeof enabled) == 0 ? socket.release() : -errno;
}

int open_datagram_sender() {
    const int socket = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    return socket >= 0 ? socket : -errno;
}

int send_datagram(int socket, std::string_view name, std::span<const iovec> parts) {
    sockaddr_un address{};
    msghdr message{};
    if (!make_address(name, &address, &message.msg_namelen)) {
        return ENAMETOOLONG;
    }
    message.msg_name = &address;
    message.msg_iov = const_cast<iovec*>(parts.data());
    message.msg_iovlen = parts.size();
    ssize_t sent_bytes = 0;
    do {
        sent_bytes = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (sent_bytes < 0 && errno == EINTR);
    return sent_bytes < 0 ? errno : 0;
}

int receive_datagram(int socket, std::span<const iovec> parts, std::size_t* size_bytes) {
    alignas(cmsghdr) char control_buffer[CMSG_SPACE(sizeof(ucred))] = {};
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(parts.data());
    message.msg_iovlen = parts.size();
    message.msg_control = control_buffer;
    message.msg_controllen = sizeof control_buffer;
    ssize_t received_bytes = 0;
    do {
        // The buffer has no room for descriptors, so the kernel closes the descriptors that a hostile sender attaches.
        received_bytes = recvmsg(socket, &message, MSG_DONTWAIT | MSG_TRUNC | MSG_CMSG_CLOEXEC);
    } while (received_bytes < 0 && errno == EINTR);
    if (received_bytes < 0) {
        return errno;
    }
    *size_bytes = static_cast<std::size_t>(received_bytes);
    const cmsghdr* const control_message = CMSG_FIRSTHDR(&message);
    ucred sender{};
    if (control_message == nullptr || control_message->cmsg_level != SOL_SOCKET ||
        control_message->cmsg_type != SCM_CREDENTIALS || control_message->cmsg_len != CMSG_LEN(sizeof sender)) {
        return EPERM;
    }
    std::memcpy(&sender, CMSG_DATA(control_message), sizeof sender);
    return sender.uid == getuid() ? 0 : EPERM;
}

int connect_to(std::string_view name) {
    sockaddr_un address{};
    socklen_t size_bytes = 0;
    if (!make_address(name, &address, &size_bytes)) {
        return -ENAMETOOLONG;
    }
    Fd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket) {
        return -errno;
    }
    // SO_SNDTIMEO also limits connect(), which blocks while the listener's backlog is full: a stopped process never
    // accepts.
    setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &connect_timeout, sizeof connect_timeout);
    setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &connect_timeout, sizeof connect_timeout);
    int result = 0;
    do {
        result = connect(socket.get(), reinterpret_cast<sockaddr*>(&address), size_bytes);
    } while (result != 0 && errno == EINTR);
    if (result != 0) {
        return -errno;
    }
    return is_same_user(socket.get()) ? socket.release() : -ECONNREFUSED;
}

namespace {

bool get_peer(int socket, ucred* peer) {
    socklen_t size_bytes = sizeof *peer;
    return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, peer, &size_bytes) == 0;
}

} // namespace

bool is_same_user(int socket) {
    ucred peer{};
    return get_peer(socket, &peer) && peer.uid == getuid();
}

int get_peer_process_id(int socket) {
    ucred peer{};
    return get_peer(socket, &peer) ? peer.pid : 0;
}

int accept_from(int listener) {
    for (;;) {
        const int socket = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
        if (socket >= 0 || (errno != EINTR && errno != ECONNABORTED)) {
            return socket >= 0 ? socket : -errno;
        }
    }
}

bool send_all(int socket, const void* data, std::size_t size_bytes) {
    const char* position = static_cast<const char*>(data);
    while (size_bytes > 0) {
        const ssize_t sent_bytes = send(socket, position, size_bytes, MSG_NOSIGNAL);
        if (sent_bytes < 0 && errno == EINTR) {
            continue;
        }
        if (sent_bytes <= 0) {
            return false;
        }
        position += sent_bytes;
        size_bytes -= static_cast<std::size_t>(sent_bytes);
    }
    return true;
}

bool recv_all(int socket, void* data, std::size_t size_bytes) {
    char* position = static_cast<char*>(data);
    while (size_bytes > 0) {
        const ssize_t received_bytes = recv(socket, position, size_bytes, 0);
        if (received_bytes < 0 && errno == EINTR) {
            continue;
        }
        if (received_bytes <= 0) {
            errno = received_bytes == 0 ? EPIPE : errno;
            return false;
        }
        position += received_bytes;
        size_bytes -= static_cast<std::size_t>(received_bytes);
    }
    return true;
}

bool send_fds(int socket, std::span<const int> fds) {
    if (fds.empty() || fds.size() > max_fds) {
        errno = EINVAL;
        return false;
    }
    char payload = 'F'; // descriptors can be sent only along with at least one byte
    iovec data{&payload, 1};
    alignas(cmsghdr) char control_buffer[CMSG_SPACE(max_fds * sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control_buffer;
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* control_message = CMSG_FIRSTHDR(&message);
    control_message->cmsg_level = SOL_SOCKET;
    control_message->cmsg_type = SCM_RIGHTS;
    control_message->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(control_message), fds.data(), fds.size_bytes());
    ssize_t sent_bytes = 0;
    do {
        sent_bytes = sendmsg(socket, &message, MSG_NOSIGNAL);
    } while (sent_bytes < 0 && errno == EINTR);
    return sent_bytes == 1;
}

bool recv_fds(int socket, std::size_t count, std::vector<Fd>* fds) {
    char payload = 0;
    iovec data{&payload, 1};
    alignas(cmsghdr) char control_buffer[CMSG_SPACE(max_fds * sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control_buffer;
    message.msg_controllen = sizeof control_buffer;
    ssize_t received_bytes = 0;
    do {
        received_bytes = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    } while (received_bytes < 0 && errno == EINTR);
    if (received_bytes <= 0) {
        errno = received_bytes == 0 ? EPIPE : errno;
        return false;
    }
    // Take ownership of every received descriptor before the checks, so that a wrong message leaves none open.
    std::vector<Fd> received_fds;
    for (cmsghdr* control_message = CMSG_FIRSTHDR(&message); control_message != nullptr;
         control_message = CMSG_NXTHDR(&message, control_message)) {
        if (control_message->cmsg_level != SOL_SOCKET || control_message->cmsg_type != SCM_RIGHTS) {
            continue;
        }
        const std::size_t descriptor_count = (control_message->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (std::size_t index = 0; index < descriptor_count; ++index) {
            int fd = -1;
            std::memcpy(&fd, CMSG_DATA(control_message) + index * sizeof(int), sizeof fd);
            received_fds.emplace_back(fd);
        }
    }
    if (received_fds.size() != count || (message.msg_flags & MSG_CTRUNC) != 0) {
        errno = EPROTO;
        return false;
    }
    *fds = std::move(received_fds);
    return true;
}

void register_handler(std::uint32_t type, Handler handler) {
    Service& control_service = service();
    std::lock_guard lock(control_service.mutex);
    control_service.handlers[type] = std::move(handler);
    start_control_service(&control_service);
}

std::uint64_t read_control_service_id() {
    Service& control_service = service();
    std::lock_guard lock(control_service.mutex);
    start_control_service(&control_service);
    return control_service.id;
}

bool send_control_request(std::uint64_t service_id, std::uint32_t type, std::span<const std::byte> request,
                          std::vector<std::byte>* reply, std::vector<Fd>* fds) {
    const Fd socket(connect_to(make_service_socket_name(service_id)));
    const MessageHeader header{message_magic, type, static_cast<std::uint32_t>(request.size()), 0};
    MessageHeader reply_header{};
    if (!socket || !send_all(socket.get(), &header, sizeof header) ||
        !send_all(socket.get(), request.data(), request.size()) ||
        !recv_all(socket.get(), &reply_header, sizeof reply_header)) {
        return false;
    }
    if (reply_header.magic != message_magic || reply_header.type != type ||
        reply_header.size_bytes > max_message_bytes || reply_header.fd_count > max_fds ||
        reply_header.size_bytes == 0) {
        return false;
    }
    reply->resize(reply_header.size_bytes);
    fds->clear();
    if ((reply_header.fd_count != 0 && !recv_fds(socket.get(), reply_header.fd_count, fds)) ||
        !recv_all(socket.get(), reply->data(), reply->size())) {
        return false;
    }
    // Wait until the service has closed its end of the connection. Then the service has no copy of the descriptors
    // left, even if client and service are the same process.
    char unexpected_byte = 0;
    return recv(socket.get(), &unexpected_byte, 1, 0) == 0;
}

} // namespace gdrkit::twin
