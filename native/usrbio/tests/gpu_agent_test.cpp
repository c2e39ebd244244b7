// What an agent gets of a GPU iov: the name, the target, the share handle and the dma-buf; its verdict is the result.
// The agent here is this test: it answers the messages of agent_protocol.hpp, and registers nothing.
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <atomic>
#include <span>
#include <thread>
#include <vector>

#include "usrbio/client/agent_protocol.hpp"
#include "usrbio/client/descriptor.hpp"
#include "usrbio/client/gpu_target.hpp"
#include "usrbio/client/share_handle.hpp"
#include "usrbio/tests/gpu_check.hpp"

namespace {

using namespace gdrkit::usrbio;
using namespace gdrkit::usrbio::test;

constexpr u64 chunk = 2 << 20;

// The last publication, and what the next one is answered with.
struct Seen {
    std::string name;
    GpuTarget target;
    ShareHandle handle;
    u64 dmabuf_bytes = 0;
    std::size_t descriptors = 0;
    std::atomic<int> verdict = 0;
    std::atomic<int> publications = 0, unpublications = 0;
    std::atomic<int> borrowings = 0, returns = 0;
};

struct Message {
    AgentHeader header{};
    std::vector<std::uint8_t> payload;
    std::vector<Descriptor> descriptors;
};

bool receive(int peer, Message* message) {
    std::vector<std::uint8_t> bytes(agent_message_bytes_max);
    alignas(cmsghdr) char control[CMSG_SPACE(agent_descriptors_max * sizeof(int))];
    iovec part{bytes.data(), bytes.size()};
    msghdr head{};
    head.msg_iov = &part;
    head.msg_iovlen = 1;
    head.msg_control = control;
    head.msg_controllen = sizeof control;
    const ssize_t length = recvmsg(peer, &head, MSG_CMSG_CLOEXEC);
    if (length <= 0) {
        return false;
    }
    CHECK(static_cast<std::size_t>(length) >= sizeof(AgentHeader) && (head.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0);
    std::memcpy(&message->header, bytes.data(), sizeof message->header);
    message->payload.assign(bytes.begin() + sizeof(AgentHeader), bytes.begin() + length);
    CHECK_EQUAL(message->payload.size(), std::size_t{message->header.length});
    for (cmsghdr* one = CMSG_FIRSTHDR(&head); one != nullptr; one = CMSG_NXTHDR(&head, one)) {
        for (std::size_t at = 0; at < (one->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++at) {
            int number = -1;
            std::memcpy(&number, CMSG_DATA(one) + at * sizeof number, sizeof number);
            message->descriptors.emplace_back(number);
        }
    }
    CHECK_EQUAL(message->descriptors.size(), std::size_t{message->header.descriptors});
    return true;
}

void note_publication(const Message& message, Seen* seen) {
    AgentPublish sizes;
    CHECK(message.payload.size() > sizeof sizes);
    std::memcpy(&sizes, message.payload.data(), sizeof sizes);
    const auto* at = message.payload.data() + sizeof sizes;
    CHECK_EQUAL(message.payload.size(),
                sizeof sizes + sizes.name_bytes + sizes.target_bytes + sizes.share_handle_bytes);
    const auto take = [&](std::size_t length) {
        const std::string text(reinterpret_cast<const char*>(at), length);
        at += length;
        return text;
    };
    seen->name = take(sizes.name_bytes);
    seen->target = parse_target(take(sizes.target_bytes)).value();
    seen->handle = parse_share_handle({at, sizes.share_handle_bytes}).value();
    seen->descriptors = message.descriptors.size();
    seen->dmabuf_bytes = 0;
    if (!message.descriptors.empty()) {
        const off_t end = lseek(message.descriptors.front().get(), 0, SEEK_END);
        CHECK(end > 0);
        seen->dmabuf_bytes = static_cast<u64>(end);
    }
    ++seen->publications;
}

// What is borrowed is what was published last, word by word, and no descriptor comes with it.
void note_borrowing(const Message& message, Seen* seen) {
    AgentPublish sizes;
    std::memcpy(&sizes, message.payload.data(), sizeof sizes);
    const std::string text(message.payload.begin() + sizeof sizes, message.payload.end());
    CHECK(text == seen->name + format_target(seen->target));
    CHECK(sizes.share_handle_bytes == 0 && sizes.name_bytes == seen->name.size() && message.descriptors.empty());
    ++seen->borrowings;
}

class Agent {
public:
    explicit Agent(const Mount& mount) : socket_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
        sockaddr_un address{};
        address.sun_family = AF_UNIX;
        std::snprintf(address.sun_path, sizeof address.sun_path, "%s/3fs-virt/agent.sock", mount.path());
        CHECK(bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
        CHECK(listen(socket_.get(), 4) == 0);
        thread_ = std::thread([this] { serve(); });
    }
    Agent(const Agent&) = delete;
    Agent& operator=(const Agent&) = delete;
    ~Agent() {
        shutdown(socket_.get(), SHUT_RDWR);
        thread_.join();
    }
    Seen seen;

private:
    // Who comes second is another process, for which the first one waits. The agent ends after the last publication.
    void serve() {
        std::vector<std::jthread> threads;
        for (;;) {
            Descriptor peer(accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
            if (!peer) {
                return;
            }
            threads.emplace_back([this, peer = std::move(peer)] {
                for (Message message; !over_ && receive(peer.get(), &message); message = {}) {
                    answer(peer.get(), message);
                }
                if (over_) {
                    shutdown(socket_.get(), SHUT_RDWR);
                }
            });
        }
    }
    void answer(int peer, const Message& message) {
        AgentHeader reply = message.header;
        reply.descriptors = 0;
        reply.length = 0;
        std::vector<std::uint8_t> bytes(sizeof reply);
        switch (static_cast<AgentRequest>(message.header.type)) {
        case AgentRequest::hello:
            bytes.resize(sizeof reply + sizeof(AgentHello));
            reply.length = sizeof(AgentHello);
            break;
        case AgentRequest::publish:
            note_publication(message, &seen);
            reply.status = seen.verdict;
            over_ = seen.publications == publications_in_all;
            break;
        case AgentRequest::borrow:
            note_borrowing(message, &seen);
            reply.status = seen.verdict;
            break;
        case AgentRequest::give_back:
            ++seen.returns;
            break;
        default:
            CHECK(static_cast<AgentRequest>(message.header.type) == AgentRequest::unpublish);
            ++seen.unpublications;
        }
        std::memcpy(bytes.data(), &reply, sizeof reply);
        CHECK(send(peer, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
    }

public:
    static constexpr int publications_in_all = 5;

private:
    Descriptor socket_;
    std::atomic<bool> over_{false};
    std::thread thread_;
};

void check_dmabuf(const Seen& seen, u64 address, u64 bytes) {
    CHECK(seen.handle.kind == ShareKind::dmabuf && seen.descriptors == 1);
    CHECK(seen.handle.address == address && seen.handle.length_bytes == bytes);
    CHECK(seen.handle.allocation_bytes == seen.dmabuf_bytes && seen.dmabuf_bytes % 4096 == 0);
    CHECK(seen.handle.offset_bytes == address % 4096);
    CHECK(is_running(seen.handle.owner) == true);
    CHECK(seen.target.size_bytes == bytes && seen.target.device == 0);
}

struct Location {
    int type, id;
};
struct AllocationProperties {
    int type, handle_types;
    Location location;
    void* metadata;
    std::uint8_t compression, rdma_capable;
    std::uint16_t usage;
    std::uint8_t reserved[4];
};
struct Access {
    Location location;
    int flags;
};

// Two chunks of VMM memory beside each other.
u64 map_chunks() {
    const AllocationProperties properties{1, 1, {1, 0}, nullptr, 0, 1, 0, {}};
    u64 base = 0;
    CHECK_EQUAL(cu("cuMemAddressReserve", &base, 2 * chunk, u64{0}, u64{0}, u64{0}), 0);
    for (u64 at = base; at < base + 2 * chunk; at += chunk) {
        u64 handle = 0;
        CHECK_EQUAL(cu("cuMemCreate", &handle, chunk, &properties, u64{0}), 0);
        CHECK_EQUAL(cu("cuMemMap", at, chunk, u64{0}, handle, u64{0}), 0);
        CHECK_EQUAL(cu("cuMemRelease", handle), 0);
    }
    const Access access{{1, 0}, 3};
    CHECK_EQUAL(cu("cuMemSetAccess", base, 2 * chunk, &access, u64{1}), 0);
    return base;
}

void unmap_chunks(u64 base) {
    for (u64 at = base; at < base + 2 * chunk; at += chunk) {
        CHECK_EQUAL(cu("cuMemUnmap", at, chunk), 0);
    }
    CHECK_EQUAL(cu("cuMemAddressFree", base, 2 * chunk), 0);
}

// Another process, that opens or imports what this one published.
int peer(const std::string& what, const char* mount, const std::string& bytes, std::size_t size, int expected) {
    hf3fs_iov iov{};
    const auto given = from_hex(bytes);
    hf3fs_gpu_ipc_handle_t handle{};
    if (what == "import") {
        std::ranges::copy(given, handle.data);
    }
    const int error = what == "import" ? hf3fs_iov_import_gpu(&iov, &handle, mount)
                                       : hf3fs_iovopen_device(&iov, given.data(), mount, size, 0, 0);
    CHECK_EQUAL(error, expected);
    hf3fs_iovdestroy(&iov);
    return 0;
}

} // namespace

int main(int count, char** arguments) {
    if (count == 6) {
        return peer(arguments[1], arguments[2], arguments[3], std::stoul(arguments[4]), std::stoi(arguments[5]));
    }
    const std::uint8_t id[16] = {1, 2, 3};
    const std::uint8_t zero[16] = {};
    hf3fs_iov iov{};
    make_current(0);
    const u64 chunks = map_chunks();
    const u64 memory = allocate(1 << 20);
    {
        // Nobody takes a dma-buf here, and VMM memory has nothing else.
        const Mount mount;
        CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, pointer_of(chunks), id, mount.path(), 2 * chunk, 0, 0), -ENOTSUP);
        CHECK_EQUAL(mount.links(), std::size_t{0});
    }
    const Mount mount;
    Agent agent(mount);
    // Memory of the library.
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), 70'001, 0, 0), 0);
    check_dmabuf(agent.seen, reinterpret_cast<u64>(iov.base), 70'001);
    CHECK(agent.seen.name == gpu_link_name(reinterpret_cast<std::uint8_t*>(iov.id), 0));
    CHECK(agent.seen.target.ipc.has_value() && agent.seen.target.offset_bytes == 0);
    CHECK(!std::ranges::equal(agent.seen.handle.device_uuid, zero));
    // Who opens or imports it borrows it, and gives it back; or learns why not.
    const std::string text = hex(iov.id, 16), bytes = "70001";
    std::filesystem::create_symlink(format_target(agent.seen.target), mount.iovs() / agent.seen.name);
    hf3fs_gpu_ipc_handle_t exported{};
    CHECK_EQUAL(hf3fs_iov_export_gpu(&iov, &exported), 0);
    CHECK_EQUAL(run_peer({"open", mount.path(), text, bytes, "0"}), 0);
    CHECK(agent.seen.borrowings == 1 && agent.seen.returns == 1);
    CHECK_EQUAL(run_peer({"import", mount.path(), hex(exported.data, sizeof exported), bytes, "0"}), 0);
    CHECK(agent.seen.borrowings == 2 && agent.seen.returns == 2);
    agent.seen.verdict = EACCES;
    const std::string refused = std::to_string(-EACCES);
    CHECK_EQUAL(run_peer({"open", mount.path(), text, bytes, refused}), 0);
    CHECK_EQUAL(run_peer({"import", mount.path(), hex(exported.data, sizeof exported), bytes, refused}), 0);
    agent.seen.verdict = 0;
    CHECK(agent.seen.borrowings == 4 && agent.seen.returns == 2);
    std::filesystem::remove(mount.iovs() / agent.seen.name);
    hf3fs_iovunlink_gpu(&iov);
    CHECK_EQUAL(agent.seen.unpublications.load(), 1);
    hf3fs_iovdestroy_gpu(&iov);
    CHECK_EQUAL(agent.seen.unpublications.load(), 1);
    // The inside of somebody else's, which begins and ends within a page.
    CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, pointer_of(memory + 4099), id, mount.path(), 10'000, 0, 0), 0);
    check_dmabuf(agent.seen, memory + 4099, 10'000);
    CHECK(agent.seen.target.ipc.has_value() && agent.seen.target.offset_bytes >= 4099);
    CHECK(agent.seen.dmabuf_bytes <= 16384);
    hf3fs_iovdestroy(&iov);
    CHECK(iov.base == nullptr && agent.seen.unpublications == 2);
    // Across two chunks of VMM memory: by its dma-buf alone, and the target says so.
    CHECK_EQUAL(hf3fs_iovwrap_device(&iov, pointer_of(chunks + 513), id, mount.path(), chunk, 0, 0), 0);
    check_dmabuf(agent.seen, chunks + 513, chunk);
    CHECK(!agent.seen.target.ipc && agent.seen.target.offset_bytes == 513);
    CHECK(format_target(agent.seen.target).ends_with("/dmabuf"));
    hf3fs_gpu_ipc_handle_t handle{};
    gdrkit_share_handle_t share{};
    CHECK_EQUAL(hf3fs_iov_export_gpu(&iov, &handle), -EINVAL);
    CHECK_EQUAL(gdrkit_iov_export_share(&iov, &share), -ENOTSUP);
    CHECK_EQUAL(hf3fs_iovsync(&iov, 0), 0);
    hf3fs_iovdestroy_gpu(&iov);
    // The agent's verdict is the result, and nothing is left.
    const hf3fs_iov before = iov;
    agent.seen.verdict = EOPNOTSUPP;
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), 4096, 0, 0), -EOPNOTSUPP);
    CHECK(std::memcmp(&iov, &before, sizeof iov) == 0);
    agent.seen.verdict = 0;
    // An agent that has ended holds nothing: the iov ends without it.
    CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, pointer_of(memory), id, mount.path(), 1 << 20, 0, 0), 0);
    CHECK_EQUAL(agent.seen.publications.load(), Agent::publications_in_all);
    hf3fs_iovdestroy_gpu(&iov);
    CHECK(iov.base == nullptr && agent.seen.unpublications == 3);
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), 4096, 0, 0), -EREMOTEIO);
    release(memory);
    unmap_chunks(chunks);
}
