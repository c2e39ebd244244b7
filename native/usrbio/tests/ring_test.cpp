// Both sides of a ring against each other, and the agent's side against an application that lies.
#include "tests/check.hpp"
#include "usrbio/ring/agent_side.hpp"
#include "usrbio/ring/application_side.hpp"

#include <climits>
#include <cstring>
#include <sys/mman.h>
#include <thread>
#include <time.h>

using namespace gdrkit::usrbio;

namespace {

// The side of 3FS: glibc's functions on the same words.
sem_t* glibc(Semaphore* semaphore) {
    return reinterpret_cast<sem_t*>(semaphore);
}

struct Memory {
    explicit Memory(std::size_t entries) : bytes(ring_bytes(entries)) {
        data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        CHECK(data != MAP_FAILED);
        CHECK_EQUAL(RingView::over(data, bytes, view), 0);
    }
    ~Memory() { munmap(data, bytes); }
    void* data;
    std::size_t bytes;
    RingView view;
};

struct Pair {
    explicit Pair(std::size_t entries, int io_depth = 0, std::int64_t timeout_ns = 0) : memory(entries) {
        CHECK_EQUAL(ApplicationRing::attach(memory.data, memory.bytes, application), 0);
        CHECK_EQUAL(AgentRing::attach(memory.data, memory.bytes, io_depth, timeout_ns, agent), 0);
    }
    int prepare(std::uint64_t userdata) { return application->prepare(id, 1, 2, 3, 4, userdata); }
    std::size_t claim(std::size_t most = 64, std::int64_t now_ns = 0) {
        return agent->claim(std::span(claimed).first(most), now_ns);
    }
    std::uint32_t reap(std::uint32_t most = 64) {
        std::uint32_t at = 0;
        return application->reap(most, [&](std::int32_t index, std::int64_t result, std::uint64_t userdata) {
            completed[at++] = {index, 0, result, userdata};
        });
    }
    int semaphore() {
        int value = -1;
        CHECK_EQUAL(sem_getvalue(glibc(memory.view.completed), &value), 0);
        return value;
    }
    const std::uint8_t id[16] = {9, 8, 7};
    Memory memory;
    std::unique_ptr<ApplicationRing> application;
    std::unique_ptr<AgentRing> agent;
    ClaimedOperation claimed[64];
    Completion completed[64];
};

void attach_refuses_what_is_no_ring() {
    Memory memory(4);
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

void an_operation_goes_round() {
    Pair pair(4);
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

void a_full_ring_says_so_and_goes_on() {
    Pair pair(3);
    std::uint64_t next = 0;
    std::uint64_t seen = 0;
    for (int round = 0; round < 50; ++round) {
        int prepared = 0;
        while (pair.prepare(next) >= 0) {
            ++next;
            ++prepared;
        }
        CHECK_EQUAL(prepared, 3);
        CHECK_EQUAL(pair.prepare(0), -EAGAIN);
        pair.application->submit();
        CHECK_EQUAL(pair.claim(), 3u);
        // In reverse: the slot of the last is free, and its place in the queue is not.
        CHECK(pair.agent->complete(pair.claimed[2].position, 0));
        pair.agent->flush();
        CHECK_EQUAL(pair.reap(), 1u);
        CHECK_EQUAL(pair.prepare(0), -EAGAIN);
        CHECK(pair.agent->complete(pair.claimed[1].position, 0));
        CHECK(pair.agent->complete(pair.claimed[0].position, 0));
        pair.agent->flush();
        CHECK_EQUAL(pair.reap(1), 1u);
        CHECK_EQUAL(pair.completed[0].userdata, seen + 1);
        CHECK_EQUAL(pair.reap(), 1u);
        CHECK_EQUAL(pair.completed[0].userdata, seen);
        seen += 3;
    }
}

void positive_depth_takes_exact_batches() {
    Pair pair(16, 4);
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
    CHECK_EQUAL(pair.claim(3), 3u); // A batch that does not fit the caller's array comes in parts.
    CHECK(!pair.agent->prepare_to_sleep());
    CHECK_EQUAL(pair.claim(), 5u);
    CHECK_EQUAL(pair.claim(), 0u);
    CHECK(pair.agent->prepare_to_sleep());
}

void negative_depth_holds_a_short_batch() {
    Pair pair(16, -4, 100);
    pair.prepare(0);
    pair.application->submit();
    CHECK_EQUAL(pair.claim(64, 1000), 0u);
    CHECK_EQUAL(pair.agent->held_until_ns(), 1100);
    pair.prepare(0);
    pair.application->submit();
    CHECK_EQUAL(pair.claim(64, 1099), 0u); // The first of the batch starts the clock, a later one does not restart it.
    CHECK(pair.agent->prepare_to_sleep());
    CHECK_EQUAL(pair.claim(64, 1100), 2u);
    CHECK_EQUAL(pair.agent->held_until_ns(), -1);
    for (int i = 0; i < 9; ++i) {
        pair.prepare(0);
    }
    pair.application->submit();
    CHECK_EQUAL(pair.claim(64, 1101), 4u);
    CHECK(!pair.agent->prepare_to_sleep()); // Another full batch is there.
    CHECK_EQUAL(pair.claim(64, 1101), 4u);
    CHECK_EQUAL(pair.claim(64, 1101), 0u);
    CHECK_EQUAL(pair.agent->held_until_ns(), 1201);
    CHECK_EQUAL(pair.claim(64, 5000), 1u);
}

void negative_depth_without_timeout_takes_what_is_there() {
    Pair pair(16, -4);
    pair.prepare(0);
    pair.application->submit();
    CHECK_EQUAL(pair.claim(), 1u);
    CHECK_EQUAL(pair.agent->held_until_ns(), -1);
}

void sleepers_are_woken_once() {
    Pair pair(8);
    CHECK(pair.agent->prepare_to_sleep());
    pair.prepare(0);
    CHECK(pair.application->submit());
    CHECK(!pair.application->submit());
    pair.agent->woke();
    CHECK(!pair.agent->prepare_to_sleep());
    CHECK_EQUAL(pair.claim(), 1u);
    CHECK(pair.application->prepare_to_sleep());
    CHECK_EQUAL(pair.semaphore(), 0);
    pair.agent->complete(pair.claimed[0].position, 0);
    pair.agent->flush();
    CHECK_EQUAL(pair.semaphore(), 1);
    pair.agent->flush();
    CHECK_EQUAL(pair.semaphore(), 1);
    pair.application->woke();
    CHECK(!pair.application->prepare_to_sleep());
    CHECK_EQUAL(pair.reap(), 1u);
}

// Both sides sleep, and wait for one post each.
void one_round(Pair& pair, std::uint32_t told) {
    CHECK_EQUAL(pair.claim(), 0u);
    CHECK(pair.agent->prepare_to_sleep());
    CHECK_EQUAL(pair.memory.view.extension->agent.sleeping.load(), told);
    CHECK(pair.prepare(0) >= 0);
    CHECK(pair.application->submit());
    pair.agent->woke();
    CHECK_EQUAL(pair.claim(), 1u);
    CHECK(pair.application->prepare_to_sleep());
    CHECK_EQUAL(pair.memory.view.extension->application.sleeping.load(), told);
    CHECK(pair.agent->complete(pair.claimed[0].position, 0));
    pair.agent->flush();
    CHECK_EQUAL(sem_trywait(glibc(pair.memory.view.completed)), 0);
    CHECK_EQUAL(pair.reap(), 1u);
    pair.application->slept(1);
}

// Nobody sleeps when work comes; `posted`: whether the other side is told that somebody did.
void one_round_awake(Pair& pair, bool posted) {
    pair.prepare(0);
    CHECK_EQUAL(pair.application->submit(), posted);
    CHECK_EQUAL(pair.claim(), 1u);
    CHECK(pair.agent->complete(pair.claimed[0].position, 0));
    pair.agent->flush();
    CHECK_EQUAL(pair.semaphore(), posted ? 1 : 0);
    sem_trywait(glibc(pair.memory.view.completed));
    CHECK_EQUAL(pair.reap(), 1u);
    pair.application->slept(0);
}

void sides_that_always_sleep_say_it_once_and_for_all() {
    Pair pair(8);
    SideState& agent = pair.memory.view.extension->agent;
    SideState& application = pair.memory.view.extension->application;
    for (int round = 0; round < 16; ++round) {
        one_round(pair, sleeps_once);
        CHECK(agent.sleeping == sleeps_not && application.sleeping == sleeps_not);
    }
    for (int round = 0; round < 3; ++round) {
        one_round(pair, sleeps_always);
        CHECK(agent.sleeping == sleeps_always && application.sleeping == sleeps_always);
    }
    // A version that takes back whatever it sees.
    agent.sleeping = application.sleeping = sleeps_not;
    one_round(pair, sleeps_always);
    // Work that comes to the waking now and then changes nothing, and again and again it does.
    one_round_awake(pair, true);
    one_round(pair, sleeps_always);
    for (int round = 0; round < 2; ++round) {
        CHECK(agent.sleeping == sleeps_always && application.sleeping == sleeps_always);
        one_round_awake(pair, true);
    }
    CHECK(agent.sleeping == sleeps_not && application.sleeping == sleeps_not);
    one_round_awake(pair, false);
    one_round(pair, sleeps_once);
}

// Another ring, or the server, wakes the agent: what it then finds here it would have found without a post.
void an_agent_that_others_wake_says_each_sleep() {
    Pair pair(8);
    for (int round = 0; round < 40; ++round) {
        CHECK_EQUAL(pair.claim(), 0u);
        CHECK(pair.agent->prepare_to_sleep());
        CHECK_EQUAL(pair.memory.view.extension->agent.sleeping.load(), sleeps_once);
        pair.agent->woke();
        one_round_awake(pair, false);
    }
    for (int round = 0; round < 40; ++round) { // Nor does it sleep where the last look finds work.
        pair.prepare(0);
        pair.application->submit();
        CHECK(!pair.agent->prepare_to_sleep());
        CHECK_EQUAL(pair.memory.view.extension->agent.sleeping.load(), sleeps_not);
        CHECK_EQUAL(pair.claim(), 1u);
        CHECK(pair.agent->complete(pair.claimed[0].position, 0));
        pair.agent->flush();
        CHECK_EQUAL(pair.reap(), 1u);
        CHECK_EQUAL(pair.claim(), 0u);
    }
}

// Sleeps of all kinds, of which each must end: a wake-up that got lost is a wait that never ends.
void nobody_sleeps_for_ever() {
    constexpr std::uint64_t rounds = 30000;
    Pair pair(8);
    sem_t submitted;
    CHECK_EQUAL(sem_init(&submitted, 0, 0), 0);
    const auto sleep = [](sem_t* semaphore) {
        timespec limit{};
        clock_gettime(CLOCK_REALTIME, &limit);
        limit.tv_sec += 20;
        CHECK_EQUAL(sem_timedwait(semaphore, &limit), 0);
    };
    std::thread agent([&] {
        for (std::uint64_t done = 0; done < rounds * 2;) {
            const std::size_t count = pair.claim();
            for (std::size_t i = 0; i < count; ++i) {
                CHECK(pair.agent->complete(pair.claimed[i].position, 0));
                // Now both in one flush, now each in its own.
                if (pair.claimed[i].arguments.userdata % 64 < 16) {
                    pair.agent->flush();
                }
            }
            pair.agent->flush();
            done += count;
            if (count == 0 && pair.agent->prepare_to_sleep()) {
                sleep(&submitted);
                pair.agent->woke();
            }
        }
    });
    std::uint32_t always = 0;
    for (std::uint64_t round = 0; round < rounds; ++round) {
        for (int i = 0; i < 2; ++i) {
            CHECK(pair.prepare(round) >= 0);
            if (i == 1 || round % 128 < 32) {
                if (pair.application->submit()) {
                    sem_post(&submitted);
                }
            }
        }
        std::uint32_t got = pair.reap();
        std::uint32_t posts = 0;
        for (; got < 2; got += pair.reap()) {
            if (pair.application->prepare_to_sleep()) {
                ++posts;
                sleep(glibc(pair.memory.view.completed));
            }
        }
        pair.application->slept(posts);
        always += pair.memory.view.extension->application.sleeping.load() == sleeps_always;
    }
    agent.join();
    CHECK(always > 0);
    CHECK_EQUAL(sem_destroy(&submitted), 0);
}

void strangers_get_the_plain_protocol() {
    Pair pair(8);
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
    CHECK_EQUAL(pair.semaphore(), 3);
}

template <typename Spoil> void breaks(Spoil spoil) {
    Pair pair(8);
    for (int i = 0; i < 4; ++i) {
        pair.prepare(0);
    }
    pair.application->submit();
    CHECK_EQUAL(pair.claim(2), 2u);
    CHECK(pair.agent->complete(pair.claimed[1].position, 0));
    pair.agent->flush();
    CHECK_EQUAL(pair.reap(), 1u);
    spoil(pair.memory.view);
    CHECK_EQUAL(pair.claim(), 0u);
    CHECK(pair.agent->broken());
    CHECK(!pair.agent->prepare_to_sleep());
    CHECK(pair.application->agent_ended());
    CHECK_EQUAL(pair.agent->outstanding(), 1u);
    CHECK(pair.agent->complete(pair.claimed[0].position, 0)); // What was claimed still ends in order.
    pair.agent->flush();
    CHECK_EQUAL(pair.agent->outstanding(), 0u);
}

void hostile_contents_break_the_ring_alone() {
    for (const std::int32_t wrong : {-1, 9, INT_MAX, INT_MIN}) {
        breaks([=](RingView& view) { view.indices->submission_head = wrong; });
        breaks([=](RingView& view) { view.indices->completion_tail = wrong; });
        breaks([=](RingView& view) { view.submissions[2].index = wrong; });
    }
    breaks([](RingView& view) { view.indices->submission_head = 1; }); // Back into what was claimed.
    breaks([](RingView& view) { view.indices->completion_tail = 2; }); // Reaped before it was there.
}

void a_reaper_that_sleeps_holds_the_submissions_back() {
    // No application of ours does it: it reuses its slots without reaping.
    Pair pair(2);
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
    CHECK(!pair.agent->broken());
    CHECK(pair.agent->prepare_to_sleep());
    view.indices->completion_tail = 1;
    CHECK_EQUAL(pair.claim(), 1u);
}

void an_agent_that_lies_harms_no_slot() {
    Pair pair(4);
    pair.prepare(5);
    pair.application->submit();
    RingView& view = pair.memory.view;
    view.completions[0] = {3, 0, 0, 0};  // Not under way.
    view.completions[1] = {-7, 0, 0, 0}; // No slot.
    view.completions[2] = {0, 0, 12, 5}; // Right.
    view.completions[3] = {0, 0, 12, 5}; // Again.
    view.indices->completion_head = 4;
    CHECK_EQUAL(pair.reap(), 1u);
    CHECK_EQUAL(pair.completed[0].result, 12);
    view.indices->completion_head = 99;
    CHECK_EQUAL(pair.reap(), 0u);
    CHECK(pair.application->agent_ended());
}

void the_end_of_the_agent_fails_what_is_under_way() {
    Pair pair(4);
    pair.prepare(5);
    pair.prepare(6);
    pair.application->submit();
    pair.agent.reset();
    CHECK(pair.application->agent_ended());
    CHECK_EQUAL(pair.semaphore(), 1);
    std::uint64_t users = 0;
    const auto sink = [&](std::int32_t, std::int64_t result, std::uint64_t userdata) {
        CHECK_EQUAL(result, -EREMOTEIO);
        users += userdata;
    };
    CHECK_EQUAL(pair.application->fail_outstanding(1, -EREMOTEIO, sink), 1u);
    CHECK_EQUAL(pair.application->fail_outstanding(8, -EREMOTEIO, sink), 1u);
    CHECK_EQUAL(pair.application->fail_outstanding(8, -EREMOTEIO, sink), 0u);
    CHECK_EQUAL(users, 11u);
}

void three_threads() {
    constexpr std::uint64_t operations = 100000;
    Pair pair(64, -8, 1000);
    std::thread agent([&] {
        std::int64_t now = 0;
        for (std::uint64_t done = 0; done < operations;) {
            const std::size_t count = pair.claim(64, ++now * 1000);
            for (std::size_t i = count; i-- > 0;) {
                CHECK(pair.agent->complete(pair.claimed[i].position,
                                           static_cast<std::int64_t>(pair.claimed[i].arguments.userdata)));
            }
            pair.agent->flush();
            done += count;
            if (count == 0) {
                std::this_thread::yield();
            }
        }
    });
    std::thread reaper([&] {
        std::uint64_t sum = 0;
        for (std::uint64_t done = 0; done < operations;) {
            const std::uint32_t count = pair.reap();
            for (std::uint32_t i = 0; i < count; ++i) {
                CHECK_EQUAL(pair.completed[i].result, static_cast<std::int64_t>(pair.completed[i].userdata));
                sum += pair.completed[i].userdata;
            }
            done += count;
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
    attach_refuses_what_is_no_ring();
    an_operation_goes_round();
    a_full_ring_says_so_and_goes_on();
    positive_depth_takes_exact_batches();
    negative_depth_holds_a_short_batch();
    negative_depth_without_timeout_takes_what_is_there();
    sleepers_are_woken_once();
    sides_that_always_sleep_say_it_once_and_for_all();
    an_agent_that_others_wake_says_each_sleep();
    nobody_sleeps_for_ever();
    strangers_get_the_plain_protocol();
    hostile_contents_break_the_ring_alone();
    a_reaper_that_sleeps_holds_the_submissions_back();
    an_agent_that_lies_harms_no_slot();
    the_end_of_the_agent_fails_what_is_under_way();
    three_threads();
    return 0;
}
