// The second thread, which executes a part of the local reads of the loop.
#include "usrbio/agent/read_helper.hpp"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <system_error>

#include "common/futex.hpp"
#include "common/spin.hpp"

namespace gdrkit::usrbio::agent {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint32_t jobs_to_skip_max = 64; // Largest value of jobs_to_skip_.
// The caller of run() checks this many times whether the helper has ended its last index, and then sleeps. The work of
// an index takes 10 to 50 us.
constexpr unsigned spins_max = 2048;
// The helper spins for this time after a job, because a sleep and the wake-up take longer than a short job.
constexpr std::chrono::microseconds spin_time{50};
constexpr unsigned spins_per_clock_read = 16; // The helper reads the clock and yields once in this many spins.
// Shortest time between two moves of the loop's thread to the processor of an application. A move takes some
// microseconds.
constexpr std::chrono::milliseconds move_interval_min{1};
// If the processor of the application is busy, a move takes milliseconds. The pause after a move is this many times
// longer than the move, so that an application can take at most about 1 % of the loop's time.
constexpr int move_pause_factor = 100;

} // namespace

ReadHelper::~ReadHelper() {
    is_stopping_ = true;
    if (is_asleep_.exchange(0) != 0)
        futex_wake_all(is_asleep_);
    if (thread_.joinable())
        thread_.join();
}

void ReadHelper::run(std::size_t count, int application_processor, const Work& work) {
    Job job;
    job.work = &work;
    job.count = count;
    const bool is_shared = count > 1 && offer(job, application_processor);
    for (std::size_t index = 0; job.begun_index_count.fetch_add(1, std::memory_order_relaxed) < count; ++index)
        work(index, false);
    if (is_shared)
        withdraw(job);
}

// Offers a job to the helper, whose thread is started first if necessary. Returns false if the helper gets no part of
// the job.
bool ReadHelper::offer(Job& job, int application_processor) {
    if (jobs_to_skip_ != 0) {
        --jobs_to_skip_;
        return false;
    }
    if (has_failed_to_start_)
        return false;
    if (!thread_.joinable()) {
        try {
            thread_ = std::thread(&ReadHelper::run_helper, this);
        } catch (const std::system_error&) { // The process may start no more threads.
            has_failed_to_start_ = true;
            return false;
        }
    }
    if (has_two_processors_ && application_processor >= 0 && application_processor != sched_getcpu())
        move_to_processor(application_processor);
    if (const int processor = sched_getcpu(); processor != avoided_processor_)
        avoid_processor(processor);
    offered_job_.store(&job);
    if (is_asleep_.load() != 0 && is_asleep_.exchange(0) != 0)
        futex_wake_all(is_asleep_);
    return true;
}

// Keeps the helper off the processor of this thread. Otherwise, if all processors are busy, the kernel would wake the
// helper there, and the two threads would run in turns instead of at the same time.
void ReadHelper::avoid_processor(int processor) noexcept {
    avoided_processor_ = processor;
    cpu_set_t processors;
    // On a machine with more than CPU_SETSIZE processors, sched_getaffinity() fails. This function assumes that such a
    // machine has a free processor.
    if (processor < 0 || processor >= CPU_SETSIZE || sched_getaffinity(0, sizeof processors, &processors) != 0)
        return;
    has_two_processors_ = CPU_COUNT(&processors) == 2;
    CPU_CLR(processor, &processors);
    if (CPU_COUNT(&processors) == 0)
        return; // The loop's thread may use only this processor, so the helper keeps its processors.
    pthread_setaffinity_np(thread_.native_handle(), sizeof processors, &processors);
}

