// The loop against a server of this process that speaks frames, and rings whose application is this process too.
#include <fcntl.h>
#include <semaphore.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "storage/crc32c.hpp"
#include "usrbio/agent/loop.hpp"

using namespace gdrkit::usrbio;
using namespace gdrkit::usrbio::agent;
namespace storage = gdrkit::storage;

namespace {

using storage::crc32c;

#define REQUIRE(condition)                                                                                             \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                       \
            std::abort();                                                                                              \
        }                                                                                                              \
    } while (false)

constexpr std::chrono::milliseconds patience{20000};

class Semaphores {
public:
    Semaphores() {
        for (int index = 0; index < priority_classes; ++index) {
            names[index] = "/gdrkit-loop-test." + std::to_string(getpid()) + "." + std::to_string(index);
            opened[index] = sem_open(names[index].c_str(), O_CREAT | O_EXCL, 0600, 0);
            REQUIRE(opened[index] != SEM_FAILED);
        }
    }
    ~Semaphores() {
        for (int index = 0; index < priority_classes; ++index) {
            sem_close(opened[index]);
            sem_unlink(names[index].c_str());
        }
    }
    std::array<std::string, priority_classes> names;
    std::array<sem_t*, priority_classes> opened{};
};

// Answers every operation with its length, or as `answer` says.
class FrameServer {
public:
    using Answer = std::function<storage::Result(const storage::Operation&)>;

    explicit FrameServer(Answer answer = {}) : answer_(std::move(answer)) {
        int ends[2];
        REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
        mine_ = ends[0];
        theirs = ends[1];
        thread_ = std::thread([this] { run(); });
    }
    ~FrameServer() {
        ::shutdown(mine_, SHUT_RDWR);
        thread_.join();
        ::close(mine_);
    }
    void hang_up() const { ::shutdown(mine_, SHUT_RDWR); }

    int theirs = -1;
    std::atomic<bool> is_silent{false};
    std::atomic<std::uint64_t> seen{0};

private:
    bool read(void* into, std::size_t length) const {
        auto* at = static_cast<std::byte*>(into);
        while (length != 0) {
            const ssize_t got = ::recv(mine_, at, length, 0);
            if (got <= 0)
                return false;
            at += got;
            length -= static_cast<std::size_t>(got);
        }
        return true;
    }

    void run() {
        storage::FrameHeader header;
        while (read(&header, sizeof header)) {
            REQUIRE(header.magic == storage::frame_magic && header.count != 0);
            REQUIRE(header.header_crc32c == crc32c(&header, 28));
            std::vector<storage::Operation> operations(header.count);
            if (!read(operations.data(), header.length))
                return;
            REQUIRE(header.payload_crc32c == crc32c(operations.data(), header.length));
            seen += header.count;
            if (is_silent)
                continue;
            std::vector<storage::Result> results;
            for (const auto& operation : operations)
                results.push_back(answer_ ? answer_(operation)
                                          : storage::Result{operation.tag, std::int64_t(operation.length), 0, 0, 0, 0});
            header.type = static_cast<std::uint16_t>(storage::FrameType::io_reply);
            header.sequence = 0;
            header.length = static_cast<std::uint32_t>(results.size() * sizeof(storage::Result));
            header.payload_crc32c = crc32c(results.data(), header.length);
            header.header_crc32c = crc32c(&header, 28);
            ::send(mine_, &header, sizeof header, MSG_NOSIGNAL);
            ::send(mine_, results.data(), header.length, MSG_NOSIGNAL);
        }
    }

    Answer answer_;
    int mine_ = -1;
    std::thread thread_;
};

