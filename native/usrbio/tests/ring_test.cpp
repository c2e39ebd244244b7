// Tests of the two sides of a ring, and of the agent's side against a hostile application.
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

// Returns the semaphore as one of glibc. 3FS uses the functions of glibc on the same words.
sem_t* as_glibc(Semaphore* semaphore) {
    return reinterpret_cast<sem_t*>(semaphore);
}

struct RingMemory {
    explicit RingMemory(std::size_t entries) : bytes(ring_bytes(entries)) {
        data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        CHECK(data != MAP_FAILED);
        CHECK_EQUAL(RingView::bind(data, bytes, view), 0);
    }
    ~RingMemory() { munmap(data, bytes); }
    void* data;
    std::size_t bytes;
    RingView view;
};

// The two sides of one ring, with arrays for claimed operations and for reaped completions.
struct RingPair {
    explicit RingPair(std::size_t entries, int io_depth = 0, std::int64_t timeout_ns = 0) : memory(entries) {
        CHECK_EQUAL(ApplicationRing::attach(memory.data, memory.bytes, application), 0);
        CHECK_EQUAL(AgentRing::attach(memory.data, memory.bytes, io_depth, timeout_ns, agent), 0);
    }
    int prepare(std::uint64_t userdata) { return application->prepare(id, 1, 2, 3, 4, userdata); }
    std::size_t claim(std::size_t count_max = 64, std::int64_t now_ns = 0) {
        return agent->claim(std::span(claimed).first(count_max), now_ns);
    }
    std::uint32_t reap(std::uint32_t count_max = 64) {
        std::uint32_t reaped = 0;
        return application->reap(count_max, [&](std::int32_t index, std::int64_t result, std::uint64_t userdata) {
            completed[reaped++] = {index, 0, result, userdata};
        });
    }
    int semaphore_value() {
        int value = -1;
        CHECK_EQUAL(sem_getvalue(as_glibc(memory.view.completion_semaphore), &value), 0);
        return value;
    }
    const std::uint8_t id[16] = {9, 8, 7};
    RingMemory memory;
    std::unique_ptr<ApplicationRing> application;
    std::unique_ptr<AgentRing> agent;
    ClaimedOperation claimed[64];
    Completion completed[64];
};

void test_attach_refuses_invalid_rings() {
    RingMemory memory(4);
    std::unique_ptr<AgentRing> agent;
    std::unique_ptr<ApplicationRing> application;
    CHECK_EQUAL(AgentRing::attach(memory.data, ring_bytes(1) - 1, 0, 0, agent), -EINVAL);
    CHECK_EQUAL(AgentRing::attach(nullptr, memory.bytes, 0, 0, agent), -EINVAL);
    CHECK_EQUAL(AgentRing::attach(static_cast<char*>(memory.data) + 8, memory.bytes - 96, 0, 0, agent), -EINVAL);
    CHECK_EQUAL(AgentRing::attach(memory.data, memory.bytes, 5, 0, agent), -EINVAL);
    CHECK_EQUAL(AgentRing::attach(memory.data, memory.bytes, -5, 0, agent), -EINVAL);
    CHECK_EQUAL(AgentRing::attach(memory.data, memory.bytes, INT_MIN, 0, agent), -EINVAL);
    CHECK_EQUAL(AgentRing::attach(memory.data, memory.bytes, -4, -1, agent), -EINVAL);
    CHECK_EQUAL(AgentRing::attach(memory.data, ring_bytes(ring_entries_max + 1), 0, 0, agent), -EINVAL);
    CHECK_EQUAL(ApplicationRing::attach(memory.data, ring_bytes(1) - 1, application), -EINVAL);
    memory.view.indices->completion_tail = 5;
    CHECK_EQUAL(AgentRing::attach(memory.data, memory.bytes, 0, 0, agent), -EINVAL);
    CHECK_EQUAL(ApplicationRing::attach(memory.data, memory.bytes, application), -EINVAL);
    memory.view.indices->completion_tail = 4;
    CHECK_EQUAL(AgentRing::attach(memory.data, memory.bytes, 4, 0, agent), 0);
    CHECK_EQUAL(agent->entries(), 4u);
}

