// Tests of operations in rings that an agent serves, and of their completions when the agent or the application dies.
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

void test_read_and_write_move_bytes() {
    Mount mount;
    Agent agent(mount);
    Session session(mount, 16);
    hf3fs_cqe cqes[16];
    std::iota(session.iov.base, session.iov.base + 4096, std::uint8_t{0});
    // hf3fs_prep_io accepts the registered descriptor, and the value that hf3fs_reg_fd returned.
    CHECK(hf3fs_prep_io(&session.write_ring, &session.iov, false, session.iov.base, session.file.fd, 0, 2048,
                        &session) >= 0);
    CHECK(hf3fs_prep_io(&session.write_ring, &session.iov, false, session.iov.base + 2048, session.registered_fd, 2048,
                        2048, &session) >= 0);
    CHECK_EQUAL(hf3fs_submit_ios(&session.write_ring), 0);
    CHECK_EQUAL(hf3fs_wait_for_ios(&session.write_ring, cqes, 16, 2, nullptr), 2);
    CHECK(cqes[0].result == 2048 && cqes[1].result == 2048 && cqes[0].userdata == &session);
    // The file has 4096 bytes, so the read of 3000 bytes at offset 1500 returns 2596 bytes.
    CHECK(session.prepare_read(8192, 3000, 1500, 7) >= 0);
    CHECK(session.prepare_read(20000, 10, 5000, 8) >= 0); // This read begins after the end of the file.
    CHECK_EQUAL(hf3fs_submit_ios(&session.read_ring), 0);
    for (int reaped_count = 0; reaped_count < 2; ++reaped_count) {
        CHECK_EQUAL(hf3fs_wait_for_ios(&session.read_ring, cqes, 1, 1, nullptr), 1);
        CHECK_EQUAL(cqes[0].result, cqes[0].userdata == reinterpret_cast<void*>(7) ? 2596 : 0);
    }
    CHECK(std::memcmp(session.iov.base + 8192, session.iov.base + 1500, 2596) == 0);
}

void test_prep_io_refuses_invalid_arguments() {
    Mount mount;
    Agent agent(mount);
    Session session(mount, 2, 65536);
    const std::size_t size = session.iov.size;
    CHECK_EQUAL(session.prepare_read(0, 0), -EINVAL);
    CHECK_EQUAL(session.prepare_read(size, 1), -EINVAL);
    CHECK_EQUAL(session.prepare_read(size - 1, 2), -EINVAL);
    CHECK_EQUAL(session.prepare_read(0, size + 1), -EINVAL);
    CHECK_EQUAL(session.prepare_read(8, UINT64_MAX - 7), -EINVAL); // ptr + len would overflow.
    CHECK_EQUAL(session.prepare_read(8, UINT64_MAX), -EINVAL);
    CHECK_EQUAL(session.prepare_read(65536 - 1, 2), -EINVAL); // The range crosses a block boundary.
    CHECK_EQUAL(session.prepare_read(0, 65537), -EINVAL);
    CHECK_EQUAL(session.prepare_read(0, 1, static_cast<std::size_t>(INT64_MAX)), -EINVAL);
    CHECK_EQUAL(session.prepare_read(0, 1, SIZE_MAX), -EINVAL);
    CHECK_EQUAL(hf3fs_prep_io(&session.read_ring, &session.iov, true, session.iov.base - 1, session.registered_fd, 0, 1,
                              nullptr),
                -EINVAL);
    CHECK_EQUAL(
        hf3fs_prep_io(&session.read_ring, &session.iov, false, session.iov.base, session.registered_fd, 0, 1, nullptr),
        -EINVAL);
    CHECK_EQUAL(
        hf3fs_prep_io(&session.read_ring, nullptr, true, session.iov.base, session.registered_fd, 0, 1, nullptr),
        -EINVAL);
    CHECK_EQUAL(hf3fs_prep_io(&session.read_ring, &session.iov, true, session.iov.base, INT_MIN, 0, 1, nullptr),
                -EINVAL);
    CHECK_EQUAL(hf3fs_prep_io(&session.read_ring, &session.iov, true, session.iov.base, INT_MAX, 0, 1, nullptr),
                -EBADF);
    CHECK_EQUAL(hf3fs_prep_io(&session.read_ring, &session.iov, true, session.iov.base, 0, 0, 1, nullptr), -EBADF);
    File writer(mount, "data", O_WRONLY);
    const int write_only_fd = hf3fs_reg_fd(writer.fd, 0);
    CHECK(write_only_fd <= 0);
    CHECK_EQUAL(hf3fs_prep_io(&session.read_ring, &session.iov, true, session.iov.base, write_only_fd, 0, 1, nullptr),
                -EACCES);
    hf3fs_dereg_fd(write_only_fd);
    CHECK_EQUAL(hf3fs_prep_io(&session.read_ring, &session.iov, true, session.iov.base, write_only_fd, 0, 1, nullptr),
                -EBADF);
    CHECK(session.prepare_read(65535, 1) >= 0);
    CHECK(session.prepare_read(65536, 65536) >= 0);
    CHECK_EQUAL(session.prepare_read(0, 1), -EAGAIN); // Both entries of the ring are in use.
}

