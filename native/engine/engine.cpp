// The threads of the copy engine, the queue of its jobs, and small transfers on the calling thread.
#include "engine/engine.hpp"

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <system_error>

#include "common/spin.hpp"
#include "engine/numa.hpp"

namespace gdrkit::engine {
namespace {

// Maximum length of the job queue. submit() blocks while the queue is full.
constexpr std::size_t queued_jobs_max = 256;
// A sleep of a worker may end this much later than requested. With the default of Linux, 50 us, the short sleeps of
// CopyStream::wait would take several times as long.
constexpr unsigned long timer_slack_ns = 1000;
// A worker without work spins this long before it sleeps. Within this time, a program that starts many short transfers
// usually starts the next one. For a worker that spins, submit() saves the wake-up, which takes 2 to 3 us.
constexpr std::chrono::microseconds spin_time{50};
constexpr unsigned spins_per_clock_read = 16;

} // namespace

// The staging memory and the stream of transfer_small(), for one transfer at a time. The stream has no events (0
// buffers), because transfer_small() waits for the whole stream.
struct SmallTransferBuffer {
    SmallTransferBuffer(cuda::Context context, int numa_node)
        : staging(Engine::small_bytes_max, numa_node), stream(context, 0) {
        staging.pin();
    }
    ~SmallTransferBuffer() {
        cuda::driver().context_push(stream.context());
        stream.drain(); // A copy must not use the staging memory when it is unpinned.
        staging.unpin();
        cuda::Context popped_context = nullptr;
        cuda::driver().context_pop(&popped_context);
    }
    Staging staging;
    CopyStream stream;
};

// The staging memory has the slabs of the workers, and then the buffers of the coalesced copies.
Engine::Engine(const Tuning& tuning, int numa_node)
    : tuning_(tuning), numa_node_(numa_node),
      staging_(tuning.workers_count * slab_bytes_of(tuning) + tuning.coalesced_count * tuning.coalesced_bytes,
               numa_node),
      coalesced_copies_(contexts_, staging_, staging_.data() + tuning.workers_count * slab_bytes_of(tuning), tuning) {}

Engine::~Engine() {
    close();
}

void Engine::start_threads() {
    // The threads block all signals, so that the kernel delivers signals to threads of the program.
    sigset_t all_signals;
    sigset_t previous_signals;
    sigfillset(&all_signals);
    pthread_sigmask(SIG_BLOCK, &all_signals, &previous_signals);
    try {
        while (threads_.size() < tuning_.workers_count) {
            threads_.emplace_back([this, worker_index = threads_.size()] { run_worker(worker_index); });
        }
    } catch (const std::system_error& error) {
        pthread_sigmask(SIG_SETMASK, &previous_signals, nullptr);
        // The engine also works with fewer threads, but more slowly.
        if (threads_.empty()) {
            throw make_kernel_error("pthread_create", error.code().value());
        }
        return;
    }
    pthread_sigmask(SIG_SETMASK, &previous_signals, nullptr);
}

void Engine::run_worker(std::size_t worker_index) {
    pthread_setname_np(pthread_self(), "gdrkit-engine");
    prctl(PR_SET_TIMERSLACK, timer_slack_ns);
    if (cpu_set_t cpus; cpus_of_node(numa_node_, cpus)) {
        pthread_setaffinity_np(pthread_self(), sizeof cpus, &cpus);
    }
    Worker worker(*this, contexts_, staging_, coalesced_copies_,
                  staging_.data() + worker_index * slab_bytes_of(tuning_), tuning_);
    worker.run();
}

bool Engine::submit(const std::shared_ptr<Job>& job, std::chrono::nanoseconds timeout) {
    std::unique_lock lock(mutex_);
    const auto is_refused = [&] { return is_closing_ || closings_count_ != 0; };
    if (!queue_not_full_.wait_for(lock, timeout, [&] { return jobs_.size() < queued_jobs_max || is_refused(); })) {
        return false;
    }
    if (is_refused()) {
        throw make_kernel_error("submit", ESHUTDOWN);
    }
    if (threads_.empty()) {
        start_threads();
    }
    jobs_.push_back(job);
    ++changes_count_;
    const std::size_t wakeups_count = std::min(job->chunks_count(), threads_.size());
    is_last_job_short_ = wakeups_count == 1;
    if (is_last_job_short_) {
        wake_for_short_job();
    } else if (wakeups_count == threads_.size()) {
        work_changed_.notify_all();
    } else {
        for (std::size_t count = 0; count < wakeups_count; ++count) {
            work_changed_.notify_one();
        }
    }
    return true;
}

// The system call that wakes a worker takes longer than all other steps of the start of a short job. So this function
// notifies only one worker at a time, and none while a worker spins. If several jobs are queued, each worker that stops
// waiting wakes the next worker.
void Engine::wake_for_short_job() {
    if (idle_workers_count_ != 0 && !is_wake_pending_ && !is_spinning_) {
        is_wake_pending_ = true;
        work_changed_.notify_one();
    }
}

// Spins until there may be work, at most `spin_time`. Returns whether there may be work. Returns false at once if the
// worker should sleep instead: while another worker spins, and after a long job, which needs all workers.
bool Engine::spin_until_change(std::unique_lock<std::mutex>& lock, std::uint64_t seen_changes_count) {
    if (is_spinning_ || is_closing_ || !is_last_job_short_ || !may_spin_) {
        return false;
    }
    is_spinning_ = true;
    lock.unlock();
    const auto spin_end = std::chrono::steady_clock::now() + spin_time;
    for (unsigned spins_count = 0; changes_count_.load(std::memory_order_relaxed) == seen_changes_count;
         ++spins_count) {
        if (spins_count % spins_per_clock_read == 0 && std::chrono::steady_clock::now() >= spin_end) {
            break;
        }
        pause_processor();
    }
    lock.lock();
    is_spinning_ = false;
    return changes_count_ != seen_changes_count;
}

TakeResult Engine::take_work(Chunk& chunk, bool may_wait) {
    std::unique_lock lock(mutex_);
    for (;;) {
        const std::uint64_t seen_changes_count = changes_count_;
        bool is_busy = false; // A job has work left that this worker cannot take now.
        for (; !copies_to_fill_.empty(); copies_to_fill_.pop_front()) {
            if (CoalescedCopy::claim(copies_to_fill_.front(), chunk)) {
                return TakeResult::chunk;
            }
        }
        for (std::size_t index = 0; index < jobs_.size();) {
            const std::shared_ptr<Job> job = jobs_[index];
            lock.unlock();
            const TakeResult take_result = job->take(chunk, coalesced_copies_.is_copy_opening());
            if (take_result == TakeResult::chunk) {
                chunk.job = job;
                return take_result;
            }
            is_busy |= take_result == TakeResult::busy;
            lock.lock();
            if (const auto position = std::find(jobs_.begin(), jobs_.end(), job); position == jobs_.end()) {
                index = 0; // Another thread has removed the job meanwhile, so the search starts again.
            } else if (take_result == TakeResult::nothing) {
                jobs_.erase(position);
                queue_not_full_.notify_one();
            } else {
                index = static_cast<std::size_t>(position - jobs_.begin()) + 1;
            }
        }
        if (seen_changes_count != changes_count_) {
            continue;
        }
        if (is_closing_ && !is_busy) {
            return TakeResult::nothing;
        }
        if (!may_wait) {
            return TakeResult::busy;
        }
        if (!spin_until_change(lock, seen_changes_count)) {
            if (++idle_workers_count_ == threads_.size()) {
                idle_changed_.notify_all();
            }
            work_changed_.wait(lock, [&] { return changes_count_ != seen_changes_count || (is_closing_ && !is_busy); });
            --idle_workers_count_;
            is_wake_pending_ = false;
        }
        if (jobs_.size() > 1) {
            wake_for_short_job();
        }
    }
}

void Engine::wake_another_worker() {
    const std::lock_guard lock(mutex_);
    ++changes_count_;
    // One worker is enough, because the calling worker usually continues too. When the engine closes, wake all workers,
    // so that they see that no work is left and end.
    if (is_closing_) {
        work_changed_.notify_all();
    } else {
        work_changed_.notify_one();
    }
}

void Engine::publish(std::shared_ptr<CoalescedCopy> copy) {
    const std::lock_guard lock(mutex_);
    ++changes_count_;
    if (copy) {
        copies_to_fill_.push_back(std::move(copy));
    }
    coalesced_copies_.is_copy_opening().store(false, std::memory_order_relaxed);
    work_changed_.notify_all();
}

std::unique_ptr<SmallTransferBuffer> Engine::take_small_buffer(int device) {
    {
        const std::lock_guard lock(small_mutex_);
        std::vector<std::unique_ptr<SmallTransferBuffer>>& free_buffers = small_buffers_[device];
        if (!free_buffers.empty()) {
            std::unique_ptr<SmallTransferBuffer> buffer = std::move(free_buffers.back());
            free_buffers.pop_back();
            return buffer;
        }
    }
    return nullptr;
}

IoResult Engine::transfer_small(Direction direction, File& file, std::uint64_t offset, std::uint64_t address,
                                std::uint64_t length, int device) {
    if (device == host_memory) {
        auto* const memory = reinterpret_cast<std::byte*>(address);
        IoResult result = direction == Direction::read ? read_buffered(file, offset, length, memory)
                                                       : write_buffered(file, offset, length, memory);
        totals.add(result.bytes);
        return result;
    }
    std::unique_ptr<SmallTransferBuffer> buffer = take_small_buffer(device);
    const cuda::Context context = buffer ? buffer->stream.context() : contexts_.get(device);
    IoResult result;
    {
        const CurrentContext current(context);
        try {
            if (!buffer) {
                buffer = std::make_unique<SmallTransferBuffer>(context, numa_node_);
            }
            std::byte* const staging = buffer->staging.data();
            if (direction == Direction::read) {
                result = read_buffered(file, offset, length, staging);
                if (result.bytes != 0) {
                    buffer->stream.copy_to_device(address, staging, result.bytes);
                    buffer->stream.synchronize();
                }
            } else {
                buffer->stream.copy_to_host(staging, address, length);
                buffer->stream.synchronize();
                result = write_buffered(file, offset, length, staging);
            }
        } catch (const Error& error) {
            result.bytes = 0;
            result.failure = error.failure();
            // A copy may still run. It must end now, because after the return the caller may free its memory, and the
            // next transfer uses the staging memory.
            if (buffer) {
                buffer->stream.drain();
            }
        }
    }
    if (buffer) {
        const std::lock_guard lock(small_mutex_);
        small_buffers_[device].push_back(std::move(buffer));
    }
    totals.add(result.bytes);
    return result;
}

bool Engine::wait_until_idle(std::chrono::nanoseconds timeout) {
    std::unique_lock lock(mutex_);
    return idle_changed_.wait_for(lock, timeout, [&] {
        return is_closing_ || (jobs_.empty() && copies_to_fill_.empty() && idle_workers_count_ == threads_.size());
    });
}

void Engine::close() {
    const EngineClosing closing(*this);
    wait_until_idle(no_limit);
    std::vector<std::thread> threads;
    {
        std::unique_lock lock(mutex_);
        if (is_closing_) {
            idle_changed_.wait(lock, [&] { return is_closed_; });
            return;
        }
        is_closing_ = true;
        ++changes_count_;
        work_changed_.notify_all();
        threads.swap(threads_);
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    {
        const std::lock_guard lock(small_mutex_);
        small_buffers_.clear();
    }
    coalesced_copies_.close();
    // unpin() needs a current context. Without a context, the memory was never pinned.
    if (const cuda::Context context = contexts_.get_any(); context != nullptr) {
        cuda::driver().context_push(context);
        staging_.unpin();
        cuda::Context popped_context = nullptr;
        cuda::driver().context_pop(&popped_context);
    }
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    idle_changed_.notify_all();
}

EngineClosing::EngineClosing(Engine& engine) : engine_(engine) {
    const std::lock_guard lock(engine_.mutex_);
    ++engine_.closings_count_;
    engine_.queue_not_full_.notify_all();
}

} // namespace gdrkit::engine
