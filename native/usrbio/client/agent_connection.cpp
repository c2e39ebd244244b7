// The socket to the agent of a mount: requests and replies, and the thread that wakes waiters when the agent ends.
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
constexpr int agent_close_ms_max = 30000;    // Longest wait for a failed agent to close its end of the socket.
constexpr int agent_exit_ms_max = 10000;     // Longest wait until the process of an exiting agent has ended.
constexpr std::size_t payload_parts_max = 4; // Largest number of iovecs of a request's payload.

struct Connections {
    // The newest connection of each mount. The pointers are weak, because the publications, rings and registered files
    // own their connection, which closes with the last of them.
    std::map<std::string, std::weak_ptr<AgentConnection>, std::less<>> by_mount;
    std::set<AgentConnection*> all_connections; // Also older connections of a mount, as long as they have owners.
};

Connections& connections() {
    static auto* table = [] {
        auto* new_table = new Connections;
        add_fork_handler([] {
            for (AgentConnection* connection : connections().all_connections) {
                connection->close_descriptors();
            }
        });
        return new_table;
    }();
    return *table;
}

// Returns whether the process has begun to exit: PF_EXITING in field 9 of /proc/<pid>/stat (proc(5)). The kernel sets
// this flag before it closes the descriptors of the process.
bool is_exiting(pid_t pid) noexcept {
    constexpr unsigned long exiting_flag = 0x4; // PF_EXITING
    char path[32];
    std::snprintf(path, sizeof(path), "/proc/%d/stat", static_cast<int>(pid));
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    char stat_line[512];
    const ssize_t stat_line_bytes = fd < 0 ? -1 : read(fd, stat_line, sizeof(stat_line) - 1);
    if (fd >= 0) {
        close(fd);
    }
    if (stat_line_bytes <= 0) {
        return false;
    }
    stat_line[stat_line_bytes] = 0;
    // The name of the process is in parentheses and may contain any character, so search for the last parenthesis.
    const char* name_end = std::strrchr(stat_line, ')');
    unsigned long flags = 0;
    return name_end != nullptr && std::sscanf(name_end + 1, " %*c %*d %*d %*d %*d %*d %lu", &flags) == 1 &&
           (flags & exiting_flag) != 0;
}

// Returns whether the header of a reply is valid for `request` and a payload of `payload_bytes`. A status is an errno,
// so it is below 4096.
bool is_valid_reply(const AgentHeader& reply, const AgentHeader& request, std::size_t payload_bytes) noexcept {
    return reply.magic == agent_magic && reply.version == agent_version && reply.type == request.type &&
           reply.sequence == request.sequence && reply.length == payload_bytes && reply.status >= 0 &&
           reply.status < 4096 && reply.descriptors == 0;
}

} // namespace

AgentConnection::AgentConnection(int fd) noexcept : fd_(fd) {
    ucred peer{};
    socklen_t peer_bytes = sizeof(peer);
    // SO_PEERCRED reports the process that listens, which is the agent. The pid is 0 if the agent is in another PID
    // namespace. Then this process cannot observe its exit.
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &peer_bytes) == 0 && peer.pid > 0) {
        agent_pid_ = peer.pid;
        agent_pidfd_.store(static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0)));
    }
}

AgentConnection::~AgentConnection() {
    if (has_watch_thread_) {             // Without library_mutex(): no other thread uses this connection any more.
        shutdown(fd_.load(), SHUT_RDWR); // Ends the wait of the watch thread.
        watch_thread_ended_->acquire();
    }
    {
        const std::lock_guard lock(library_mutex());
        connections().all_connections.erase(this);
    }
    close_descriptors();
}

void AgentConnection::close_descriptors() noexcept {
    has_failed_.store(true, std::memory_order_release);
    is_closed_by_agent_.store(true, std::memory_order_release);
    has_watch_thread_ = false; // A child does not have the threads of its parent.
    for (std::atomic<int>* descriptor : {&fd_, &agent_pidfd_}) {
        if (const int fd = descriptor->exchange(-1); fd >= 0) {
            close(fd);
        }
    }
}