RingView make_view(const hf3fs_ior& ring) {
    RingView view;
    CHECK_EQUAL(RingView::bind(ring.iov.base, ring.iov.size, view), 0);
    return view;
}

void test_wait_ends_at_count_or_deadline() {
    Mount mount;
    Agent agent(mount);
    Session session(mount);
    hf3fs_cqe cqes[16];
    CHECK_EQUAL(hf3fs_wait_for_ios(&session.read_ring, cqes, 0, 0, nullptr), -EINVAL);
    CHECK_EQUAL(hf3fs_wait_for_ios(&session.read_ring, nullptr, 1, 0, nullptr), -EINVAL);
    const timespec invalid_deadline{.tv_sec = 0, .tv_nsec = 1000000000};
    CHECK_EQUAL(hf3fs_wait_for_ios(&session.read_ring, cqes, 1, 0, &invalid_deadline), -EINVAL);
    CHECK_EQUAL(hf3fs_wait_for_ios(&session.read_ring, cqes, 16, 0, nullptr), 0);
    CHECK_EQUAL(hf3fs_wait_for_ios(&session.read_ring, cqes, 16, -5, nullptr), 0);
    const timespec wait_begin = make_deadline_after(0);
    const timespec deadline = make_deadline_after(30);
    CHECK_EQUAL(hf3fs_wait_for_ios(&session.read_ring, cqes, 16, 1, &deadline), 0);
    const timespec wait_end = make_deadline_after(0);
    CHECK((wait_end.tv_sec - wait_begin.tv_sec) * 1000 + (wait_end.tv_nsec - wait_begin.tv_nsec) / 1000000 >= 29);
    const timespec past_deadline = make_deadline_after(-1000);
    CHECK_EQUAL(hf3fs_wait_for_ios(&session.read_ring, cqes, 16, 1, &past_deadline), 0);
    CHECK(session.prepare_read(0, 1) >= 0);
    CHECK_EQUAL(hf3fs_submit_ios(&session.read_ring), 0);
    const auto* const indices = make_view(session.read_ring).indices;
    wait_until_true([&] { return indices->completion_head.load() != indices->completion_tail.load(); });
    const timespec short_deadline = make_deadline_after(30);
    // After the deadline the function returns the number of completions, not -ETIMEDOUT.
    CHECK_EQUAL(hf3fs_wait_for_ios(&session.read_ring, cqes, 16, 16, &short_deadline), 1);
    for (int i = 0; i < 3; ++i) {
        CHECK(session.prepare_read(0, 1) >= 0);
    }
    CHECK_EQUAL(hf3fs_submit_ios(&session.read_ring), 0);
    CHECK_EQUAL(hf3fs_wait_for_ios(&session.read_ring, cqes, 3, 99, nullptr), 3); // min_results is larger than cqec.
}

