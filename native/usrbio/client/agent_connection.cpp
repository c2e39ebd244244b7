#include "usrbio/client/agent_connection.hpp"

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

constexpr timeval reply_limit{.tv_sec = 30, .tv_usec = 0};
constexpr int closing_ms = 30000;
constexpr int death_ms = 10000;
constexpr std::size_t payload_parts_max = 4;

struct Connections {
    // Kept by what needs it: publications, rings and registered files. With the last of them it closes.
    std::map<std::string, std::weak_ptr<AgentConnection>, std::less<>> by_mount;
    std::set<AgentConnection*> all; // Those too that rings keep after the mount got a new one.
};

Connections& connections() {
    static auto* the = [] {
        auto* made = new Connections;
        in_forked_child([] {
            for (AgentConnection* connection : connections().all) {
                connection->abandon();
            }
        });
        return made;
    }();
    return *the;
}

// Of /proc/<pid>/stat, field 9 (proc(5)): set before a process closes anything.
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
    const char* name_end = std::strrchr(text, ')'); // The name may hold anything; its last bracket ends it.
    unsigned long flags = 0;
    return name_end != nullptr && std::sscanf(name_end + 1, " %*c %*d %*d %*d %*d %*d %lu", &flags) == 1 &&
           (flags & exiting) != 0;
}

bool well_formed(const AgentHeader& reply, const AgentHeader& request, std::size_t bytes) noexcept {
    return reply.magic == agent_magic && reply.version == agent_version && reply.type == request.type &&
           reply.sequence == request.sequence && reply.length == bytes && reply.status >= 0 && reply.status < 4096 &&
           reply.descriptors == 0;
}

} // namespace

AgentConnection::AgentConnection(int fd) noexcept : fd_(fd) {
    ucred peer{};
    socklen_t bytes = sizeof(peer);
    // Who listens; 0 in another PID namespace, whose end cannot be watched.
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && peer.pid > 0) {
        agent_ = peer.pid;
        process_.store(static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0)));
    }
}

AgentConnection::~AgentConnection() {
    if (is_watched_) { // Nobody else has the connection any more.
        shutdown(fd_.load(), SHUT_RDWR);
        watch_ended_->acquire();
    }
    {
        const std::lock_guard lock(library_mutex());
        connections().all.erase(this);
    }
    abandon();
}

void AgentConnection::abandon() noexcept {
    ended_.store(true, std::memory_order_release);
    gone_.store(true, std::memory_order_release);
    is_watched_ = false; // A child has no threads of its parent.
    for (std::atomic<int>* held : {&fd_, &process_}) {
        if (const int fd = held->exchange(-1); fd >= 0) {
            close(fd);
        }
    }
}

int AgentConnection::end(const char* why, int patience_ms) noexcept {
    if (!ended_.exchange(true, std::memory_order_acq_rel)) {
        log_line(LogLevel::warning, "the connection to the agent ended: %s", why);
    }
    // An agent that ends takes no request any more while it takes back what it has: its end of the socket says when
    // that is done. One that only hangs may go on where it was.
    gone_within(patience_ms);
    return -EREMOTEIO;
}

// The kernel closes the descriptors of a process that dies in an order of its own: this socket may be closed while the
// NIC still is not, and bytes arrive. The process counts as dead only after all of that.
void AgentConnection::await_death() noexcept {
    pollfd death{.fd = process_.load(), .events = POLLIN, .revents = 0};
    if (death.fd < 0 || poll(&death, 1, 0) > 0 || !is_exiting(agent_)) {
        return;
    }
    if (poll(&death, 1, death_ms) <= 0) {
        log_line(LogLevel::warning, "the agent, process %d, dies and does not end", static_cast<int>(agent_));
    }
}

bool AgentConnection::gone_within(int milliseconds) noexcept {
    if (gone()) {
        return true;
    }
    pollfd state{.fd = fd_.load(), .events = POLLRDHUP, .revents = 0};
    if (poll(&state, 1, milliseconds) > 0 && (state.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL)) != 0) {
        await_death();
        gone_.store(true, std::memory_order_release);
        ended_.store(true, std::memory_order_release);
    }
    return gone();
}

bool AgentConnection::watch(Semaphore& sleeper) noexcept {
    const std::lock_guard lock(library_mutex());
    if (!is_watched_ && !gone() && !start_watching()) {
        return false;
    }
    try {
        sleepers_.push_back(&sleeper);
    } catch (const std::bad_alloc&) {
        return false;
    }
    if (gone()) { // And the thread may have posted all that it knew.
        post(sleeper);
    }
    return true;
}

void AgentConnection::forget(Semaphore& sleeper) noexcept {
    const std::lock_guard lock(library_mutex());
    std::erase(sleepers_, &sleeper);
}

struct AgentConnection::Watch {
    AgentConnection* connection;
    std::shared_ptr<std::binary_semaphore> ended; // Outlives the connection for as long as it is being released.
};

