// Tests of a session of the storage service with its queue pairs, threads and files, against a minimal client in the
// same process. They use the libibverbs.so.1 that the loader finds, and also run with the sanitizers.
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "storage/crc32c.hpp"
#include "storage/session.hpp"
#include "tests/check.hpp"

using namespace gdrkit;
using namespace gdrkit::storage;

namespace {

constexpr std::size_t chunk_bytes = 4096, memory_bytes = 4 << 20;
constexpr std::uint64_t file_handle = 7;

// A temporary folder of a store, with the folder of its checksums.
struct StoreFolder {
    std::string path = "/tmp/gdrkit-session-XXXXXX";
    Descriptor fd, sums_folder;
    StoreFolder() {
        CHECK(mkdtemp(path.data()) != nullptr);
        fd = Descriptor(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
        CHECK(mkdirat(fd.get(), "sums", 0700) == 0);
        sums_folder = Descriptor(openat(fd.get(), "sums", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    }
    ~StoreFolder() { CHECK(std::system(("rm -r " + path).c_str()) == 0); }
};

// The RDMA part of a client: a queue pair, and the memory that the server reads and writes through it.
class Target {
public:
    explicit Target(const std::string& device_name) : device(device_name), memory(memory_bytes) {
        completion_queue_.reset(ibv_create_cq(device.context(), 16, nullptr, nullptr, 0));
        CHECK(completion_queue_ != nullptr);
        ibv_qp_init_attr attributes{};
        attributes.send_cq = attributes.recv_cq = completion_queue_.get();
        attributes.cap = {
            .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
        attributes.qp_type = IBV_QPT_RC;
        queue_pair_.reset(ibv_create_qp(device.domain(), &attributes));
        CHECK(queue_pair_ != nullptr);
        region.reset(ibv_reg_mr(device.domain(), memory.data(), memory.size(), access_flags));
        CHECK(region != nullptr);
    }
    // The PSN is 0, and the MTU is 1024 bytes.
    verbs::Endpoint endpoint() const {
        return {queue_pair_->qp_num, 0, device.gid(), device.port_attributes().lid, 1024};
    }
    void connect(const verbs::Endpoint& peer) {
        ibv_qp_attr attributes{};
        attributes.qp_state = IBV_QPS_INIT;
        attributes.port_num = device.port();
        attributes.qp_access_flags = access_flags;
        modify(attributes, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
        attributes = {};
        attributes.qp_state = IBV_QPS_RTR;
        attributes.path_mtu = IBV_MTU_1024;
        attributes.dest_qp_num = peer.qp_number;
        attributes.rq_psn = peer.psn;
        attributes.max_dest_rd_atomic = device.reads_max();
        attributes.min_rnr_timer = 12; // 0.64 ms
        attributes.ah_attr.is_global = 1;
        attributes.ah_attr.port_num = device.port();
        attributes.ah_attr.grh.dgid = peer.gid;
        attributes.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(device.gid_index());
        attributes.ah_attr.grh.hop_limit = 1;
        modify(attributes, IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                               IBV_QP_MIN_RNR_TIMER);
    }
    std::uint64_t address(std::size_t offset) const { return reinterpret_cast<std::uintptr_t>(memory.data()) + offset; }

    verbs::Device device;
    std::vector<std::byte> memory;
    verbs::Owned<ibv_mr> region; // Declared after the memory, so that it is deregistered first.

private:
    static constexpr int access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
    void modify(ibv_qp_attr& attributes, int mask) {
        CHECK(ibv_modify_qp(queue_pair_.get(), &attributes, mask | IBV_QP_STATE) == 0);
    }
    verbs::Owned<ibv_cq> completion_queue_;
    verbs::Owned<ibv_qp> queue_pair_;
};

// A client with one queue pair and a data connection, and the session that serves it. The session has one open file.
struct Client {
    Client(const StoreFolder& folder, const std::shared_ptr<Store>& store, const std::shared_ptr<Fabric>& fabric,
           const SessionLimits& limits = {})
        : target(fabric->devices().front()->name()), session(store, fabric, {target.endpoint()}, limits) {
        target.connect(session.endpoints().front());
        session.add_file(
            file_handle,
            store->adopt(Descriptor(openat(folder.fd.get(), "file", O_RDWR | O_CREAT | O_CLOEXEC, 0600)), true, true));
        std::array<int, 2> socket_fds{};
        CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, socket_fds.data()) == 0);
        connection = Descriptor(socket_fds[0]);
        session.start(Descriptor(socket_fds[1]));
    }

    Operation make_operation(Opcode opcode, std::uint64_t file_offset, std::size_t memory_offset,
                             std::uint64_t length) {
        Operation operation{};
        operation.tag = ++last_tag;
        operation.handle = file_handle;
        operation.file_offset = file_offset;
        operation.length = length;
        operation.remote_address = target.address(memory_offset);
        operation.rkey = target.region->rkey;
        operation.opcode = static_cast<std::uint8_t>(opcode);
        return operation;
    }
    void send(const std::vector<Operation>& operations) {
        std::vector<std::byte> frame;
        append_frame(frame, FrameType::io_request, static_cast<std::uint32_t>(operations.size()), 1,
                     std::as_bytes(std::span(operations)));
        CHECK(::send(connection.get(), frame.data(), frame.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(frame.size()));
    }
    // Receives `count` results, and returns them in the order of their tags, which begin with `first_tag`.
    std::vector<Result> receive(std::size_t count, std::uint64_t first_tag) {
        std::vector<Result> results_by_tag(count);
        for (std::size_t received_count = 0; received_count < count;) {
            std::array<std::byte, sizeof(FrameHeader)> header_bytes;
            CHECK(recv(connection.get(), header_bytes.data(), header_bytes.size(), MSG_WAITALL) ==
                  static_cast<ssize_t>(header_bytes.size()));
            const char* refusal_reason = nullptr;
            const auto header = parse_header(header_bytes, refusal_reason);
            CHECK(header.has_value());
            std::vector<std::byte> payload(header->length);
            CHECK(recv(connection.get(), payload.data(), payload.size(), MSG_WAITALL) ==
                  static_cast<ssize_t>(payload.size()));
            std::vector<Result> results;
            CHECK(parse_results(*header, payload, results, holes, refusal_reason));
            for (const Result& result : results) {
                results_by_tag.at(result.tag - first_tag) = result;
                ++received_count;
            }
        }
        return results_by_tag;
    }
    // Sends the operations in one frame and returns their results in the same order.
    std::vector<Result> run(const std::vector<Operation>& operations) {
        send(operations);
        return receive(operations.size(), operations.front().tag);
    }

    Target target;
    Session session;
    Descriptor connection;
    std::uint64_t last_tag = 0;    // Tag of the last operation.
    std::vector<HoleExtent> holes; // Holes of the last reply.
};

// A store and the RDMA devices of a server. main() makes a new Fixture for each test.
struct Fixture {
    StoreFolder folder;
    std::shared_ptr<Store> store = std::make_shared<Store>(folder.sums_folder.get(), chunk_bytes);
    std::shared_ptr<Fabric> fabric = std::make_shared<Fabric>(std::vector<std::string>{});
};

void fill_randomly(std::vector<std::byte>& bytes, unsigned seed) {
    std::mt19937 random_number(seed);
    for (auto& byte : bytes) {
        byte = static_cast<std::byte>(random_number());
    }
}

// Written bytes are read with small and large, aligned and unaligned lengths. The memory around them stays unchanged.
void test_written_bytes_are_read_back(const Fixture& fixture) {
    Client client(fixture.folder, fixture.store, fixture.fabric);
    fill_randomly(client.target.memory, 1);
    const std::vector<std::byte> written_bytes = client.target.memory;
    constexpr std::size_t file_bytes = 3 * (1 << 20) + 17;
    CHECK(client.run({client.make_operation(Opcode::write, 0, 0, file_bytes)})[0].result == file_bytes);
    for (const std::size_t length : {std::size_t{1}, chunk_bytes - 1, chunk_bytes, 65537UL, std::size_t{1} << 20}) {
        std::fill(client.target.memory.begin(), client.target.memory.end(), std::byte{0xa5});
        constexpr std::size_t file_offset = 4097, memory_offset = 33;
        Operation operation = client.make_operation(Opcode::read, file_offset, memory_offset, length);
        operation.flags = checksum_wanted;
        const Result result = client.run({operation})[0];
        CHECK(result.result == static_cast<std::int64_t>(length) && result.flags == checksum_valid);
        CHECK(result.checksum == crc32c(written_bytes.data() + file_offset, length, 0));
        CHECK(std::memcmp(client.target.memory.data() + memory_offset, written_bytes.data() + file_offset, length) ==
              0);
        CHECK(client.target.memory[memory_offset - 1] == std::byte{0xa5});
        CHECK(client.target.memory[memory_offset + length] == std::byte{0xa5});
    }
    // One read begins before the end of the file, and one read after it.
    CHECK(client.run({client.make_operation(Opcode::read, file_bytes - 5, 0, 100)})[0].result == 5);
    CHECK(client.run({client.make_operation(Opcode::read, file_bytes + 5, 0, 100)})[0].result == 0);
}

// Each operation gets its result, even if a frame has more reads and writes than the session has staging buffers.
void test_each_of_many_operations_gets_its_result(const Fixture& fixture) {
    Client client(fixture.folder, fixture.store, fixture.fabric);
    for (unsigned round = 0; round < 20; ++round) {
        std::vector<Operation> operations;
        for (std::size_t index = 0; index < 500; ++index) {
            const auto opcode = index % 2 == 0 ? Opcode::write : Opcode::read;
            operations.push_back(client.make_operation(opcode, index * 4096, index * 8192, 1 + index * 7 % 8000));
        }
        const std::vector<Result> results = client.run(operations);
        for (std::size_t index = 0; index < results.size(); ++index) {
            CHECK(results[index].result >= 0);
            CHECK(index % 2 != 0 || results[index].result == static_cast<std::int64_t>(operations[index].length));
        }
    }
}

void test_invalid_operations_get_an_errno(const Fixture& fixture) {
    Client client(fixture.folder, fixture.store, fixture.fabric);
    std::vector<Operation> operations(4, client.make_operation(Opcode::read, 0, 0, 10));
    // The copies have the same tag. Give each operation a tag of its own.
    for (std::size_t index = 0; index < operations.size(); ++index) {
        operations[index].tag = client.last_tag + index;
    }
    operations[0].handle = file_handle + 1;        // No file has this handle.
    operations[1].queue_pair = 9;                  // The session has one queue pair.
    operations[2].length = std::uint64_t{1} << 40; // More than length_bytes_max.
    operations[3].opcode = static_cast<std::uint8_t>(Opcode::write);
    operations[3].flags = checksum_given;
    operations[3].checksum = 1; // The bytes have another checksum.
    const std::vector<Result> results = client.run(operations);
    CHECK(results[0].result == -EBADF && results[1].result == -EINVAL && results[2].result == -EINVAL);
    CHECK(results[3].result == -EBADMSG);
}

// The session reuses its PendingOperation objects. The result of an operation must not depend on an earlier
// operation.
void test_operation_does_not_see_state_of_an_earlier_one(const Fixture& fixture) {
    Client client(fixture.folder, fixture.store, fixture.fabric);
    // The file has a hole, and then data.
    constexpr std::size_t hole_bytes = 65536, data_bytes = 8192;
    CHECK(client.run({client.make_operation(Opcode::write, hole_bytes, 0, data_bytes)})[0].result == data_bytes);
    Operation read_with_hole = client.make_operation(Opcode::read, 0, 0, hole_bytes + data_bytes);
    read_with_hole.flags = report_holes;
    CHECK(client.run({read_with_hole})[0].holes == 1);
    Operation write_with_wrong_checksum = client.make_operation(Opcode::write, hole_bytes, 0, data_bytes);
    write_with_wrong_checksum.flags = checksum_given;
    write_with_wrong_checksum.checksum = ~crc32c(client.target.memory.data(), data_bytes);
    CHECK(client.run({write_with_wrong_checksum})[0].result == -EBADMSG);
    const Result data_result = client.run({client.make_operation(Opcode::read, hole_bytes, 0, data_bytes)})[0];
    CHECK(data_result.result == data_bytes && data_result.holes == 0 && data_result.checksum == 0);
    // This read reaches the end of the file. The byte counts of the earlier, shorter read must not be added.
    CHECK(client.run({client.make_operation(Opcode::read, 0, 0, 3 * hole_bytes)})[0].result == hole_bytes + data_bytes);
    Operation empty_read = client.make_operation(Opcode::read, 0, 0, 0);
    empty_read.flags = checksum_wanted;
    const Result empty_result = client.run({empty_read})[0];
    CHECK(empty_result.result == 0 && empty_result.flags == checksum_valid && empty_result.checksum == 0);
}

void wait_for_end(Session& session) {
    pollfd ended_pollfd{session.ended_fd(), POLLIN, 0};
    CHECK(poll(&ended_pollfd, 1, 30000) == 1);
}

// If operations use the rkey of a region that the client has deregistered (a stale rkey), the session ends.
void test_stale_rkey_ends_the_session(const Fixture& fixture) {
    Client client(fixture.folder, fixture.store, fixture.fabric);
    CHECK(client.run({client.make_operation(Opcode::write, 0, 0, 1 << 20)})[0].result == 1 << 20);
    std::vector<Operation> operations;
    for (int index = 0; index < 64; ++index) {
        operations.push_back(client.make_operation(Opcode::read, 0, 0, 1 << 20));
    }
    client.target.region.reset();
    client.send(operations);
    wait_for_end(client.session);
    CHECK(fixture.store->counters().rdma_errors == 1);
}

void test_garbage_ends_the_session(const Fixture& fixture) {
    Client client(fixture.folder, fixture.store, fixture.fabric);
    const std::array<char, 64> garbage{"this is not a frame"};
    CHECK(::send(client.connection.get(), garbage.data(), garbage.size(), MSG_NOSIGNAL) > 0);
    wait_for_end(client.session);
    CHECK(fixture.store->counters().refused_frames == 1);
}

// Two threads close a session with operations in progress, while a third thread removes files.
void test_close_with_operations_in_progress(const Fixture& fixture) {
    for (unsigned round = 0; round < 20; ++round) {
        Client client(fixture.folder, fixture.store, fixture.fabric);
        std::vector<Operation> operations;
        for (int index = 0; index < 100; ++index) {
            const auto opcode = index % 2 == 0 ? Opcode::write : Opcode::read;
            operations.push_back(client.make_operation(opcode, 0, 0, 300000));
        }
        client.send(operations);
        std::thread file_remover([&] {
            for (std::uint64_t unknown_handle = 100; unknown_handle < 200; ++unknown_handle) {
                client.session.remove_file(unknown_handle);
            }
            client.session.remove_file(file_handle);
        });
        std::thread closer([&] { client.session.close(); });
        client.session.close();
        closer.join();
        file_remover.join();
    }
}

} // namespace

int main() {
    for (const auto test :
         {test_written_bytes_are_read_back, test_each_of_many_operations_gets_its_result,
          test_invalid_operations_get_an_errno, test_operation_does_not_see_state_of_an_earlier_one,
          test_stale_rkey_ends_the_session, test_garbage_ends_the_session, test_close_with_operations_in_progress}) {
        const Fixture fixture;
        test(fixture);
    }
    std::puts("7 tests passed");
    return 0;
}
