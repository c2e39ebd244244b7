// Operations against an agent, and what becomes of them when somebody dies.
#include "client_fixture.hpp"
#include "tests/threads.hpp"

#include <signal.h>
#include <sys/wait.h>

#include <atomic>
#include <climits>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <string>
#include <thread>

using namespace gdrkit::usrbio;
using namespace gdrkit::usrbio::test;

namespace {

void bytes_go_both_ways() {
    Mount mount;
    Agent agent(mount);
    Session session(mount, 16);
    hf3fs_cqe cqes[16];
    std::iota(session.iov.base, session.iov.base + 4096, std::uint8_t{0});
    // By the descriptor, and by its second name.
    CHECK(hf3fs_prep_io(&session.writes, &session.iov, false, session.iov.base, session.file.fd, 0, 2048, &session) >=
          0);
    CHECK(hf3fs_prep_io(&session.writes, &session.iov, false, session.iov.base + 2048, session.registered, 2048, 2048,
                        &session) >= 0);
    CHECK_EQUAL(hf3fs_submit_ios(&session.writes), 0);
    CHECK_EQUAL(hf3fs_wait_for_ios(&session.writes, cqes, 16, 2, nullptr), 2);
    CHECK(cqes[0].result == 2048 && cqes[1].result == 2048 && cqes[0].userdata == &session);
    CHECK(session.read(8192, 3000, 1500, 7) >= 0); // Ends with the file.
    CHECK(session.read(20000, 10, 5000, 8) >= 0);  // Behind its end.
    CHECK_EQUAL(hf3fs_submit_ios(&session.reads), 0);
    int got = 0;
    while (got < 2) {
        const int now = hf3fs_wait_for_ios(&session.reads, cqes, 1, 1, nullptr);
        CHECK_EQUAL(now, 1);
        CHECK_EQUAL(cqes[0].result, cqes[0].userdata == reinterpret_cast<void*>(7) ? 2596 : 0);
        ++got;
    }
    CHECK(std::memcmp(session.iov.base + 8192, session.iov.base + 1500, 2596) == 0);
}

void prep_io_refuses() {
    Mount mount;
    Agent agent(mount);
    Session session(mount, 2, 65536);
    const std::size_t size = session.iov.size;
    CHECK_EQUAL(session.read(0, 0), -EINVAL);
    CHECK_EQUAL(session.read(size, 1), -EINVAL);
    CHECK_EQUAL(session.read(size - 1, 2), -EINVAL);
    CHECK_EQUAL(session.read(0, size + 1), -EINVAL);
    CHECK_EQUAL(session.read(8, UINT64_MAX - 7), -EINVAL); // ptr + len would wrap.
    CHECK_EQUAL(session.read(8, UINT64_MAX), -EINVAL);
    CHECK_EQUAL(session.read(65536 - 1, 2), -EINVAL); // A block boundary.
    CHECK_EQUAL(session.read(0, 65537), -EINVAL);
    CHECK_EQUAL(session.read(0, 1, static_cast<std::size_t>(INT64_MAX)), -EINVAL);
    CHECK_EQUAL(session.read(0, 1, SIZE_MAX), -EINVAL);
    CHECK_EQUAL(
        hf3fs_prep_io(&session.reads, &session.iov, true, session.iov.base - 1, session.registered, 0, 1, nullptr),
        -EINVAL);
    CHECK_EQUAL(hf3fs_prep_io(&session.reads, &session.iov, false, session.iov.base, session.registered, 0, 1, nullptr),
                -EINVAL);
    CHECK_EQUAL(hf3fs_prep_io(&session.reads, nullptr, true, session.iov.base, session.registered, 0, 1, nullptr),
                -EINVAL);
    CHECK_EQUAL(hf3fs_prep_io(&session.reads, &session.iov, true, session.iov.base, INT_MIN, 0, 1, nullptr), -EINVAL);
    CHECK_EQUAL(hf3fs_prep_io(&session.reads, &session.iov, true, session.iov.base, INT_MAX, 0, 1, nullptr), -EBADF);
    CHECK_EQUAL(hf3fs_prep_io(&session.reads, &session.iov, true, session.iov.base, 0, 0, 1, nullptr), -EBADF);
    File writer(mount, "data", O_WRONLY);
    const int only_writes = hf3fs_reg_fd(writer.fd, 0);
    CHECK(only_writes <= 0);
    CHECK_EQUAL(hf3fs_prep_io(&session.reads, &session.iov, true, session.iov.base, only_writes, 0, 1, nullptr),
                -EACCES);
    hf3fs_dereg_fd(only_writes);
    CHECK_EQUAL(hf3fs_prep_io(&session.reads, &session.iov, true, session.iov.base, only_writes, 0, 1, nullptr),
                -EBADF);
    CHECK(session.read(65535, 1) >= 0);
    CHECK(session.read(65536, 65536) >= 0);
    CHECK_EQUAL(session.read(0, 1), -EAGAIN);
}

void waiting_ends() {
    Mount mount;
    Agent agent(mount);
    Session session(mount);
    hf3fs_cqe cqes[16];
    CHECK_EQUAL(hf3fs_wait_for_ios(&session.reads, cqes, 0, 0, nullptr), -EINVAL);
    CHECK_EQUAL(hf3fs_wait_for_ios(&session.reads, nullptr, 1, 0, nullptr), -EINVAL);
    const timespec wrong{.tv_sec = 0, .tv_nsec = 1000000000};
    CHECK_EQUAL(hf3fs_wait_for_ios(&session.reads, cqes, 1, 0, &wrong), -EINVAL);
    CHECK_EQUAL(hf3fs_wait_for_ios(&session.reads, cqes, 16, 0, nullptr), 0);
    CHECK_EQUAL(hf3fs_wait_for_ios(&session.reads, cqes, 16, -5, nullptr), 0);
    const timespec begin = in_ms(0);
    const timespec deadline = in_ms(30);
    CHECK_EQUAL(hf3fs_wait_for_ios(&session.reads, cqes, 16, 1, &deadline), 0);
    const timespec end = in_ms(0);
    CHECK((end.tv_sec - begin.tv_sec) * 1000 + (end.tv_nsec - begin.tv_nsec) / 1000000 >= 29);
    const timespec past = in_ms(-1000);
    CHECK_EQUAL(hf3fs_wait_for_ios(&session.reads, cqes, 16, 1, &past), 0);
    CHECK(session.read(0, 1) >= 0);
    CHECK_EQUAL(hf3fs_submit_ios(&session.reads), 0);
    const timespec later = in_ms(300);
    CHECK_EQUAL(hf3fs_wait_for_ios(&session.reads, cqes, 16, 16, &later), 1); // The count, and no -ETIMEDOUT.
    for (int i = 0; i < 3; ++i) {
        CHECK(session.read(0, 1) >= 0);
    }
    CHECK_EQUAL(hf3fs_submit_ios(&session.reads), 0);
    CHECK_EQUAL(hf3fs_wait_for_ios(&session.reads, cqes, 3, 99, nullptr), 3); // min_results above cqec.
}

void the_agent_dies() {
    const std::size_t before = shared_memories();
    {
        Mount mount;
        auto agent = std::make_unique<Agent>(mount);
        Session session(mount);
        hf3fs_cqe cqes[16];
        agent->hold(true);
        for (std::uintptr_t i = 1; i <= 3; ++i) {
            CHECK(session.read(0, 1, 0, i) >= 0);
        }
        CHECK_EQUAL(hf3fs_submit_ios(&session.reads), 0);
        CHECK(session.read(0, 1, 0, 4) >= 0); // Prepared, and never submitted.
        std::thread end([&] {
            usleep(20000);
            agent.reset();
        });
        std::uintptr_t users = 0;
        int count = hf3fs_wait_for_ios(&session.reads, cqes, 3, 1, nullptr);
        CHECK_EQUAL(count, 3);
        end.join();
        for (int i = 0; i < 3; ++i) {
            CHECK_EQUAL(cqes[i].result, -EREMOTEIO);
            users += reinterpret_cast<std::uintptr_t>(cqes[i].userdata);
        }
        CHECK_EQUAL(hf3fs_wait_for_ios(&session.reads, cqes, 16, 16, nullptr), 1);
        users += reinterpret_cast<std::uintptr_t>(cqes[0].userdata);
        CHECK_EQUAL(users, 10u);
        CHECK_EQUAL(hf3fs_wait_for_ios(&session.reads, cqes, 16, 1, nullptr), -EREMOTEIO);
        CHECK_EQUAL(session.read(0, 1), -EREMOTEIO);
        CHECK_EQUAL(hf3fs_submit_ios(&session.reads), -EREMOTEIO);
        CHECK_EQUAL(hf3fs_submit_ios(&session.writes), -EREMOTEIO);
        hf3fs_iov iov{};
        hf3fs_ior ior{};
        CHECK_EQUAL(hf3fs_iovcreate(&iov, mount.path(), 4096, 0, -1), -EREMOTEIO);
        CHECK_EQUAL(hf3fs_iorcreate(&ior, mount.path(), 4, true, 0, -1), -EREMOTEIO);
        File file(mount, "data");
        CHECK_EQUAL(hf3fs_reg_fd(file.fd, 0), EREMOTEIO);
        CHECK_EQUAL(hf3fs_hardlink(file.path.c_str(), mount.file("b").c_str()), EREMOTEIO);

        Agent next(mount); // A new one serves what is new.
        Session anew(mount);
        CHECK(anew.read(0, 1) >= 0);
        CHECK_EQUAL(hf3fs_submit_ios(&anew.reads), 0);
        CHECK_EQUAL(hf3fs_wait_for_ios(&anew.reads, cqes, 1, 1, nullptr), 1);
        CHECK_EQUAL(session.read(0, 1), -EREMOTEIO);
        next.answer_rubbish = true;
        CHECK_EQUAL(hf3fs_iovcreate(&iov, mount.path(), 4096, 0, -1), -EREMOTEIO);
        next.answer_rubbish = false;
    }
    CHECK_EQUAL(shared_memories(), before);
}

RingView view_of(const hf3fs_ior& ring) {
    RingView view;
    CHECK_EQUAL(RingView::over(ring.iov.base, ring.iov.size, view), 0);
    return view;
}

// A thread that waits for one result without a deadline, and sleeps by now.
class Sleeper {
public:
    explicit Sleeper(hf3fs_ior& ring)
        : thread_([this, &ring] { got_ = hf3fs_wait_for_ios(&ring, &cqe, 1, 1, nullptr); }) {
        SideState& application = view_of(ring).extension->application;
        becomes([&] { return application.sleeping != sleeps_not; });
        usleep(5000);
    }
    int got() {
        becomes([&] { return got_ != INT_MIN; });
        thread_.join();
        return got_;
    }
    hf3fs_cqe cqe{};

private:
    std::atomic<int> got_{INT_MIN};
    std::thread thread_;
};

void submit_one(Session& session) {
    CHECK(session.read(0, 1) >= 0);
    CHECK_EQUAL(hf3fs_submit_ios(&session.reads), 0);
}

void an_agent_that_writes_nonsense_ends_the_wait() {
    Mount mount;
    Agent agent(mount);
    agent.hold(true);
    {
        Session session(mount);
        submit_one(session);
        Sleeper sleeper(session.reads);
        view_of(session.reads).indices->completion_head = 9999;
        post(*view_of(session.reads).completed);
        CHECK_EQUAL(sleeper.got(), 1);
        CHECK_EQUAL(sleeper.cqe.result, -EREMOTEIO);
        CHECK_EQUAL(session.read(0, 1), -EREMOTEIO);
    }
    // Found by who prepares: who waits is told.
    Session session(mount, 2);
    agent.hold(false);
    submit_one(session);
    hf3fs_cqe cqe;
    CHECK_EQUAL(hf3fs_wait_for_ios(&session.reads, &cqe, 1, 1, nullptr), 1);
    agent.hold(true);
    submit_one(session);
    Sleeper sleeper(session.reads);
    view_of(session.reads).indices->submission_tail = 9999;
    CHECK_EQUAL(session.read(0, 1), -EAGAIN); // It has to look there.
    CHECK_EQUAL(sleeper.got(), 1);
    CHECK_EQUAL(sleeper.cqe.result, -EREMOTEIO);
    CHECK_EQUAL(session.read(0, 1), -EREMOTEIO);
}

void a_ring_that_ended_before_is_not_waited_for() {
    Mount mount;
    Agent agent(mount);
    alignas(64) static std::byte memory[ring_bytes(8)];
    {
        std::unique_ptr<AgentRing> earlier;
        CHECK_EQUAL(AgentRing::attach(memory, sizeof(memory), 0, 0, earlier), 0);
    }
    hf3fs_ior ior{};
    CHECK_EQUAL(hf3fs_iorwrap(&ior, memory, mount.path(), sizeof(memory), true, 0, 0, 0, 0), 0);
    RingView view;
    CHECK_EQUAL(RingView::over(memory, sizeof(memory), view), 0);
    while (try_wait(*view.completed)) {
    }
    hf3fs_cqe cqe;
    CHECK_EQUAL(hf3fs_wait_for_ios(&ior, &cqe, 1, 1, nullptr), -EREMOTEIO);
    hf3fs_iordestroy(&ior);
}

void who_does_not_want_to_wait_does_not_wait_for_who_waits() {
    Mount mount;
    Agent agent(mount);
    Session session(mount);
    agent.hold(true);
    submit_one(session);
    Sleeper sleeper(session.reads);
    hf3fs_cqe cqe;
    CHECK_EQUAL(hf3fs_wait_for_ios(&session.reads, &cqe, 1, 0, nullptr), 0);
    const timespec soon = in_ms(20);
    CHECK_EQUAL(hf3fs_wait_for_ios(&session.reads, &cqe, 1, 1, &soon), 0);
    agent.hold(false);
    CHECK_EQUAL(sleeper.got(), 1);
}

bool has_watcher() {
    return gdrkit::test::has_thread("hf3fs-watch");
}

// One operation that the agent holds back until its wait sleeps.
void read_asleep(Session& session, Agent& agent, const timespec* deadline) {
    agent.hold(true);
    submit_one(session);
    SideState& application = view_of(session.reads).extension->application;
    std::thread release([&] {
        becomes([&] { return application.sleeping != sleeps_not; });
        agent.hold(false);
    });
    hf3fs_cqe cqe;
    CHECK_EQUAL(hf3fs_wait_for_ios(&session.reads, &cqe, 1, 1, deadline), 1);
    CHECK_EQUAL(cqe.result, 0);
    release.join();
}

void who_waits_without_a_deadline_has_the_agent_watched() {
    Mount mount;
    Agent agent(mount);
    {
        Session session(mount);
        becomes([] { return !has_watcher(); }); // Of an earlier case.
        const timespec deadline = in_ms(10000);
        read_asleep(session, agent, &deadline);
        CHECK(!has_watcher()); // Its timer looks after the agent.
        read_asleep(session, agent, nullptr);
        becomes(has_watcher);
        read_asleep(session, agent, nullptr);
    }
    becomes([] { return !has_watcher(); });
}

// Not under tsan, which does not follow threads over a fork.
[[maybe_unused]] void a_forked_child_stands_alone() {
    Mount mount;
    Agent agent(mount);
    Session session(mount);
    becomes([&] { return agent.connections == 1; });
    for (int i = 0; i < 20; ++i) { // The ring says that its waits always sleep; a child has no thread that watches.
        read_asleep(session, agent, nullptr);
    }
    std::atomic<bool> waits{false};
    std::thread waiting([&] { // With a lock that the child inherits.
        hf3fs_cqe cqe;
        const timespec deadline = in_ms(1000);
        waits = true;
        CHECK_EQUAL(hf3fs_wait_for_ios(&session.writes, &cqe, 1, 1, &deadline), 0);
    });
    becomes([&] { return waits.load(); });
    usleep(20000);
    agent.hold(true);
    submit_one(session);
    int go[2], gone[2];
    CHECK(pipe(go) == 0 && pipe(gone) == 0);
    char byte = 0;
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        hf3fs_cqe cqe;
        CHECK_EQUAL(read(go[0], &byte, 1), ssize_t{1});
        CHECK_EQUAL(hf3fs_wait_for_ios(&session.reads, &cqe, 1, 0, nullptr), -EREMOTEIO);
        CHECK_EQUAL(write(gone[1], &byte, 1), ssize_t{1});
        CHECK_EQUAL(hf3fs_wait_for_ios(&session.writes, &cqe, 1, 1, nullptr), -EREMOTEIO);
        CHECK_EQUAL(session.read(0, 1), -EREMOTEIO);
        CHECK_EQUAL(hf3fs_wait_for_ios(&session.reads, &cqe, 1, 1, nullptr), -EREMOTEIO);
        hf3fs_iordestroy(&session.writes);
        hf3fs_iovdestroy(&session.iov);
        {
            Session own(mount);
            CHECK(own.read(0, 1) >= 0);
            CHECK_EQUAL(hf3fs_submit_ios(&own.reads), 0);
            CHECK_EQUAL(hf3fs_wait_for_ios(&own.reads, &cqe, 1, 1, nullptr), 1);
        }
        _exit(0);
    }
    Sleeper sleeper(session.reads); // The child leaves the ring alone: what it says of sleeps there, too.
    CHECK_EQUAL(write(go[1], &byte, 1), ssize_t{1});
    CHECK_EQUAL(read(gone[0], &byte, 1), ssize_t{1});
    agent.hold(false);
    CHECK_EQUAL(sleeper.got(), 1);
    for (const int end : {go[0], go[1], gone[0], gone[1]}) {
        close(end);
    }
    int status = -1;
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    CHECK_EQUAL(status, 0);
    waiting.join();
    becomes(has_watcher);
    becomes([&] { return agent.connections == 1; });
    CHECK_EQUAL(agent.publications.load(), 3); // The child took nothing of them.
    hf3fs_cqe cqe;
    CHECK(session.read(0, 1) >= 0);
    CHECK_EQUAL(hf3fs_submit_ios(&session.reads), 0);
    CHECK_EQUAL(hf3fs_wait_for_ios(&session.reads, &cqe, 1, 1, nullptr), 1);
}

