// Tests of a ring, the shared memory by which an application passes file operations to the agent: of both sides
// together, and of each side when the other side writes invalid values.
#include "tests/check.hpp"
#include "tests/threads.hpp"
#include "usrbio/ring/agent_side.hpp"
#include "usrbio/ring/application_side.hpp"

#include <climits>
#include <cstring>
#include <limits>
#include <sys/mman.h>
#include <thread>
#include <time.h>

using namespace gdrkit::usrbio;

namespace {

// Returns the semaphore as a glibc semaphore, because a client of 3FS calls the functions of glibc.
sem_t* as_glibc(Semaphore* semaphore) {
    return reinterpret_cast<sem_t*>(semaphore);
}

// Zeroed shared memory of a ring.
struct RingMemory {
    explicit RingMemory(std::size_t entries) : size_bytes(ring_bytes(entries)) {
        data = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        CHECK(data != MAP_FAILED);
        CHECK_EQUAL(RingView::bind(data, size_bytes, view), 0);
    }
    ~RingMemory() { munmap(data, size_bytes); }
    void* data;
    std::size_t size_bytes;
    RingView view;
};

// One ring with its two sides, and with arrays for the claimed operations and the reaped completions.
struct TestRing {
    explicit TestRing(std::size_t entries, int io_depth = 0, std::int64_t timeout_ns = 0) : memory(entries) {
        CHECK_EQUAL(ApplicationRing::attach(memory.data, memory.size_bytes, application), 0);
        CHECK_EQUAL(AgentRing::attach(memory.data, memory.size_bytes, io_depth, timeout_ns, agent), 0);
    }
    // Prepares an operation with the buffer offset 1, the inode 2, the file offset 3 and the length 4.
    int prepare(std::uint64_t userdata) { return application->prepare(buffer_id, 1, 2, 3, 4, userdata); }
    // Claims at most `count_max` operations into claimed_operations.
    std::size_t claim(std::size_t count_max = 64, std::int64_t now_ns = 0) {
        return agent->claim(std::span(claimed_operations).first(count_max), now_ns);
    }
    // Reaps at most `count_max` completions into reaped_completions.
    std::uint32_t reap(std::uint32_t count_max = 64) {
        std::uint32_t reaped_count = 0;
        return application->reap(count_max, [&](std::int32_t index, std::int64_t result, std::uint64_t userdata) {
            reaped_completions[reaped_count++] = {index, 0, result, userdata};
        });
    }
    int get_semaphore_value() {
        int value = -1;
        CHECK_EQUAL(sem_getvalue(as_glibc(memory.view.completion_semaphore), &value), 0);
        return value;
    }
    const std::uint8_t buffer_id[16] = {9, 8, 7};
    RingMemory memory;
    std::unique_ptr<ApplicationRing> application;
    std::unique_ptr<AgentRing> agent;
    ClaimedOperation claimed_operations[64];
    Completion reaped_completions[64];
};

void test_attach_refuses_invalid_rings() {
    RingMemory memory(4);
    std::unique_ptr<AgentRing> agent;
    std::unique_ptr<ApplicationRing> application;
    // The memory is too small, null or not aligned to a cache line. An entry of a ring has 96 bytes.
    CHECK_EQUAL(AgentRing::attach(memory.data, ring_bytes(1) - 1, 0, 0, agent), -EINVAL);
    CHECK_EQUAL(AgentRing::attach(nullptr, memory.size_bytes, 0, 0, agent), -EINVAL);
    CHECK_EQUAL(AgentRing::attach(static_cast<char*>(memory.data) + 8, memory.size_bytes - 96, 0, 0, agent), -EINVAL);
    // A batch of io_depth exceeds the four entries, or the timeout is negative.
    CHECK_EQUAL(AgentRing::attach(memory.data, memory.size_bytes, 5, 0, agent), -EINVAL);
    CHECK_EQUAL(AgentRing::attach(memory.data, memory.size_bytes, -5, 0, agent), -EINVAL);
    CHECK_EQUAL(AgentRing::attach(memory.data, memory.size_bytes, INT_MIN, 0, agent), -EINVAL);
    CHECK_EQUAL(AgentRing::attach(memory.data, memory.size_bytes, -4, -1, agent), -EINVAL);
    // The memory would have too many entries, or is too small for one entry.
    CHECK_EQUAL(AgentRing::attach(memory.data, ring_bytes(ring_entries_max + 1), 0, 0, agent), -EINVAL);
    CHECK_EQUAL(ApplicationRing::attach(memory.data, ring_bytes(1) - 1, application), -EINVAL);
    // A ring with four entries has five slots, so valid indices are 0 to 4.
    memory.view.indices->completion_tail = 5;
    CHECK_EQUAL(AgentRing::attach(memory.data, memory.size_bytes, 0, 0, agent), -EINVAL);
    CHECK_EQUAL(ApplicationRing::attach(memory.data, memory.size_bytes, application), -EINVAL);
    memory.view.indices->completion_tail = 4;
    CHECK_EQUAL(AgentRing::attach(memory.data, memory.size_bytes, 4, 0, agent), 0);
    CHECK_EQUAL(agent->entries(), 4u);
}

void test_operation_completes() {
    TestRing ring(4);
    CHECK_EQUAL(ring.prepare(77), 0);
    CHECK_EQUAL(ring.claim(), 0u);
    CHECK(!ring.application->submit()); // The agent does not sleep, so no post is needed.
    CHECK_EQUAL(ring.claim(), 1u);
    const Arguments& arguments = ring.claimed_operations[0].arguments;
    CHECK(std::memcmp(arguments.buffer_id, ring.buffer_id, 16) == 0);
    CHECK(arguments.buffer_offset == 1 && arguments.file_inode == 2 && arguments.file_offset == 3);
    CHECK(arguments.length == 4 && arguments.userdata == 77);
    CHECK(ring.agent->complete(ring.claimed_operations[0].position, 4));
    // These positions have no claimed operation.
    CHECK(!ring.agent->complete(ring.claimed_operations[0].position, 4));
    CHECK(!ring.agent->complete(4, 4));
    CHECK(!ring.agent->complete(UINT_MAX, 4));
    CHECK_EQUAL(ring.reap(), 0u); // The application sees the completion only after flush().
    ring.agent->flush();
    CHECK_EQUAL(ring.reap(), 1u);
    CHECK(ring.reaped_completions[0].index == 0 && ring.reaped_completions[0].result == 4 &&
          ring.reaped_completions[0].userdata == 77);
    CHECK_EQUAL(ring.reap(), 0u);
}

void test_full_ring_returns_eagain() {
    TestRing ring(3);
    std::uint64_t next_userdata = 0;
    std::uint64_t first_userdata = 0;
    for (int round = 0; round < 50; ++round) {
        int prepared_count = 0;
        while (ring.prepare(next_userdata) >= 0) {
            ++next_userdata;
            ++prepared_count;
        }
        CHECK_EQUAL(prepared_count, 3);
        CHECK_EQUAL(ring.prepare(0), -EAGAIN);
        ring.application->submit();
        CHECK_EQUAL(ring.claim(), 3u);
        // The agent completes the operations in reverse order. When the first completion is reaped, the index of the
        // last operation is free. Its position in the submission queue is not free, because the operations before are
        // in flight.
        CHECK(ring.agent->complete(ring.claimed_operations[2].position, 0));
        ring.agent->flush();
        CHECK_EQUAL(ring.reap(), 1u);
        CHECK_EQUAL(ring.prepare(0), -EAGAIN);
        CHECK(ring.agent->complete(ring.claimed_operations[1].position, 0));
        CHECK(ring.agent->complete(ring.claimed_operations[0].position, 0));
        ring.agent->flush();
        CHECK_EQUAL(ring.reap(1), 1u);
        CHECK_EQUAL(ring.reaped_completions[0].userdata, first_userdata + 1);
        CHECK_EQUAL(ring.reap(), 1u);
        CHECK_EQUAL(ring.reaped_completions[0].userdata, first_userdata);
        first_userdata += 3;
    }
}

void test_positive_depth_takes_exact_batches() {
    // With io_depth 4, the agent claims batches of exactly four submissions.
    TestRing ring(16, 4);
    for (int i = 0; i < 3; ++i) {
        ring.prepare(0);
    }
    ring.application->submit();
    CHECK_EQUAL(ring.claim(), 0u);
    CHECK(ring.agent->prepare_to_sleep());
    for (int i = 0; i < 6; ++i) {
        ring.prepare(0);
    }
    CHECK(ring.application->submit());
    CHECK(!ring.agent->prepare_to_sleep()); // Of the nine submissions, two batches are due.
    CHECK_EQUAL(ring.claim(3), 3u);         // A batch that is larger than the caller's array is returned in parts.
    CHECK(!ring.agent->prepare_to_sleep());
    CHECK_EQUAL(ring.claim(), 5u);
    CHECK_EQUAL(ring.claim(), 0u);
    CHECK(ring.agent->prepare_to_sleep());
}

void test_negative_depth_holds_an_incomplete_batch() {
    // With io_depth -4, the agent claims batches of at most four submissions. It holds an incomplete batch for 100 ns.
    TestRing ring(16, -4, 100);
    ring.prepare(0);
    ring.application->submit();
    CHECK_EQUAL(ring.claim(64, 1000), 0u);
    CHECK_EQUAL(ring.agent->held_until_ns(), 1100);
    ring.prepare(0);
    ring.application->submit();
    // The first operation of the batch starts the timeout; later ones do not restart it.
    CHECK_EQUAL(ring.claim(64, 1099), 0u);
    CHECK(ring.agent->prepare_to_sleep());
    CHECK_EQUAL(ring.claim(64, 1100), 2u);
    CHECK_EQUAL(ring.agent->held_until_ns(), -1);
    for (int i = 0; i < 9; ++i) {
        ring.prepare(0);
    }
    ring.application->submit();
    CHECK_EQUAL(ring.claim(64, 1101), 4u);
    CHECK(!ring.agent->prepare_to_sleep()); // Another full batch is due.
    CHECK_EQUAL(ring.claim(64, 1101), 4u);
    CHECK_EQUAL(ring.claim(64, 1101), 0u);
    CHECK_EQUAL(ring.agent->held_until_ns(), 1201);
    CHECK_EQUAL(ring.claim(64, 5000), 1u);
}

void test_negative_depth_without_timeout_holds_nothing() {
    TestRing ring(16, -4);
    ring.prepare(0);
    ring.application->submit();
    CHECK_EQUAL(ring.claim(), 1u);
    CHECK_EQUAL(ring.agent->held_until_ns(), -1);
}

void test_sleeper_is_woken_once() {
    TestRing ring(8);
    CHECK(ring.agent->prepare_to_sleep());
    ring.prepare(0);
    CHECK(ring.application->submit());
    CHECK(!ring.application->submit()); // The first submit() withdrew the agent's announcement.
    ring.agent->end_sleep();
    CHECK(!ring.agent->prepare_to_sleep());
    CHECK_EQUAL(ring.claim(), 1u);
    CHECK(ring.application->prepare_to_sleep());
    CHECK_EQUAL(ring.get_semaphore_value(), 0);
    ring.agent->complete(ring.claimed_operations[0].position, 0);
    ring.agent->flush();
    CHECK_EQUAL(ring.get_semaphore_value(), 1);
    ring.agent->flush();
    CHECK_EQUAL(ring.get_semaphore_value(), 1);
    ring.application->end_sleep();
    CHECK(!ring.application->prepare_to_sleep());
    CHECK_EQUAL(ring.reap(), 1u);
}

// A sleeper that needs several completions is woken by the last of them, and not by each flush.
void test_sleeper_is_woken_when_it_has_enough() {
    TestRing ring(8);
    const auto complete = [&](std::size_t index) {
        CHECK(ring.agent->complete(ring.claimed_operations[index].position, 0));
        ring.agent->flush();
    };
    for (std::uint64_t userdata = 0; userdata < 8; ++userdata)
        ring.prepare(userdata);
    ring.application->submit();
    CHECK_EQUAL(ring.claim(), 8u);
    CHECK(ring.application->prepare_to_sleep(3));
    complete(0);
    complete(1);
    CHECK_EQUAL(ring.get_semaphore_value(), 0);
    complete(2);
    CHECK_EQUAL(ring.get_semaphore_value(), 1);
    CHECK_EQUAL(ring.memory.view.extension->application.sleeping.load(), awake);
    // When half of the entries have completed operations, the sleeper is always woken, because another thread may need
    // free entries for its submissions.
    CHECK_EQUAL(ring.reap(), 3u);
    CHECK(ring.application->prepare_to_sleep(8));
    CHECK_EQUAL(ring.memory.view.extension->application.awaited_count.load(), 4u);
    complete(3);
    CHECK_EQUAL(ring.reap(), 1u);
    CHECK(ring.application->prepare_to_sleep(1));
    // If the application has written an invalid index, the agent posts in any case. A needless post does no harm.
    ring.memory.view.extension->application.awaited_count = 100;
    ring.memory.view.indices->completion_tail = 1000;
    complete(4);
    CHECK_EQUAL(ring.get_semaphore_value(), 2);
}

void test_submit_tells_the_agent_the_processor() {
    TestRing ring(4);
    CHECK_EQUAL(ring.agent->application_processor(), -1); // Nothing was submitted yet.
    const std::vector<int> processors = gdrkit::test::list_processors();
    for (const int& processor : processors) {
        gdrkit::test::restrict_thread({&processor, 1});
        CHECK(ring.prepare(0) >= 0);
        ring.application->submit();
        CHECK_EQUAL(ring.agent->application_processor(), processor);
        CHECK_EQUAL(ring.claim(), 1u);
        ring.agent->complete(ring.claimed_operations[0].position, 1);
        ring.agent->flush();
        CHECK_EQUAL(ring.reap(), 1u);
    }
    gdrkit::test::restrict_thread(processors);
    // A faulty application may write any number (1 + the processor). attach() of the next application resets the
    // number.
    ring.memory.view.extension->application.processor = 0x80000000U;
    CHECK_EQUAL(ring.agent->application_processor(), std::numeric_limits<int>::max());
    CHECK_EQUAL(ApplicationRing::attach(ring.memory.data, ring.memory.size_bytes, ring.application), 0);
    CHECK_EQUAL(ring.agent->application_processor(), -1);
}

// Runs a round in which each side sleeps until one post. `expected_announcement`: the value of SideState::sleeping with
// which each side announces its sleep.
void run_sleeping_round(TestRing& ring, std::uint32_t expected_announcement) {
    CHECK_EQUAL(ring.claim(), 0u);
    CHECK(ring.agent->prepare_to_sleep());
    CHECK_EQUAL(ring.memory.view.extension->agent.sleeping.load(), expected_announcement);
    CHECK(ring.prepare(0) >= 0);
    CHECK(ring.application->submit());
    ring.agent->end_sleep();
    CHECK_EQUAL(ring.claim(), 1u);
    CHECK(ring.application->prepare_to_sleep());
    CHECK_EQUAL(ring.memory.view.extension->application.sleeping.load(), expected_announcement);
    CHECK(ring.agent->complete(ring.claimed_operations[0].position, 0));
    ring.agent->flush();
    CHECK_EQUAL(sem_trywait(as_glibc(ring.memory.view.completion_semaphore)), 0);
    CHECK_EQUAL(ring.reap(), 1u);
    ring.application->record_wait(1);
}

// Runs a round in which neither side sleeps. If `expects_posts`, each side must post nevertheless, because the
// announcement of the other side is permanent.
void run_awake_round(TestRing& ring, bool expects_posts) {
    ring.prepare(0);
    CHECK_EQUAL(ring.application->submit(), expects_posts);
    CHECK_EQUAL(ring.claim(), 1u);
    CHECK(ring.agent->complete(ring.claimed_operations[0].position, 0));
    ring.agent->flush();
    CHECK_EQUAL(ring.get_semaphore_value(), expects_posts ? 1 : 0);
    sem_trywait(as_glibc(ring.memory.view.completion_semaphore));
    CHECK_EQUAL(ring.reap(), 1u);
    ring.application->record_wait(0);
}

void test_announcement_becomes_permanent() {
    TestRing ring(8);
    SideState& agent_state = ring.memory.view.extension->agent;
    SideState& application_state = ring.memory.view.extension->application;
    for (int round = 0; round < 16; ++round) {
        run_sleeping_round(ring, asleep_once);
        CHECK(agent_state.sleeping == awake && application_state.sleeping == awake);
    }
    for (int round = 0; round < 3; ++round) {
        run_sleeping_round(ring, asleep_always);
        CHECK(agent_state.sleeping == asleep_always && application_state.sleeping == asleep_always);
    }
    // Some versions of gdrkit reset every announcement of the other side. After a reset, the next sleep announces
    // permanently again.
    agent_state.sleeping = application_state.sleeping = awake;
    run_sleeping_round(ring, asleep_always);
    // After a single round without sleep, a side keeps its announcement. After several such rounds, it withdraws the
    // announcement.
    run_awake_round(ring, true);
    run_sleeping_round(ring, asleep_always);
    for (int round = 0; round < 2; ++round) {
        CHECK(agent_state.sleeping == asleep_always && application_state.sleeping == asleep_always);
        run_awake_round(ring, true);
    }
    CHECK(agent_state.sleeping == awake && application_state.sleeping == awake);
    run_awake_round(ring, false);
    run_sleeping_round(ring, asleep_once);
}

// If another ring or the server wakes the agent, the work in this ring needs no post. Such rounds must not make the
// announcement permanent.
void test_announcement_stays_single_without_posts() {
    TestRing ring(8);
    for (int round = 0; round < 40; ++round) {
        CHECK_EQUAL(ring.claim(), 0u);
        CHECK(ring.agent->prepare_to_sleep());
        CHECK_EQUAL(ring.memory.view.extension->agent.sleeping.load(), asleep_once);
        ring.agent->end_sleep();
        run_awake_round(ring, false);
    }
    // In these rounds, prepare_to_sleep() finds work, so the agent does not sleep.
    for (int round = 0; round < 40; ++round) {
        ring.prepare(0);
        ring.application->submit();
        CHECK(!ring.agent->prepare_to_sleep());
        CHECK_EQUAL(ring.memory.view.extension->agent.sleeping.load(), awake);
        CHECK_EQUAL(ring.claim(), 1u);
        CHECK(ring.agent->complete(ring.claimed_operations[0].position, 0));
        ring.agent->flush();
        CHECK_EQUAL(ring.reap(), 1u);
        CHECK_EQUAL(ring.claim(), 0u);
    }
}

// Runs rounds of two operations, in which both sides sleep with one-time and with permanent announcements. A lost
// wake-up would make a wait time out. Returns the number of rounds after which the announcement of the application was
// permanent.
std::uint32_t run_rounds_on_two_threads() {
    constexpr std::uint64_t round_count = 30000;
    TestRing ring(8);
    sem_t submit_semaphore;
    CHECK_EQUAL(sem_init(&submit_semaphore, 0, 0), 0);
    const auto wait_for_post = [](sem_t* semaphore) {
        timespec deadline{};
        clock_gettime(CLOCK_REALTIME, &deadline);
        deadline.tv_sec += 20;
        CHECK_EQUAL(sem_timedwait(semaphore, &deadline), 0);
    };
    std::thread agent_thread([&] {
        for (std::uint64_t completed_count = 0; completed_count < round_count * 2;) {
            const std::size_t claimed_count = ring.claim();
            for (std::size_t i = 0; i < claimed_count; ++i) {
                CHECK(ring.agent->complete(ring.claimed_operations[i].position, 0));
                // In some rounds one flush publishes both completions. In other rounds each completion has its own
                // flush.
                if (ring.claimed_operations[i].arguments.userdata % 64 < 16) {
                    ring.agent->flush();
                }
            }
            ring.agent->flush();
            completed_count += claimed_count;
            if (claimed_count == 0 && ring.agent->prepare_to_sleep()) {
                wait_for_post(&submit_semaphore);
                ring.agent->end_sleep();
            }
        }
    });
    std::uint32_t permanent_round_count = 0;
    for (std::uint64_t round = 0; round < round_count; ++round) {
        // In some rounds, each operation has its own submit(). In other rounds, one submit() publishes both.
        for (int i = 0; i < 2; ++i) {
            CHECK(ring.prepare(round) >= 0);
            if (i == 1 || round % 128 < 32) {
                if (ring.application->submit()) {
                    sem_post(&submit_semaphore);
                }
            }
        }
        std::uint32_t reaped_count = ring.reap();
        std::uint32_t post_count = 0;
        for (; reaped_count < 2; reaped_count += ring.reap()) {
            if (ring.application->prepare_to_sleep()) {
                ++post_count;
                wait_for_post(as_glibc(ring.memory.view.completion_semaphore));
            }
        }
        ring.application->record_wait(post_count);
        permanent_round_count += ring.memory.view.extension->application.sleeping.load() == asleep_always;
    }
    agent_thread.join();
    CHECK_EQUAL(sem_destroy(&submit_semaphore), 0);
    return permanent_round_count;
}

void test_no_wake_up_is_lost() {
    // An announcement becomes permanent after sixteen sleeps in a row that end with one post. On a busy machine, that
    // may take several attempts.
    std::uint32_t permanent_round_count = 0;
    for (int attempt = 0; attempt < 50 && permanent_round_count == 0; ++attempt)
        permanent_round_count = run_rounds_on_two_threads();
    CHECK(permanent_round_count > 0);
}

void test_side_without_extension_gets_one_post_each() {
    // A side without the extension cannot announce a sleep. The other side posts for each submit() and each completion.
    TestRing ring(8);
    ring.memory.view.extension->application.magic = 0;
    ring.memory.view.extension->agent.magic = 0;
    for (int i = 0; i < 3; ++i) {
        ring.prepare(0);
    }
    CHECK(ring.application->submit());
    CHECK(ring.application->submit());
    CHECK_EQUAL(ring.claim(), 3u);
    for (int i = 0; i < 3; ++i) {
        ring.agent->complete(ring.claimed_operations[i].position, 0);
    }
    ring.agent->flush();
    CHECK_EQUAL(ring.get_semaphore_value(), 3);
}

// Checks that the agent's side finds the ring broken after `corrupt` has changed the shared memory. Of the four
// submissions in the ring, the agent has claimed two, and the application has reaped the completion of one of these
// two.
template <typename Corrupt> void check_breaks_ring(Corrupt corrupt) {
    TestRing ring(8);
    for (int i = 0; i < 4; ++i) {
        ring.prepare(0);
    }
    ring.application->submit();
    CHECK_EQUAL(ring.claim(2), 2u);
    CHECK(ring.agent->complete(ring.claimed_operations[1].position, 0));
    ring.agent->flush();
    CHECK_EQUAL(ring.reap(), 1u);
    corrupt(ring.memory.view);
    CHECK_EQUAL(ring.claim(), 0u);
    CHECK(ring.agent->is_broken());
    CHECK(!ring.agent->prepare_to_sleep());
    CHECK(ring.application->has_agent_ended());
    CHECK_EQUAL(ring.agent->outstanding(), 1u);
    // A claimed operation can still be completed.
    CHECK(ring.agent->complete(ring.claimed_operations[0].position, 0));
    ring.agent->flush();
    CHECK_EQUAL(ring.agent->outstanding(), 0u);
}

void test_hostile_contents_break_the_ring() {
    // A ring with 8 entries has 9 slots, so valid indices are 0 to 8.
    for (const std::int32_t invalid_index : {-1, 9, INT_MAX, INT_MIN}) {
        check_breaks_ring([=](RingView& view) { view.indices->submission_head = invalid_index; });
        check_breaks_ring([=](RingView& view) { view.indices->completion_tail = invalid_index; });
        check_breaks_ring([=](RingView& view) { view.submissions[2].index = invalid_index; });
    }
    // The head moves back to submissions that were claimed already.
    check_breaks_ring([](RingView& view) { view.indices->submission_head = 1; });
    // This tail means that two completions were reaped, but the agent has posted only one.
    check_breaks_ring([](RingView& view) { view.indices->completion_tail = 2; });
}

void test_full_completion_queue_delays_submissions() {
    // The test writes submissions into the shared memory, and reaps no completions. An ApplicationRing always has space
    // for the completions of its submissions.
    TestRing ring(2);
    RingView& view = ring.memory.view;
    for (int round = 0; round < 2; ++round) {
        view.submissions[round] = {0, 0, 0}; // The fields: index, reserved, user data.
        view.indices->submission_head = round + 1;
        CHECK_EQUAL(ring.claim(), 1u);
        CHECK(ring.agent->complete(ring.claimed_operations[0].position, 0));
        ring.agent->flush();
    }
    view.submissions[2] = {0, 0, 0};
    view.indices->submission_head = 0; // The queue has three positions, so the head wraps around.
    CHECK_EQUAL(ring.claim(), 0u);
    CHECK(!ring.agent->is_broken());
    CHECK(ring.agent->prepare_to_sleep());
    view.indices->completion_tail = 1; // One completion is reaped.
    CHECK_EQUAL(ring.claim(), 1u);
}

void test_invalid_completions_are_ignored() {
    TestRing ring(4);
    ring.prepare(5);
    ring.application->submit();
    RingView& view = ring.memory.view;
    // The fields of a completion: index, reserved, result, user data.
    view.completions[0] = {3, 0, 0, 0};  // The operation is not in flight.
    view.completions[1] = {-7, 0, 0, 0}; // The index is invalid.
    view.completions[2] = {0, 0, 12, 5}; // The completion is valid.
    view.completions[3] = {0, 0, 12, 5}; // The completion is a duplicate.
    view.indices->completion_head = 4;
    CHECK_EQUAL(ring.reap(), 1u);
    CHECK_EQUAL(ring.reaped_completions[0].result, 12);
    view.indices->completion_head = 99;
    CHECK_EQUAL(ring.reap(), 0u);
    CHECK(ring.application->has_agent_ended());
}

void test_end_of_agent_fails_operations() {
    TestRing ring(4);
    ring.prepare(5);
    ring.prepare(6);
    ring.application->submit();
    ring.agent.reset();
    CHECK(ring.application->has_agent_ended());
    CHECK_EQUAL(ring.get_semaphore_value(), 1);
    std::uint64_t userdata_sum = 0;
    const auto check_completion = [&](std::int32_t, std::int64_t result, std::uint64_t userdata) {
        CHECK_EQUAL(result, -EREMOTEIO);
        userdata_sum += userdata;
    };
    CHECK_EQUAL(ring.application->fail_outstanding(1, -EREMOTEIO, check_completion), 1u);
    CHECK_EQUAL(ring.application->fail_outstanding(8, -EREMOTEIO, check_completion), 1u);
    CHECK_EQUAL(ring.application->fail_outstanding(8, -EREMOTEIO, check_completion), 0u);
    CHECK_EQUAL(userdata_sum, 11u);
}

void test_three_threads_use_a_ring() {
    constexpr std::uint64_t operation_count = 100000;
    TestRing ring(64, -8, 1000); // An incomplete batch is held for 1000 ns.
    std::thread agent_thread([&] {
        std::int64_t now_us = 0;
        for (std::uint64_t completed_count = 0; completed_count < operation_count;) {
            const std::size_t claimed_count = ring.claim(64, ++now_us * 1000);
            for (std::size_t i = claimed_count; i-- > 0;) {
                CHECK(ring.agent->complete(ring.claimed_operations[i].position,
                                           static_cast<std::int64_t>(ring.claimed_operations[i].arguments.userdata)));
            }
            ring.agent->flush();
            completed_count += claimed_count;
            if (claimed_count == 0) {
                std::this_thread::yield();
            }
        }
    });
    std::thread reaper_thread([&] {
        std::uint64_t userdata_sum = 0;
        for (std::uint64_t completed_count = 0; completed_count < operation_count;) {
            const std::uint32_t reaped_count = ring.reap();
            for (std::uint32_t i = 0; i < reaped_count; ++i) {
                CHECK_EQUAL(ring.reaped_completions[i].result,
                            static_cast<std::int64_t>(ring.reaped_completions[i].userdata));
                userdata_sum += ring.reaped_completions[i].userdata;
            }
            completed_count += reaped_count;
            if (reaped_count == 0) {
                std::this_thread::yield();
            }
        }
        CHECK_EQUAL(userdata_sum, operation_count * (operation_count - 1) / 2);
    });
    for (std::uint64_t next_userdata = 0; next_userdata < operation_count;) {
        const int index = ring.prepare(next_userdata);
        if (index >= 0) {
            ++next_userdata;
        } else {
            CHECK_EQUAL(index, -EAGAIN);
            std::this_thread::yield();
        }
        ring.application->submit();
    }
    agent_thread.join();
    reaper_thread.join();
}

} // namespace

int main() {
    test_attach_refuses_invalid_rings();
    test_operation_completes();
    test_full_ring_returns_eagain();
    test_positive_depth_takes_exact_batches();
    test_negative_depth_holds_an_incomplete_batch();
    test_negative_depth_without_timeout_holds_nothing();
    test_sleeper_is_woken_once();
    test_sleeper_is_woken_when_it_has_enough();
    test_submit_tells_the_agent_the_processor();
    test_announcement_becomes_permanent();
    test_announcement_stays_single_without_posts();
    test_no_wake_up_is_lost();
    test_side_without_extension_gets_one_post_each();
    test_hostile_contents_break_the_ring();
    test_full_completion_queue_delays_submissions();
    test_invalid_completions_are_ignored();
    test_end_of_agent_fails_operations();
    test_three_threads_use_a_ring();
    return 0;
}
