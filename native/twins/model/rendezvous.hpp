// How the processes of a domain meet: abstract unix stream sockets, file descriptors over SCM_RIGHTS.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace gdrkit::twin {

// A file descriptor with an owner.
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

// Listens on the abstract name "gdrkit-twins/<uid>/<domain>/<name>", close-on-exec. -errno when the name is taken
// (EADDRINUSE) or refused. A name of a queue pair ("qp.") lies in the folder GDRKIT_TWINS_FABRIC instead, where there
// is one: abstract names end at a network namespace.
int listen_on(std::string_view name);

// Takes a name out of that folder; nothing is left of any other by itself.
void forget(std::string_view name);

// Connects to that name. -ECONNREFUSED when nobody listens, or when the listener is of another user (SO_PEERCRED is
// checked). What waits for the other side, here and on the socket, gives up after 10 s with EAGAIN.
int connect_to(std::string_view name);

// Accepts one connection; -errno.
int accept_from(int listener);

// Whether the process at the other end is of the same user; nobody else is served.
bool same_user(int socket);

// Whole messages; false on end of file or error (errno is set; EPIPE on end of file). SIGPIPE is never raised.
bool send_all(int socket, const void* data, std::size_t size);
bool recv_all(int socket, void* data, std::size_t size);

// One small message with file descriptors (at most 64). recv gives descriptors close-on-exec.
bool send_fds(int socket, std::span<const int> fds);
// errno EPROTO when another number of descriptors came than `count`.
bool recv_fds(int socket, std::size_t count, std::vector<Fd>* fds);

// The control service of this library in this process: one thread that answers requests of the domain's processes.
// Started at the first `serve`; survives nothing: the name vanishes with the process. `handler` runs on that thread
// (several requests are served one after another; no lock of this file is held) with the request's bytes; it fills
// `reply` and `fds` (its own duplicates, closed once sent). A request type that nobody serves answers with an empty
// reply. The name of the service is `control_name()`, unique in the domain.
using Handler =
    std::function<void(std::span<const std::byte> request, std::vector<std::byte>* reply, std::vector<Fd>* fds)>;
void serve(std::uint32_t type, Handler handler);
std::uint64_t control_name();

// Asks the control service `name` of some process (also this one). False when that process is gone, is stopped or does
// not serve the type.
bool ask(std::uint64_t name, std::uint32_t type, std::span<const std::byte> request, std::vector<std::byte>* reply,
         std::vector<Fd>* fds);

// Types of requests.
inline constexpr std::uint32_t ask_dmabuf_extents = 1;
inline constexpr std::uint32_t ask_cuda_ipc = 2;

} // namespace gdrkit::twin