void test_agent_death_fails_operations() {
    const std::size_t shm_name_count_before = count_existing_shm_names();
    {
        Mount mount;
        auto agent = std::make_unique<Agent>(mount);
        Session session(mount);
        hf3fs_cqe cqes[16];
        agent->set_rings_paused(true);
        for (std::uintptr_t i = 1; i <= 3; ++i) {
            CHECK(session.prepare_read(0, 1, 0, i) >= 0);
        }
        CHECK_EQUAL(hf3fs_submit_ios(&session.read_ring), 0);
        CHECK(session.prepare_read(0, 1, 0, 4) >= 0); // This operation is prepared and never submitted.
        std::thread agent_stopper([&] {
            usleep(20000);
            agent.reset();
        });
        std::uintptr_t userdata_sum = 0;
        const int failed_count = hf3fs_wait_for_ios(&session.read_ring, cqes, 3, 1, nullptr);
        CHECK_EQUAL(failed_count, 3);
        agent_stopper.join();
        for (int i = 0; i < 3; ++i) {
            CHECK_EQUAL(cqes[i].result, -EREMOTEIO);
            userdata_sum += reinterpret_cast<std::uintptr_t>(cqes[i].userdata);
        }
        CHECK_EQUAL(hf3fs_wait_for_ios(&session.read_ring, cqes, 16, 16, nullptr), 1);
        userdata_sum += reinterpret_cast<std::uintptr_t>(cqes[0].userdata);
        CHECK_EQUAL(userdata_sum, 10u); // 1 + 2 + 3 + 4: each operation completed once.
        CHECK_EQUAL(hf3fs_wait_for_ios(&session.read_ring, cqes, 16, 1, nullptr), -EREMOTEIO);
        CHECK_EQUAL(session.prepare_read(0, 1), -EREMOTEIO);
        CHECK_EQUAL(hf3fs_submit_ios(&session.read_ring), -EREMOTEIO);
        CHECK_EQUAL(hf3fs_submit_ios(&session.write_ring), -EREMOTEIO);
        hf3fs_iov iov{};
        hf3fs_ior ior{};
        CHECK_EQUAL(hf3fs_iovcreate(&iov, mount.path(), 4096, 0, -1), -EREMOTEIO);
        CHECK_EQUAL(hf3fs_iorcreate(&ior, mount.path(), 4, true, 0, -1), -EREMOTEIO);
        File file(mount, "data");
        CHECK_EQUAL(hf3fs_reg_fd(file.fd, 0), EREMOTEIO);
        CHECK_EQUAL(hf3fs_hardlink(file.path.c_str(), mount.file_path("b").c_str()), EREMOTEIO);

        Agent new_agent(mount); // A new agent serves new rings and iovs.
        Session new_session(mount);
        CHECK(new_session.prepare_read(0, 1) >= 0);
        CHECK_EQUAL(hf3fs_submit_ios(&new_session.read_ring), 0);
        CHECK_EQUAL(hf3fs_wait_for_ios(&new_session.read_ring, cqes, 1, 1, nullptr), 1);
        CHECK_EQUAL(session.prepare_read(0, 1), -EREMOTEIO);
        new_agent.corrupts_replies = true;
        CHECK_EQUAL(hf3fs_iovcreate(&iov, mount.path(), 4096, 0, -1), -EREMOTEIO);
        new_agent.corrupts_replies = false;
    }
    CHECK_EQUAL(count_existing_shm_names(), shm_name_count_before);
}

// A thread that waits for one completion without a deadline. The thread sleeps when the constructor returns.
class Sleeper {
public:
    explicit Sleeper(hf3fs_ior& ring)
        : thread_([this, &ring] { result_ = hf3fs_wait_for_ios(&ring, &cqe, 1, 1, nullptr); }) {
        SideState& application = make_view(ring).extension->application;
        wait_until_true([&] { return application.sleeping != awake; });
        usleep(5000); // The thread announces its sleep shortly before it sleeps.
    }
    // Waits until the thread has ended, and returns the result of its hf3fs_wait_for_ios.
    int wait_for_result() {
        wait_until_true([&] { return result_ != INT_MIN; });
        thread_.join();
        return result_;
    }
    hf3fs_cqe cqe{};

private:
    std::atomic<int> result_{INT_MIN};
    std::thread thread_;
};

// Submits a read of one byte.
void submit_read(Session& session) {
    CHECK(session.prepare_read(0, 1) >= 0);
    CHECK_EQUAL(hf3fs_submit_ios(&session.read_ring), 0);
}

