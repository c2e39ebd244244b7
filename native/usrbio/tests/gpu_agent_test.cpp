// Tests of the publication of GPU iovs to an agent: the name, the target, the share handle and the dma-buf. The status
// in the agent's reply is the result of the publication. The agent is a thread of this test. It implements the messages
// of agent_protocol.hpp, and registers nothing with a NIC.
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

constexpr u64 chunk_bytes = 2 << 20;

// The last publication that the agent received, counts of the requests, and the status of the next replies.
struct ReceivedRequests {
    std::string name;
    GpuTarget target;
    ShareHandle share_handle;
    u64 dmabuf_bytes = 0;
    std::size_t descriptor_count = 0;
    std::atomic<int> reply_status = 0; // Status of replies to publish and borrow: 0 or an errno.
    std::atomic<int> publication_count = 0, unpublish_count = 0;
    std::atomic<int> borrow_count = 0, returned_borrow_count = 0;
};

struct Message {
    AgentHeader header{};
    std::vector<std::uint8_t> payload;
    std::vector<Descriptor> descriptors;
};

bool receive(int socket, Message* message) {
    std::vector<std::uint8_t> message_bytes(agent_message_bytes_max);
    alignas(cmsghdr) char control_buffer[CMSG_SPACE(agent_descriptors_max * sizeof(int))];
    iovec message_part{message_bytes.data(), message_bytes.size()};
    msghdr socket_message{};
    socket_message.msg_iov = &message_part;
    socket_message.msg_iovlen = 1;
    socket_message.msg_control = control_buffer;
    socket_message.msg_controllen = sizeof control_buffer;
    const ssize_t received_bytes = recvmsg(socket, &socket_message, MSG_CMSG_CLOEXEC);
    if (received_bytes <= 0) {
        return false;
    }
    CHECK(static_cast<std::size_t>(received_bytes) >= sizeof(AgentHeader) &&
          (socket_message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0);
    std::memcpy(&message->header, message_bytes.data(), sizeof message->header);
    message->payload.assign(message_bytes.begin() + sizeof(AgentHeader), message_bytes.begin() + received_bytes);
    CHECK_EQUAL(message->payload.size(), std::size_t{message->header.length});
    for (cmsghdr* control_message = CMSG_FIRSTHDR(&socket_message); control_message != nullptr;
         control_message = CMSG_NXTHDR(&socket_message, control_message)) {
        for (std::size_t index = 0; index < (control_message->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++index) {
            int fd = -1;
            std::memcpy(&fd, CMSG_DATA(control_message) + index * sizeof fd, sizeof fd);
            message->descriptors.emplace_back(fd);
        }
    }
    CHECK_EQUAL(message->descriptors.size(), std::size_t{message->header.descriptors});
    return true;
}

// Stores the publication. Payload of the message: AgentPublish (the sizes), name, target, share handle.
void record_publication(const Message& message, ReceivedRequests* received) {
    AgentPublish sizes;
    CHECK(message.payload.size() > sizeof sizes);
    std::memcpy(&sizes, message.payload.data(), sizeof sizes);
    const auto* next_byte = message.payload.data() + sizeof sizes;
    CHECK_EQUAL(message.payload.size(),
                sizeof sizes + sizes.name_bytes + sizes.target_bytes + sizes.share_handle_bytes);
    const auto take_text = [&](std::size_t length) {
        const std::string text(reinterpret_cast<const char*>(next_byte), length);
        next_byte += length;
        return text;
    };
    received->name = take_text(sizes.name_bytes);
    received->target = parse_target(take_text(sizes.target_bytes)).value();
    received->share_handle = parse_share_handle({next_byte, sizes.share_handle_bytes}).value();
    received->descriptor_count = message.descriptors.size();
    received->dmabuf_bytes = 0;
    if (!message.descriptors.empty()) {
        const off_t dmabuf_end = lseek(message.descriptors.front().get(), 0, SEEK_END);
        CHECK(dmabuf_end > 0);
        received->dmabuf_bytes = static_cast<u64>(dmabuf_end);
    }
    ++received->publication_count;
}

// Checks that the borrow request repeats the last publication, without descriptors.
void record_borrow(const Message& message, ReceivedRequests* received) {
    AgentPublish sizes;
    std::memcpy(&sizes, message.payload.data(), sizeof sizes);
    const std::string name_and_target(message.payload.begin() + sizeof sizes, message.payload.end());
    CHECK(name_and_target == received->name + format_target(received->target));
    CHECK(sizes.share_handle_bytes == 0 && sizes.name_bytes == received->name.size() && message.descriptors.empty());
    ++received->borrow_count;
}

// An agent that accepts publications and borrows, and records the requests.
class RecordingAgent {
public:
    explicit RecordingAgent(const Mount& mount) : socket_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
        sockaddr_un address{};
        address.sun_family = AF_UNIX;
        std::snprintf(address.sun_path, sizeof address.sun_path, "%s/3fs-virt/agent.sock", mount.path());
        CHECK(bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
        CHECK(listen(socket_.get(), 4) == 0);
        thread_ = std::thread([this] { serve(); });
    }
    RecordingAgent(const RecordingAgent&) = delete;
    RecordingAgent& operator=(const RecordingAgent&) = delete;
    ~RecordingAgent() {
        shutdown(socket_.get(), SHUT_RDWR);
        thread_.join();
    }
    ReceivedRequests received;

private:
    // Serves each client in its own thread: while this process, a client, waits for its child process, the child must
    // be served too. The agent ends after publications_max publish requests, including refused ones.
    void serve() {
        std::vector<std::jthread> threads;
        for (;;) {
            Descriptor client(accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
            if (!client) {
                return;
            }
            threads.emplace_back([this, client = std::move(client)] {
                for (Message message; !is_ending_ && receive(client.get(), &message); message = {}) {
                    reply_to(client.get(), message);
                }
                if (is_ending_) {
                    shutdown(socket_.get(), SHUT_RDWR);
                }
            });
        }
    }
    void reply_to(int client_fd, const Message& message) {
        AgentHeader reply_header = message.header;
        reply_header.descriptors = 0;
        reply_header.length = 0;
        std::vector<std::uint8_t> reply(sizeof reply_header);
        switch (static_cast<AgentRequest>(message.header.type)) {
        case AgentRequest::hello:
            reply.resize(sizeof reply_header + sizeof(AgentHello));
            reply_header.length = sizeof(AgentHello);
            break;
        case AgentRequest::publish:
            record_publication(message, &received);
            reply_header.status = received.reply_status;
            is_ending_ = received.publication_count == publications_max;
            break;
        case AgentRequest::borrow:
            record_borrow(message, &received);
            reply_header.status = received.reply_status;
            break;
        case AgentRequest::return_borrowed:
            ++received.returned_borrow_count;
            break;
        default:
            CHECK(static_cast<AgentRequest>(message.header.type) == AgentRequest::unpublish);
            ++received.unpublish_count;
        }
        std::memcpy(reply.data(), &reply_header, sizeof reply_header);
        CHECK(send(client_fd, reply.data(), reply.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(reply.size()));
    }

public:
    static constexpr int publications_max = 5;

private:
    Descriptor socket_;
    std::atomic<bool> is_ending_{false};
    std::thread thread_;
};

// Checks that the last publication describes the `iov_bytes` bytes at `address`, and came with one dma-buf.
void check_dmabuf_publication(const ReceivedRequests& received, u64 address, u64 iov_bytes) {
    CHECK(received.share_handle.kind == ShareKind::dmabuf && received.descriptor_count == 1);
    CHECK(received.share_handle.address == address && received.share_handle.length_bytes == iov_bytes);
    CHECK(received.share_handle.allocation_bytes == received.dmabuf_bytes && received.dmabuf_bytes % 4096 == 0);
    CHECK(received.share_handle.offset_bytes == address % 4096);
    CHECK(is_running(received.share_handle.owner) == true);
    CHECK(received.target.size_bytes == iov_bytes && received.target.device == 0);
}

// CUmemLocation, CUmemAllocationProp and CUmemAccessDesc of the CUDA driver.
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

// Allocates two chunks of VMM memory and maps them at adjacent addresses.
u64 map_chunks() {
    // CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CU_MEM_LOCATION_TYPE_DEVICE 0, and the
    // flag gpuDirectRDMACapable.
    const AllocationProperties properties{1, 1, {1, 0}, nullptr, 0, 1, 0, {}};
    u64 base = 0;
    CHECK_EQUAL(call_cuda("cuMemAddressReserve", &base, 2 * chunk_bytes, u64{0}, u64{0}, u64{0}), 0);
    for (u64 chunk_address = base; chunk_address < base + 2 * chunk_bytes; chunk_address += chunk_bytes) {
        u64 allocation_handle = 0;
        CHECK_EQUAL(call_cuda("cuMemCreate", &allocation_handle, chunk_bytes, &properties, u64{0}), 0);
        CHECK_EQUAL(call_cuda("cuMemMap", chunk_address, chunk_bytes, u64{0}, allocation_handle, u64{0}), 0);
        CHECK_EQUAL(call_cuda("cuMemRelease", allocation_handle), 0);
    }
    const Access access{{1, 0}, 3}; // Device 0 may read and write (CU_MEM_ACCESS_FLAGS_PROT_READWRITE).
    CHECK_EQUAL(call_cuda("cuMemSetAccess", base, 2 * chunk_bytes, &access, u64{1}), 0);
    return base;
}

void unmap_chunks(u64 base) {
    for (u64 chunk_address = base; chunk_address < base + 2 * chunk_bytes; chunk_address += chunk_bytes) {
        CHECK_EQUAL(call_cuda("cuMemUnmap", chunk_address, chunk_bytes), 0);
    }
    CHECK_EQUAL(call_cuda("cuMemAddressFree", base, 2 * chunk_bytes), 0);
}

// The main function of the second process, which opens or imports an iov of the first process. `id_or_handle_hex`: the
// id of the iov for the action "open", the IPC handle for the action "import".
int peer_main(const std::string& action, const char* mount, const std::string& id_or_handle_hex, std::size_t iov_bytes,
              int expected_status) {
    hf3fs_iov iov{};
    const auto id_or_handle = parse_hex(id_or_handle_hex);
    hf3fs_gpu_ipc_handle_t handle{};
    if (action == "import") {
        std::ranges::copy(id_or_handle, handle.data);
    }
    const int status = action == "import" ? hf3fs_iov_import_gpu(&iov, &handle, mount)
                                          : hf3fs_iovopen_device(&iov, id_or_handle.data(), mount, iov_bytes, 0, 0);
    CHECK_EQUAL(status, expected_status);
    hf3fs_iovdestroy(&iov);
    return 0;
}

} // namespace

int main(int argument_count, char** arguments) {
    if (argument_count == 6) { // This is the second process, which run_peer() started with five arguments.
        return peer_main(arguments[1], arguments[2], arguments[3], std::stoul(arguments[4]), std::stoi(arguments[5]));
    }
    const std::uint8_t id[16] = {1, 2, 3};
    const std::uint8_t zeros[16] = {};
    hf3fs_iov iov{};
    use_device(0);
    const u64 chunks_base = map_chunks();
    const u64 memory_address = allocate_device_memory(1 << 20);
    {
        // Without an agent, memory is published by its IPC handle, which VMM memory does not have.
        const Mount mount;
        CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, to_pointer(chunks_base), id, mount.path(), 2 * chunk_bytes, 0, 0),
                    -ENOTSUP);
        CHECK_EQUAL(mount.count_links(), std::size_t{0});
    }
    const Mount mount;
    RecordingAgent agent(mount);
    // The library allocates the memory.
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), 70'001, 0, 0), 0);
    check_dmabuf_publication(agent.received, reinterpret_cast<u64>(iov.base), 70'001);
    CHECK(agent.received.name == make_gpu_link_name(reinterpret_cast<std::uint8_t*>(iov.id), 0));
    CHECK(agent.received.target.ipc.has_value() && agent.received.target.offset_bytes == 0);
    CHECK(!std::ranges::equal(agent.received.share_handle.device_uuid, zeros));
    // A process that opens or imports the iov sends a request to borrow it, and ends the borrow when it destroys the
    // iov. If the agent refuses the request, the call fails with the agent's error.
    const std::string id_text = format_hex(iov.id, 16), size_text = "70001";
    // An agent creates the link of a publication. RecordingAgent does not, so the test creates the link.
    std::filesystem::create_symlink(format_target(agent.received.target), mount.iovs_folder() / agent.received.name);
    hf3fs_gpu_ipc_handle_t exported_handle{};
    CHECK_EQUAL(hf3fs_iov_export_gpu(&iov, &exported_handle), 0);
    CHECK_EQUAL(run_peer({"open", mount.path(), id_text, size_text, "0"}), 0);
    CHECK(agent.received.borrow_count == 1 && agent.received.returned_borrow_count == 1);
    CHECK_EQUAL(
        run_peer({"import", mount.path(), format_hex(exported_handle.data, sizeof exported_handle), size_text, "0"}),
        0);
    CHECK(agent.received.borrow_count == 2 && agent.received.returned_borrow_count == 2);
    agent.received.reply_status = EACCES;
    const std::string eacces_text = std::to_string(-EACCES);
    CHECK_EQUAL(run_peer({"open", mount.path(), id_text, size_text, eacces_text}), 0);
    CHECK_EQUAL(run_peer({"import", mount.path(), format_hex(exported_handle.data, sizeof exported_handle), size_text,
                          eacces_text}),
                0);
    agent.received.reply_status = 0;
    CHECK(agent.received.borrow_count == 4 && agent.received.returned_borrow_count == 2);
    std::filesystem::remove(mount.iovs_folder() / agent.received.name);
    hf3fs_iovunlink_gpu(&iov);
    CHECK_EQUAL(agent.received.unpublish_count.load(), 1);
    hf3fs_iovdestroy_gpu(&iov);
    CHECK_EQUAL(agent.received.unpublish_count.load(), 1);
    // Wrapped memory is inside an allocation, and begins and ends within a page.
    CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, to_pointer(memory_address + 4099), id, mount.path(), 10'000, 0, 0), 0);
    check_dmabuf_publication(agent.received, memory_address + 4099, 10'000);
    CHECK(agent.received.target.ipc.has_value() && agent.received.target.offset_bytes >= 4099);
    CHECK(agent.received.dmabuf_bytes <= 16384);
    hf3fs_iovdestroy(&iov);
    CHECK(iov.base == nullptr && agent.received.unpublish_count == 2);
    // Memory that extends over two VMM chunks is published only by its dma-buf, so the target ends in /dmabuf.
    CHECK_EQUAL(hf3fs_iovwrap_device(&iov, to_pointer(chunks_base + 513), id, mount.path(), chunk_bytes, 0, 0), 0);
    check_dmabuf_publication(agent.received, chunks_base + 513, chunk_bytes);
    CHECK(!agent.received.target.ipc && agent.received.target.offset_bytes == 513);
    CHECK(format_target(agent.received.target).ends_with("/dmabuf"));
    hf3fs_gpu_ipc_handle_t handle{};
    gdrkit_share_handle_t share_handle{};
    CHECK_EQUAL(hf3fs_iov_export_gpu(&iov, &handle), -EINVAL);
    CHECK_EQUAL(gdrkit_iov_export_share(&iov, &share_handle), -ENOTSUP);
    CHECK_EQUAL(hf3fs_iovsync(&iov, 0), 0);
    hf3fs_iovdestroy_gpu(&iov);
    // If the agent refuses the publication, the function returns the agent's error and changes nothing.
    const hf3fs_iov iov_before = iov;
    agent.received.reply_status = EOPNOTSUPP;
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), 4096, 0, 0), -EOPNOTSUPP);
    CHECK(std::memcmp(&iov, &iov_before, sizeof iov) == 0);
    agent.received.reply_status = 0;
    // The agent ends after this publication. The memory regions of an agent end with it, so the iov can be destroyed.
    CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, to_pointer(memory_address), id, mount.path(), 1 << 20, 0, 0), 0);
    CHECK_EQUAL(agent.received.publication_count.load(), RecordingAgent::publications_max);
    hf3fs_iovdestroy_gpu(&iov);
    CHECK(iov.base == nullptr && agent.received.unpublish_count == 3);
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), 4096, 0, 0), -EREMOTEIO);
    free_device_memory(memory_address);
    unmap_chunks(chunks_base);
}
