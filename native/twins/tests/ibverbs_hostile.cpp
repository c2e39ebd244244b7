// Tests of the software twin of libibverbs: a hostile peer that connects correctly and then corrupts the shared memory.
// The target ends the connection of this peer, protects memory outside its region, and continues to serve other peers.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <functional>
#include <random>
#include <thread>

#include "ibverbs/grants.hpp"
#include "ibverbs/link.hpp"
#include "ibverbs/wire.hpp"
#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::tests;
using gdrkit::twin::verbs::Link;
namespace wire = gdrkit::twin::verbs::wire;

namespace {

constexpr std::size_t region_bytes = 4096, buffer_bytes = 3 * region_bytes;

// A queue pair that expects the peer at the given address. Its region is the middle third of its memory. The destructor
// checks that the other two thirds are unchanged.
struct Target {
    Endpoint endpoint{0};
    Buffer memory{endpoint.pd, buffer_bytes, 0};
    ibv_mr* mr = ibv_reg_mr(endpoint.pd, memory.bytes + region_bytes, region_bytes, read_write_atomic_access);

    explicit Target(const QueuePairAddress& peer) {
        CHECK(mr != nullptr);
        fill_pattern(memory.bytes, buffer_bytes);
        endpoint.connect(peer);
    }
    ~Target() {
        CHECK(has_pattern(memory.bytes, region_bytes));
        CHECK(has_pattern(memory.bytes + 2 * region_bytes, region_bytes, 2 * region_bytes));
        CHECK(ibv_dereg_mr(mr) == 0);
    }
    [[nodiscard]] std::uint64_t region_address() const { return memory.address_at(region_bytes); }
};

wire::ConnectRequest make_connect_request(const QueuePairAddress& from, const QueuePairAddress& to) {
    return {wire::magic, wire::version,        from.gid,   to.gid, from.qp_num, to.qp_num,
            from.psn,    IBV_GID_TYPE_ROCE_V2, IBV_QPT_RC, 0};
}

// A hostile peer that has completed a correct handshake.
struct HostilePeer {
    Fd socket;
    std::unique_ptr<Link> link = Link::make();