void test_operation_completes() {
    RingPair pair(4);
    CHECK_EQUAL(pair.prepare(77), 0);
    CHECK_EQUAL(pair.claim(), 0u);
    CHECK(!pair.application->submit());
    CHECK_EQUAL(pair.claim(), 1u);
    const Arguments& arguments = pair.claimed[0].arguments;
    CHECK(std::memcmp(arguments.buffer_id, pair.id, 16) == 0);
    CHECK(arguments.buffer_offset == 1 && arguments.file_inode == 2 && arguments.file_offset == 3);
    CHECK(arguments.length == 4 && arguments.userdata == 77);
    CHECK(pair.agent->complete(pair.claimed[0].position, 4));
    CHECK(!pair.agent->complete(pair.claimed[0].position, 4));
    CHECK(!pair.agent->complete(4, 4));
    CHECK(!pair.agent->complete(UINT_MAX, 4));
    CHECK_EQUAL(pair.reap(), 0u);
    pair.agent->flush();
    CHECK_EQUAL(pair.reap(), 1u);
    CHECK(pair.completed[0].index == 0 && pair.completed[0].result == 4 && pair.completed[0].userdata == 77);
    CHECK_EQUAL(pair.reap(), 0u);
}

void test_full_ring_returns_eagain() {
    RingPair pair(3);
    std::uint64_t next_userdata = 0;
    std::uint64_t reaped_userdata = 0;
    for (int round = 0; round < 50; ++round) {
        int prepared = 0;
        while (pair.prepare(next_userdata) >= 0) {
            ++next_userdata;
            ++prepared;
        }
        CHECK_EQUAL(prepared, 3);
        CHECK_EQUAL(pair.prepare(0), -EAGAIN);
        pair.application->submit();
        CHECK_EQUAL(pair.claim(), 3u);
        // Complete in reverse order: the index of the last operation is free, but its place in the queue is not.
        CHECK(pair.agent->complete(pair.claimed[2].position, 0));
        pair.agent->flush();
        CHECK_EQUAL(pair.reap(), 1u);
        CHECK_EQUAL(pair.prepare(0), -EAGAIN);
        CHECK(pair.agent->complete(pair.claimed[1].position, 0));
        CHECK(pair.agent->complete(pair.claimed[0].position, 0));
        pair.agent->flush();
        CHECK_EQUAL(pair.reap(1), 1u);
        CHECK_EQUAL(pair.completed[0].userdata, reaped_userdata + 1);
        CHECK_EQUAL(pair.reap(), 1u);
        CHECK_EQUAL(pair.completed[0].userdata, reaped_userdata);
        reaped_userdata += 3;
    }
}

void test_positive_depth_takes_exact_batches() {
    RingPair pair(16, 4);
    for (int i = 0; i < 3; ++i) {
        pair.prepare(0);
    }
    pair.application->submit();
    CHECK_EQUAL(pair.claim(), 0u);
    CHECK(pair.agent->prepare_to_sleep());
    for (int i = 0; i < 6; ++i) {
        pair.prepare(0);
    }
    CHECK(pair.application->submit());
    CHECK(!pair.agent->prepare_to_sleep());
    CHECK_EQUAL(pair.claim(3), 3u); // A batch that is larger than the caller's array is returned in parts.
    CHECK(!pair.agent->prepare_to_sleep());
    CHECK_EQUAL(pair.claim(), 5u);
    CHECK_EQUAL(pair.claim(), 0u);
    CHECK(pair.agent->prepare_to_sleep());
}

void test_negative_depth_holds_an_incomplete_batch() {
    RingPair pair(16, -4, 100);
    pair.prepare(0);
    pair.application->submit();
    CHECK_EQUAL(pair.claim(64, 1000), 0u);
    CHECK_EQUAL(pair.agent->held_until_ns(), 1100);
    pair.prepare(0);
    pair.application->submit();
    CHECK_EQUAL(pair.claim(64, 1099),
                0u); // The first operation of the batch starts the timeout; later ones do not restart it.
    CHECK(pair.agent->prepare_to_sleep());
    CHECK_EQUAL(pair.claim(64, 1100), 2u);
    CHECK_EQUAL(pair.agent->held_until_ns(), -1);
    for (int i = 0; i < 9; ++i) {
        pair.prepare(0);
    }
    pair.application->submit();
    CHECK_EQUAL(pair.claim(64, 1101), 4u);
    CHECK(!pair.agent->prepare_to_sleep()); // Another full batch is due.
    CHECK_EQUAL(pair.claim(64, 1101), 4u);
    CHECK_EQUAL(pair.claim(64, 1101), 0u);
    CHECK_EQUAL(pair.agent->held_until_ns(), 1201);
    CHECK_EQUAL(pair.claim(64, 5000), 1u);
}

