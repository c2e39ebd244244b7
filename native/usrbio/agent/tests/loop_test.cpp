// Tests of the agent's loop. Another thread of this process acts as the storage server, which exchanges data frames
// with the loop. The thread of the test acts as the applications that own the rings.
#include <fcntl.h>
#include <netinet/in.h>
#include <semaphore.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "storage/crc32c.hpp"
#include "tests/check.hpp"
#include "usrbio/agent/bus_guard.hpp"
#include "usrbio/agent/loop.hpp"
#include "usrbio/agent/tests/store_folder.hpp"

using gdrkit::Descriptor;
using namespace gdrkit::usrbio;
using namespace gdrkit::usrbio::agent;
namespace storage = gdrkit::storage;

namespace {

using storage::crc32c;

constexpr std::chrono::milliseconds wait_timeout{20000};

// The three submit semaphores of an agent, high priority first.
class SubmitSemaphores {
public:
    SubmitSemaphores() {
        for (int index = 0; index < priority_class_count; ++index) {
            names[index] = "/gdrkit-loop-test." + std::to_string(getpid()) + "." + std::to_string(index);
            handles[index] = sem_open(names[index].c_str(), O_CREAT | O_EXCL, 0600, 0);
            CHECK(handles[index] != SEM_FAILED);
        }
    }
    ~SubmitSemaphores() {
        for (int index = 0; index < priority_class_count; ++index) {
            sem_close(handles[index]);
            sem_unlink(names[index].c_str());
        }
    }
    std::array<std::string, priority_class_count> names;
    std::array<sem_t*, priority_class_count> handles{};
};

// A storage server without files. The result of every operation is its length, or what `make_result` returns.
class FrameServer {
public:
    using MakeResult = std::function<storage::Result(const storage::Operation&)>;

    explicit FrameServer(MakeResult make_result = {}) : make_result_(std::move(make_result)) {
        int sockets[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) == 0);
        server_socket_ = sockets[0];
        client_socket = sockets[1];
        thread_ = std::thread([this] { run(); });
    }
    ~FrameServer() {
        ::shutdown(server_socket_, SHUT_RDWR);
        thread_.join();
        ::close(server_socket_);
    }
    void close_connection() const { ::shutdown(server_socket_, SHUT_RDWR); }

    int client_socket = -1;
    std::atomic<bool> is_silent{false};           // Further operations get no results.
    std::atomic<std::uint64_t> received_count{0}; // Number of received operations.

private:
    bool receive_fully(void* buffer, std::size_t length) const {
        auto* position = static_cast<std::byte*>(buffer);
        while (length != 0) {
            const ssize_t bytes_read = ::recv(server_socket_, position, length, 0);
            if (bytes_read <= 0)
                return false;
            position += bytes_read;
            length -= static_cast<std::size_t>(bytes_read);
        }
        return true;
    }

    void run() {
        storage::FrameHeader header;
        while (receive_fully(&header, sizeof header)) {
            CHECK(header.magic == storage::frame_magic && header.count != 0);
            CHECK(header.header_crc32c == crc32c(&header, offsetof(storage::FrameHeader, header_crc32c)));
            std::vector<storage::Operation> operations(header.count);
            if (!receive_fully(operations.data(), header.length))
                return;
            CHECK(header.payload_crc32c == crc32c(operations.data(), header.length));
            received_count += header.count;
            if (is_silent)
                continue;
            std::vector<storage::Result> results;
            for (const auto& operation : operations)
                results.push_back(make_result_
                                      ? make_result_(operation)
                                      : storage::Result{operation.tag, std::int64_t(operation.length), 0, 0, 0, 0});
            header.type = static_cast<std::uint16_t>(storage::FrameType::io_reply);
            header.sequence = 0;
            header.length = static_cast<std::uint32_t>(results.size() * sizeof(storage::Result));
            header.payload_crc32c = crc32c(results.data(), header.length);
            header.header_crc32c = crc32c(&header, offsetof(storage::FrameHeader, header_crc32c));
            ::send(server_socket_, &header, sizeof header, MSG_NOSIGNAL);
            ::send(server_socket_, results.data(), header.length, MSG_NOSIGNAL);
        }
    }

    MakeResult make_result_;
    int server_socket_ = -1;
    std::thread thread_;
};

