#include "usrbio/client/agent_connection.hpp"

#include "common/errno_text.hpp"
#include "usrbio/client/library_mutex.hpp"
#include "usrbio/client/log.hpp"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <set>
#include <string>
#include <utility>

namespace gdrkit::usrbio {

namespace {

constexpr timeval reply_timeout{.tv_sec = 30, .tv_usec = 0};
constexpr int close_ms_max = 30000;
constexpr int exit_ms_max = 10000;
constexpr std::size_t payload_parts_max = 4;

struct Connections {
    // Publications, rings and registered files hold the connection. It closes with the last of them.
    std::map<std::string, std::weak_ptr<AgentConnection>, std::less<>> by_mount;
    std::set<AgentConnection*> all; // Includes connections that rings still hold after the mount got a new one.
};

Connections& connections() {
    static auto* table = [] {
        auto* created = new Connections;
        in_forked_child([] {
            for (AgentConnection* connection : connections().all) {
                connection->close_descriptors();
            }
        });
        return created;
    }();
    return *table;
}

// Reads field 9 of /proc/<pid>/stat (proc(5)). The kernel sets the flag before the process closes anything.
bool is_exiting(pid_t process) noexcept {
    constexpr unsigned long exiting = 0x4; // PF_EXITING
    char path[32];
    std::snprintf(path, sizeof(path), "/proc/%d/stat", static_cast<int>(process));
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    char text[512];
    const ssize_t count = file < 0 ? -1 : read(file, text, sizeof(text) - 1);
    if (file >= 0) {
        close(file);
    }
    if (count <= 0) {
        return false;
    }
    text[count] = 0;
    const char* name_end = std::strrchr(text, ')'); // The name may contain any character; the last bracket ends it.
    unsigned long flags = 0;
    return name_end != nullptr && std::sscanf(name_end + 1, " %*c %*d %*d %*d %*d %*d %lu", &flags) == 1 &&
           (flags & exiting) != 0;
}

bool is_valid_reply(const AgentHeader& reply, const AgentHeader& request, std::size_t bytes) noexcept {
    return reply.magic == agent_magic && reply.version == agent_version && reply.type == request.type &&
           reply.sequence == request.sequence && reply.length == bytes && reply.status >= 0 && reply.status < 4096 &&
           reply.descriptors == 0;
}

} // namespace

AgentConnection::AgentConnection(int fd) noexcept : fd_(fd) {
    ucred peer{};
    socklen_t bytes = sizeof(peer);
    // The process that listens; 0 if it is in another PID namespace, so that its exit cannot be watched.
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && peer.pid > 0) {
        agent_pid_ = peer.pid;
        agent_pidfd_.store(static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0)));
    }
}

AgentConnection::~AgentConnection() {
    if (is_watched_) { // No other thread uses the connection any more.
        shutdown(fd_.load(), SHUT_RDWR);
        watch_done_->acquire();
    }
    {
        const std::lock_guard lock(library_mutex());
        connections().all.erase(this);
    }
    close_descriptors();
}

void AgentConnection::close_descriptors() noexcept {
    failed_.store(true, std::memory_order_release);
    peer_closed_.store(true, std::memory_order_release);
    is_watched_ = false; // A child does not have the threads of its parent.
    for (std::atomic<int>* descriptor : {&fd_, &agent_pidfd_}) {
        if (const int fd = descriptor->exchange(-1); fd >= 0) {
            close(fd);
        }
    }
}

int AgentConnection::fail(const char* reason, int close_timeout_ms) noexcept {
    if (!failed_.exchange(true, std::memory_order_acq_rel)) {
        log_line(LogLevel::warning, "the connection to the agent failed: %s", reason);
    }
    // An agent that exits accepts no further request while it withdraws its publications, and closes its end of the
    // socket afterwards. An agent that only hangs may continue.
    wait_peer_closed(close_timeout_ms);
    return -EREMOTEIO;
}

// The kernel closes the descriptors of a dying process in an unspecified order: this socket may be closed while the NIC
// still is open, and data arrives. The process counts as dead only after all of that.
void AgentConnection::wait_agent_exit() noexcept {
    pollfd pidfd{.fd = agent_pidfd_.load(), .events = POLLIN, .revents = 0};
    if (pidfd.fd < 0 || poll(&pidfd, 1, 0) > 0 || !is_exiting(agent_pid_)) {
        return;
    }
    if (poll(&pidfd, 1, exit_ms_max) <= 0) {
        log_line(LogLevel::warning, "the agent (process %d) is exiting, but has not ended after 10 s",
                 static_cast<int>(agent_pid_));
    }
}

bool AgentConnection::wait_peer_closed(int timeout_ms) noexcept {
    if (peer_closed()) {
        return true;
    }
    pollfd socket_state{.fd = fd_.load(), .events = POLLRDHUP, .revents = 0};
    if (poll(&socket_state, 1, timeout_ms) > 0 &&
        (socket_state.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL)) != 0) {
        wait_agent_exit();
        peer_closed_.store(true, std::memory_order_release);
        failed_.store(true, std::memory_order_release);
    }
    return peer_closed();
}