// An application that speaks the plain protocol of 3FS.
class Application {
public:
    Application(std::size_t entries, sem_t* submit) : submit_(submit), length_(ring_bytes(entries)) {
        fd = memfd_create("ring", MFD_CLOEXEC);
        REQUIRE(fd >= 0 && ftruncate(fd, static_cast<off_t>(length_)) == 0);
        base_ = mmap(nullptr, length_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        REQUIRE(base_ != MAP_FAILED && RingView::over(base_, length_, view) == 0);
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
    void submit() { sem_post(submit_); }
    Completion wait() {
        REQUIRE(wait_for(patience));
        const auto tail = static_cast<std::uint32_t>(view.indices->completion_tail.load());
        const Completion completion = view.completions[tail];
        view.indices->completion_tail.store(static_cast<std::int32_t>(view.next(tail)), std::memory_order_release);
        return completion;
    }
    bool wait_for(std::chrono::milliseconds timeout) {
        timespec until{};
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += timeout.count() / 1000 + 1;
        while (view.indices->completion_head.load(std::memory_order_acquire) == view.indices->completion_tail.load())
            if (sem_timedwait(reinterpret_cast<sem_t*>(view.completed), &until) != 0 && errno == ETIMEDOUT)
                return false;
        return true;
    }

    int fd = -1;
    RingView view;

private:
    sem_t* submit_;
    std::size_t length_;
    void* base_;
};

const Id buffer_id{1};
const Id ring_id{2};
constexpr std::uint64_t inode = 7;

Arguments entry(std::uint64_t offset, std::uint64_t length, std::uint64_t userdata = 0) {
    Arguments made{};
    std::memcpy(made.buffer_id, buffer_id.data(), 16);
    made.buffer_offset = offset;
    made.file_inode = inode;
    made.length = length;
    made.userdata = userdata;
    return made;
}

struct Setting {
    explicit Setting(std::size_t outstanding_max = 64, std::chrono::milliseconds silence = std::chrono::minutes(1))
        : loop({std::chrono::microseconds(50), outstanding_max, silence}, names.names) {
        loop.add_client(1);
        loop.add_buffer(1, {buffer_id, 1 << 20, 1 << 18, {{0x1000, 5}}, {}});
        loop.set_file(1, {inode, 11, 12, true, true});
    }
    void serve(const Application& application, int priority = 1) {
        loop.add_ring(1, {ring_id, true, 0, priority, std::chrono::milliseconds(0), 0}, application.fd);
    }
    Semaphores names;
    Loop loop;
};

void operations_go_round() {
    Setting setting;
    FrameServer server;
    Application application(256, setting.names.opened[1]);
    setting.loop.connect(server.theirs, {0}, 1);
    setting.serve(application);
    for (int round = 0; round < 200; ++round) {
        for (std::uint64_t number = 0; number < 100; ++number)
            application.prepare(entry(number * 4096, 4096, number));
        application.submit();
        for (int number = 0; number < 100; ++number)
            REQUIRE(application.wait().result == 4096);
    }
    const Statistics counted = setting.loop.statistics();
    REQUIRE(counted.operations == 20000 && counted.completions == 20000 && counted.outstanding == 0);
    REQUIRE(setting.loop.remove_ring(1, ring_id, patience) && setting.loop.remove_buffer(1, buffer_id, patience));
    REQUIRE(setting.loop.remove_file(1, inode, patience));
    setting.loop.remove_client(1);
}

void a_removal_waits_for_what_is_in_flight() {
    Setting setting;
    FrameServer server;
    server.is_silent = true;
    Application application(8, setting.names.opened[1]);
    setting.loop.connect(server.theirs, {0}, 1);
    setting.serve(application);
    application.prepare(entry(0, 4096));
    application.submit();
    while (server.seen == 0)
        std::this_thread::yield();
    REQUIRE(!setting.loop.remove_buffer(1, buffer_id, std::chrono::milliseconds(1)));
    REQUIRE(!setting.loop.remove_ring(1, ring_id, std::chrono::milliseconds(1)));
    std::thread closer([&] { REQUIRE(setting.loop.remove_buffer(1, buffer_id, patience)); });
    setting.loop.disconnect();
    closer.join();
    REQUIRE(application.wait().result == -EREMOTEIO);
    REQUIRE(setting.loop.remove_ring(1, ring_id, patience));
}

void a_connection_that_ends_is_told_and_renewed() {
    Setting setting;
    FrameServer first;
    FrameServer second;
    Application application(8, setting.names.opened[1]);
    first.is_silent = true;
    setting.loop.connect(first.theirs, {0}, 1);
    setting.serve(application);
    application.prepare(entry(0, 4096));
    application.submit();
    while (first.seen == 0)
        std::this_thread::yield();
    first.hang_up();
    const std::vector<Event> events = setting.loop.events(patience);
    REQUIRE(events.size() == 1 && events[0].kind == Event::Kind::disconnected && events[0].generation == 1);
    application.prepare(entry(0, 1));
    application.submit();
    REQUIRE(application.wait().result == -EREMOTEIO);
    setting.loop.disconnect();
    REQUIRE(application.wait().result == -EREMOTEIO);
    setting.loop.connect(second.theirs, {0}, 2);
    application.prepare(entry(0, 4096));
    application.submit();
    REQUIRE(application.wait().result == 4096);
}

// A server that hangs closes nothing: only the loop can notice, and what is in flight stays so until disconnect().
void a_server_that_is_silent_is_told() {
    Setting setting(64, std::chrono::milliseconds(200));
    FrameServer server;
    Application application(8, setting.names.opened[1]);
    setting.loop.connect(server.theirs, {0}, 1);
    setting.serve(application);
    // One that has nothing to do may be silent, and one that answers was not.
    for (int round = 0; round < 3; ++round) {
        std::this_thread::sleep_for(std::chrono::milliseconds(150));
        application.prepare(entry(0, 4096));
        application.submit();
        REQUIRE(application.wait().result == 4096);
    }
    REQUIRE(setting.loop.events(std::chrono::milliseconds(400)).empty());
    server.is_silent = true;
    application.prepare(entry(0, 4096));
    application.submit();
    const std::vector<Event> events = setting.loop.events(patience);
    REQUIRE(events.size() == 1 && events[0].kind == Event::Kind::silent && events[0].generation == 1);
    REQUIRE(setting.loop.statistics().outstanding == 1);
    setting.loop.disconnect();
    REQUIRE(application.wait().result == -EREMOTEIO);
}

// One client's memory is gone: the session ends with that, and no operation of another client does.
void refused_memory_ends_no_other_operation() {
    constexpr std::uint32_t cut = 6;
    Setting setting;
    std::atomic<int> silent{0};
    // As the storage server: the operation whose memory was refused has a result, and those with it have none.
    FrameServer first([&](const storage::Operation& operation) {
        storage::Result result{operation.tag, std::int64_t(operation.length), 0, 0, 0, 0};
        if (operation.rkey == cut)
            result.result = -EREMOTEIO;
        return result;
    });
    FrameServer second;
    first.is_silent = true;
    Application good(8, setting.names.opened[1]);
    Application bad(8, setting.names.opened[1]);
    setting.loop.add_client(2);
    setting.loop.add_buffer(2, {buffer_id, 1 << 20, 0, {{0x1000, cut}}, {}});
    setting.loop.set_file(2, {inode, 11, 12, true, true});
    setting.loop.connect(first.theirs, {0}, 1);
    setting.serve(good);
    setting.loop.add_ring(2, {ring_id, true, 0, 1, std::chrono::milliseconds(0), 0}, bad.fd);
    good.prepare(entry(0, 4096, 1));
    good.submit();
    while (first.seen == 0)
        std::this_thread::yield();
    first.is_silent = false;
    bad.prepare(entry(0, 512, 2));
    bad.submit();
    REQUIRE(bad.wait().result == -EREMOTEIO);
    const std::vector<Event> events = setting.loop.events(patience);
    REQUIRE(events.size() == 1 && events[0].kind == Event::Kind::disconnected);
    // An operation that is submitted now waits too, unless its memory was refused.
    good.prepare(entry(4096, 512, 3));
    good.submit();
    REQUIRE(setting.loop.disconnect());
    setting.loop.connect(second.theirs, {0}, 2);
    std::uint64_t seen = 0;
    for (int number = 0; number < 2; ++number) {
        const Completion done = good.wait();
        REQUIRE(done.result == (done.userdata == 1 ? 4096 : 512));
        seen += done.userdata;
    }
    REQUIRE(seen == 4);
    bad.prepare(entry(0, 512));
    bad.submit();
    REQUIRE(bad.wait().result == -EREMOTEIO);
    REQUIRE(setting.loop.events(std::chrono::milliseconds(0)).empty());
}

// No server comes: what waits for one ends.
void operations_between_connections_can_be_abandoned() {
    Setting setting;
    FrameServer server([](const storage::Operation& operation) {
        return storage::Result{operation.tag, operation.length == 1 ? -EREMOTEIO : 0, 0, 0, 0, 0};
    });
    Application application(8, setting.names.opened[1]);
    const Id other{3};
    setting.loop.add_buffer(1, {other, 1 << 20, 0, {{0x1000, 5}}, {}});
    setting.loop.connect(server.theirs, {0}, 1);
    setting.serve(application);
    server.is_silent = true;
    application.prepare(entry(0, 4096));
    application.submit();
    while (server.seen == 0)
        std::this_thread::yield();
    server.is_silent = false;
    Arguments gone = entry(0, 1);
    std::memcpy(gone.buffer_id, other.data(), other.size());
    application.prepare(gone);
    application.submit();
    REQUIRE(application.wait().result == -EREMOTEIO);
    REQUIRE(setting.loop.events(patience).size() == 1);
    REQUIRE(setting.loop.disconnect());
    REQUIRE(setting.loop.statistics().outstanding == 1);
    setting.loop.abandon();
    REQUIRE(application.wait().result == -EREMOTEIO);
    REQUIRE(!setting.loop.disconnect());
}

void answers_that_cannot_be_end_the_connection() {
    for (int kind = 0; kind < 4; ++kind) {
        Setting setting;
        FrameServer server([kind](const storage::Operation& operation) {
            storage::Result result{operation.tag, std::int64_t(operation.length), 0, 0, 0, 0};
            if (kind == 0)
                result.tag += 1;
            if (kind == 1)
                result.result += 1;
            if (kind == 2)
                result.result = -100000;
            if (kind == 3)
                result.holes = 1;
            return result;
        });
        Application application(8, setting.names.opened[1]);
        setting.loop.connect(server.theirs, {0}, 1);
        setting.serve(application);
        application.prepare(entry(0, 4096));
        application.submit();
        const std::vector<Event> events = setting.loop.events(patience);
        REQUIRE(events.size() == 1 && events[0].kind == Event::Kind::disconnected);
        setting.loop.disconnect();
        REQUIRE(application.wait().result == -EREMOTEIO);
    }
}

void more_than_the_server_takes_waits_in_the_ring() {
    Setting setting(4);
    FrameServer server;
    Application application(64, setting.names.opened[2]);
    setting.loop.connect(server.theirs, {0, 0}, 1);
    setting.serve(application, 2);
    for (int round = 0; round < 50; ++round) {
        for (int number = 0; number < 64; ++number)
            application.prepare(entry(0, 512));
        application.submit();
        for (int number = 0; number < 64; ++number)
            REQUIRE(application.wait().result == 512);
    }
}

// Whatever stands in a ring, the loop answers it or ends the ring; another ring goes on.
void hostile_rings_end_alone() {
    std::mt19937_64 random(20260101);
    for (int round = 0; round < 100; ++round) {
        Setting setting;
        FrameServer server;
        Application bad(16, setting.names.opened[0]);
        Application good(16, setting.names.opened[1]);
        setting.loop.connect(server.theirs, {0}, 1);
        setting.loop.add_ring(1, {Id{9}, true, 0, 0, std::chrono::milliseconds(0), 0}, bad.fd);
        setting.serve(good);
        for (int step = 0; step < 20; ++step) {
            Arguments arguments = entry(random(), random() % 8192, random());
            if (random() % 2 == 0)
                arguments.file_inode = random() % 16;
            bad.view.arguments[random() % bad.view.slots] = arguments;
            bad.view.submissions[random() % bad.view.slots] = {static_cast<std::int32_t>(random() % 40) - 4, 0, 0};
            auto& index = random() % 4 == 0 ? bad.view.indices->completion_tail : bad.view.indices->submission_head;
            index.store(static_cast<std::int32_t>(random() % 24) - 2, std::memory_order_release);
            bad.submit();
            good.prepare(entry(4096, 4096));
            good.submit();
            REQUIRE(good.wait().result == 4096);
        }
    }
}

void a_ring_that_is_cut_short_ends_alone() {
    Setting setting;
    FrameServer server;
    Application good(16, setting.names.opened[1]);
    setting.loop.connect(server.theirs, {0}, 1);
    setting.serve(good);
    {
        Application bad(16, setting.names.opened[0]);
        setting.loop.add_ring(1, {Id{9}, true, 0, 0, std::chrono::milliseconds(0), 0}, bad.fd);
        REQUIRE(ftruncate(bad.fd, 0) == 0);
        sem_post(setting.names.opened[0]);
        const std::vector<Event> events = setting.loop.events(patience);
        REQUIRE(events.size() == 1 && events[0].kind == Event::Kind::ring_broken && events[0].id == Id{9});
    }
    good.prepare(entry(0, 4096));
    good.submit();
    REQUIRE(good.wait().result == 4096);
}

} // namespace

int main() {
    operations_go_round();
    a_removal_waits_for_what_is_in_flight();
    a_connection_that_ends_is_told_and_renewed();
    a_server_that_is_silent_is_told();
    refused_memory_ends_no_other_operation();
    operations_between_connections_can_be_abandoned();
    answers_that_cannot_be_end_the_connection();
    more_than_the_server_takes_waits_in_the_ring();
    hostile_rings_end_alone();
    a_ring_that_is_cut_short_ends_alone();
    std::puts("the loop holds");
}