// An application with a ring. Like an application of 3FS, it does not use gdrkit's extension of the ring.
class Application {
public:
    Application(std::size_t entries, sem_t* submit_semaphore)
        : submit_semaphore_(submit_semaphore), length_(ring_bytes(entries)) {
        fd = memfd_create("ring", MFD_CLOEXEC);
        CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(length_)) == 0);
        base_ = mmap(nullptr, length_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        CHECK(base_ != MAP_FAILED && RingView::bind(base_, length_, view) == 0);
    }
    ~Application() {
        munmap(base_, length_);
        ::close(fd);
    }

    void prepare(const Arguments& arguments) {
        const auto head = static_cast<std::uint32_t>(view.indices->submission_head.load());
        view.arguments[head] = arguments;
        view.submissions[head] = {static_cast<std::int32_t>(head), 0, arguments.userdata};
        view.indices->submission_head.store(static_cast<std::int32_t>(view.next(head)), std::memory_order_release);
    }
    void submit() { sem_post(submit_semaphore_); }
    Completion wait_for_completion() {
        CHECK(has_completion_within(wait_timeout));
        const auto tail = static_cast<std::uint32_t>(view.indices->completion_tail.load());
        const Completion completion = view.completions[tail];
        view.indices->completion_tail.store(static_cast<std::int32_t>(view.next(tail)), std::memory_order_release);
        return completion;
    }
    bool has_completion_within(std::chrono::milliseconds timeout) {
        timespec deadline{};
        clock_gettime(CLOCK_REALTIME, &deadline);
        deadline.tv_sec += timeout.count() / 1000 + 1; // Rounded up to whole seconds.
        while (view.indices->completion_head.load(std::memory_order_acquire) == view.indices->completion_tail.load())
            if (sem_timedwait(reinterpret_cast<sem_t*>(view.completion_semaphore), &deadline) != 0 &&
                errno == ETIMEDOUT)
                return false;
        return true;
    }

    int fd = -1;
    RingView view;

private:
    sem_t* submit_semaphore_;
    std::size_t length_;
    void* base_;
};

const Id buffer_id{1};
const Id ring_id{2};
constexpr std::uint64_t inode = 7;

Arguments make_arguments(std::uint64_t buffer_offset, std::uint64_t length, std::uint64_t userdata = 0) {
    Arguments arguments{};
    std::memcpy(arguments.buffer_id, buffer_id.data(), 16);
    arguments.buffer_offset = buffer_offset;
    arguments.file_inode = inode;
    arguments.length = length;
    arguments.userdata = userdata;
    return arguments;
}

struct LoopFixture {
    explicit LoopFixture(std::size_t outstanding_max = 64,
                         std::chrono::milliseconds server_timeout = std::chrono::minutes(1))
        : loop({std::chrono::microseconds(50), outstanding_max, server_timeout}, semaphores.names) {
        loop.add_client(1);
        // A buffer of 1 MiB in blocks of 256 KiB, with the address 0x1000 and the rkey 5 at the only NIC. A file with
        // the handles 11 (for reading) and 12 (for writing).
        loop.add_buffer(1, {buffer_id, 1 << 20, 1 << 18, {{0x1000, 5}}, {}});
        loop.set_file(1, {inode, 11, 12, true, true});
    }
    // Adds the ring of the application, for reads, with the depth 0, the timeout 0 and no flags.
    void add_ring_of(const Application& application, int priority = 1) {
        loop.add_ring(1, {ring_id, true, 0, priority, std::chrono::milliseconds(0), 0}, application.fd);
    }
    SubmitSemaphores semaphores;
    Loop loop;
};

void test_operations_complete() {
    LoopFixture fixture;
    FrameServer server;
    Application application(256, fixture.semaphores.handles[1]);
    // The connection has one queue pair, at NIC 0, and the generation 1.
    fixture.loop.connect(server.client_socket, {0}, 1);
    fixture.add_ring_of(application);
    for (int round = 0; round < 200; ++round) {
        for (std::uint64_t block = 0; block < 100; ++block)
            application.prepare(make_arguments(block * 4096, 4096, block));
        application.submit();
        for (int count = 0; count < 100; ++count)
            CHECK(application.wait_for_completion().result == 4096);
    }
    const Statistics statistics = fixture.loop.statistics();
    CHECK(statistics.operations == 20000 && statistics.completions == 20000 && statistics.outstanding == 0);
    CHECK(fixture.loop.remove_ring(1, ring_id, wait_timeout) && fixture.loop.remove_buffer(1, buffer_id, wait_timeout));
    CHECK(fixture.loop.remove_file(1, inode, wait_timeout));
    fixture.loop.remove_client(1);
}

