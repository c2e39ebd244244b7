// The copy engine: threads and staging memory on one NUMA node, for jobs of any device.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "common/futex.hpp"
#include "engine/coalesced_copy.hpp"
#include "engine/copy_stream.hpp"
#include "engine/job.hpp"
#include "engine/staging.hpp"
#include "engine/worker.hpp"

namespace gdrkit::engine {

struct SmallTransferBuffer;

// The engine itself. Its worker threads start with the first job.
class Engine final : public Dispatcher {
public:
    // `node` is the NUMA node whose memory and processors the engine uses, -1 for any. Throws Error.
    Engine(const Tuning& tuning, int node);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // Queues a job. Waits while the queue is full, at most `timeout`. Returns whether the job is queued. Throws Error:
    // ESHUTDOWN during and after close(), or the error of pthread_create.
    bool submit(const std::shared_ptr<Job>& job, std::chrono::nanoseconds timeout = no_limit);

    // Moves one range on the calling thread, without the queue. The bytes have arrived when the call returns. A range
    // of device memory must not be longer than small_bytes_max.
    IoResult transfer_small(Direction direction, File& file, std::uint64_t offset, std::uint64_t address,
                            std::uint64_t length, int device);
    static constexpr std::uint64_t small_bytes_max = 256U << 10U;
    // Up to this size, one running thread writes host memory into the page cache faster than two workers that must wake
    // up first.
    static constexpr std::uint64_t small_host_write_bytes_max = 4U << 20U;

    // Waits until no job is queued or in progress, at most `timeout`. Returns whether there is none.
    bool wait_until_idle(std::chrono::nanoseconds timeout);
    // Waits for the queued jobs, ends the threads and frees all resources. A second call waits for the first.
    void close();

    const Tuning& tuning() const noexcept { return tuning_; }

    // The interface for the workers; see Dispatcher.
    TakeResult take_work(Chunk& chunk, bool may_wait) override;
    void wake_another_worker() override;
    void publish(std::shared_ptr<CoalescedCopy> copy) override;

private:
    friend class EngineClosing;

    void start_threads();
    void wake_for_short_job();
    bool spin_until_change(std::unique_lock<std::mutex>& lock, std::uint64_t changes_seen);
    void run_worker(std::size_t worker_index);
    std::unique_ptr<SmallTransferBuffer> take_small_buffer(int device);

    const Tuning tuning_;
    const int node_;
    Contexts contexts_; // The CUDA contexts of the devices.
    Staging staging_;
    CoalescedCopies coalesced_copies_;
    std::mutex mutex_;
    std::condition_variable work_changed_;
    std::condition_variable queue_not_full_;
    std::condition_variable idle_changed_; // Also notified at the end of close().
    std::deque<std::shared_ptr<Job>> jobs_;
    // Coalesced copies whose slices must be filled from files. Workers take these slices first, then chunks of jobs.
    std::deque<std::shared_ptr<CoalescedCopy>> copies_to_fill_;
    // Incremented, with the mutex locked, whenever new work may be available. A worker that found no work sleeps only
    // until the count changes.
    std::atomic<std::uint64_t> changes_count_{0};
    std::size_t idle_workers_count_ = 0; // Number of workers that wait for work.
    bool is_wake_pending_ = false;       // submit() has notified a worker that has not run since.
    // True if workers may spin. On a single processor, a spinning worker would keep the caller of submit() from
    // running.
    const bool may_spin_ = std::thread::hardware_concurrency() > 1;
    bool is_last_job_short_ = false; // The job that was queued last has work for only one worker.
    bool is_spinning_ = false;       // A worker spins and looks for work.
    // Number of EngineClosing objects. It is decremented without the mutex, which a forked child cannot lock.
    std::atomic<std::size_t> is_close_running_{0};
    bool is_closing_ = false; // The threads end when no work is left.
    bool is_closed_ = false;
    std::vector<std::thread> threads_;
    std::mutex small_mutex_;
    std::map<int, std::vector<std::unique_ptr<SmallTransferBuffer>>> small_buffers_;
};

// Refuses further jobs of an engine from its construction on. The destructor accepts them again, unless the engine is
// closed.
class EngineClosing {
public:
    explicit EngineClosing(Engine& engine);
    EngineClosing(const EngineClosing&) = delete;
    EngineClosing& operator=(const EngineClosing&) = delete;
    ~EngineClosing() { --engine_.is_close_running_; }

private:
    Engine& engine_;
};

} // namespace gdrkit::engine