void test_invalid_index_of_agent_ends_the_wait() {
    Mount mount;
    Agent agent(mount);
    agent.set_rings_paused(true);
    {
        Session session(mount);
        submit_read(session);
        Sleeper sleeper(session.read_ring);
        make_view(session.read_ring).indices->completion_head = 9999; // This ring has 17 positions.
        post(*make_view(session.read_ring).completion_semaphore);
        CHECK_EQUAL(sleeper.wait_for_result(), 1);
        CHECK_EQUAL(sleeper.cqe.result, -EREMOTEIO);
        CHECK_EQUAL(session.prepare_read(0, 1), -EREMOTEIO);
    }
    // In this second part, the thread that calls hf3fs_prep_io finds the invalid index, and wakes the waiting thread.
    Session session(mount, 2);
    agent.set_rings_paused(false);
    submit_read(session);
    hf3fs_cqe cqe;
    CHECK_EQUAL(hf3fs_wait_for_ios(&session.read_ring, &cqe, 1, 1, nullptr), 1);
    agent.set_rings_paused(true);
    submit_read(session);
    Sleeper sleeper(session.read_ring);
    make_view(session.read_ring).indices->submission_tail = 9999;
    CHECK_EQUAL(session.prepare_read(0, 1), -EAGAIN); // The ring is full, so hf3fs_prep_io reads the tail.
    CHECK_EQUAL(sleeper.wait_for_result(), 1);
    CHECK_EQUAL(sleeper.cqe.result, -EREMOTEIO);
    CHECK_EQUAL(session.prepare_read(0, 1), -EREMOTEIO);
}

void test_wait_on_ended_ring_fails() {
    Mount mount;
    Agent agent(mount);
    alignas(64) static std::byte memory[ring_bytes(8)];
    {
        std::unique_ptr<AgentRing> ended_ring;
        CHECK_EQUAL(AgentRing::attach(memory, sizeof(memory), 0, 0, ended_ring), 0);
    }
    hf3fs_ior ior{};
    CHECK_EQUAL(hf3fs_iorwrap(&ior, memory, mount.path(), sizeof(memory), true, 0, 0, 0, 0), 0);
    RingView view;
    CHECK_EQUAL(RingView::bind(memory, sizeof(memory), view), 0);
    // The end of `ended_ring` set SideState::ended and posted the semaphore. Consume the post, so that only
    // SideState::ended shows that the agent has ended.
    while (try_wait(*view.completion_semaphore)) {
    }
    hf3fs_cqe cqe;
    CHECK_EQUAL(hf3fs_wait_for_ios(&ior, &cqe, 1, 1, nullptr), -EREMOTEIO);
    hf3fs_iordestroy(&ior);
}

void test_poll_returns_while_another_thread_waits() {
    Mount mount;
    Agent agent(mount);
    Session session(mount);
    agent.set_rings_paused(true);
    submit_read(session);
    Sleeper sleeper(session.read_ring);
    hf3fs_cqe cqe;
    CHECK_EQUAL(hf3fs_wait_for_ios(&session.read_ring, &cqe, 1, 0, nullptr), 0);
    const timespec short_deadline = make_deadline_after(20);
    CHECK_EQUAL(hf3fs_wait_for_ios(&session.read_ring, &cqe, 1, 1, &short_deadline), 0);
    agent.set_rings_paused(false);
    CHECK_EQUAL(sleeper.wait_for_result(), 1);
}

bool has_watch_thread() {
    return gdrkit::test::has_thread("hf3fs-watch");
}

// Executes one read, which the agent delays until the wait for its completion sleeps.
void read_with_sleeping_wait(Session& session, Agent& agent, const timespec* deadline) {
    agent.set_rings_paused(true);
    submit_read(session);
    SideState& application = make_view(session.read_ring).extension->application;
    std::thread agent_resumer([&] {
        wait_until_true([&] { return application.sleeping != awake; });
        agent.set_rings_paused(false);
    });
    hf3fs_cqe cqe;
    CHECK_EQUAL(hf3fs_wait_for_ios(&session.read_ring, &cqe, 1, 1, deadline), 1);
    CHECK_EQUAL(cqe.result, 0);
    agent_resumer.join();
}

void test_wait_without_deadline_starts_the_watch_thread() {
    Mount mount;
    Agent agent(mount);
    {
        Session session(mount);
        wait_until_true([] { return !has_watch_thread(); }); // A thread of an earlier test may still run.
        const timespec deadline = make_deadline_after(10000);
        read_with_sleeping_wait(session, agent, &deadline);
        CHECK(!has_watch_thread()); // A wait with a deadline checks whether the agent lives, without the watch thread.
        read_with_sleeping_wait(session, agent, nullptr);
        wait_until_true(has_watch_thread);
        read_with_sleeping_wait(session, agent, nullptr);
    }
    wait_until_true([] { return !has_watch_thread(); });
}