// Moves this thread to the processor of the application. With two processors, the application shares a processor
// with this thread or with the helper. If it shares the processor of this thread, the entries of the ring stay in the
// cache of one processor.
void ReadHelper::move_to_processor(int processor) noexcept {
    const auto move_begin = Clock::now();
    if (move_begin < next_move_time_ || processor >= CPU_SETSIZE)
        return;
    next_move_time_ = move_begin + move_interval_min;
    cpu_set_t allowed_processors, application_processors, current_processors;
    if (sched_getaffinity(0, sizeof allowed_processors, &allowed_processors) != 0 ||
        !CPU_ISSET(processor, &allowed_processors))
        return;
    CPU_ZERO(&application_processors);
    CPU_SET(processor, &application_processors);
    // The thread moves during this call, and waits until the other threads of that processor let it run.
    if (sched_setaffinity(0, sizeof application_processors, &application_processors) != 0) {
        next_move_time_ = Clock::time_point::max(); // The system forbids moves.
        return;
    }
    // Restore the affinity, so that the kernel may move the thread again. If another program has changed the affinity
    // meanwhile, the choice of that program remains.
    if (sched_getaffinity(0, sizeof current_processors, &current_processors) == 0 &&
        CPU_EQUAL(&current_processors, &application_processors) &&
        sched_setaffinity(0, sizeof allowed_processors, &allowed_processors) != 0) {
        // The process may no longer use these processors. Pass the full set, which the kernel reduces to the processors
        // that the process may use.
        std::memset(&allowed_processors, 0xff, sizeof allowed_processors);
        sched_setaffinity(0, sizeof allowed_processors, &allowed_processors);
    }
    const auto move_end = Clock::now();
    next_move_time_ =
        move_end + std::max<Clock::duration>(move_interval_min, move_pause_factor * (move_end - move_begin));
}

// Withdraws a job whose indices have all been begun. If the helper has taken the job, waits until the helper has
// executed its last index.
void ReadHelper::withdraw(Job& job) {
    bool has_slept = false;
    if (offered_job_.exchange(nullptr) == nullptr) { // The helper has begun the job.
        ++begun_job_count_;
        for (unsigned spin = 0; spin < spins_max && ended_job_count_.load() != begun_job_count_; ++spin)
            pause_processor();
        while (ended_job_count_.load() != begun_job_count_) {
            has_slept = true;
            is_awaited_.store(true);
            if (ended_job_count_.load() != begun_job_count_)
                futex_wait(ended_job_count_, begun_job_count_ - 1, no_limit);
            is_awaited_.store(false);
        }
    }
    const bool has_helped_in_time = job.helped_index_count != 0 && !has_slept;
    // The threads may now be restricted to other processors, so let offer() set the helper's affinity again.
    if (!has_helped_in_time)
        avoided_processor_ = -1;
    last_skip_count_ = has_helped_in_time ? 0 : std::clamp(last_skip_count_ * 2, 1U, jobs_to_skip_max);
    jobs_to_skip_ = last_skip_count_;
}

void ReadHelper::run_helper() {
    pthread_setname_np(pthread_self(), "gdrkit-helper");
    while (Job* const job = wait_for_job()) {
        // This thread begins with the last index, and the caller of run() with the first. They never execute the same
        // index, because together they begin only `count` indices.
        std::size_t helped_count = 0;
        while (job->begun_index_count.fetch_add(1, std::memory_order_relaxed) < job->count)
            (*job->work)(job->count - ++helped_count, true);
        job->helped_index_count = helped_count;
        ended_job_count_.fetch_add(1); // The caller of run() may now destroy the job.
        if (is_awaited_.load())
            futex_wake_all(ended_job_count_);
    }
}

// Waits for a job and begins it: spins for `spin_time`, and then sleeps until a job is offered. Returns null if the
// thread must end.
ReadHelper::Job* ReadHelper::wait_for_job() {
    Clock::time_point spin_end{};
    for (unsigned spin = 1; !is_stopping_.load(std::memory_order_relaxed); ++spin) {
        if (offered_job_.load(std::memory_order_relaxed) != nullptr)
            if (Job* const job = offered_job_.exchange(nullptr))
                return job;
        pause_processor();
        if (spin % spins_per_clock_read != 0)
            continue;
        sched_yield(); // The application that submits the next work may need this processor.
        const auto now = Clock::now();
        if (spin_end == Clock::time_point{})
            spin_end = now + spin_time;
        if (now < spin_end)
            continue;
        is_asleep_.store(1);
        while (offered_job_.load() == nullptr && !is_stopping_.load() && is_asleep_.load() != 0)
            futex_wait(is_asleep_, 1, no_limit);
        is_asleep_.store(0);
        spin_end = {};
    }
    return nullptr;
}

} // namespace gdrkit::usrbio::agent