bool AgentConnection::watch(Semaphore& semaphore) noexcept {
    const std::lock_guard lock(library_mutex());
    if (!is_watched_ && !peer_closed() && !start_watch_thread()) {
        return false;
    }
    try {
        watched_.push_back(&semaphore);
    } catch (const std::bad_alloc&) {
        return false;
    }
    if (peer_closed()) { // The thread may have posted all semaphores before this one was added.
        post(semaphore);
    }
    return true;
}

void AgentConnection::unwatch(Semaphore& semaphore) noexcept {
    const std::lock_guard lock(library_mutex());
    std::erase(watched_, &semaphore);
}

struct AgentConnection::WatchThread {
    AgentConnection* connection;
    std::shared_ptr<std::binary_semaphore> done; // It outlives the connection until release() has returned.
};

bool AgentConnection::start_watch_thread() noexcept {
    std::unique_ptr<WatchThread> watch;
    try {
        watch_done_ = std::make_shared<std::binary_semaphore>(0);
        watch.reset(new WatchThread{this, watch_done_});
    } catch (const std::bad_alloc&) {
        return false;
    }
    sigset_t all, before;
    sigfillset(&all);
    // Signals must be handled by threads of the application.
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t watcher{};
    const int status = pthread_create(
        &watcher, nullptr,
        [](void* argument) -> void* {
            pthread_setname_np(pthread_self(), "hf3fs-watch");
            const std::unique_ptr<WatchThread> context(static_cast<WatchThread*>(argument));
            context->connection->watch_socket();
            context->done->release();
            return nullptr;
        },
        watch.get());
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (status != 0) {
        log_line(LogLevel::warning, "pthread_create() failed: %s. Waits check the agent by timers instead",
                 ErrnoText(status).c_str());
    }
    is_watched_ = status == 0;
    if (is_watched_) { // The thread is detached: a publication that cannot be withdrawn keeps its connection until the
                       // process ends, and then no thread joins it.
        watch.release();
        pthread_detach(watcher);
    }
    return is_watched_;
}

void AgentConnection::watch_socket() noexcept {
    while (!wait_peer_closed(-1)) {
    }
    const std::lock_guard lock(library_mutex());
    for (Semaphore* semaphore : watched_) {
        post(*semaphore);
    }
}

int AgentConnection::send(const AgentHeader& header, std::span<const iovec> payload,
                          std::span<const int> descriptors) noexcept {
    std::array<iovec, 1 + payload_parts_max> parts;
    parts[0] = {const_cast<AgentHeader*>(&header), sizeof(header)};
    std::copy(payload.begin(), payload.end(), parts.begin() + 1);
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * agent_descriptors_max)] = {};
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = 1 + payload.size();
    if (!descriptors.empty()) {
        message.msg_control = control;
        message.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
        cmsghdr* rights = CMSG_FIRSTHDR(&message);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(descriptors.size_bytes());
        std::memcpy(CMSG_DATA(rights), descriptors.data(), descriptors.size_bytes());
    }
    while (sendmsg(fd_.load(), &message, MSG_NOSIGNAL) < 0) {
        if (errno == EBADF) { // A descriptor to pass is not open, and nothing was sent.
            return -EBADF;
        }
        if (errno != EINTR) {
            return fail(ErrnoText(errno).c_str(), errno == EPIPE ? close_ms_max : 0);
        }
    }
    return 0;
}