int AgentConnection::fail(const char* reason, int close_timeout_ms) noexcept {
    if (!has_failed_.exchange(true, std::memory_order_acq_rel)) {
        log_line(LogLevel::warning, "the connection to the agent failed: %s", reason);
    }
    // When an agent exits, it withdraws its publications and then closes its end of the socket. Its NIC may access the
    // memory until then, so wait until the socket is closed. The wait has a limit, because an agent that hangs does not
    // close the socket.
    wait_until_closed_by_agent(close_timeout_ms);
    return -EREMOTEIO;
}

// If the agent is exiting, waits until its process has ended. The kernel closes the descriptors of a dying process in
// an unspecified order. So the agent's end of the socket may be closed while its NIC is still open and still writes to
// memory.
void AgentConnection::wait_for_agent_exit() noexcept {
    pollfd polled_pidfd{.fd = agent_pidfd_.load(), .events = POLLIN, .revents = 0};
    if (polled_pidfd.fd < 0 || poll(&polled_pidfd, 1, 0) > 0 || !is_exiting(agent_pid_)) {
        return;
    }
    if (poll(&polled_pidfd, 1, agent_exit_ms_max) <= 0) {
        log_line(LogLevel::warning, "the agent (process %d) is exiting, but has not ended after 10 s",
                 static_cast<int>(agent_pid_));
    }
}

// Waits until the agent has closed its end of the socket, at most `timeout_ms` (-1: no limit). Returns whether the
// agent has closed it.
bool AgentConnection::wait_until_closed_by_agent(int timeout_ms) noexcept {
    if (is_closed_by_agent()) {
        return true;
    }
    pollfd polled_socket{.fd = fd_.load(), .events = POLLRDHUP, .revents = 0};
    if (poll(&polled_socket, 1, timeout_ms) > 0 &&
        (polled_socket.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL)) != 0) {
        wait_for_agent_exit();
        is_closed_by_agent_.store(true, std::memory_order_release);
        has_failed_.store(true, std::memory_order_release);
    }
    return is_closed_by_agent();
}

bool AgentConnection::watch(Semaphore& semaphore) noexcept {
    const std::lock_guard lock(library_mutex());
    if (!has_watch_thread_ && !is_closed_by_agent() && !start_watch_thread()) {
        return false;
    }
    try {
        watched_semaphores_.push_back(&semaphore);
    } catch (const std::bad_alloc&) {
        return false;
    }
    if (is_closed_by_agent()) { // The watch thread may already have posted the other semaphores.
        post(semaphore);
    }
    return true;
}

void AgentConnection::unwatch(Semaphore& semaphore) noexcept {
    const std::lock_guard lock(library_mutex());
    std::erase(watched_semaphores_, &semaphore);
}

struct AgentConnection::WatchThreadContext {
    AgentConnection* connection;
    // Shared, because release() may still run when the connection is destroyed.
    std::shared_ptr<std::binary_semaphore> ended;
};

bool AgentConnection::start_watch_thread() noexcept {
    std::unique_ptr<WatchThreadContext> thread_context;
    try {
        watch_thread_ended_ = std::make_shared<std::binary_semaphore>(0);
        thread_context.reset(new WatchThreadContext{this, watch_thread_ended_});
    } catch (const std::bad_alloc&) {
        return false;
    }
    sigset_t all_signals, previous_mask;
    sigfillset(&all_signals);
    // The new thread inherits this mask, so that only threads of the application handle signals.
    pthread_sigmask(SIG_SETMASK, &all_signals, &previous_mask);
    pthread_t watch_thread{};
    const int status = pthread_create(
        &watch_thread, nullptr,
        [](void* argument) -> void* {
            pthread_setname_np(pthread_self(), "hf3fs-watch");
            const std::unique_ptr<WatchThreadContext> context(static_cast<WatchThreadContext*>(argument));
            context->connection->watch_socket();
            context->ended->release();
            return nullptr;
        },
        thread_context.get());
    pthread_sigmask(SIG_SETMASK, &previous_mask, nullptr);
    if (status != 0) {
        log_line(LogLevel::warning, "pthread_create() failed: %s. Waiting threads poll the agent instead",
                 ErrnoText(status).c_str());
    }
    has_watch_thread_ = status == 0;
    // Detach the thread, because it cannot always be joined: if a publication cannot be withdrawn, its connection is
    // never destroyed, and the thread runs until the process ends.
    if (has_watch_thread_) {
        static_cast<void>(thread_context.release()); // The thread owns the object now.
        pthread_detach(watch_thread);
    }
    return has_watch_thread_;
}