void test_removal_waits_for_operations_in_flight() {
    LoopFixture fixture;
    FrameServer server;
    server.is_silent = true;
    Application application(8, fixture.semaphores.handles[1]);
    fixture.loop.connect(server.client_socket, {0}, 1);
    fixture.add_ring_of(application);
    application.prepare(make_arguments(0, 4096));
    application.submit();
    while (server.received_count == 0)
        std::this_thread::yield();
    CHECK(!fixture.loop.remove_buffer(1, buffer_id, std::chrono::milliseconds(1)));
    CHECK(!fixture.loop.remove_ring(1, ring_id, std::chrono::milliseconds(1)));
    std::thread remover([&] { CHECK(fixture.loop.remove_buffer(1, buffer_id, wait_timeout)); });
    fixture.loop.disconnect();
    remover.join();
    CHECK(application.wait_for_completion().result == -EREMOTEIO);
    CHECK(fixture.loop.remove_ring(1, ring_id, wait_timeout));
}

void test_closed_connection_is_reported_and_replaced() {
    LoopFixture fixture;
    FrameServer first_server;
    FrameServer second_server;
    Application application(8, fixture.semaphores.handles[1]);
    first_server.is_silent = true;
    fixture.loop.connect(first_server.client_socket, {0}, 1);
    fixture.add_ring_of(application);
    application.prepare(make_arguments(0, 4096));
    application.submit();
    while (first_server.received_count == 0)
        std::this_thread::yield();
    first_server.close_connection();
    const std::vector<Event> events = fixture.loop.events(wait_timeout);
    CHECK(events.size() == 1 && events[0].kind == Event::Kind::disconnected && events[0].generation == 1);
    application.prepare(make_arguments(0, 1));
    application.submit();
    CHECK(application.wait_for_completion().result == -EREMOTEIO);
    fixture.loop.disconnect();
    CHECK(application.wait_for_completion().result == -EREMOTEIO);
    fixture.loop.connect(second_server.client_socket, {0}, 2);
    application.prepare(make_arguments(0, 4096));
    application.submit();
    CHECK(application.wait_for_completion().result == 4096);
}

// A server that hangs does not close its connection, so the loop must detect its silence. The operations in flight stay
// in flight until disconnect().
void test_silent_server_is_reported() {
    // On a busy machine, the thread of the server may get a processor late.
    constexpr std::chrono::milliseconds timeout{1000};
    LoopFixture fixture(64, timeout);
    FrameServer server;
    Application application(8, fixture.semaphores.handles[1]);
    fixture.loop.connect(server.client_socket, {0}, 1);
    fixture.add_ring_of(application);
    // A server without operations may be silent, and each result restarts the timeout.
    for (int round = 0; round < 2; ++round) {
        std::this_thread::sleep_for(timeout * 3 / 5);
        application.prepare(make_arguments(0, 4096));
        application.submit();
        CHECK(application.wait_for_completion().result == 4096);
    }
    CHECK(fixture.loop.events(timeout * 6 / 5).empty());
    server.is_silent = true;
    application.prepare(make_arguments(0, 4096));
    application.submit();
    const std::vector<Event> events = fixture.loop.events(wait_timeout);
    CHECK(events.size() == 1 && events[0].kind == Event::Kind::silent && events[0].generation == 1);
    CHECK(fixture.loop.statistics().outstanding == 1);
    fixture.loop.disconnect();
    CHECK(application.wait_for_completion().result == -EREMOTEIO);
}

// If a client frees memory that an operation uses, the session ends. Operations of other clients do not fail.
void test_refused_memory_fails_no_other_operation() {
    constexpr std::uint32_t refused_rkey = 6;
    LoopFixture fixture;
    // As the storage server does, return -EREMOTEIO for an operation whose memory was refused.
    FrameServer first_server([&](const storage::Operation& operation) {
        storage::Result result{operation.tag, std::int64_t(operation.length), 0, 0, 0, 0};
        if (operation.rkey == refused_rkey)
            result.result = -EREMOTEIO;
        return result;
    });
    FrameServer second_server;
    first_server.is_silent = true;
    Application healthy_application(8, fixture.semaphores.handles[1]);
    Application hostile_application(8, fixture.semaphores.handles[1]);
    fixture.loop.add_client(2);
    fixture.loop.add_buffer(2, {buffer_id, 1 << 20, 0, {{0x1000, refused_rkey}}, {}});
    fixture.loop.set_file(2, {inode, 11, 12, true, true});
    fixture.loop.connect(first_server.client_socket, {0}, 1);
    fixture.add_ring_of(healthy_application);
    fixture.loop.add_ring(2, {ring_id, true, 0, 1, std::chrono::milliseconds(0), 0}, hostile_application.fd);
    healthy_application.prepare(make_arguments(0, 4096, 1));
    healthy_application.submit();
    while (first_server.received_count == 0)
        std::this_thread::yield();
    first_server.is_silent = false;
    hostile_application.prepare(make_arguments(0, 512, 2));
    hostile_application.submit();
    CHECK(hostile_application.wait_for_completion().result == -EREMOTEIO);
    const std::vector<Event> events = fixture.loop.events(wait_timeout);
    CHECK(events.size() == 1 && events[0].kind == Event::Kind::disconnected);
    // An operation that is submitted now waits for the next connection too.
    healthy_application.prepare(make_arguments(4096, 512, 3));
    healthy_application.submit();
    CHECK(fixture.loop.disconnect());
    fixture.loop.connect(second_server.client_socket, {0}, 2);
    std::uint64_t userdata_sum = 0;
    for (int count = 0; count < 2; ++count) {
        const Completion completion = healthy_application.wait_for_completion();
        CHECK(completion.result == (completion.userdata == 1 ? 4096 : 512));
        userdata_sum += completion.userdata;
    }
    CHECK(userdata_sum == 1 + 3);
    hostile_application.prepare(make_arguments(0, 512));
    hostile_application.submit();
    CHECK(hostile_application.wait_for_completion().result == -EREMOTEIO);
    CHECK(fixture.loop.events(std::chrono::milliseconds(0)).empty());
}