// This test does not run under tsan, which does not follow threads across a fork.
[[maybe_unused]] void test_forked_child_leaves_the_rings_of_its_parent() {
    Mount mount;
    Agent agent(mount);
    Session session(mount);
    wait_until_true([&] { return agent.connection_count == 1; });
    // Start the watch thread, which a child does not inherit. After more than 16 sleeps in a row, the announcement of
    // sleep in this ring stays (asleep_always).
    for (int i = 0; i < 20; ++i) {
        read_with_sleeping_wait(session, agent, nullptr);
    }
    std::atomic<bool> is_waiting{false};
    std::thread waiter([&] { // This thread holds the mutex of a ring, which the child inherits locked.
        hf3fs_cqe cqe;
        const timespec deadline = make_deadline_after(1000);
        is_waiting = true;
        CHECK_EQUAL(hf3fs_wait_for_ios(&session.write_ring, &cqe, 1, 1, &deadline), 0);
    });
    wait_until_true([&] { return is_waiting.load(); });
    usleep(20000);
    agent.set_rings_paused(true);
    submit_read(session);
    int child_start_pipe[2], child_ready_pipe[2];
    CHECK(pipe(child_start_pipe) == 0 && pipe(child_ready_pipe) == 0);
    char byte = 0;
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        hf3fs_cqe cqe;
        CHECK_EQUAL(read(child_start_pipe[0], &byte, 1), ssize_t{1});
        CHECK_EQUAL(hf3fs_wait_for_ios(&session.read_ring, &cqe, 1, 0, nullptr), -EREMOTEIO);
        CHECK_EQUAL(write(child_ready_pipe[1], &byte, 1), ssize_t{1});
        CHECK_EQUAL(hf3fs_wait_for_ios(&session.write_ring, &cqe, 1, 1, nullptr), -EREMOTEIO);
        CHECK_EQUAL(session.prepare_read(0, 1), -EREMOTEIO);
        CHECK_EQUAL(hf3fs_wait_for_ios(&session.read_ring, &cqe, 1, 1, nullptr), -EREMOTEIO);
        hf3fs_iordestroy(&session.write_ring);
        hf3fs_iovdestroy(&session.iov);
        {
            Session child_session(mount);
            CHECK(child_session.prepare_read(0, 1) >= 0);
            CHECK_EQUAL(hf3fs_submit_ios(&child_session.read_ring), 0);
            CHECK_EQUAL(hf3fs_wait_for_ios(&child_session.read_ring, &cqe, 1, 1, nullptr), 1);
        }
        _exit(0);
    }
    Sleeper sleeper(session.read_ring); // The child must not change the announcement of sleep of this ring.
    CHECK_EQUAL(write(child_start_pipe[1], &byte, 1), ssize_t{1});
    CHECK_EQUAL(read(child_ready_pipe[0], &byte, 1), ssize_t{1});
    agent.set_rings_paused(false);
    CHECK_EQUAL(sleeper.wait_for_result(), 1);
    for (const int descriptor : {child_start_pipe[0], child_start_pipe[1], child_ready_pipe[0], child_ready_pipe[1]}) {
        close(descriptor);
    }
    int status = -1;
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    CHECK_EQUAL(status, 0);
    waiter.join();
    wait_until_true(has_watch_thread);
    wait_until_true([&] { return agent.connection_count == 1; });
    CHECK_EQUAL(agent.publication_count.load(), 3); // The child withdrew no publication of its parent.
    hf3fs_cqe cqe;
    CHECK(session.prepare_read(0, 1) >= 0);
    CHECK_EQUAL(hf3fs_submit_ios(&session.read_ring), 0);
    CHECK_EQUAL(hf3fs_wait_for_ios(&session.read_ring, &cqe, 1, 1, nullptr), 1);
}