bool AgentConnection::start_watching() noexcept {
    std::unique_ptr<Watch> watch;
    try {
        watch_ended_ = std::make_shared<std::binary_semaphore>(0);
        watch.reset(new Watch{this, watch_ended_});
    } catch (const std::bad_alloc&) {
        return false;
    }
    sigset_t all, before;
    sigfillset(&all);
    // The application's signals are for its own threads.
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t watcher{};
    const int status = pthread_create(
        &watcher, nullptr,
        [](void* given) -> void* {
            pthread_setname_np(pthread_self(), "hf3fs-watch");
            const std::unique_ptr<Watch> own(static_cast<Watch*>(given));
            own->connection->watch_socket();
            own->ended->release();
            return nullptr;
        },
        watch.get());
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (status != 0) {
        log_line(LogLevel::warning, "no thread that watches the agent: %s", std::strerror(status));
    }
    is_watched_ = status == 0;
    if (is_watched_) { // Publications that could not be taken back keep a connection for ever, and nobody joins then.
        watch.release();
        pthread_detach(watcher);
    }
    return is_watched_;
}

void AgentConnection::watch_socket() noexcept {
    while (!gone_within(-1)) {
    }
    const std::lock_guard lock(library_mutex());
    for (Semaphore* sleeper : sleepers_) {
        post(*sleeper);
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
        if (errno == EBADF) { // A descriptor to pass on is none, and nothing was sent.
            return -EBADF;
        }
        if (errno != EINTR) {
            return end(std::strerror(errno), errno == EPIPE ? closing_ms : 0);
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
            // A reply that comes later would be taken for that of the next request.
            return end(errno == EAGAIN ? "no answer within 30 s" : std::strerror(errno), 0);
        }
    }
    if (bytes == 0) {
        return end("the agent closed it", closing_ms);
    }
    const auto length = static_cast<std::size_t>(bytes) - sizeof(header);
    if (static_cast<std::size_t>(bytes) < sizeof(header) || (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0 ||
        !well_formed(header, request, length)) {
        return end("a malformed reply", 0);
    }
    if (header.status != 0) {
        log_line(LogLevel::info, "the agent refuses: %.*s", static_cast<int>(length),
                 reinterpret_cast<const char*>(payload.data()));
        return -header.status;
    }
    if (length != reply.size()) {
        return end("a reply of the wrong length", 0);
    }
    std::copy_n(payload.begin(), length, reply.begin()); // Of no bytes too, where memcpy must not be asked.
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
    if (ended()) { // Before the mutex: in a forked child another thread of the parent may have held it.
        return -EREMOTEIO;
    }
    const std::lock_guard lock(mutex_);
    return ended() ? -EREMOTEIO : exchange(type, payload, descriptors, reply);
}

namespace {

// The socket, connected. The path of a mount may be longer than an address of a socket: its folder is opened first.
int connect_to(const std::string& mount, int& connected) noexcept {
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
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &reply_limit, sizeof(reply_limit));
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &reply_limit, sizeof(reply_limit));
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
    connected = fd;
    return 0;
}

int greet(AgentConnection& connection) noexcept {
    AgentHello hello{};
    hello.pid = static_cast<std::uint32_t>(getpid());
    std::snprintf(hello.library, sizeof(hello.library), "hf3fs_api_shared " GDRKIT_VERSION);
    AgentHello answer{};
    const iovec payload{&hello, sizeof(hello)};
    return connection.call(AgentRequest::hello, {&payload, 1}, {}, std::as_writable_bytes(std::span(&answer, 1)));
}

int make_connection(const std::string& mount, std::shared_ptr<AgentConnection>& connection) {
    int fd = -1;
    if (const int status = connect_to(mount, fd); status != 0) {
        return status;
    }
    std::unique_ptr<AgentConnection> made(new (std::nothrow) AgentConnection(fd));
    if (made == nullptr) {
        close(fd);
        return -ENOMEM;
    }
    {
        const std::lock_guard lock(library_mutex());
        connections().all.insert(made.get());
    }
    if (const int status = greet(*made); status != 0) {
        return status;
    }
    connection = std::move(made);
    return 0;
}

} // namespace

int agent_connection(const char* mount, std::shared_ptr<AgentConnection>& connection) noexcept {
    char* real = realpath(mount, nullptr);
    if (real == nullptr) {
        return errno == ENOTDIR ? -ENOENT : -errno;
    }
    const std::unique_ptr<char, decltype(&std::free)> owner(real, std::free);
    try {
        const std::string path(real);
        std::shared_ptr<AgentConnection> known;
        connections();
        {
            const std::lock_guard lock(library_mutex());
            known = connections().by_mount[path].lock();
        }
        if (known == nullptr || known->ended() || known->look_gone()) {
            std::shared_ptr<AgentConnection> made;
            if (const int status = make_connection(path, made); status != 0) {
                return status;
            }
            // Two threads may have made one each: the first stays, unless it ended in the meantime. A connection that
            // closes does so after the lock.
            std::shared_ptr<AgentConnection> kept, other;
            {
                const std::lock_guard lock(library_mutex());
                std::weak_ptr<AgentConnection>& place = connections().by_mount[path];
                other = place.lock();
                kept = other == nullptr || other == known || other->ended() ? made : other;
                place = kept;
            }
            connection = std::move(kept);
            return 0;
        }
        connection = std::move(known);
        return 0;
    } catch (const std::bad_alloc&) {
        return -ENOMEM;
    }
}

} // namespace gdrkit::usrbio