// Operations wait for a new connection. If the agent gets none, it ends the operations by abandon().
void test_waiting_operations_can_be_abandoned() {
    LoopFixture fixture;
    FrameServer server([](const storage::Operation& operation) {
        return storage::Result{operation.tag, operation.length == 1 ? -EREMOTEIO : 0, 0, 0, 0, 0};
    });
    Application application(8, fixture.semaphores.handles[1]);
    const Id refused_buffer_id{3};
    fixture.loop.add_buffer(1, {refused_buffer_id, 1 << 20, 0, {{0x1000, 5}}, {}});
    fixture.loop.connect(server.client_socket, {0}, 1);
    fixture.add_ring_of(application);
    server.is_silent = true;
    application.prepare(make_arguments(0, 4096));
    application.submit();
    while (server.received_count == 0)
        std::this_thread::yield();
    server.is_silent = false;
    Arguments refused_arguments = make_arguments(0, 1);
    std::memcpy(refused_arguments.buffer_id, refused_buffer_id.data(), refused_buffer_id.size());
    application.prepare(refused_arguments);
    application.submit();
    CHECK(application.wait_for_completion().result == -EREMOTEIO);
    CHECK(fixture.loop.events(wait_timeout).size() == 1);
    CHECK(fixture.loop.disconnect());
    CHECK(fixture.loop.statistics().outstanding == 1);
    fixture.loop.abandon();
    CHECK(application.wait_for_completion().result == -EREMOTEIO);
    CHECK(!fixture.loop.disconnect());
}

void test_invalid_results_end_the_connection() {
    for (int variant = 0; variant < 4; ++variant) {
        LoopFixture fixture;
        FrameServer server([variant](const storage::Operation& operation) {
            storage::Result result{operation.tag, std::int64_t(operation.length), 0, 0, 0, 0};
            if (variant == 0)
                result.tag += 1; // No operation has this tag.
            if (variant == 1)
                result.result += 1; // More bytes than requested.
            if (variant == 2)
                result.result = -100000; // Below -4095, so not a negative errno.
            if (variant == 3)
                result.holes = 1; // The agent never requests a list of holes.
            return result;
        });
        Application application(8, fixture.semaphores.handles[1]);
        fixture.loop.connect(server.client_socket, {0}, 1);
        fixture.add_ring_of(application);
        application.prepare(make_arguments(0, 4096));
        application.submit();
        const std::vector<Event> events = fixture.loop.events(wait_timeout);
        CHECK(events.size() == 1 && events[0].kind == Event::Kind::disconnected);
        fixture.loop.disconnect();
        CHECK(application.wait_for_completion().result == -EREMOTEIO);
    }
}

void test_entries_beyond_the_limit_wait_in_the_ring() {
    LoopFixture fixture(4);
    FrameServer server;
    Application application(64, fixture.semaphores.handles[2]);
    fixture.loop.connect(server.client_socket, {0, 0}, 1);
    fixture.add_ring_of(application, 2);
    for (int round = 0; round < 50; ++round) {
        for (int count = 0; count < 64; ++count)
            application.prepare(make_arguments(0, 512));
        application.submit();
        for (int count = 0; count < 64; ++count)
            CHECK(application.wait_for_completion().result == 512);
    }
}