    HostilePeer(const QueuePairAddress& from, const QueuePairAddress& to)
        : socket(connect_to(wire::make_socket_name(to.gid, to.qp_num))) {
        const wire::ConnectRequest connect_request = make_connect_request(from, to);
        wire::ConnectReply reply{};
        CHECK(socket && send_all(socket.get(), &connect_request, sizeof connect_request) &&
              send_fds(socket.get(), link->fds()));
        CHECK(recv_all(socket.get(), &reply, sizeof reply) && reply.is_accepted == 1);
    }
    // Wait until the target ends the connection.
    void expect_end() {
        char wakeups[64]; // the socket carries only wake-ups, because the requests are in the shared memory
        while (recv(socket.get(), wakeups, sizeof wakeups, 0) > 0) {
        }
    }
    // Return a valid write of 64 bytes to the region.
    wire::Request make_request(const Target& target) {
        wire::Request request{};
        request.magic = wire::magic;
        request.opcode = wire::Opcode::write;
        request.remote_address = target.region_address();
        request.message_bytes = request.chunk_bytes = 64;
        request.rkey = target.mr->rkey;
        request.payload_offset = *link->reserve(64);
        return request;
    }
};

// Send a request that `corrupt` has changed. The target must end the connection without a response.
void check_bad_request(Target* target, const QueuePairAddress& peer,
                       const std::function<void(wire::Request*)>& corrupt) {
    HostilePeer hostile_peer(peer, target->endpoint.address());
    wire::Request request = hostile_peer.make_request(*target);
    corrupt(&request);
    hostile_peer.link->put_request(0, request);
    hostile_peer.link->publish_requests(1, hostile_peer.socket.get());
    hostile_peer.expect_end();
    CHECK(hostile_peer.link->response_count() == 0);
}

void test_bad_requests(Target* target, const QueuePairAddress& peer) {
    check_bad_request(target, peer, [](wire::Request* request) { request->magic = 0; });
    check_bad_request(target, peer, [](wire::Request* request) { request->opcode = static_cast<wire::Opcode>(77); });
    check_bad_request(target, peer, [](wire::Request* request) { request->payload_offset = 0; });
    check_bad_request(target, peer, [](wire::Request* request) { request->payload_offset = 0xffffffff; });
    // The shared memory has a control block of 16384 bytes and a payload ring of 1 MiB. The last of the 64 bytes is the
    // first byte after this memory.
    check_bad_request(target, peer, [](wire::Request* request) { request->payload_offset = (1U << 20) + 16384 - 63; });
    check_bad_request(target, peer, [](wire::Request* request) { request->chunk_bytes = 1U << 30; });
    check_bad_request(target, peer, [](wire::Request* request) { request->chunk_offset_bytes = ~0ULL; });
    // The request names a payload in the pipe, but nothing was written to the pipe.
    check_bad_request(target, peer, [](wire::Request* request) { request->flags = wire::flag_piped; });
    // The peer publishes more requests than the ring has slots.
    HostilePeer hostile_peer(peer, target->endpoint.address());
    hostile_peer.link->publish_requests(Link::slot_count + 1, hostile_peer.socket.get());
    hostile_peer.expect_end();
}

// Four requests say that their payload of 64 bytes is in the pipe, but the pipe holds only 100 bytes: one payload and a
// part of the next.
void test_short_pipe(Target* target, const QueuePairAddress& peer) {
    HostilePeer hostile_peer(peer, target->endpoint.address());
    wire::Request request = hostile_peer.make_request(*target);
    request.flags = wire::flag_piped;
    const char bytes[100]{};
    CHECK(hostile_peer.link->pipe().splice_in(bytes, sizeof bytes) == 0);
    for (std::uint32_t index = 0; index < 4; ++index) {
        hostile_peer.link->put_request(index, request);
    }
    hostile_peer.link->publish_requests(4, hostile_peer.socket.get());
    hostile_peer.expect_end();
    CHECK(hostile_peer.link->response_count() == 1);
}

// The target does not map shared memory without seals, whether the size is wrong (0, 4096) or right. It ends the
// connection without a reply.
void test_bad_shared_memory(Target* target, const QueuePairAddress& peer) {
    const QueuePairAddress target_address = target->endpoint.address();
    for (const std::size_t size_bytes : {0UL, 4096UL, (1UL << 20) + 16384}) {
        const Fd socket(connect_to(wire::make_socket_name(target_address.gid, target_address.qp_num)));
        const Fd memory_fd(memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
        CHECK(ftruncate(memory_fd.get(), static_cast<off_t>(size_bytes)) == 0);
        const wire::ConnectRequest connect_request = make_connect_request(peer, target_address);
        const int fds[] = {memory_fd.get(), memory_fd.get()};
        char reply_byte = 0;
        CHECK(send_all(socket.get(), &connect_request, sizeof connect_request) && send_fds(socket.get(), fds));
        CHECK(!recv_all(socket.get(), &reply_byte, 1));
    }
}

// Write random data to the shared memory while the target reads it. The target may refuse a request. The queue pair
// of the target then enters the error state, as with any peer.
void test_random_writes(unsigned seed) {
    Endpoint peer(1);
    Target target(peer.address());
    HostilePeer hostile_peer(peer.address(), target.endpoint.address());
    const wire::Request request = hostile_peer.make_request(target);
    std::mt19937 random(seed);
    for (std::uint32_t count = 0; count < 400; ++count) {
        // The request is valid when it is published, so that the target begins to process it. It is corrupted
        // afterwards.
        hostile_peer.link->put_request(count, request);
        hostile_peer.link->publish_requests(count + 1, hostile_peer.socket.get());
        // In the shared memory, 256 bytes precede the ring of requests.
        const std::size_t slot_offset = 256 + count % Link::slot_count * sizeof request;
        std::memset(hostile_peer.link->memory().data_at(slot_offset + random() % 64), static_cast<int>(random()),
                    random() % 4);
    }
}

// A peer claims that it uses a grant, and never withdraws this claim. ibv_dereg_mr waits for such a peer only for a
// limited time (requester_timeout).
void test_endless_use_of_grant() {
    Endpoint peer(1);
    Target target(peer.address());
    HostilePeer hostile_peer(peer.address(), target.endpoint.address());
    ibv_mr* const granted_mr =
        ibv_reg_mr(target.endpoint.pd, target.memory.bytes + region_bytes, region_bytes, read_write_access);
    wire::Request request = hostile_peer.make_request(target);
    request.rkey = granted_mr->rkey;
    hostile_peer.link->put_request(0, request);
    hostile_peer.link->publish_requests(1, hostile_peer.socket.get());
    while (hostile_peer.link->response_count() == 0) {
        std::this_thread::yield();
    }
    hostile_peer.link->grants().used_slot = 1; // slots are counted from 1; 0 means that no slot is used
    CHECK(ibv_dereg_mr(granted_mr) == 0);
}

void publish_response(Link* link, int socket, std::uint32_t index, const wire::Response& response) {
    link->put_response(index, response);
    link->publish_responses(index + 1, socket);
}

// Here the target is hostile: after it has received a request, it calls `misbehave`, which sends an invalid response.
// The requester ends the connection: its first request fails, and the second is flushed.
void check_bad_response(const std::function<void(Link*, int)>& misbehave) {
    Endpoint endpoint(0);
    Buffer read_buffer(endpoint.pd, 4096);
    QueuePairAddress hostile_address = endpoint.address();
    hostile_address.qp_num ^= 1;
    const Fd listener(listen_on(wire::make_socket_name(hostile_address.gid, hostile_address.qp_num)));
    CHECK(listener);
    std::thread target([&] {
        const Fd socket(accept_from(listener.get()));
        wire::ConnectRequest connect_request{};
        std::vector<Fd> link_fds;
        CHECK(recv_all(socket.get(), &connect_request, sizeof connect_request) &&
              recv_fds(socket.get(), Link::fd_count, &link_fds));
        const auto link = Link::adopt(std::move(link_fds));
        const wire::ConnectReply connect_reply{wire::magic, 1, 0, 0, 0, 0};
        CHECK(link != nullptr && send_all(socket.get(), &connect_reply, sizeof connect_reply));
        while (link->request_count() == 0) {
            std::this_thread::yield();
        }
        misbehave(link.get(), socket.get());
        char wakeup = 0;
        while (recv(socket.get(), &wakeup, 1, 0) > 0) {
        }
    });
    endpoint.connect(hostile_address);
    CHECK(endpoint.post(make_request(1, IBV_WR_RDMA_READ, 0, 0), {read_buffer.sge(0, 4096)}) == 0);
    CHECK(endpoint.post(make_request(2, IBV_WR_RDMA_READ, 0, 0), {read_buffer.sge(0, 4096)}) == 0);
    endpoint.expect_completion(1, IBV_WC_RETRY_EXC_ERR);
    endpoint.expect_completion(2, IBV_WC_WR_FLUSH_ERR);
    target.join();
}

} // namespace

int main() {
    isolate_from_other_processes();
    {
        Endpoint peer(1);
        Target target(peer.address());
        test_bad_shared_memory(&target, peer.address());
        test_bad_requests(&target, peer.address());
        test_short_pipe(&target, peer.address());
        // The target still serves its legitimate peer.
        peer.connect(target.endpoint.address());
        Buffer source(peer.pd, 64);
        CHECK(peer.post(make_request(1, IBV_WR_RDMA_WRITE, target.region_address(), target.mr->rkey),
                        {source.sge(0, 64)}) == 0);
        peer.expect_completion(1, IBV_WC_SUCCESS);
    }
    test_endless_use_of_grant();
    for (unsigned seed = 0; seed < 50; ++seed) {
        test_random_writes(seed);
    }
    // The four responses, in this order: its index belongs to no request, it has no magic number, its payload of 8192
    // bytes is larger than the read, and its min_rnr_timer code 4000 is invalid.
    check_bad_response([](Link* link, int socket) { publish_response(link, socket, 1000, {}); });
    check_bad_response([](Link* link, int socket) { publish_response(link, socket, 0, {}); });
    check_bad_response([](Link* link, int socket) {
        publish_response(link, socket, 0, {wire::magic, wire::Status::done, 0, 8192, 0});
    });
    check_bad_response([](Link* link, int socket) {
        publish_response(link, socket, 0, {wire::magic, wire::Status::receiver_not_ready, 4000, 0, 0});
    });
    return 0;
}
