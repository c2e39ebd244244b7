// Tests of the software twin of libibverbs: transfers between two processes, the errors after the target process is
// killed, and peers that send an invalid handshake.
#include <signal.h>

#include "model/dmabuf.hpp"
#include "tests/ibverbs_support.hpp"
#include "tests/peer_process.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::tests;

namespace {

constexpr std::size_t region_bytes = 8UL << 20;
// Size of the sent message, and the offsets in the regions at which the RDMA writes begin.
constexpr std::size_t message_bytes = 1000, host_offset = 8191, dmabuf_offset = 3;

// One-byte messages between the two processes. The target process sends target_is_ready and data_is_correct, and the
// first process sends the others.
constexpr char target_is_ready = 'r', check_data = 'c', data_is_correct = 'k', target_may_exit = 'e';

// The first message of the target process. The target process has a region in host memory, and a region in a dma-buf of
// device memory. The second region begins at the remote address 0.
struct TargetAddresses {
    QueuePairAddress queue_pair;
    std::uint64_t host_address;
    std::uint32_t host_rkey;
    std::uint32_t dmabuf_rkey;
};

// The target process runs this function. It makes both regions, waits for the message check_data, checks the received
// and written data, and ends after target_may_exit.
int run_target(int socket) {
    Endpoint endpoint(1);
    Buffer host_buffer(endpoint.pd, region_bytes);
    const Fd device_memory(make_device_memory(region_bytes));
    const Extent extent{device_memory.get(), 0, region_bytes};
    const Fd dmabuf_fd(export_dmabuf({&extent, 1}));
    ibv_mr* const dmabuf_mr = ibv_reg_dmabuf_mr(endpoint.pd, 0, region_bytes, 0, dmabuf_fd.get(), read_write_access);
    CHECK(dmabuf_mr != nullptr);
    send_value(socket,
               TargetAddresses{endpoint.address(), host_buffer.address_at(), host_buffer.mr->rkey, dmabuf_mr->rkey});
    endpoint.connect(receive_value<QueuePairAddress>(socket));
    CHECK(endpoint.post_receive(1, {host_buffer.sge(0, 4096)}) == 0);
    send_value(socket, target_is_ready);
    CHECK(receive_value<char>(socket) == check_data);
    const ibv_wc wc = endpoint.expect_completion(1, IBV_WC_SUCCESS);
    CHECK(wc.byte_len == message_bytes && has_pattern(host_buffer.bytes, message_bytes));
    CHECK(has_pattern(host_buffer.bytes + host_offset, region_bytes - host_offset));
    std::vector<std::uint8_t> device_content(region_bytes);
    CHECK(pread(device_memory.get(), device_content.data(), device_content.size(), 0) ==
          static_cast<ssize_t>(device_content.size()));
    CHECK(has_pattern(device_content.data() + dmabuf_offset, region_bytes - dmabuf_offset));
    send_value(socket, data_is_correct);
    receive_value<char>(socket);
    CHECK(ibv_dereg_mr(dmabuf_mr) == 0);
    return 0;
}

// Send a message, write to both regions, read the dma-buf back, and check what was read.
void transfer_and_check(Endpoint* endpoint, const TargetAddresses& target) {
    Buffer source(endpoint->pd, region_bytes), readback(endpoint->pd, region_bytes);
    fill_pattern(source.bytes, source.size_bytes);
    CHECK(endpoint->post(make_request(1, IBV_WR_SEND), {source.sge(0, message_bytes)}) == 0);
    CHECK(endpoint->post(make_request(2, IBV_WR_RDMA_WRITE, target.host_address + host_offset, target.host_rkey),
                         {source.sge(0, region_bytes - host_offset)}) == 0);
    CHECK(endpoint->post(make_request(3, IBV_WR_RDMA_WRITE, dmabuf_offset, target.dmabuf_rkey),
                         {source.sge(0, region_bytes - dmabuf_offset)}) == 0);
    CHECK(endpoint->post(make_request(4, IBV_WR_RDMA_READ, dmabuf_offset, target.dmabuf_rkey),
                         {readback.sge(0, region_bytes - dmabuf_offset)}) == 0);
    for (std::uint64_t wr_id = 1; wr_id <= 4; ++wr_id) {
        endpoint->expect_completion(wr_id, IBV_WC_SUCCESS);
    }
    CHECK(has_pattern(readback.bytes, region_bytes - dmabuf_offset));
}

void test_data_arrives_in_other_process() {
    const PeerProcess peer;
    Endpoint endpoint(0);
    const auto target = receive_value<TargetAddresses>(peer.socket.get());
    send_value(peer.socket.get(), endpoint.address());
    endpoint.connect(target.queue_pair);
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
    const auto target = receive_value<TargetAddresses>(peer.socket.get());
    send_value(peer.socket.get(), endpoint.address());
    endpoint.connect(target.queue_pair);
    CHECK(receive_value<char>(peer.socket.get()) == target_is_ready);
    Buffer source(endpoint.pd, 64);
    CHECK(endpoint.post(make_request(1, IBV_WR_RDMA_WRITE, target.host_address, target.host_rkey),
                        {source.sge(0, 64)}) == 0);
    endpoint.expect_completion(1, IBV_WC_SUCCESS);
    CHECK(kill(peer.pid, SIGKILL) == 0);
    CHECK(WIFSIGNALED(peer.wait()));
    CHECK(endpoint.post(make_request(2, IBV_WR_RDMA_WRITE, target.host_address, target.host_rkey),
                        {source.sge(0, 64)}) == 0);
    CHECK(endpoint.post(make_request(3, IBV_WR_SEND, 0, 0, 0), {}) == 0);
    endpoint.expect_completion(2, IBV_WC_RETRY_EXC_ERR);
    endpoint.expect_completion(3, IBV_WC_WR_FLUSH_ERR);
}

// A peer that sends an invalid handshake is disconnected. Other peers are not affected.
void test_invalid_handshakes_affect_no_other_peer() {
    Endpoint endpoint(0), second_endpoint(0);
    connect(&endpoint, &second_endpoint);
    // The queue pair listens on the socket "qp.GID.NUMBER", with the GID and the queue pair number in hexadecimal.
    std::string listener_name = "qp.";
    char hex_digits[8];
    for (const std::uint8_t byte : endpoint.address().gid.raw) {
        std::snprintf(hex_digits, sizeof hex_digits, "%02x", byte);
        listener_name += hex_digits;
    }
    char qp_num_text[8];
    std::snprintf(qp_num_text, sizeof qp_num_text, ".%06x", endpoint.qp->qp_num);
    listener_name += qp_num_text;
    for (int count = 0; count < 40; ++count) {
        const Fd untrusted_peer(connect_to(listener_name));
        CHECK(untrusted_peer);
        const std::vector<char> noise(64, static_cast<char>(count));
        char reply_byte = 0;
        send_all(untrusted_peer.get(), noise.data(), noise.size());
        CHECK(!recv_all(untrusted_peer.get(), &reply_byte, 1));
    }
    // Many peers that connect and send nothing do not prevent the connection of the legitimate peer.
    std::vector<Fd> silent_peers;
    for (int count = 0; count < 40; ++count) {
        silent_peers.emplace_back(connect_to(listener_name));
        CHECK(silent_peers.back());
    }
    CHECK(endpoint.post_receive(1, {}) == 0);
    CHECK(second_endpoint.post(make_request(2, IBV_WR_SEND), {}) == 0);
    endpoint.expect_completion(1, IBV_WC_SUCCESS);
}

} // namespace

int main(int argument_count, char** arguments) {
    isolate_from_other_processes();
    if (argument_count > 1) { // PeerProcess has started this program with a socket as its argument
        return run_target(std::atoi(arguments[1]));
    }
    test_data_arrives_in_other_process();
    test_killed_target_exceeds_retries();
    test_invalid_handshakes_affect_no_other_peer();
    return 0;
}