int AgentConnection::receive(const AgentHeader& request, std::span<std::byte> reply) noexcept {
    AgentHeader header{};
    std::array<std::byte, agent_message_bytes_max - sizeof(AgentHeader)> payload;
    std::array<iovec, 2> parts{iovec{&header, sizeof(header)}, iovec{payload.data(), payload.size()}};
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    ssize_t bytes = 0;
    while ((bytes = recvmsg(fd_.load(), &message, 0)) < 0) {
        if (errno != EINTR) {
            // A late reply would be taken for that of the next request.
            return fail(errno == EAGAIN ? "no reply within 30 s" : ErrnoText(errno).c_str(), 0);
        }
    }
    if (bytes == 0) {
        return fail("the agent closed it", close_ms_max);
    }
    const auto length = static_cast<std::size_t>(bytes) - sizeof(header);
    if (static_cast<std::size_t>(bytes) < sizeof(header) || (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0 ||
        !is_valid_reply(header, request, length)) {
        return fail("the reply is malformed", 0);
    }
    if (header.status != 0) {
        log_line(LogLevel::info, "the agent refused a request: %.*s", static_cast<int>(length),
                 reinterpret_cast<const char*>(payload.data()));
        return -header.status;
    }
    if (length != reply.size()) {
        return fail("the reply has the wrong length", 0);
    }
    std::copy_n(payload.begin(), length, reply.begin()); // It may have 0 bytes, for which memcpy must not be called.
    return 0;
}

int AgentConnection::exchange(AgentRequest type, std::span<const iovec> payload, std::span<const int> descriptors,
                              std::span<std::byte> reply) noexcept {
    std::size_t length = 0;
    for (const iovec& part : payload) {
        length += part.iov_len;
    }
    if (payload.size() > payload_parts_max || descriptors.size() > agent_descriptors_max ||
        length > agent_message_bytes_max - sizeof(AgentHeader)) {
        return -E2BIG;
    }
    const AgentHeader header{.magic = agent_magic,
                             .version = agent_version,
                             .type = static_cast<std::uint16_t>(type),
                             .length = static_cast<std::uint32_t>(length),
                             .descriptors = static_cast<std::uint32_t>(descriptors.size()),
                             .sequence = ++sequence_,
                             .status = 0,
                             .reserved = 0};
    if (const int status = send(header, payload, descriptors); status != 0) {
        return status;
    }
    return receive(header, reply);
}

int AgentConnection::call(AgentRequest type, std::span<const iovec> payload, std::span<const int> descriptors,
                          std::span<std::byte> reply) noexcept {
    if (failed()) { // Check before the lock: in a forked child, the mutex may be locked by a thread of the parent.
        return -EREMOTEIO;
    }
    const std::lock_guard lock(mutex_);
    return failed() ? -EREMOTEIO : exchange(type, payload, descriptors, reply);
}

namespace {

// Connects to the socket. The path of a mount may be longer than a socket address, so the folder is opened first.
int connect_to(const std::string& mount, int& socket_fd) noexcept {
    const int folder = open((mount + "/3fs-virt").c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0) {
        return errno == ENOTDIR ? -ENOENT : -errno;
    }
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::snprintf(address.sun_path, sizeof(address.sun_path), "/proc/self/fd/%d/agent.sock", folder);
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    int status = fd < 0 ? -errno : 0;
    if (status == 0) {
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &reply_timeout, sizeof(reply_timeout));
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &reply_timeout, sizeof(reply_timeout));
        while (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) < 0 && status == 0) {
            status = errno == EINTR ? 0 : errno == ECONNREFUSED || errno == EAGAIN ? -EREMOTEIO : -errno;
        }
    }
    close(folder);
    if (status != 0) {
        if (fd >= 0) {
            close(fd);
        }
        return status;
    }
    socket_fd = fd;
    return 0;
}

int exchange_hello(AgentConnection& connection) noexcept {
    AgentHello hello{};
    hello.pid = static_cast<std::uint32_t>(getpid());
    std::snprintf(hello.library, sizeof(hello.library), "hf3fs_api_shared " GDRKIT_VERSION);
    AgentHello reply_hello{};
    const iovec payload{&hello, sizeof(hello)};
    return connection.call(AgentRequest::hello, {&payload, 1}, {}, std::as_writable_bytes(std::span(&reply_hello, 1)));
}

int make_connection(const std::string& mount, std::shared_ptr<AgentConnection>& connection) {
    int fd = -1;
    if (const int status = connect_to(mount, fd); status != 0) {
        return status;
    }
    std::unique_ptr<AgentConnection> created(new (std::nothrow) AgentConnection(fd));
    if (created == nullptr) {
        close(fd);
        return -ENOMEM;
    }
    {
        const std::lock_guard lock(library_mutex());
        connections().all.insert(created.get());
    }
    if (const int status = exchange_hello(*created); status != 0) {
        return status;
    }
    connection = std::move(created);
    return 0;
}

} // namespace

int agent_connection(const char* mount, std::shared_ptr<AgentConnection>& connection) noexcept {
    char* resolved = realpath(mount, nullptr);
    if (resolved == nullptr) {
        return errno == ENOTDIR ? -ENOENT : -errno;
    }
    const std::unique_ptr<char, decltype(&std::free)> owner(resolved, std::free);
    try {
        const std::string path(resolved);
        std::shared_ptr<AgentConnection> existing;
        connections();
        {
            const std::lock_guard lock(library_mutex());
            existing = connections().by_mount[path].lock();
        }
        if (existing == nullptr || existing->failed() || existing->poll_peer_closed()) {
            std::shared_ptr<AgentConnection> created;
            if (const int status = make_connection(path, created); status != 0) {
                return status;
            }
            // Two threads may have created one connection each: the first stays, unless it failed in the meantime. The
            // destructor of the other runs after the lock was released.
            std::shared_ptr<AgentConnection> selected, current;
            {
                const std::lock_guard lock(library_mutex());
                std::weak_ptr<AgentConnection>& entry = connections().by_mount[path];
                current = entry.lock();
                selected = current == nullptr || current == existing || current->failed() ? created : current;
                entry = selected;
            }
            connection = std::move(selected);
            return 0;
        }
        connection = std::move(existing);
        return 0;
    } catch (const std::bad_alloc&) {
        return -ENOMEM;
    }
}

} // namespace gdrkit::usrbio
