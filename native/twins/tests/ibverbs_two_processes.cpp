// Tests of the software twin of libibverbs: traffic between two processes, and the errors after one process is killed.
#include <signal.h>

#include "model/dmabuf.hpp"
#include "tests/ibverbs_support.hpp"
#include "tests/peer_process.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::tests;

namespace {

constexpr std::size_t target_bytes = 8UL << 20;

// Messages between the two processes.
constexpr char target_is_ready = 'r', check_data = 'c', data_is_correct = 'k', target_may_exit = 'e';

// The connection data of the target process.
struct Target {
    QueuePairAddress address;
    std::uint64_t remote_address;
    std::uint32_t rkey;
    std::uint32_t dmabuf_rkey;
};

// The target process runs this function. It serves requests until it gets the message check_data, checks the data, and
// serves requests until it gets target_may_exit.
int run_target(int socket) {
    Endpoint endpoint(1);
    Buffer host(endpoint.pd, target_bytes);
    const Fd device(make_device_memory(target_bytes));
    const Extent extent{device.get(), 0, target_bytes};
    const Fd dmabuf(export_dmabuf({&extent, 1}));
    ibv_mr* const dmabuf_mr = ibv_reg_dmabuf_mr(endpoint.pd, 0, target_bytes, 0, dmabuf.get(), read_write_access);
    CHECK(dmabuf_mr != nullptr);
    send_value(socket, Target{endpoint.address(), host.address_at(), host.mr->rkey, dmabuf_mr->rkey});
    endpoint.connect(receive_value<QueuePairAddress>(socket));
    CHECK(endpoint.post_receive(1, {host.sge(0, 4096)}) == 0);
    send_value(socket, target_is_ready);
    CHECK(receive_value<char>(socket) == check_data);
    const ibv_wc wc = endpoint.expect_completion(1, IBV_WC_SUCCESS);
    CHECK(wc.byte_len == 1000 && has_pattern(host.bytes, 1000));
    CHECK(has_pattern(host.bytes + 8191, target_bytes - 8191));
    std::vector<std::uint8_t> device_content(target_bytes);
    CHECK(pread(device.get(), device_content.data(), device_content.size(), 0) ==
          static_cast<ssize_t>(device_content.size()));
    CHECK(has_pattern(device_content.data() + 3, target_bytes - 3));
    send_value(socket, data_is_correct);
    receive_value<char>(socket);
    CHECK(ibv_dereg_mr(dmabuf_mr) == 0);
    return 0;
}

void transfer_and_check(Endpoint* endpoint, const Target& target) {
    Buffer source(endpoint->pd, target_bytes), readback(endpoint->pd, target_bytes);
    fill_pattern(source.bytes, source.size_bytes);
    CHECK(endpoint->post(make_request(1, IBV_WR_SEND), {source.sge(0, 1000)}) == 0);
    CHECK(endpoint->post(make_request(2, IBV_WR_RDMA_WRITE, target.remote_address + 8191, target.rkey),
                         {source.sge(0, target_bytes - 8191)}) == 0);
    CHECK(endpoint->post(make_request(3, IBV_WR_RDMA_WRITE, 3, target.dmabuf_rkey),
                         {source.sge(0, target_bytes - 3)}) == 0);
    CHECK(endpoint->post(make_request(4, IBV_WR_RDMA_READ, 3, target.dmabuf_rkey),
                         {readback.sge(0, target_bytes - 3)}) == 0);
    for (std::uint64_t id = 1; id <= 4; ++id) {
        endpoint->expect_completion(id, IBV_WC_SUCCESS);
    }
    CHECK(has_pattern(readback.bytes, target_bytes - 3));
}

void test_data_arrives_in_other_process() {
    const PeerProcess peer;
    Endpoint endpoint(0);
    const auto target = receive_value<Target>(peer.socket.get());
    send_value(peer.socket.get(), endpoint.address());
    endpoint.connect(target.address);
    CHECK(receive_value<char>(peer.socket.get()) == target_is_ready);
    transfer_and_check(&endpoint, target);
    send_value(peer.socket.get(), check_data);
    CHECK(receive_value<char>(peer.socket.get()) == data_is_correct);
    send_value(peer.socket.get(), target_may_exit);
    CHECK(peer.wait() == 0);
}

void test_killed_target_exceeds_retries() {
    const PeerProcess peer;
    Endpoint endpoint(0);
    const auto target = receive_value<Target>(peer.socket.get());
    send_value(peer.socket.get(), endpoint.address());
    endpoint.connect(target.address);
    CHECK(receive_value<char>(peer.socket.get()) == target_is_ready);
    Buffer source(endpoint.pd, 64);
    CHECK(endpoint.post(make_request(1, IBV_WR_RDMA_WRITE, target.remote_address, target.rkey), {source.sge(0, 64)}) ==
          0);
    endpoint.expect_completion(1, IBV_WC_SUCCESS);
    CHECK(kill(peer.pid, SIGKILL) == 0);
    CHECK(WIFSIGNALED(peer.wait()));
    CHECK(endpoint.post(make_request(2, IBV_WR_RDMA_WRITE, target.remote_address, target.rkey), {source.sge(0, 64)}) ==
          0);
    CHECK(endpoint.post(make_request(3, IBV_WR_SEND, 0, 0, 0), {}) == 0);
    endpoint.expect_completion(2, IBV_WC_RETRY_EXC_ERR);
    endpoint.expect_completion(3, IBV_WC_WR_FLUSH_ERR);
}

// A peer that sends an invalid handshake is disconnected. Other peers are not affected.
void test_invalid_handshakes_affect_no_other_peer() {
    Endpoint endpoint(0), second_endpoint(0);
    connect(&endpoint, &second_endpoint);
    std::string name = "qp.";
    char digits[8];
    for (const std::uint8_t byte : endpoint.address().gid.raw) {
        std::snprintf(digits, sizeof digits, "%02x", byte);
        name += digits;
    }
    char qp_num_text[8];
    std::snprintf(qp_num_text, sizeof qp_num_text, ".%06x", endpoint.qp->qp_num);
    name += qp_num_text;
    for (int count = 0; count < 40; ++count) {
        const Fd untrusted_peer(connect_to(name));
        CHECK(untrusted_peer);
        const std::vector<char> noise(64, static_cast<char>(count));
        char reply_byte = 0;
        send_all(untrusted_peer.get(), noise.data(), noise.size());
        CHECK(!recv_all(untrusted_peer.get(), &reply_byte, 1));
    }
    // Many silent peers do not prevent the connection of the legitimate peer.
    std::vector<Fd> silent_peers;
    for (int count = 0; count < 40; ++count) {
        silent_peers.emplace_back(connect_to(name));
        CHECK(silent_peers.back());
    }
    CHECK(endpoint.post_receive(1, {}) == 0);
    CHECK(second_endpoint.post(make_request(2, IBV_WR_SEND), {}) == 0);
    endpoint.expect_completion(1, IBV_WC_SUCCESS);
}

} // namespace

int main(int argument_count, char** arguments) {
    isolate_from_other_processes();
    if (argument_count > 1) {
        return run_target(std::atoi(arguments[1]));
    }
    test_data_arrives_in_other_process();
    test_killed_target_exceeds_retries();
    test_invalid_handshakes_affect_no_other_peer();
    return 0;
}