void AgentConnection::watch_socket() noexcept {
    while (!wait_until_closed_by_agent(-1)) {
    }
    const std::lock_guard lock(library_mutex());
    for (Semaphore* semaphore : watched_semaphores_) {
        post(*semaphore);
    }
}

int AgentConnection::send(const AgentHeader& header, std::span<const iovec> payload,
                          std::span<const int> descriptors) noexcept {
    std::array<iovec, 1 + payload_parts_max> parts;
    parts[0] = {const_cast<AgentHeader*>(&header), sizeof(header)};
    std::copy(payload.begin(), payload.end(), parts.begin() + 1);
    alignas(cmsghdr) char control_buffer[CMSG_SPACE(sizeof(int) * agent_descriptors_max)] = {};
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = 1 + payload.size();
    if (!descriptors.empty()) {
        message.msg_control = control_buffer;
        message.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
        cmsghdr* control_message = CMSG_FIRSTHDR(&message);
        control_message->cmsg_level = SOL_SOCKET;
        control_message->cmsg_type = SCM_RIGHTS;
        control_message->cmsg_len = CMSG_LEN(descriptors.size_bytes());
        std::memcpy(CMSG_DATA(control_message), descriptors.data(), descriptors.size_bytes());
    }
    while (sendmsg(fd_.load(), &message, MSG_NOSIGNAL) < 0) {
        if (errno == EBADF) { // One of the passed descriptors is not open, so nothing was sent.
            return -EBADF;
        }
        if (errno != EINTR) {
            return fail(ErrnoText(errno).c_str(), errno == EPIPE ? agent_close_ms_max : 0);
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
    ssize_t received_bytes = 0;
    while ((received_bytes = recvmsg(fd_.load(), &message, 0)) < 0) {
        if (errno != EINTR) {
            // After a timeout, the late reply would arrive in place of the reply to the next request, so do not use the
            // connection any more.
            return fail(errno == EAGAIN ? "no reply within 30 s" : ErrnoText(errno).c_str(), 0);
        }
    }
    if (received_bytes == 0) {
        return fail("the agent closed the socket", agent_close_ms_max);
    }
    const auto payload_bytes = static_cast<std::size_t>(received_bytes) - sizeof(header);
    if (static_cast<std::size_t>(received_bytes) < sizeof(header) ||
        (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0 || !is_valid_reply(header, request, payload_bytes)) {
        return fail("the reply is malformed", 0);
    }
    if (header.status != 0) {
        log_line(LogLevel::info, "the agent refused a request: %.*s", static_cast<int>(payload_bytes),
                 reinterpret_cast<const char*>(payload.data()));
        return -header.status;
    }
    if (payload_bytes != reply.size()) {
        return fail("the reply has the wrong length", 0);
    }
    std::copy_n(payload.begin(), payload_bytes, reply.begin()); // Not memcpy: an empty reply may have a null pointer.
    return 0;
}

int AgentConnection::exchange(AgentRequest type, std::span<const iovec> payload, std::span<const int> descriptors,
                              std::span<std::byte> reply) noexcept {
    std::size_t payload_bytes = 0;
    for (const iovec& part : payload) {
        payload_bytes += part.iov_len;
    }
    if (payload.size() > payload_parts_max || descriptors.size() > agent_descriptors_max ||
        payload_bytes > agent_message_bytes_max - sizeof(AgentHeader)) {
        return -E2BIG;
    }
    const AgentHeader header{.magic = agent_magic,
                             .version = agent_version,
                             .type = static_cast<std::uint16_t>(type),
                             .length = static_cast<std::uint32_t>(payload_bytes),
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
    // Check before locking: in a forked child, a thread that exists only in the parent may have locked the mutex.
    if (has_failed()) {
        return -EREMOTEIO;
    }
    const std::lock_guard lock(mutex_);
    return has_failed() ? -EREMOTEIO : exchange(type, payload, descriptors, reply);
}

int AgentConnection::exchange_hello() noexcept {
    AgentHello hello{};
    hello.pid = static_cast<std::uint32_t>(getpid());
    std::snprintf(hello.library, sizeof(hello.library), "hf3fs_api_shared " GDRKIT_VERSION);
    AgentHello reply_hello{};
    const iovec payload{&hello, sizeof(hello)};
    const int status = call(AgentRequest::hello, {&payload, 1}, {}, std::as_writable_bytes(std::span(&reply_hello, 1)));
    features_ = status == 0 ? reply_hello.features : 0;
    return status;
}

namespace {

// Connects to the socket of the mount's agent. The path of the socket may be too long for sockaddr_un, so connect
// through /proc/self/fd and a descriptor of the folder.
int connect_to_agent(const std::string& mount, int& socket_fd) noexcept {
    const int folder_fd = open((mount + "/3fs-virt").c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (folder_fd < 0) {
        return errno == ENOTDIR ? -ENOENT : -errno;
    }
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::snprintf(address.sun_path, sizeof(address.sun_path), "/proc/self/fd/%d/agent.sock", folder_fd);
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    int status = fd < 0 ? -errno : 0;
    if (status == 0) {
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &reply_timeout, sizeof(reply_timeout));
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &reply_timeout, sizeof(reply_timeout));
        while (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) < 0 && status == 0) {
            status = errno == EINTR ? 0 : errno == ECONNREFUSED || errno == EAGAIN ? -EREMOTEIO : -errno;
        }
    }
    close(folder_fd);
    if (status != 0) {
        if (fd >= 0) {
            close(fd);
        }
        return status;
    }
    socket_fd = fd;
    return 0;
}

int make_connection(const std::string& mount, std::shared_ptr<AgentConnection>& connection) {
    int fd = -1;
    if (const int status = connect_to_agent(mount, fd); status != 0) {
        return status;
    }
    std::unique_ptr<AgentConnection> new_connection(new (std::nothrow) AgentConnection(fd));
    if (new_connection == nullptr) {
        close(fd);
        return -ENOMEM;
    }
    {
        const std::lock_guard lock(library_mutex());
        connections().all_connections.insert(new_connection.get());
    }
    if (const int status = new_connection->exchange_hello(); status != 0) {
        return status;
    }
    connection = std::move(new_connection);
    return 0;
}

} // namespace

int find_agent_connection(const char* mount, std::shared_ptr<AgentConnection>& connection) noexcept {
    char* resolved_path = realpath(mount, nullptr);
    if (resolved_path == nullptr) {
        return errno == ENOTDIR ? -ENOENT : -errno;
    }
    const std::unique_ptr<char, decltype(&std::free)> path_owner(resolved_path, std::free);
    try {
        const std::string path(resolved_path);
        std::shared_ptr<AgentConnection> previous_connection;
        connections(); // Its first call locks library_mutex(), so it must come before the lock below.
        {
            const std::lock_guard lock(library_mutex());
            previous_connection = connections().by_mount[path].lock();
        }
        if (previous_connection == nullptr || previous_connection->has_failed() ||
            previous_connection->check_closed_by_agent()) {
            std::shared_ptr<AgentConnection> new_connection;
            if (const int status = make_connection(path, new_connection); status != 0) {
                return status;
            }
            // Another thread may have created a connection at the same time. Use that connection, unless it has failed.
            // The destructor of the unused connection locks library_mutex(), so declare the pointers outside the locked
            // block.
            std::shared_ptr<AgentConnection> selected_connection, current_connection;
            {
                const std::lock_guard lock(library_mutex());
                std::weak_ptr<AgentConnection>& entry = connections().by_mount[path];
                current_connection = entry.lock();
                selected_connection = current_connection == nullptr || current_connection == previous_connection ||
                                              current_connection->has_failed()
                                          ? new_connection
                                          : current_connection;
                entry = selected_connection;
            }
            log_line(LogLevel::info, "connected to the agent of %s", mount);
            connection = std::move(selected_connection);
            return 0;
        }
        connection = std::move(previous_connection);
        return 0;
    } catch (const std::bad_alloc&) {
        return -ENOMEM;
    }
}

} // namespace gdrkit::usrbio
