#include "model/rendezvous.hpp"

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

constexpr std::size_t fds_most = 64;
constexpr std::uint32_t message_magic = 0x47444b31; // "1KDG"
// Who does not answer in this time is taken to be stopped. It is longer than a few silent strangers hold up a service.
constexpr timeval longest_silence{10, 0};
constexpr std::uint32_t message_bytes_most = 1U << 20;

struct MessageHeader {
    std::uint32_t magic;
    std::uint32_t type;
    std::uint32_t size_bytes;
    std::uint32_t fd_count;
};
static_assert(sizeof(MessageHeader) == 16);

// Where a queue pair is found from every network namespace; empty for what is of one machine.
std::string path_on_fabric(std::string_view name) {
    if (config().fabric.empty() || !name.starts_with("qp.")) {
        return {};
    }
    return config().fabric + "/" + std::to_string(getuid()) + "." + std::string(name);
}

// The path, or the abstract name, and its length in *size; false when it does not fit.
bool make_address(std::string_view name, sockaddr_un* address, socklen_t* size) {
    if (const std::string path = path_on_fabric(name); !path.empty()) {
        if (path.size() + 1 > sizeof address->sun_path) {
            return false;
        }
        std::memset(address, 0, sizeof *address);
        address->sun_family = AF_UNIX;
        std::memcpy(address->sun_path, path.data(), path.size());
        *size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size() + 1);
        return true;
    }
    const std::string full =
        "gdrkit-twins/" + std::to_string(getuid()) + "/" + config().domain + "/" + std::string(name);
    if (full.size() + 1 > sizeof address->sun_path) {
        return false;
    }
    std::memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    std::memcpy(address->sun_path + 1, full.data(), full.size());
    *size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + full.size());
    return true;
}

struct Service {
    std::mutex mutex;
    std::map<std::uint32_t, Handler> handlers;
    std::uint64_t name = 0;
    bool started = false;
};

Service& service() {
    static auto* const the_service = new Service;
    return *the_service;
}

std::string service_name(std::uint64_t name) {
    char text[32];
    std::snprintf(text, sizeof text, "control.%016llx", static_cast<unsigned long long>(name));
    return text;
}

Handler find_handler(std::uint32_t type) {
    Service& all = service();
    std::lock_guard lock(all.mutex);
    const auto found = all.handlers.find(type);
    return found == all.handlers.end() ? Handler() : found->second;
}

bool send_and_close(int socket, std::vector<Fd> fds) {
    std::vector<int> lent;
    for (const Fd& fd : fds) {
        lent.push_back(fd.get());
    }
    return lent.empty() || send_fds(socket, lent);
}

void answer(int socket) {
    // A stranger who says nothing must not hold up the others.
    const timeval patience{2, 0};
    setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    MessageHeader header{};
    if (!same_user(socket) || !recv_all(socket, &header, sizeof header) || header.magic != message_magic ||
        header.size_bytes > message_bytes_most || header.fd_count != 0) {
        return;
    }
    std::vector<std::byte> request(header.size_bytes), reply;
    if (!recv_all(socket, request.data(), request.size())) {
        return;
    }
    std::vector<Fd> fds;
    // The handler is copied out: it may take locks of its own whose holders call `serve` or `control_name`.
    if (const Handler handler = find_handler(header.type)) {
        handler(request, &reply, &fds);
    }
    const MessageHeader back{message_magic, header.type, static_cast<std::uint32_t>(reply.size()),
                             static_cast<std::uint32_t>(fds.size())};
    // The descriptors go, and are closed here, before the data: once the asker has all, nobody else holds what it was
    // given.
    if (!send_all(socket, &back, sizeof back) || !send_and_close(socket, std::move(fds))) {
        return;
    }
    send_all(socket, reply.data(), reply.size());
}

void serve_for_ever(int listener) {
    for (;;) {
        const Fd socket(accept_from(listener));
        if (socket) {
            answer(socket.get());
        } else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
            poll(nullptr, 0, 10);
        }
    }
}

// Called with the lock held.
void start(Service* all) {
    if (all->started) {
        return;
    }
    int listener = -EADDRINUSE;
    while (listener == -EADDRINUSE) {
        all->name = random_u64();
        listener = listen_on(service_name(all->name));
    }
    if (listener < 0) {
        std::fprintf(stderr, "gdrkit twin: no control socket: %s\n", std::strerror(-listener));
        return;
    }
    start_quiet_thread([listener] { serve_for_ever(listener); }).detach();
    all->started = true;
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
        const int kept = errno;
        ::close(fd_);
        errno = kept;
        fd_ = -1;
    }
}

int listen_on(std::string_view name) {
    sockaddr_un address{};
    socklen_t size = 0;
    if (!make_address(name, &address, &size)) {
        return -ENAMETOOLONG;
    }
    Fd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket || bind(socket.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
        listen(socket.get(), 128) != 0) {
        return -errno;
    }
    return socket.release();
}

void forget(std::string_view name) {
    if (const std::string path = path_on_fabric(name); !path.empty()) {
        unlink(path.c_str());
    }
}

