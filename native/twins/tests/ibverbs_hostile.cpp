// A peer that knows how to introduce itself and then writes whatever it likes to the memory that both share: it ends
// its own connection, reaches nothing that its keys do not name, and the other side goes on.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <functional>
#include <random>
#include <thread>

#include "ibverbs/link.hpp"
#include "ibverbs/wire.hpp"
#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::tests;
using gdrkit::twin::verbs::Link;
namespace wire = gdrkit::twin::verbs::wire;

namespace {

constexpr std::size_t region_bytes = 4096, whole_bytes = 3 * region_bytes;

// A queue pair that waits for the peer whose address it was told, and whose region has guards before and behind it.
struct Target {
    Side side{0};
    Buffer whole{side.pd, whole_bytes, 0};
    ibv_mr* mr = ibv_reg_mr(side.pd, whole.bytes + region_bytes, region_bytes, all_access_atomic);

    explicit Target(const Address& peer) {
        CHECK(mr != nullptr);
        fill_pattern(whole.bytes, whole_bytes);
        side.connect(peer);
    }
    ~Target() {
        CHECK(has_pattern(whole.bytes, region_bytes));
        CHECK(has_pattern(whole.bytes + 2 * region_bytes, region_bytes, 2 * region_bytes));
        CHECK(ibv_dereg_mr(mr) == 0);
    }
    [[nodiscard]] std::uint64_t address() const { return whole.at(region_bytes); }
};

wire::Hello hello_of(const Address& from, const Address& to) {
    return {wire::magic, wire::version, from.gid, to.gid, from.qp_num, to.qp_num, from.psn, IBV_GID_TYPE_ROCE_V2};
}

// What a peer has after its introduction.
struct Intruder {
    Fd socket;
    std::unique_ptr<Link> link = Link::make();

