// Unix sockets that connect the processes of a domain and pass file descriptors (SCM_RIGHTS), and the control service,
// from which another process requests descriptors.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace gdrkit::twin {

// A file descriptor that is closed on destruction.
class Fd {
public:
    Fd() = default;
    explicit Fd(int fd) : fd_(fd) {}
    Fd(Fd&& other) noexcept : fd_(other.release()) {}
    Fd& operator=(Fd&& other) noexcept;
    Fd(const Fd&) = delete;
    Fd& operator=(const Fd&) = delete;
    ~Fd() { reset(); }
    [[nodiscard]] int get() const { return fd_; }
    [[nodiscard]] int release() {
        int fd = fd_;
        fd_ = -1;
        return fd;
    }
    void reset();
    explicit operator bool() const { return fd_ >= 0; }

private:
    int fd_ = -1;
};

// Listen on the abstract name "gdrkit-twins/<uid>/<domain>/<name>", close-on-exec. Return the socket or -errno:
// -EADDRINUSE if the name is taken.
int listen_on(std::string_view name);

// Connect to the listening socket of this name. Return the connected socket or -errno: -ECONNREFUSED if no process
// listens or the listener belongs to another user (SO_PEERCRED). The connect, and later reads and writes of the socket,
// time out after 10 s with EAGAIN.
int connect_to(std::string_view name);

// Reserve a name without listening on it. No other socket can then get the name, and each connect to it is refused.
// Return the socket or -errno, as listen_on does.
int reserve_name(std::string_view name);

// Open a socket that receives datagrams at this name, with the credentials of the sender. Return the socket or -errno,
// as listen_on does. Datagram sockets and listening sockets have separate namespaces.
int open_datagram_receiver(std::string_view name);

// Open a socket that sends datagrams. Return the socket or -errno.
int open_datagram_sender();

// Send the parts as one datagram to the receiver of this name, and do not wait. Return 0 or an errno: EAGAIN if the
// queue of the receiver is full, ECONNREFUSED if no process receives at the name.
int send_datagram(int socket, std::string_view name, std::span<const iovec> parts);

// Receive one datagram without waiting. *size_bytes is its size, even if the datagram is larger than the parts. Return
// 0 or an errno: EAGAIN if there is no datagram, EPERM if a process of another user sent the datagram, which is
// discarded.
int receive_datagram(int socket, std::span<const iovec> parts, std::size_t* size_bytes);

// Accept one connection. Return the socket or -errno.
int accept_from(int listener);

// Return whether the peer process belongs to the same user. The twins serve no other users.
bool is_same_user(int socket);

// Return the id that the peer process has in the PID namespace of this process; 0 if it is not visible there.
int get_peer_process_id(int socket);

// Send or receive exactly `size_bytes` bytes. Return false with errno set on error; EPIPE means end of file. SIGPIPE is
// never raised.
bool send_all(int socket, const void* data, std::size_t size_bytes);
bool recv_all(int socket, void* data, std::size_t size_bytes);

// Send or receive one message that carries up to 64 file descriptors. Received descriptors are close-on-exec.
bool send_fds(int socket, std::span<const int> fds);
// Return false with errno EPROTO if the message does not carry exactly `count` descriptors.
bool recv_fds(int socket, std::size_t count, std::vector<Fd>* fds);

// Register the handler for one type of request to this process's control service. The service is one thread, started at
// the first registration; its socket name vanishes with the process. The thread calls one handler at a time and holds
// no lock meanwhile. A handler fills `reply` and `fds`; the service closes the descriptors after it has sent them. A
// request of an unregistered type gets an empty reply.
using Handler =
    std::function<void(std::span<const std::byte> request, std::vector<std::byte>* reply, std::vector<Fd>* fds)>;
void register_handler(std::uint32_t type, Handler handler);
// Return the id of this process's control service, which is unique in the domain. Start the service if it is not
// running.
std::uint64_t read_control_service_id();

// Send a request to the control service with this id, in this or another process, and wait for the reply. Return false
// if the process of the service is gone or stopped, or has no handler for the type.
bool send_control_request(std::uint64_t service_id, std::uint32_t type, std::span<const std::byte> request,
                          std::vector<std::byte>* reply, std::vector<Fd>* fds);

// Types of control requests.
inline constexpr std::uint32_t dmabuf_extents_request = 1;
inline constexpr std::uint32_t cuda_ipc_request = 2;
inline constexpr std::uint32_t cuda_ipc_event_request = 3;

} // namespace gdrkit::twin