void test_negative_depth_without_timeout_holds_nothing() {
    RingPair pair(16, -4);
    pair.prepare(0);
    pair.application->submit();
    CHECK_EQUAL(pair.claim(), 1u);
    CHECK_EQUAL(pair.agent->held_until_ns(), -1);
}

void test_sleeper_is_woken_once() {
    RingPair pair(8);
    CHECK(pair.agent->prepare_to_sleep());
    pair.prepare(0);
    CHECK(pair.application->submit());
    CHECK(!pair.application->submit());
    pair.agent->end_sleep();
    CHECK(!pair.agent->prepare_to_sleep());
    CHECK_EQUAL(pair.claim(), 1u);
    CHECK(pair.application->prepare_to_sleep());
    CHECK_EQUAL(pair.semaphore_value(), 0);
    pair.agent->complete(pair.claimed[0].position, 0);
    pair.agent->flush();
    CHECK_EQUAL(pair.semaphore_value(), 1);
    pair.agent->flush();
    CHECK_EQUAL(pair.semaphore_value(), 1);
    pair.application->end_sleep();
    CHECK(!pair.application->prepare_to_sleep());
    CHECK_EQUAL(pair.reap(), 1u);
}

// A sleeper that needs several completions is woken by the last of them, and not by each batch.
void test_sleeper_is_woken_when_it_has_enough() {
    RingPair pair(8);
    const auto complete = [&](std::size_t index) {
        CHECK(pair.agent->complete(pair.claimed[index].position, 0));
        pair.agent->flush();
    };
    for (std::uint64_t user = 0; user < 8; ++user)
        pair.prepare(user);
    pair.application->submit();
    CHECK_EQUAL(pair.claim(), 8u);
    CHECK(pair.application->prepare_to_sleep(3));
    complete(0);
    complete(1);
    CHECK_EQUAL(pair.semaphore_value(), 0);
    complete(2);
    CHECK_EQUAL(pair.semaphore_value(), 1);
    CHECK_EQUAL(pair.memory.view.extension->application.sleeping.load(), awake);
    // Half of the entries are always enough, because another thread may need the entries.
    CHECK_EQUAL(pair.reap(), 3u);
    CHECK(pair.application->prepare_to_sleep(8));
    CHECK_EQUAL(pair.memory.view.extension->application.awaited_count.load(), 4u);
    complete(3);
    CHECK_EQUAL(pair.reap(), 1u);
    CHECK(pair.application->prepare_to_sleep(1));
    // A post that is not needed does no harm. An application that writes invalid indices gets one.
    pair.memory.view.extension->application.awaited_count = 100;
    pair.memory.view.indices->completion_tail = 1000;
    complete(4);
    CHECK_EQUAL(pair.semaphore_value(), 2);
}

void test_submit_tells_the_agent_the_processor() {
    RingPair pair(4);
    CHECK_EQUAL(pair.agent->application_processor(), -1); // Nothing was submitted yet.
    const std::vector<int> processors = gdrkit::test::list_processors();
    for (const int& processor : processors) {
        gdrkit::test::restrict_thread({&processor, 1});
        CHECK(pair.prepare(0) >= 0);
        pair.application->submit();
        CHECK_EQUAL(pair.agent->application_processor(), processor);
        CHECK_EQUAL(pair.claim(), 1u);
        pair.agent->complete(pair.claimed[0].position, 1);
        pair.agent->flush();
        CHECK_EQUAL(pair.reap(), 1u);
    }
    gdrkit::test::restrict_thread(processors);
    // A faulty application may write any number. The next application that uses the memory begins anew.
    pair.memory.view.extension->application.processor = 0x80000000U;
    CHECK_EQUAL(pair.agent->application_processor(), std::numeric_limits<int>::max());
    CHECK_EQUAL(ApplicationRing::attach(pair.memory.data, pair.memory.bytes, pair.application), 0);
    CHECK_EQUAL(pair.agent->application_processor(), -1);
}