// One ring gets random values. The loop completes its entries or reports it as broken, and always serves the other
// ring.
void test_hostile_ring_leaves_other_rings() {
    std::mt19937_64 random_number(20260101);
    for (int round = 0; round < 100; ++round) {
        LoopFixture fixture;
        FrameServer server;
        Application hostile_application(16, fixture.semaphores.handles[0]);
        Application healthy_application(16, fixture.semaphores.handles[1]);
        fixture.loop.connect(server.client_socket, {0}, 1);
        fixture.loop.add_ring(1, {Id{9}, true, 0, 0, std::chrono::milliseconds(0), 0}, hostile_application.fd);
        fixture.add_ring_of(healthy_application);
        for (int step = 0; step < 20; ++step) {
            Arguments arguments = make_arguments(random_number(), random_number() % 8192, random_number());
            if (random_number() % 2 == 0)
                arguments.file_inode = random_number() % 16;
            hostile_application.view.arguments[random_number() % hostile_application.view.slot_count] = arguments;
            hostile_application.view.submissions[random_number() % hostile_application.view.slot_count] = {
                static_cast<std::int32_t>(random_number() % 40) - 4, 0, 0};
            auto& corrupt_index = random_number() % 4 == 0 ? hostile_application.view.indices->completion_tail
                                                           : hostile_application.view.indices->submission_head;
            corrupt_index.store(static_cast<std::int32_t>(random_number() % 24) - 2, std::memory_order_release);
            hostile_application.submit();
            healthy_application.prepare(make_arguments(4096, 4096));
            healthy_application.submit();
            CHECK(healthy_application.wait_for_completion().result == 4096);
        }
    }
}

void test_truncated_ring_leaves_other_rings() {
    LoopFixture fixture;
    FrameServer server;
    Application healthy_application(16, fixture.semaphores.handles[1]);
    fixture.loop.connect(server.client_socket, {0}, 1);
    fixture.add_ring_of(healthy_application);
    {
        Application hostile_application(16, fixture.semaphores.handles[0]);
        fixture.loop.add_ring(1, {Id{9}, true, 0, 0, std::chrono::milliseconds(0), 0}, hostile_application.fd);
        CHECK(ftruncate(hostile_application.fd, 0) == 0);
        sem_post(fixture.semaphores.handles[0]);
        const std::vector<Event> events = fixture.loop.events(wait_timeout);
        CHECK(events.size() == 1 && events[0].kind == Event::Kind::ring_broken && events[0].id == Id{9});
    }
    healthy_application.prepare(make_arguments(0, 4096));
    healthy_application.submit();
    CHECK(healthy_application.wait_for_completion().result == 4096);
}

// A turn of a ring is its part of one pass of the loop. In each turn, the loop executes about 1 MiB of local reads. A
// short read before many long reads must not make the turn longer: the server executes the rest of the claimed reads.
// The ring is full before the loop serves it, so that one turn begins with all reads.
void check_turn_is_limited(LoopFixture& fixture, const FrameServer& server, Descriptor file) {
    constexpr std::size_t long_reads_count = 40, long_read_bytes = std::size_t{1} << 20;
    CHECK(ftruncate(file.get(), long_read_bytes) == 0);
    const std::vector<char> zeros(long_read_bytes);
    CHECK(pwrite(file.get(), zeros.data(), long_read_bytes, 0) == ssize_t{long_read_bytes});
    std::vector<char> memory(long_read_bytes);
    Application application(64, fixture.semaphores.handles[1]);
    const Id long_buffer_id{4};
    fixture.loop.add_buffer(
        1, {long_buffer_id, memory.size(), 0, {{0x1000, 5}}, {}, reinterpret_cast<std::uintptr_t>(memory.data())});
    fixture.loop.set_file(1, {inode, 11, 12, true, true}, std::move(file));
    const std::uint64_t local_reads_before = fixture.loop.statistics().local_reads,
                        received_before = server.received_count;
    const auto prepare = [&](std::size_t length) {
        Arguments arguments = make_arguments(0, length);
        std::memcpy(arguments.buffer_id, long_buffer_id.data(), long_buffer_id.size());
        application.prepare(arguments);
    };
    prepare(1);
    for (std::size_t index = 0; index < long_reads_count; ++index)
        prepare(long_read_bytes);
    fixture.loop.add_ring(1, {Id{5}, true, 0, 1, std::chrono::milliseconds(0), 0}, application.fd);
    application.submit();
    std::size_t short_results_count = 0;
    for (std::size_t index = 0; index <= long_reads_count; ++index) {
        const std::int64_t result = application.wait_for_completion().result;
        CHECK(result == 1 || result == long_read_bytes);
        short_results_count += result == 1;
    }
    // The loop has executed the short read and one long read.
    CHECK(short_results_count == 1 && fixture.loop.statistics().local_reads - local_reads_before == 2);
    CHECK(server.received_count - received_before == long_reads_count - 1);
    CHECK(fixture.loop.remove_buffer(1, long_buffer_id, wait_timeout));
}

