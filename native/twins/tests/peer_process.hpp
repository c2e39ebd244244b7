// A second process for a test of the software twins: the same program, started again with a socket to the first process
// as its argument.
#pragma once

#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#include "model/sockets.hpp"
#include "tests/check.hpp"

namespace gdrkit::twin::tests {

template <typename Message> void send_value(int socket, const Message& message) {
    CHECK(send_all(socket, &message, sizeof message));
}

template <typename Message> Message receive_value(int socket) {
    Message message{};
    CHECK(recv_all(socket, &message, sizeof message));
    return message;
}

// The second process, and the socket that is connected to it. The first argument of the process is the number of the
// file descriptor of its end of the socket pair.
struct PeerProcess {
    pid_t pid = 0;
    Fd socket;
    PeerProcess() {
        int sockets[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
        socket = Fd(sockets[0]);
        const Fd peer_socket(sockets[1]);
        std::string program = "/proc/self/exe", socket_text = std::to_string(peer_socket.get());
        char* arguments[] = {program.data(), socket_text.data(), nullptr};
        posix_spawn_file_actions_t actions;
        posix_spawn_file_actions_init(&actions);
        posix_spawn_file_actions_addclose(&actions, sockets[0]);
        CHECK(posix_spawn(&pid, "/proc/self/exe", &actions, nullptr, arguments, environ) == 0);
        posix_spawn_file_actions_destroy(&actions);
    }
    // Wait until the process ends, and return its wait status.
    [[nodiscard]] int wait() const {
        int status = 0;
        CHECK(waitpid(pid, &status, 0) == pid);
        return status;
    }
};

} // namespace gdrkit::twin::tests
