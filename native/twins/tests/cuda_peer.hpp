// A second process for the tests of the CUDA twin, connected by a socket. It executes the test program again, because a
// forked child cannot use the CUDA driver of its parent.
#pragma once

#include <sys/socket.h>

#include "cuda_driver.hpp"
#include "model/sockets.hpp"

namespace gdrkit::twin::cuda {

// The second process. Its destructor waits until the process ends, and checks that it exited with 0 or was killed.
class ChildProcess {
public:
    // Run this executable again, with the argument "peer" and the descriptor of one end of a socket pair.
    ChildProcess() {
        int sockets[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
        std::fflush(nullptr);
        child_ = fork();
        CHECK(child_ >= 0);
        if (child_ == 0) {
            close(sockets[0]);
            const std::string socket_text = std::to_string(sockets[1]);
            execl("/proc/self/exe", "peer", "peer", socket_text.c_str(), nullptr);
            _exit(127);
        }
        close(sockets[1]);
        socket_ = sockets[0];
    }
    ChildProcess(const ChildProcess&) = delete;
    ChildProcess& operator=(const ChildProcess&) = delete;
    ~ChildProcess() {
        close(socket_);
        int status = 0;
        CHECK(waitpid(child_, &status, 0) == child_);
        CHECK(was_killed_ || (WIFEXITED(status) && WEXITSTATUS(status) == 0));
    }
    [[nodiscard]] int socket() const { return socket_; }
    void kill_and_wait() {
        was_killed_ = true;
        CHECK(kill(child_, SIGKILL) == 0);
        // End of file shows that the kernel has closed all descriptors of the process.
        char byte = 0;
        CHECK(recv(socket_, &byte, 1, 0) == 0);
    }

private:
    pid_t child_ = -1;
    int socket_ = -1;
    bool was_killed_ = false;
};

template <typename Value> void send_value(int socket, const Value& value) {
    CHECK(send_all(socket, &value, sizeof value));
}
template <typename Value> Value receive_value(int socket) {
    Value value{};
    CHECK(recv_all(socket, &value, sizeof value));
    return value;
}

} // namespace gdrkit::twin::cuda
