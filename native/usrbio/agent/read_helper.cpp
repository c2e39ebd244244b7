// The thread that shares the long reads of the loop.
#include "usrbio/agent/read_helper.hpp"

#include <pthread.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "common/spin.hpp"

namespace gdrkit::usrbio::agent {
namespace {

// For fewer indices, waking the helper costs more than it saves.
constexpr std::size_t shared_count_min = 4;
constexpr std::uint32_t skip_max = 64;
// Number of checks for the end of the helper's last index before the thread sleeps. An index takes about 10 us.
constexpr unsigned spins_max = 512;

} // namespace

ReadHelper::~ReadHelper() {
    {
        const std::lock_guard lock(lock_);
        is_stopping_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable())
        thread_.join();
}

void ReadHelper::run(std::size_t count, const std::function<void(std::size_t)>& work) {
    Job job;
    job.work = &work;
    job.count = count;
    const bool is_shared = count >= shared_count_min && share(job);
    for (std::size_t index = 0; (index = job.next.fetch_add(1, std::memory_order_relaxed)) < count;)
        work(index);
    if (is_shared)
        finish(job);
}

// Offers a job to the helper. Returns false if the job is not shared.
bool ReadHelper::share(Job& job) {
    if (jobs_to_skip_ != 0) {
        --jobs_to_skip_;
        return false;
    }
    if (has_failed_to_start_)
        return false;
    if (!thread_.joinable()) {
        try {
            thread_ = std::thread(&ReadHelper::help, this);
        } catch (const std::system_error&) { // The process may start no more threads.
            has_failed_to_start_ = true;
            return false;
        }
    }
    {
        const std::lock_guard lock(lock_);
        job_ = &job;
    }
    changed_.notify_all();
    return true;
}

// Withdraws a job whose indices have all been begun, and waits until the helper has executed its last index.
void ReadHelper::finish(Job& job) {
    std::unique_lock lock(lock_);
    job_ = nullptr;
    if (is_helping_.load(std::memory_order_relaxed)) {
        lock.unlock();
        for (unsigned spin = 0; spin < spins_max && is_helping_.load(std::memory_order_relaxed); ++spin)
            pause_processor();
        lock.lock();
    }
    changed_.wait(lock, [&] { return !is_helping_.load(std::memory_order_relaxed); });
    last_skip_ = job.helped_count != 0 ? 0 : std::clamp(last_skip_ * 2, 1U, skip_max);
    jobs_to_skip_ = last_skip_;
}

void ReadHelper::help() {
    pthread_setname_np(pthread_self(), "gdrkit-helper");
    std::unique_lock lock(lock_);
    for (;;) {
        changed_.wait(lock, [&] { return is_stopping_ || job_ != nullptr; });
        if (is_stopping_)
            return;
        Job& job = *std::exchange(job_, nullptr);
        is_helping_.store(true, std::memory_order_relaxed);
        lock.unlock();
        std::size_t helped_count = 0;
        for (std::size_t index = 0; (index = job.next.fetch_add(1, std::memory_order_relaxed)) < job.count;
             ++helped_count)
            (*job.work)(index);
        lock.lock();
        job.helped_count = helped_count;
        is_helping_.store(false, std::memory_order_relaxed);
        changed_.notify_all();
    }
}

} // namespace gdrkit::usrbio::agent