// Runs a round in which each side sleeps until one post. `announced`: how each side announces its sleep.
void run_sleeping_round(RingPair& pair, std::uint32_t announced) {
    CHECK_EQUAL(pair.claim(), 0u);
    CHECK(pair.agent->prepare_to_sleep());
    CHECK_EQUAL(pair.memory.view.extension->agent.sleeping.load(), announced);
    CHECK(pair.prepare(0) >= 0);
    CHECK(pair.application->submit());
    pair.agent->end_sleep();
    CHECK_EQUAL(pair.claim(), 1u);
    CHECK(pair.application->prepare_to_sleep());
    CHECK_EQUAL(pair.memory.view.extension->application.sleeping.load(), announced);
    CHECK(pair.agent->complete(pair.claimed[0].position, 0));
    pair.agent->flush();
    CHECK_EQUAL(sem_trywait(as_glibc(pair.memory.view.completion_semaphore)), 0);
    CHECK_EQUAL(pair.reap(), 1u);
    pair.application->record_wait(1);
}

// Runs a round in which neither side sleeps. `is_posted`: each side posts all the same, because the announcement of the
// other side is permanent.
void run_awake_round(RingPair& pair, bool is_posted) {
    pair.prepare(0);
    CHECK_EQUAL(pair.application->submit(), is_posted);
    CHECK_EQUAL(pair.claim(), 1u);
    CHECK(pair.agent->complete(pair.claimed[0].position, 0));
    pair.agent->flush();
    CHECK_EQUAL(pair.semaphore_value(), is_posted ? 1 : 0);
    sem_trywait(as_glibc(pair.memory.view.completion_semaphore));
    CHECK_EQUAL(pair.reap(), 1u);
    pair.application->record_wait(0);
}

void test_announcement_becomes_permanent() {
    RingPair pair(8);
    SideState& agent = pair.memory.view.extension->agent;
    SideState& application = pair.memory.view.extension->application;
    for (int round = 0; round < 16; ++round) {
        run_sleeping_round(pair, asleep_once);
        CHECK(agent.sleeping == awake && application.sleeping == awake);
    }
    for (int round = 0; round < 3; ++round) {
        run_sleeping_round(pair, asleep_always);
        CHECK(agent.sleeping == asleep_always && application.sleeping == asleep_always);
    }
    // Act like a version of gdrkit that resets every announcement.
    agent.sleeping = application.sleeping = awake;
    run_sleeping_round(pair, asleep_always);
    // A single round without sleep does not withdraw the announcement, but several do.
    run_awake_round(pair, true);
    run_sleeping_round(pair, asleep_always);
    for (int round = 0; round < 2; ++round) {
        CHECK(agent.sleeping == asleep_always && application.sleeping == asleep_always);
        run_awake_round(pair, true);
    }
    CHECK(agent.sleeping == awake && application.sleeping == awake);
    run_awake_round(pair, false);
    run_sleeping_round(pair, asleep_once);
}

// If another ring or the server wakes the agent, the work in this ring needs no post. Such rounds must not make the
// announcement permanent.
void test_announcement_stays_single_without_posts() {
    RingPair pair(8);
    for (int round = 0; round < 40; ++round) {
        CHECK_EQUAL(pair.claim(), 0u);
        CHECK(pair.agent->prepare_to_sleep());
        CHECK_EQUAL(pair.memory.view.extension->agent.sleeping.load(), asleep_once);
        pair.agent->end_sleep();
        run_awake_round(pair, false);
    }
    for (int round = 0; round < 40; ++round) { // The agent does not sleep if the last check finds work.
        pair.prepare(0);
        pair.application->submit();
        CHECK(!pair.agent->prepare_to_sleep());
        CHECK_EQUAL(pair.memory.view.extension->agent.sleeping.load(), awake);
        CHECK_EQUAL(pair.claim(), 1u);
        CHECK(pair.agent->complete(pair.claimed[0].position, 0));
        pair.agent->flush();
        CHECK_EQUAL(pair.reap(), 1u);
        CHECK_EQUAL(pair.claim(), 0u);
    }
}