    Intruder(const Address& from, const Address& to) : socket(connect_to(wire::name_of(to.gid, to.qp_num))) {
        const wire::Hello hello = hello_of(from, to);
        wire::Welcome welcome{};
        CHECK(socket && send_all(socket.get(), &hello, sizeof hello) && send_fds(socket.get(), link->fds()));
        CHECK(recv_all(socket.get(), &welcome, sizeof welcome) && welcome.ready == 1);
    }
    // Also when nothing of it was answered.
    void expect_end() {
        char wakes[64];
        while (recv(socket.get(), wakes, sizeof wakes, 0) > 0) {
        }
    }
    wire::Request request(const Target& target) {
        wire::Request good{};
        good.magic = wire::magic;
        good.opcode = wire::Opcode::write;
        good.remote_address = target.address();
        good.message_bytes = good.chunk_bytes = 64;
        good.rkey = target.mr->rkey;
        good.payload_at = *link->reserve(64);
        return good;
    }
};

void one_bad_request(Target* target, const Address& peer, const std::function<void(wire::Request*)>& spoil) {
    Intruder intruder(peer, target->side.address());
    wire::Request request = intruder.request(*target);
    spoil(&request);
    intruder.link->put(0, request);
    intruder.link->publish_requests(1, intruder.socket.get());
    intruder.expect_end();
    CHECK(intruder.link->answered() == 0);
}

void bad_requests(Target* target, const Address& peer) {
    one_bad_request(target, peer, [](wire::Request* request) { request->magic = 0; });
    one_bad_request(target, peer, [](wire::Request* request) { request->opcode = static_cast<wire::Opcode>(77); });
    one_bad_request(target, peer, [](wire::Request* request) { request->payload_at = 0; });
    one_bad_request(target, peer, [](wire::Request* request) { request->payload_at = 0xffffffff; });
    one_bad_request(target, peer, [](wire::Request* request) { request->payload_at = (1U << 20) + 16384 - 63; });
    one_bad_request(target, peer, [](wire::Request* request) { request->chunk_bytes = 1U << 30; });
    one_bad_request(target, peer, [](wire::Request* request) { request->chunk_offset_bytes = ~0ULL; });
    // A payload that was never put into the pipe.
    one_bad_request(target, peer, [](wire::Request* request) { request->flags = wire::flag_piped; });
    // More than the ring holds.
    Intruder intruder(peer, target->side.address());
    intruder.link->publish_requests(Link::slot_count + 1, intruder.socket.get());
    intruder.expect_end();
}

// Several that say that they lie in the pipe, which has one of them and a part of the next.
void short_pipe(Target* target, const Address& peer) {
    Intruder intruder(peer, target->side.address());
    wire::Request request = intruder.request(*target);
    request.flags = wire::flag_piped;
    const char bytes[100]{};
    CHECK(intruder.link->pipe().lend(bytes, sizeof bytes) == 0);
    for (std::uint32_t number = 0; number < 4; ++number) {
        intruder.link->put(number, request);
    }
    intruder.link->publish_requests(4, intruder.socket.get());
    intruder.expect_end();
    CHECK(intruder.link->answered() == 1);
}

// Memory that is not what a requester makes is not mapped at all.
void bad_memory(Target* target, const Address& peer) {
    const Address own = target->side.address();
    for (const std::size_t size : {0UL, 4096UL, (1UL << 20) + 16384}) {
        const Fd socket(connect_to(wire::name_of(own.gid, own.qp_num)));
        const Fd memory(memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
        CHECK(ftruncate(memory.get(), static_cast<off_t>(size)) == 0);
        const wire::Hello hello = hello_of(peer, own);
        const int fds[] = {memory.get(), memory.get()};
        char answer = 0;
        CHECK(send_all(socket.get(), &hello, sizeof hello) && send_fds(socket.get(), fds));
        CHECK(!recv_all(socket.get(), &answer, 1));
    }
}

// All that is shared is written over and over while the target looks at it. What comes of it may be a request that is
// refused, after which the queue pair is in error, as for any peer.
void noise(unsigned seed) {
    Side peer(1);
    Target target(peer.address());
    Intruder intruder(peer.address(), target.side.address());
    const wire::Request request = intruder.request(target);
    std::mt19937 random(seed);
    for (std::uint32_t count = 0; count < 400; ++count) {
        // Right at first, so that the target comes far; spoiled after it was published.
        intruder.link->put(count, request);
        intruder.link->publish_requests(count + 1, intruder.socket.get());
        const std::size_t slot = 256 + count % Link::slot_count * sizeof request;
        std::memset(intruder.link->memory().at(slot + random() % 64), static_cast<int>(random()), random() % 4);
    }
}

void answer(Link* link, int socket, std::uint32_t number, const wire::Response& response) {
    link->answer(number, response);
    link->publish_answers(number + 1, socket);
}

// The other way round: a target that answers what was never asked.
void bad_answers(const std::function<void(Link*, int)>& lie) {
    Side side(0);
    Buffer from(side.pd, 4096);
    Address liar = side.address();
    liar.qp_num ^= 1;
    const Fd listener(listen_on(wire::name_of(liar.gid, liar.qp_num)));
    CHECK(listener);
    std::thread target([&] {
        const Fd socket(accept_from(listener.get()));
        wire::Hello hello{};
        std::vector<Fd> memory;
        CHECK(recv_all(socket.get(), &hello, sizeof hello) && recv_fds(socket.get(), Link::fd_count, &memory));
        const auto link = Link::adopt(std::move(memory));
        const wire::Welcome welcome{wire::magic, 1};
        CHECK(link != nullptr && send_all(socket.get(), &welcome, sizeof welcome));
        while (link->submitted() == 0) {
            std::this_thread::yield();
        }
        lie(link.get(), socket.get());
        char end = 0;
        while (recv(socket.get(), &end, 1, 0) > 0) {
        }
    });
    side.connect(liar);
    CHECK(side.post(request(1, IBV_WR_RDMA_READ, 0, 0), {from.part(0, 4096)}) == 0);
    CHECK(side.post(request(2, IBV_WR_RDMA_READ, 0, 0), {from.part(0, 4096)}) == 0);
    side.expect(1, IBV_WC_RETRY_EXC_ERR);
    side.expect(2, IBV_WC_WR_FLUSH_ERR);
    target.join();
}

} // namespace

int main() {
    use_own_domain();
    {
        Side peer(1);
        Target target(peer.address());
        bad_memory(&target, peer.address());
        bad_requests(&target, peer.address());
        short_pipe(&target, peer.address());
        // The true peer is served all the same.
        peer.connect(target.side.address());
        Buffer from(peer.pd, 64);
        CHECK(peer.post(request(1, IBV_WR_RDMA_WRITE, target.address(), target.mr->rkey), {from.part(0, 64)}) == 0);
        peer.expect(1, IBV_WC_SUCCESS);
    }
    for (unsigned seed = 0; seed < 50; ++seed) {
        noise(seed);
    }
    bad_answers([](Link* link, int socket) { answer(link, socket, 1000, {}); });
    bad_answers([](Link* link, int socket) { answer(link, socket, 0, {}); });
    bad_answers([](Link* link, int socket) { answer(link, socket, 0, {wire::magic, wire::Answer::done, 0, 8192, 0}); });
    bad_answers([](Link* link, int socket) {
        answer(link, socket, 0, {wire::magic, wire::Answer::receiver_not_ready, 4000, 0, 0});
    });
    return 0;
}
