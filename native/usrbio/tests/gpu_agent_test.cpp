// Tests of the publication of GPU iovs to an agent: the name, the target, the share handle and the dma-buf. The agent's
// verdict is the result. The agent is part of this test: it implements the messages of agent_protocol.hpp, and
// registers nothing.
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <atomic>
#include <span>
#include <thread>
#include <vector>

#include "common/descriptor.hpp"
#include "usrbio/client/agent_protocol.hpp"
#include "usrbio/client/gpu_target.hpp"
#include "usrbio/client/share_handle.hpp"
#include "usrbio/tests/gpu_check.hpp"

namespace {

using gdrkit::Descriptor;
using namespace gdrkit::usrbio;
using namespace gdrkit::usrbio::test;

constexpr u64 chunk = 2 << 20;

// The last publication, and the status of the next replies.
struct Requests {
    std::string name;
    GpuTarget target;
    ShareHandle handle;
    u64 dmabuf_bytes = 0;
    std::size_t descriptors = 0;
    std::atomic<int> verdict = 0;
    std::atomic<int> publications = 0, unpublications = 0;
    std::atomic<int> borrows = 0, ended_borrows = 0;
};

struct Message {
    AgentHeader header{};
    std::vector<std::uint8_t> payload;
    std::vector<Descriptor> descriptors;
};

bool receive(int peer, Message* message) {
    std::vector<std::uint8_t> bytes(agent_message_bytes_max);
    alignas(cmsghdr) char control[CMSG_SPACE(agent_descriptors_max * sizeof(int))];
    iovec buffer{bytes.data(), bytes.size()};
    msghdr request{};
    request.msg_iov = &buffer;
    request.msg_iovlen = 1;
    request.msg_control = control;
    request.msg_controllen = sizeof control;
    const ssize_t length = recvmsg(peer, &request, MSG_CMSG_CLOEXEC);
    if (length <= 0) {
        return false;
    }
    CHECK(static_cast<std::size_t>(length) >= sizeof(AgentHeader) &&
          (request.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0);
    std::memcpy(&message->header, bytes.data(), sizeof message->header);
    message->payload.assign(bytes.begin() + sizeof(AgentHeader), bytes.begin() + length);
    CHECK_EQUAL(message->payload.size(), std::size_t{message->header.length});
    for (cmsghdr* control_message = CMSG_FIRSTHDR(&request); control_message != nullptr;
         control_message = CMSG_NXTHDR(&request, control_message)) {
        for (std::size_t position = 0; position < (control_message->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++position) {
            int fd = -1;
            std::memcpy(&fd, CMSG_DATA(control_message) + position * sizeof fd, sizeof fd);
            message->descriptors.emplace_back(fd);
        }
    }
    CHECK_EQUAL(message->descriptors.size(), std::size_t{message->header.descriptors});
    return true;
}

void record_publication(const Message& message, Requests* requests) {
    AgentPublish sizes;
    CHECK(message.payload.size() > sizeof sizes);
    std::memcpy(&sizes, message.payload.data(), sizeof sizes);
    const auto* position = message.payload.data() + sizeof sizes;
    CHECK_EQUAL(message.payload.size(),
                sizeof sizes + sizes.name_bytes + sizes.target_bytes + sizes.share_handle_bytes);
    const auto consume = [&](std::size_t length) {
        const std::string text(reinterpret_cast<const char*>(position), length);
        position += length;
        return text;
    };
    requests->name = consume(sizes.name_bytes);
    requests->target = parse_target(consume(sizes.target_bytes)).value();
    requests->handle = parse_share_handle({position, sizes.share_handle_bytes}).value();
    requests->descriptors = message.descriptors.size();
    requests->dmabuf_bytes = 0;
    if (!message.descriptors.empty()) {
        const off_t end = lseek(message.descriptors.front().get(), 0, SEEK_END);
        CHECK(end > 0);
        requests->dmabuf_bytes = static_cast<u64>(end);
    }
    ++requests->publications;
}

// Checks that the borrow request repeats the last publication, without descriptors.
void record_borrow(const Message& message, Requests* requests) {
    AgentPublish sizes;
    std::memcpy(&sizes, message.payload.data(), sizeof sizes);
    const std::string text(message.payload.begin() + sizeof sizes, message.payload.end());
    CHECK(text == requests->name + format_target(requests->target));
    CHECK(sizes.share_handle_bytes == 0 && sizes.name_bytes == requests->name.size() && message.descriptors.empty());
    ++requests->borrows;
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
    Requests requests;

private:
    // A second client is another process, for which the first one waits. The agent ends after the last publication.
    void serve() {
        std::vector<std::jthread> threads;
        for (;;) {
            Descriptor peer(accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
            if (!peer) {
                return;
            }
            threads.emplace_back([this, peer = std::move(peer)] {
                for (Message message; !is_ending_ && receive(peer.get(), &message); message = {}) {
                    reply_to(peer.get(), message);
                }
                if (is_ending_) {
                    shutdown(socket_.get(), SHUT_RDWR);
                }
            });
        }
    }
    void reply_to(int peer, const Message& message) {
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
            record_publication(message, &requests);
            reply.status = requests.verdict;
            is_ending_ = requests.publications == publications_max;
            break;
        case AgentRequest::borrow:
            record_borrow(message, &requests);
            reply.status = requests.verdict;
            break;
        case AgentRequest::return_borrowed:
            ++requests.ended_borrows;
            break;
        default:
            CHECK(static_cast<AgentRequest>(message.header.type) == AgentRequest::unpublish);
            ++requests.unpublications;
        }
        std::memcpy(bytes.data(), &reply, sizeof reply);
        CHECK(send(peer, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
    }

public:
    static constexpr int publications_max = 5;

private:
    Descriptor socket_;
    std::atomic<bool> is_ending_{false};
    std::thread thread_;
};

void check_dmabuf(const Requests& requests, u64 address, u64 bytes) {
    CHECK(requests.handle.kind == ShareKind::dmabuf && requests.descriptors == 1);
    CHECK(requests.handle.address == address && requests.handle.length_bytes == bytes);
    CHECK(requests.handle.allocation_bytes == requests.dmabuf_bytes && requests.dmabuf_bytes % 4096 == 0);
    CHECK(requests.handle.offset_bytes == address % 4096);
    CHECK(is_running(requests.handle.owner) == true);
    CHECK(requests.target.size_bytes == bytes && requests.target.device == 0);
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

// Maps two chunks of VMM memory at adjacent addresses.
u64 map_chunks() {
    const AllocationProperties properties{1, 1, {1, 0}, nullptr, 0, 1, 0, {}};
    u64 base = 0;
    CHECK_EQUAL(cu("cuMemAddressReserve", &base, 2 * chunk, u64{0}, u64{0}, u64{0}), 0);
    for (u64 position = base; position < base + 2 * chunk; position += chunk) {
        u64 handle = 0;
        CHECK_EQUAL(cu("cuMemCreate", &handle, chunk, &properties, u64{0}), 0);
        CHECK_EQUAL(cu("cuMemMap", position, chunk, u64{0}, handle, u64{0}), 0);
        CHECK_EQUAL(cu("cuMemRelease", handle), 0);
    }
    const Access access{{1, 0}, 3};
    CHECK_EQUAL(cu("cuMemSetAccess", base, 2 * chunk, &access, u64{1}), 0);
    return base;
}

void unmap_chunks(u64 base) {
    for (u64 position = base; position < base + 2 * chunk; position += chunk) {
        CHECK_EQUAL(cu("cuMemUnmap", position, chunk), 0);
    }
    CHECK_EQUAL(cu("cuMemAddressFree", base, 2 * chunk), 0);
}

// Runs in another process, and opens or imports an iov of this process.
int peer(const std::string& action, const char* mount, const std::string& bytes, std::size_t size, int expected) {
    hf3fs_iov iov{};
    const auto handle_bytes = from_hex(bytes);
    hf3fs_gpu_ipc_handle_t handle{};
    if (action == "import") {
        std::ranges::copy(handle_bytes, handle.data);
    }
    const int error = action == "import" ? hf3fs_iov_import_gpu(&iov, &handle, mount)
                                         : hf3fs_iovopen_device(&iov, handle_bytes.data(), mount, size, 0, 0);
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
    const std::uint8_t zeros[16] = {};
    hf3fs_iov iov{};
    make_current(0);
    const u64 chunks = map_chunks();
    const u64 memory = allocate(1 << 20);
    {
        // Without an agent no dma-buf can be published, and VMM memory has no IPC handle.
        const Mount mount;
        CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, to_pointer(chunks), id, mount.path(), 2 * chunk, 0, 0), -ENOTSUP);
        CHECK_EQUAL(mount.links(), std::size_t{0});
    }
    const Mount mount;
    Agent agent(mount);
    // Memory that the library allocates.
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), 70'001, 0, 0), 0);
    check_dmabuf(agent.requests, reinterpret_cast<u64>(iov.base), 70'001);
    CHECK(agent.requests.name == gpu_link_name(reinterpret_cast<std::uint8_t*>(iov.id), 0));
    CHECK(agent.requests.target.ipc.has_value() && agent.requests.target.offset_bytes == 0);
    CHECK(!std::ranges::equal(agent.requests.handle.device_uuid, zeros));
    // A process that opens or imports the iov borrows it and ends the borrow, or gets the error of the agent.
    const std::string text = hex(iov.id, 16), bytes = "70001";
    std::filesystem::create_symlink(format_target(agent.requests.target), mount.iovs() / agent.requests.name);
    hf3fs_gpu_ipc_handle_t exported{};
    CHECK_EQUAL(hf3fs_iov_export_gpu(&iov, &exported), 0);
    CHECK_EQUAL(run_peer({"open", mount.path(), text, bytes, "0"}), 0);
    CHECK(agent.requests.borrows == 1 && agent.requests.ended_borrows == 1);
    CHECK_EQUAL(run_peer({"import", mount.path(), hex(exported.data, sizeof exported), bytes, "0"}), 0);
    CHECK(agent.requests.borrows == 2 && agent.requests.ended_borrows == 2);
    agent.requests.verdict = EACCES;
    const std::string refused = std::to_string(-EACCES);
    CHECK_EQUAL(run_peer({"open", mount.path(), text, bytes, refused}), 0);
    CHECK_EQUAL(run_peer({"import", mount.path(), hex(exported.data, sizeof exported), bytes, refused}), 0);
    agent.requests.verdict = 0;
    CHECK(agent.requests.borrows == 4 && agent.requests.ended_borrows == 2);
    std::filesystem::remove(mount.iovs() / agent.requests.name);
    hf3fs_iovunlink_gpu(&iov);
    CHECK_EQUAL(agent.requests.unpublications.load(), 1);
    hf3fs_iovdestroy_gpu(&iov);
    CHECK_EQUAL(agent.requests.unpublications.load(), 1);
    // Wrapped memory inside an allocation, which begins and ends within a page.
    CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, to_pointer(memory + 4099), id, mount.path(), 10'000, 0, 0), 0);
    check_dmabuf(agent.requests, memory + 4099, 10'000);
    CHECK(agent.requests.target.ipc.has_value() && agent.requests.target.offset_bytes >= 4099);
    CHECK(agent.requests.dmabuf_bytes <= 16384);
    hf3fs_iovdestroy(&iov);
    CHECK(iov.base == nullptr && agent.requests.unpublications == 2);
    // Memory in two chunks of VMM memory is published only by its dma-buf, and the target ends in /dmabuf.
    CHECK_EQUAL(hf3fs_iovwrap_device(&iov, to_pointer(chunks + 513), id, mount.path(), chunk, 0, 0), 0);
    check_dmabuf(agent.requests, chunks + 513, chunk);
    CHECK(!agent.requests.target.ipc && agent.requests.target.offset_bytes == 513);
    CHECK(format_target(agent.requests.target).ends_with("/dmabuf"));
    hf3fs_gpu_ipc_handle_t handle{};
    gdrkit_share_handle_t share{};
    CHECK_EQUAL(hf3fs_iov_export_gpu(&iov, &handle), -EINVAL);
    CHECK_EQUAL(gdrkit_iov_export_share(&iov, &share), -ENOTSUP);
    CHECK_EQUAL(hf3fs_iovsync(&iov, 0), 0);
    hf3fs_iovdestroy_gpu(&iov);
    // The agent's verdict is the result, and nothing is left.
    const hf3fs_iov before = iov;
    agent.requests.verdict = EOPNOTSUPP;
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), 4096, 0, 0), -EOPNOTSUPP);
    CHECK(std::memcmp(&iov, &before, sizeof iov) == 0);
    agent.requests.verdict = 0;
    // An agent that has ended has no memory region, so the iov can be destroyed without it.
    CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, to_pointer(memory), id, mount.path(), 1 << 20, 0, 0), 0);
    CHECK_EQUAL(agent.requests.publications.load(), Agent::publications_max);
    hf3fs_iovdestroy_gpu(&iov);
    CHECK(iov.base == nullptr && agent.requests.unpublications == 3);
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), 4096, 0, 0), -EREMOTEIO);
    release(memory);
    unmap_chunks(chunks);
}