// Mixes sleeps of both sides with one-time and permanent announcements. A lost wake-up would make a wait time out.
// Returns the number of rounds after which the announcement of the application was permanent.
std::uint32_t mix_sleeps() {
    constexpr std::uint64_t rounds = 30000;
    RingPair pair(8);
    sem_t submit_semaphore;
    CHECK_EQUAL(sem_init(&submit_semaphore, 0, 0), 0);
    const auto sleep = [](sem_t* semaphore) {
        timespec deadline{};
        clock_gettime(CLOCK_REALTIME, &deadline);
        deadline.tv_sec += 20;
        CHECK_EQUAL(sem_timedwait(semaphore, &deadline), 0);
    };
    std::thread agent([&] {
        for (std::uint64_t completed_count = 0; completed_count < rounds * 2;) {
            const std::size_t count = pair.claim();
            for (std::size_t i = 0; i < count; ++i) {
                CHECK(pair.agent->complete(pair.claimed[i].position, 0));
                // In some rounds one flush publishes both completions. In other rounds each completion has its own
                // flush.
                if (pair.claimed[i].arguments.userdata % 64 < 16) {
                    pair.agent->flush();
                }
            }
            pair.agent->flush();
            completed_count += count;
            if (count == 0 && pair.agent->prepare_to_sleep()) {
                sleep(&submit_semaphore);
                pair.agent->end_sleep();
            }
        }
    });
    std::uint32_t permanent_count = 0;
    for (std::uint64_t round = 0; round < rounds; ++round) {
        for (int i = 0; i < 2; ++i) {
            CHECK(pair.prepare(round) >= 0);
            if (i == 1 || round % 128 < 32) {
                if (pair.application->submit()) {
                    sem_post(&submit_semaphore);
                }
            }
        }
        std::uint32_t reaped = pair.reap();
        std::uint32_t posts = 0;
        for (; reaped < 2; reaped += pair.reap()) {
            if (pair.application->prepare_to_sleep()) {
                ++posts;
                sleep(as_glibc(pair.memory.view.completion_semaphore));
            }
        }
        pair.application->record_wait(posts);
        permanent_count += pair.memory.view.extension->application.sleeping.load() == asleep_always;
    }
    agent.join();
    CHECK_EQUAL(sem_destroy(&submit_semaphore), 0);
    return permanent_count;
}

void test_no_wake_up_is_lost() {
    // An announcement becomes permanent after sixteen equal rounds. On a busy machine, that may not happen at once.
    std::uint32_t permanent_count = 0;
    for (int attempt = 0; attempt < 50 && permanent_count == 0; ++attempt)
        permanent_count = mix_sleeps();
    CHECK(permanent_count > 0);
}

void test_side_without_extension_gets_one_post_each() {
    RingPair pair(8);
    pair.memory.view.extension->application.magic = 0;
    pair.memory.view.extension->agent.magic = 0;
    for (int i = 0; i < 3; ++i) {
        pair.prepare(0);
    }
    CHECK(pair.application->submit());
    CHECK(pair.application->submit());
    CHECK_EQUAL(pair.claim(), 3u);
    for (int i = 0; i < 3; ++i) {
        pair.agent->complete(pair.claimed[i].position, 0);
    }
    pair.agent->flush();
    CHECK_EQUAL(pair.semaphore_value(), 3);
}

// Checks that the agent's side finds the ring broken after `corrupt` has changed the shared memory. Of the four
// submissions in the ring, the agent has claimed two, and the application has reaped one of these two.
template <typename Corrupt> void check_breaks_ring(Corrupt corrupt) {
    RingPair pair(8);
    for (int i = 0; i < 4; ++i) {
        pair.prepare(0);
    }
    pair.application->submit();
    CHECK_EQUAL(pair.claim(2), 2u);
    CHECK(pair.agent->complete(pair.claimed[1].position, 0));
    pair.agent->flush();
    CHECK_EQUAL(pair.reap(), 1u);
    corrupt(pair.memory.view);
    CHECK_EQUAL(pair.claim(), 0u);
    CHECK(pair.agent->is_broken());
    CHECK(!pair.agent->prepare_to_sleep());
    CHECK(pair.application->has_agent_ended());
    CHECK_EQUAL(pair.agent->outstanding(), 1u);
    CHECK(pair.agent->complete(pair.claimed[0].position, 0)); // A claimed operation can still be completed.
    pair.agent->flush();
    CHECK_EQUAL(pair.agent->outstanding(), 0u);
}

void test_hostile_contents_break_the_ring() {
    for (const std::int32_t invalid : {-1, 9, INT_MAX, INT_MIN}) {
        check_breaks_ring([=](RingView& view) { view.indices->submission_head = invalid; });
        check_breaks_ring([=](RingView& view) { view.indices->completion_tail = invalid; });
        check_breaks_ring([=](RingView& view) { view.submissions[2].index = invalid; });
    }
    // The head moves back to submissions that were claimed already.
    check_breaks_ring([](RingView& view) { view.indices->submission_head = 1; });
    // With this tail, a completion was reaped before the agent posted it.
    check_breaks_ring([](RingView& view) { view.indices->completion_tail = 2; });
}