int connect_to(std::string_view name) {
    sockaddr_un address{};
    socklen_t size = 0;
    if (!make_address(name, &address, &size)) {
        return -ENAMETOOLONG;
    }
    Fd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket) {
        return -errno;
    }
    // A connect waits for a place in the listener's queue, and whoever is stopped never makes one.
    setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &longest_silence, sizeof longest_silence);
    setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &longest_silence, sizeof longest_silence);
    int result = 0;
    do {
        result = connect(socket.get(), reinterpret_cast<sockaddr*>(&address), size);
    } while (result != 0 && errno == EINTR);
    if (result != 0) {
        return -errno;
    }
    return same_user(socket.get()) ? socket.release() : -ECONNREFUSED;
}

bool same_user(int socket) {
    ucred peer{};
    socklen_t size = sizeof peer;
    return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == getuid();
}

int accept_from(int listener) {
    for (;;) {
        const int socket = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
        if (socket >= 0 || (errno != EINTR && errno != ECONNABORTED)) {
            return socket >= 0 ? socket : -errno;
        }
    }
}

bool send_all(int socket, const void* data, std::size_t size) {
    const char* at = static_cast<const char*>(data);
    while (size > 0) {
        const ssize_t sent = send(socket, at, size, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) {
            continue;
        }
        if (sent <= 0) {
            return false;
        }
        at += sent;
        size -= static_cast<std::size_t>(sent);
    }
    return true;
}

bool recv_all(int socket, void* data, std::size_t size) {
    char* at = static_cast<char*>(data);
    while (size > 0) {
        const ssize_t got = recv(socket, at, size, 0);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            errno = got == 0 ? EPIPE : errno;
            return false;
        }
        at += got;
        size -= static_cast<std::size_t>(got);
    }
    return true;
}

bool send_fds(int socket, std::span<const int> fds) {
    if (fds.empty() || fds.size() > fds_most) {
        errno = EINVAL;
        return false;
    }
    char one = 'F';
    iovec data{&one, 1};
    alignas(cmsghdr) char room[CMSG_SPACE(fds_most * sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = room;
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* control = CMSG_FIRSTHDR(&message);
    control->cmsg_level = SOL_SOCKET;
    control->cmsg_type = SCM_RIGHTS;
    control->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(control), fds.data(), fds.size_bytes());
    ssize_t sent = 0;
    do {
        sent = sendmsg(socket, &message, MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR);
    return sent == 1;
}

bool recv_fds(int socket, std::size_t count, std::vector<Fd>* fds) {
    char one = 0;
    iovec data{&one, 1};
    alignas(cmsghdr) char room[CMSG_SPACE(fds_most * sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = room;
    message.msg_controllen = sizeof room;
    ssize_t got = 0;
    do {
        got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    } while (got < 0 && errno == EINTR);
    if (got <= 0) {
        errno = got == 0 ? EPIPE : errno;
        return false;
    }
    // Whatever came is owned before it is judged: nothing of a wrong message stays open.
    std::vector<Fd> received;
    for (cmsghdr* control = CMSG_FIRSTHDR(&message); control != nullptr; control = CMSG_NXTHDR(&message, control)) {
        if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS) {
            continue;
        }
        const std::size_t here = (control->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (std::size_t index = 0; index < here; ++index) {
            int fd = -1;
            std::memcpy(&fd, CMSG_DATA(control) + index * sizeof(int), sizeof fd);
            received.emplace_back(fd);
        }
    }
    if (received.size() != count || (message.msg_flags & MSG_CTRUNC) != 0) {
        errno = EPROTO;
        return false;
    }
    *fds = std::move(received);
    return true;
}

void serve(std::uint32_t type, Handler handler) {
    Service& all = service();
    std::lock_guard lock(all.mutex);
    all.handlers[type] = std::move(handler);
    start(&all);
}

std::uint64_t control_name() {
    Service& all = service();
    std::lock_guard lock(all.mutex);
    start(&all);
    return all.name;
}

bool ask(std::uint64_t name, std::uint32_t type, std::span<const std::byte> request, std::vector<std::byte>* reply,
         std::vector<Fd>* fds) {
    const Fd socket(connect_to(service_name(name)));
    const MessageHeader header{message_magic, type, static_cast<std::uint32_t>(request.size()), 0};
    MessageHeader back{};
    if (!socket || !send_all(socket.get(), &header, sizeof header) ||
        !send_all(socket.get(), request.data(), request.size()) || !recv_all(socket.get(), &back, sizeof back)) {
        return false;
    }
    if (back.magic != message_magic || back.type != type || back.size_bytes > message_bytes_most ||
        back.fd_count > fds_most || back.size_bytes == 0) {
        return false;
    }
    reply->resize(back.size_bytes);
    fds->clear();
    if ((back.fd_count != 0 && !recv_fds(socket.get(), back.fd_count, fds)) ||
        !recv_all(socket.get(), reply->data(), reply->size())) {
        return false;
    }
    // The service has closed its end when this ends: an answer leaves no descriptor behind, also where asker and
    // service are one process.
    char end = 0;
    return recv(socket.get(), &end, 1, 0) == 0;
}

} // namespace gdrkit::twin