void sixty_four_rings_of_eight_threads() {
    Mount mount;
    Agent agent(mount);
    std::vector<std::thread> threads;
    for (int t = 0; t < 8; ++t) {
        threads.emplace_back([&, t] {
            Session session(mount);
            std::vector<hf3fs_ior> rings(8);
            for (hf3fs_ior& ring : rings) {
                CHECK_EQUAL(hf3fs_iorcreate3(&ring, mount.path(), 8, true, -4, 0, 1, -1), 0);
            }
            for (int round = 0; round < 20; ++round) {
                for (hf3fs_ior& ring : rings) {
                    for (std::uintptr_t i = 0; i < 8; ++i) {
                        CHECK(hf3fs_prep_io(&ring, &session.iov, true, session.iov.base + i, session.registered, i, 1,
                                            reinterpret_cast<void*>(i + static_cast<std::uintptr_t>(t))) >= 0);
                    }
                    CHECK_EQUAL(hf3fs_submit_ios(&ring), 0);
                }
                for (hf3fs_ior& ring : rings) {
                    hf3fs_cqe cqes[8];
                    CHECK_EQUAL(hf3fs_wait_for_ios(&ring, cqes, 8, 8, nullptr), 8);
                    for (const hf3fs_cqe& cqe : cqes) {
                        CHECK_EQUAL(cqe.result, 0);
                    }
                }
            }
            for (hf3fs_ior& ring : rings) {
                hf3fs_iordestroy(&ring);
            }
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    CHECK_EQUAL(agent.publications.load(), 0);
    CHECK_EQUAL(agent.files.load(), 0);
    becomes([&] { return agent.connections == 0; }); // A process that has nothing there is no client.
}

[[maybe_unused]] void the_agent_is_another_process_and_is_killed() {
    Mount mount;
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        Agent agent(mount);
        for (;;) {
            pause();
        }
    }
    becomes([&] { return std::filesystem::exists(mount.file("3fs-virt/agent.sock")); });
    int status = -EREMOTEIO;
    hf3fs_iov probe{};
    while ((status = hf3fs_iovcreate(&probe, mount.path(), 4096, 0, -1)) == -EREMOTEIO) {
        usleep(1000);
    }
    CHECK_EQUAL(status, 0);
    {
        Session session(mount, 64);
        hf3fs_cqe cqes[64];
        for (int round = 0; round < 200; ++round) {
            for (std::size_t i = 0; i < 64; ++i) {
                CHECK(session.read(i * 16, 16, i) >= 0);
            }
            CHECK_EQUAL(hf3fs_submit_ios(&session.reads), 0);
            CHECK_EQUAL(hf3fs_wait_for_ios(&session.reads, cqes, 64, 64, nullptr), 64);
        }
        // Who waits without a deadline has no timer, and is told.
        std::thread killer([&] {
            usleep(50000);
            CHECK_EQUAL(kill(child, SIGKILL), 0);
        });
        CHECK_EQUAL(hf3fs_wait_for_ios(&session.writes, cqes, 64, 1, nullptr), -EREMOTEIO);
        killer.join();
        CHECK_EQUAL(waitpid(child, &status, 0), child);
        const int index = session.read(0, 1);
        CHECK(index >= 0 || index == -EREMOTEIO);
        hf3fs_submit_ios(&session.reads);
        const int count = hf3fs_wait_for_ios(&session.reads, cqes, 64, 1, nullptr);
        CHECK(count == -EREMOTEIO || (count == 1 && cqes[0].result == -EREMOTEIO));
    }
    hf3fs_iovdestroy(&probe);
    CHECK(mount.links().empty()); // The library removed what the dead agent left.
}

} // namespace

int main() {
#ifndef __SANITIZE_THREAD__
    the_agent_is_another_process_and_is_killed();
    a_forked_child_stands_alone();
#endif
    bytes_go_both_ways();
    prep_io_refuses();
    waiting_ends();
    the_agent_dies();
    an_agent_that_writes_nonsense_ends_the_wait();
    a_ring_that_ended_before_is_not_waited_for();
    who_does_not_want_to_wait_does_not_wait_for_who_waits();
    who_waits_without_a_deadline_has_the_agent_watched();
    sixty_four_rings_of_eight_threads();
    return 0;
}