void test_full_completion_queue_delays_submissions() {
    // Submit operations without reaping the completions of earlier ones. ApplicationRing never does this.
    RingPair pair(2);
    RingView& view = pair.memory.view;
    for (int round = 0; round < 2; ++round) {
        view.submissions[round] = {0, 0, 0};
        view.indices->submission_head = round + 1;
        CHECK_EQUAL(pair.claim(), 1u);
        CHECK(pair.agent->complete(pair.claimed[0].position, 0));
        pair.agent->flush();
    }
    view.submissions[2] = {0, 0, 0};
    view.indices->submission_head = 0;
    CHECK_EQUAL(pair.claim(), 0u);
    CHECK(!pair.agent->is_broken());
    CHECK(pair.agent->prepare_to_sleep());
    view.indices->completion_tail = 1;
    CHECK_EQUAL(pair.claim(), 1u);
}

void test_invalid_completions_are_ignored() {
    RingPair pair(4);
    pair.prepare(5);
    pair.application->submit();
    RingView& view = pair.memory.view;
    view.completions[0] = {3, 0, 0, 0};  // The operation is not in flight.
    view.completions[1] = {-7, 0, 0, 0}; // The index is invalid.
    view.completions[2] = {0, 0, 12, 5}; // The completion is valid.
    view.completions[3] = {0, 0, 12, 5}; // The completion is a duplicate.
    view.indices->completion_head = 4;
    CHECK_EQUAL(pair.reap(), 1u);
    CHECK_EQUAL(pair.completed[0].result, 12);
    view.indices->completion_head = 99;
    CHECK_EQUAL(pair.reap(), 0u);
    CHECK(pair.application->has_agent_ended());
}

void test_end_of_agent_fails_operations() {
    RingPair pair(4);
    pair.prepare(5);
    pair.prepare(6);
    pair.application->submit();
    pair.agent.reset();
    CHECK(pair.application->has_agent_ended());
    CHECK_EQUAL(pair.semaphore_value(), 1);
    std::uint64_t userdata_sum = 0;
    const auto sink = [&](std::int32_t, std::int64_t result, std::uint64_t userdata) {
        CHECK_EQUAL(result, -EREMOTEIO);
        userdata_sum += userdata;
    };
    CHECK_EQUAL(pair.application->fail_outstanding(1, -EREMOTEIO, sink), 1u);
    CHECK_EQUAL(pair.application->fail_outstanding(8, -EREMOTEIO, sink), 1u);
    CHECK_EQUAL(pair.application->fail_outstanding(8, -EREMOTEIO, sink), 0u);
    CHECK_EQUAL(userdata_sum, 11u);
}

void test_three_threads_use_a_ring() {
    constexpr std::uint64_t operations = 100000;
    RingPair pair(64, -8, 1000);
    std::thread agent([&] {
        std::int64_t now = 0;
        for (std::uint64_t completed_count = 0; completed_count < operations;) {
            const std::size_t count = pair.claim(64, ++now * 1000);
            for (std::size_t i = count; i-- > 0;) {
                CHECK(pair.agent->complete(pair.claimed[i].position,
                                           static_cast<std::int64_t>(pair.claimed[i].arguments.userdata)));
            }
            pair.agent->flush();
            completed_count += count;
            if (count == 0) {
                std::this_thread::yield();
            }
        }
    });
    std::thread reaper([&] {
        std::uint64_t sum = 0;
        for (std::uint64_t completed_count = 0; completed_count < operations;) {
            const std::uint32_t count = pair.reap();
            for (std::uint32_t i = 0; i < count; ++i) {
                CHECK_EQUAL(pair.completed[i].result, static_cast<std::int64_t>(pair.completed[i].userdata));
                sum += pair.completed[i].userdata;
            }
            completed_count += count;
            if (count == 0) {
                std::this_thread::yield();
            }
        }
        CHECK_EQUAL(sum, operations * (operations - 1) / 2);
    });
    for (std::uint64_t i = 0; i < operations;) {
        const int index = pair.prepare(i);
        if (index >= 0) {
            ++i;
        } else {
            CHECK_EQUAL(index, -EAGAIN);
            std::this_thread::yield();
        }
        pair.application->submit();
    }
    agent.join();
    reaper.join();
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