void test_eight_threads_use_64_rings() {
    Mount mount;
    Agent agent(mount);
    std::vector<std::thread> threads;
    for (int thread_index = 0; thread_index < 8; ++thread_index) {
        threads.emplace_back([&, thread_index] {
            Session session(mount);
            std::vector<hf3fs_ior> rings(8);
            for (hf3fs_ior& ring : rings) {
                // 8 entries, for reads, io_depth -4, normal priority, timeout of 1 ms, any NUMA node.
                CHECK_EQUAL(hf3fs_iorcreate3(&ring, mount.path(), 8, true, -4, 0, 1, -1), 0);
            }
            for (int round = 0; round < 20; ++round) {
                for (hf3fs_ior& ring : rings) {
                    for (std::uintptr_t i = 0; i < 8; ++i) {
                        CHECK(
                            hf3fs_prep_io(&ring, &session.iov, true, session.iov.base + i, session.registered_fd, i, 1,
                                          reinterpret_cast<void*>(i + static_cast<std::uintptr_t>(thread_index))) >= 0);
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
    CHECK_EQUAL(agent.publication_count.load(), 0);
    CHECK_EQUAL(agent.registered_file_count.load(), 0);
    // A process without publications and registered files closes its connection.
    wait_until_true([&] { return agent.connection_count == 0; });
}

[[maybe_unused]] void test_killed_agent_process_ends_the_wait() {
    Mount mount;
    const pid_t agent_pid = fork();
    CHECK(agent_pid >= 0);
    if (agent_pid == 0) {
        Agent agent(mount);
        for (;;) {
            pause();
        }
    }
    wait_until_true([&] { return std::filesystem::exists(mount.file_path("3fs-virt/agent.sock")); });
    // The file of the socket exists shortly before the agent listens, so retry until the agent accepts a publication.
    int status = -EREMOTEIO;
    hf3fs_iov probe_iov{};
    while ((status = hf3fs_iovcreate(&probe_iov, mount.path(), 4096, 0, -1)) == -EREMOTEIO) {
        usleep(1000);
    }
    CHECK_EQUAL(status, 0);
    {
        Session session(mount, 64);
        hf3fs_cqe cqes[64];
        for (int round = 0; round < 200; ++round) {
            for (std::size_t i = 0; i < 64; ++i) {
                CHECK(session.prepare_read(i * 16, 16, i) >= 0);
            }
            CHECK_EQUAL(hf3fs_submit_ios(&session.read_ring), 0);
            CHECK_EQUAL(hf3fs_wait_for_ios(&session.read_ring, cqes, 64, 64, nullptr), 64);
        }
        // A wait without a deadline has no timer, so the watch thread must wake it when the agent dies.
        std::thread killer([&] {
            usleep(50000);
            CHECK_EQUAL(kill(agent_pid, SIGKILL), 0);
        });
        CHECK_EQUAL(hf3fs_wait_for_ios(&session.write_ring, cqes, 64, 1, nullptr), -EREMOTEIO);
        killer.join();
        int exit_status = 0;
        CHECK_EQUAL(waitpid(agent_pid, &exit_status, 0), agent_pid);
        // Either hf3fs_prep_io detects the death of the agent, or the read completes with -EREMOTEIO.
        const int prepare_result = session.prepare_read(0, 1);
        CHECK(prepare_result >= 0 || prepare_result == -EREMOTEIO);
        hf3fs_submit_ios(&session.read_ring);
        const int wait_result = hf3fs_wait_for_ios(&session.read_ring, cqes, 64, 1, nullptr);
        CHECK(wait_result == -EREMOTEIO || (wait_result == 1 && cqes[0].result == -EREMOTEIO));
    }
    hf3fs_iovdestroy(&probe_iov);
    CHECK(mount.link_names().empty()); // The library removed the links of the dead agent.
}

} // namespace

int main() {
#ifndef __SANITIZE_THREAD__
    test_killed_agent_process_ends_the_wait();
    test_forked_child_leaves_the_rings_of_its_parent();
#endif
    test_read_and_write_move_bytes();
    test_prep_io_refuses_invalid_arguments();
    test_wait_ends_at_count_or_deadline();
    test_agent_death_fails_operations();
    test_invalid_index_of_agent_ends_the_wait();
    test_wait_on_ended_ring_fails();
    test_poll_returns_while_another_thread_waits();
    test_wait_without_deadline_starts_the_watch_thread();
    test_eight_threads_use_64_rings();
    return 0;
}