// The loop itself reads cached bytes, but only into a mapped buffer, for a ring without flags, and while it is
// connected to the server.
void test_cached_bytes_are_read_by_the_loop() {
    LoopFixture fixture;
    FrameServer server;
    Application application(64, fixture.semaphores.handles[1]);
    std::string folder = "/tmp/gdrkit-loop-XXXXXX";
    CHECK(mkdtemp(folder.data()) != nullptr);
    Descriptor sums_folder(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    Descriptor generation_memory(memfd_create("generation", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    CHECK(ftruncate(generation_memory.get(), 4096) == 0 &&
          fcntl(generation_memory.get(), F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    Descriptor file(open((folder + "/file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    const std::string content(10000, 'x');
    CHECK(pwrite(file.get(), content.data(), content.size(), 0) == 10000);
    const auto duplicate_file = [&] { return Descriptor(fcntl(file.get(), F_DUPFD_CLOEXEC, 0)); };
    std::vector<char> memory(1 << 16);
    const Id mapped_buffer_id{3};
    fixture.loop.set_local_store(std::move(sums_folder), std::move(generation_memory));
    fixture.loop.add_buffer(
        1, {mapped_buffer_id, memory.size(), 0, {{0x1000, 5}}, {}, reinterpret_cast<std::uintptr_t>(memory.data())});
    fixture.loop.connect(server.client_socket, {0}, 1);
    fixture.add_ring_of(application);
    const auto read = [&](std::uint64_t offset, const Id& buffer) {
        Arguments arguments = make_arguments(offset, 4096);
        std::memcpy(arguments.buffer_id, buffer.data(), buffer.size());
        arguments.file_offset = offset;
        application.prepare(arguments);
        application.submit();
        return application.wait_for_completion().result;
    };
    // The fixture has registered the file without a descriptor.
    CHECK(read(0, mapped_buffer_id) == 4096 && server.received_count == 1);
    fixture.loop.set_file(1, {inode, 11, 12, true, true}, duplicate_file());
    for (int count = 0; count < 100; ++count) {
        CHECK(read(0, mapped_buffer_id) == 4096 && memory[4095] == 'x' && memory[4096] == 0);
        CHECK(read(8192, mapped_buffer_id) == 10000 - 8192 && memory[9999] == 'x' && memory[10000] == 0);
        std::fill(memory.begin(), memory.end(), 0);
    }
    CHECK(server.received_count == 1 && fixture.loop.statistics().local_reads == 200);
    // The server executes reads into a buffer without a mapping, and reads of a file that has no read handle.
    CHECK(read(0, buffer_id) == 4096 && server.received_count == 2);
    fixture.loop.set_file(1, {inode, 0, 12, true, true}, duplicate_file());
    CHECK(read(0, mapped_buffer_id) == 4096 && server.received_count == 3);
    check_turn_is_limited(fixture, server, duplicate_file());
    fixture.loop.set_file(1, {inode, 11, 12, true, true}, duplicate_file());
    fixture.loop.disconnect();
    CHECK(read(0, mapped_buffer_id) == -EREMOTEIO);
    CHECK(std::system(("rm -r " + folder).c_str()) == 0);
}

// A loop with a store of files of its own machine, and an application whose buffer the loop may fill itself.
struct LocalFixture : LoopFixture {
    static constexpr std::size_t memory_bytes = std::size_t{8} << 20;
    static constexpr Id mapped_buffer_id{3};

    LocalFixture() {
        loop.set_local_store(Descriptor(fcntl(folder.sums_folder.get(), F_DUPFD_CLOEXEC, 0)),
                             Descriptor(fcntl(folder.generation_memory.get(), F_DUPFD_CLOEXEC, 0)));
        memory_file = Descriptor(memfd_create("buffer", MFD_CLOEXEC));
        CHECK(ftruncate(memory_file.get(), memory_bytes) == 0);
        mapped_memory =
            static_cast<char*>(mmap(nullptr, memory_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory_file.get(), 0));
        CHECK(mapped_memory != MAP_FAILED);
        loop.add_buffer(
            1, {mapped_buffer_id, memory_bytes, 0, {{0x1000, 5}}, {}, reinterpret_cast<std::uintptr_t>(mapped_memory)});
        loop.set_file(1, {inode, 11, 12, true, true}, open_file());
        loop.connect(server.client_socket, {0}, 1);
    }
    ~LocalFixture() {
        CHECK(loop.remove_buffer(1, mapped_buffer_id, wait_timeout));
        munmap(mapped_memory, memory_bytes);
    }
    Descriptor open_file() const { return Descriptor(fcntl(folder.file.get(), F_DUPFD_CLOEXEC, 0)); }
    void prepare(std::size_t buffer_offset, std::size_t length, std::uint64_t file_inode = inode) {
        Arguments arguments = make_arguments(buffer_offset, length);
        std::memcpy(arguments.buffer_id, mapped_buffer_id.data(), mapped_buffer_id.size());
        arguments.file_inode = file_inode;
        application.prepare(arguments);
    }
    // Reads the first bytes of a file. Returns whether the loop has executed the read.
    bool reads_locally(std::uint64_t file_inode = inode) {
        const std::uint64_t local_reads_before = loop.statistics().local_reads, received_before = server.received_count;
        prepare(0, 4096, file_inode);
        application.submit();
        CHECK(application.wait_for_completion().result == 4096);
        const std::uint64_t local_count = loop.statistics().local_reads - local_reads_before;
        CHECK(local_count + server.received_count - received_before == 1);
        return local_count == 1;
    }

    tests::StoreFolder folder{std::size_t{1} << 20};
    Descriptor memory_file;
    char* mapped_memory = nullptr;
    FrameServer server;
    Application application{64, semaphores.handles[1]};
};

// The loop may copy up to 1 MiB before it notices that the server must execute the read. These bytes count too, so that
// such reads also end the turn of a ring.
void test_failed_local_reads_end_the_turn_of_a_ring() {
    LocalFixture fixture;
    fixture.folder.add_sums();
    // The two threads begin at the two ends of a long read, so they come last to the corrupt byte in the middle.
    const std::size_t middle = fixture.folder.bytes.size() / 2;
    const std::byte flipped_byte = fixture.folder.bytes[middle] ^ std::byte{1};
    CHECK(pwrite(fixture.folder.file.get(), &flipped_byte, 1, static_cast<off_t>(middle)) == 1);
    const std::size_t long_read_bytes = fixture.folder.bytes.size(),
                      long_read_count = LocalFixture::memory_bytes / long_read_bytes;
    // After the short read, the loop claims all long reads at once, because the ring is full before the loop serves it.
    fixture.prepare(0, 1);
    for (std::size_t index = 0; index < long_read_count; ++index)
        fixture.prepare(index * long_read_bytes, long_read_bytes);
    fixture.add_ring_of(fixture.application);
    fixture.application.submit();
    for (std::size_t index = 0; index <= long_read_count; ++index)
        CHECK(fixture.application.wait_for_completion().result > 0);
    CHECK(fixture.loop.statistics().local_reads == 0 && fixture.server.received_count == long_read_count + 1);
    // The server of this test moves no bytes, so only the reads of the loop have changed the memory. Each failed local
    // read has copied at least half of its bytes, so the second or third of these reads has ended the turn.
    std::size_t copied_count = 0;
    for (std::size_t index = 0; index < long_read_count; ++index)
        copied_count +=
            std::memcmp(fixture.mapped_memory + index * long_read_bytes, fixture.folder.bytes.data(), 4096) == 0;
    CHECK(copied_count >= 1 && copied_count <= 3 && long_read_count > 3);
}

// The server executes writes, reads that must not return holes (flag 2, HF3FS_IOR_FORBID_READ_HOLES), and reads into
// memory that was truncated.
void test_server_executes_what_the_loop_may_not() {
    for (const auto& [for_read, flags] : {std::pair<bool, std::uint64_t>{true, 0}, {false, 0}, {true, 2}}) {
        LocalFixture fixture;
        fixture.loop.add_ring(1, {ring_id, for_read, 0, 1, std::chrono::milliseconds(0), flags},
                              fixture.application.fd);
        CHECK(fixture.reads_locally() == (for_read && flags == 0));
    }
    LocalFixture fixture;
    fixture.add_ring_of(fixture.application);
    CHECK(fixture.reads_locally());
    CHECK(ftruncate(fixture.memory_file.get(), 0) == 0);
    CHECK(*static_cast<volatile char*>(fixture.mapped_memory) == 0); // The handler of SIGBUS maps a page of zeros.
    CHECK(!fixture.reads_locally());
}

// The loop has at most one local file for every eight descriptors that the process may open.
void test_files_leave_descriptors_for_others() {
    rlimit limit_before{};
    CHECK(getrlimit(RLIMIT_NOFILE, &limit_before) == 0);
    constexpr std::uint64_t descriptors_max = 256, files_max = descriptors_max / 8, first_inode = 1000;
    CHECK(limit_before.rlim_max >= descriptors_max);
    const rlimit low_limit{descriptors_max, limit_before.rlim_max};
    CHECK(setrlimit(RLIMIT_NOFILE, &low_limit) == 0);
    {
        LocalFixture fixture; // The fixture has one file already.
        fixture.add_ring_of(fixture.application);
        for (std::uint64_t index = 0; index < files_max; ++index)
            fixture.loop.set_file(1, {first_inode + index, 11, 12, true, true}, fixture.open_file());
        CHECK(fixture.reads_locally(first_inode + files_max - 2) &&
              !fixture.reads_locally(first_inode + files_max - 1));
        CHECK(fixture.loop.remove_file(1, first_inode, wait_timeout));
        fixture.loop.set_file(1, {first_inode + files_max - 1, 11, 12, true, true}, fixture.open_file());
        CHECK(fixture.reads_locally(first_inode + files_max - 1));
    }
    CHECK(setrlimit(RLIMIT_NOFILE, &limit_before) == 0);
}

// Returns one end of a connection whose close(2) blocks until the other end, `peer`, is closed.
Descriptor make_descriptor_with_slow_close(Descriptor& peer) {
    const Descriptor listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    auto* const socket_address = reinterpret_cast<sockaddr*>(&address);
    CHECK(bind(listener.get(), socket_address, length) == 0 && listen(listener.get(), 1) == 0);
    CHECK(getsockname(listener.get(), socket_address, &length) == 0);
    Descriptor descriptor(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    CHECK(connect(descriptor.get(), socket_address, length) == 0);
    peer = Descriptor(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    CHECK(peer.get() >= 0);
    const linger linger_option{1, 60}; // close(2) waits at most 60 s until the sent bytes are acknowledged.
    CHECK(setsockopt(descriptor.get(), SOL_SOCKET, SO_LINGER, &linger_option, sizeof linger_option) == 0);
    const std::vector<char> unread_bytes(1 << 16);
    while (send(descriptor.get(), unread_bytes.data(), unread_bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL) > 0) {
    }
    return descriptor;
}

// The last close(2) of a deleted file frees its blocks, which takes long. It must not stop the loop.
void test_loop_closes_no_files() {
    for (const bool is_removed : {false, true}) {
        LocalFixture fixture;
        fixture.add_ring_of(fixture.application);
        Descriptor peer;
        constexpr std::uint64_t slow_inode = 8;
        Descriptor slow_file = make_descriptor_with_slow_close(peer);
        const int slow_fd = slow_file.get();
        fixture.loop.set_file(1, {slow_inode, 13, 0, true, false}, std::move(slow_file));
        std::atomic<bool> has_closed{false};
        std::thread closer([&] {
            if (is_removed)
                CHECK(fixture.loop.remove_file(1, slow_inode, wait_timeout));
            else
                fixture.loop.set_file(1, {slow_inode, 13, 0, true, false});
            has_closed = true;
        });
        while (fcntl(slow_fd, F_GETFD) >= 0) // close(2) frees the number of the descriptor before it blocks.
            std::this_thread::yield();
        CHECK(fixture.reads_locally() && !has_closed);
        peer = Descriptor();
        closer.join();
    }
}

// Buffers may use only half of the table of guarded ranges. After they have used it, rings still get the other half.
void test_buffers_leave_guards_for_rings() {
    char byte = 0;
    std::vector<std::unique_ptr<BusGuard>> guards;
    try {
        while (true)
            guards.push_back(std::make_unique<BusGuard>(&byte, 1, BusGuard::Purpose::buffer));
    } catch (const std::bad_alloc&) {
        CHECK(!guards.empty());
    }
    const std::size_t buffers_count = guards.size();
    for (std::size_t count = 0; count < buffers_count; ++count)
        guards.push_back(std::make_unique<BusGuard>(&byte, 1));
    // The entries of destroyed guards are free again, wherever they are in the table.
    for (const std::size_t index : {buffers_count - 1, buffers_count / 2, std::size_t{0}})
        guards[index].reset();
    for (int count = 0; count < 3; ++count)
        guards.push_back(std::make_unique<BusGuard>(&byte, 1, BusGuard::Purpose::buffer));
}

} // namespace

int main() {
    test_operations_complete();
    test_cached_bytes_are_read_by_the_loop();
    test_failed_local_reads_end_the_turn_of_a_ring();
    test_server_executes_what_the_loop_may_not();
    test_files_leave_descriptors_for_others();
    test_loop_closes_no_files();
    test_removal_waits_for_operations_in_flight();
    test_closed_connection_is_reported_and_replaced();
    test_silent_server_is_reported();
    test_refused_memory_fails_no_other_operation();
    test_waiting_operations_can_be_abandoned();
    test_invalid_results_end_the_connection();
    test_entries_beyond_the_limit_wait_in_the_ring();
    test_hostile_ring_leaves_other_rings();
    test_truncated_ring_leaves_other_rings();
    test_buffers_leave_guards_for_rings();
}
