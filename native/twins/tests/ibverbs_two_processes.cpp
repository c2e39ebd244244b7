// Tests of traffic between two spawned processes, and of the errors after one of them is killed.
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "model/dmabuf.hpp"
#include "model/sockets.hpp"
#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::tests;

namespace {

constexpr std::size_t target_bytes = 8UL << 20;

// The connection data of the target process.
struct Target {
    Address address;
    std::uint64_t remote_address;
    std::uint32_t rkey;
    std::uint32_t dmabuf_rkey;
};

template <typename Message> void send_value(int socket, const Message& message) {
    CHECK(send_all(socket, &message, sizeof message));
}

template <typename Message> Message receive_value(int socket) {
    Message message{};
    CHECK(recv_all(socket, &message, sizeof message));
    return message;
}

// Body of the target process: serves until told to check the data, then until told to exit.
int run_target(int socket) {
    Endpoint side(1);
    Buffer host(side.pd, target_bytes);
    const Fd device(make_device_memory(target_bytes));
    const Extent whole{device.get(), 0, target_bytes};
    const Fd dmabuf(export_dmabuf({&whole, 1}));
    ibv_mr* const mr = ibv_reg_dmabuf_mr(side.pd, 0, target_bytes, 0, dmabuf.get(), all_access);
    CHECK(mr != nullptr);
    send_value(socket, Target{side.address(), host.at(), host.mr->rkey, mr->rkey});
    side.connect(receive_value<Address>(socket));
    CHECK(side.post_receive(1, {host.part(0, 4096)}) == 0);
    send_value(socket, 'r');
    CHECK(receive_value<char>(socket) == 'c');
    const ibv_wc wc = side.expect_completion(1, IBV_WC_SUCCESS);
    CHECK(wc.byte_len == 1000 && has_pattern(host.bytes, 1000));
    CHECK(has_pattern(host.bytes + 8191, target_bytes - 8191));
    std::vector<std::uint8_t> seen(target_bytes);
    CHECK(pread(device.get(), seen.data(), seen.size(), 0) == static_cast<ssize_t>(seen.size()));
    CHECK(has_pattern(seen.data() + 3, target_bytes - 3));
    send_value(socket, 'k');
    receive_value<char>(socket);
    CHECK(ibv_dereg_mr(mr) == 0);
    return 0;
}

struct Peer {
    pid_t pid = 0;
    Fd socket;
    Peer() {
        int ends[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
        socket = Fd(ends[0]);
        const Fd given(ends[1]);
        std::string self = "/proc/self/exe", number = std::to_string(given.get());
        char* arguments[] = {self.data(), number.data(), nullptr};
        posix_spawn_file_actions_t actions;
        posix_spawn_file_actions_init(&actions);
        posix_spawn_file_actions_addclose(&actions, ends[0]);
        CHECK(posix_spawn(&pid, "/proc/self/exe", &actions, nullptr, arguments, environ) == 0);
        posix_spawn_file_actions_destroy(&actions);
    }
    int wait() const {
        int status = 0;
        CHECK(waitpid(pid, &status, 0) == pid);
        return status;
    }
};

void test_traffic(Endpoint* side, const Target& target) {
    Buffer from(side->pd, target_bytes), back(side->pd, target_bytes);
    fill_pattern(from.bytes, from.size);
    CHECK(side->post(request(1, IBV_WR_SEND), {from.part(0, 1000)}) == 0);
    CHECK(side->post(request(2, IBV_WR_RDMA_WRITE, target.remote_address + 8191, target.rkey),
                     {from.part(0, target_bytes - 8191)}) == 0);
    CHECK(side->post(request(3, IBV_WR_RDMA_WRITE, 3, target.dmabuf_rkey), {from.part(0, target_bytes - 3)}) == 0);
    CHECK(side->post(request(4, IBV_WR_RDMA_READ, 3, target.dmabuf_rkey), {back.part(0, target_bytes - 3)}) == 0);
    for (std::uint64_t id = 1; id <= 4; ++id) {
        side->expect_completion(id, IBV_WC_SUCCESS);
    }
    CHECK(has_pattern(back.bytes, target_bytes - 3));
}

void test_two_processes() {
    const Peer peer;
    Endpoint side(0);
    const auto target = receive_value<Target>(peer.socket.get());
    send_value(peer.socket.get(), side.address());
    side.connect(target.address);
    CHECK(receive_value<char>(peer.socket.get()) == 'r');
    test_traffic(&side, target);
    send_value(peer.socket.get(), 'c');
    CHECK(receive_value<char>(peer.socket.get()) == 'k');
    send_value(peer.socket.get(), 'e');
    CHECK(peer.wait() == 0);
}

void test_target_killed() {
    const Peer peer;
    Endpoint side(0);
    const auto target = receive_value<Target>(peer.socket.get());
    send_value(peer.socket.get(), side.address());
    side.connect(target.address);
    CHECK(receive_value<char>(peer.socket.get()) == 'r');
    Buffer from(side.pd, 64);
    CHECK(side.post(request(1, IBV_WR_RDMA_WRITE, target.remote_address, target.rkey), {from.part(0, 64)}) == 0);
    side.expect_completion(1, IBV_WC_SUCCESS);
    CHECK(kill(peer.pid, SIGKILL) == 0);
    peer.wait();
    CHECK(side.post(request(2, IBV_WR_RDMA_WRITE, target.remote_address, target.rkey), {from.part(0, 64)}) == 0);
    CHECK(side.post(request(3, IBV_WR_SEND, 0, 0, 0), {}) == 0);
    side.expect_completion(2, IBV_WC_RETRY_EXC_ERR);
    side.expect_completion(3, IBV_WC_WR_FLUSH_ERR);
}

// A client that does not speak the protocol is disconnected without effect on others.
void test_foreign_clients() {
    Endpoint side(0), other(0);
    connect(&side, &other);
    std::string name = "qp.";
    char digits[8];
    for (const std::uint8_t byte : side.address().gid.raw) {
        std::snprintf(digits, sizeof digits, "%02x", byte);
        name += digits;
    }
    std::snprintf(digits, sizeof digits, ".%06x", side.qp->qp_num);
    for (int count = 0; count < 40; ++count) {
        const Fd stranger(connect_to(name + digits));
        CHECK(stranger);
        const std::vector<char> noise(64, static_cast<char>(count));
        char answer = 0;
        send_all(stranger.get(), noise.data(), noise.size());
        CHECK(!recv_all(stranger.get(), &answer, 1));
    }
    // Any number of silent clients cannot keep the legitimate peer out.
    std::vector<Fd> silent;
    for (int count = 0; count < 40; ++count) {
        silent.emplace_back(connect_to(name + digits));
        CHECK(silent.back());
    }
    CHECK(side.post_receive(1, {}) == 0);
    CHECK(other.post(request(2, IBV_WR_SEND), {}) == 0);
    side.expect_completion(1, IBV_WC_SUCCESS);
}

} // namespace

int main(int count, char** arguments) {
    use_own_domain();
    if (count > 1) {
        return run_target(std::atoi(arguments[1]));
    }
    test_two_processes();
    test_target_killed();
    test_foreign_clients();
    return 0;
}
