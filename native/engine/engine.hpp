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

// A copy engine. Its worker threads start with the first job.
class Engine final : public Dispatcher {
public:
    // `numa_node` is the NUMA node whose memory and processors the engine uses, -1 for any. Throws Error.
    Engine(const Tuning& tuning, int numa_node);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // Queues a job. Waits while the queue is full, at most `timeout`. Returns whether the job is queued. Throws Error
    // with ESHUTDOWN during and after close(), or with the error of pthread_create.
    bool submit(const std::shared_ptr<Job>& job, std::chrono::nanoseconds timeout = no_limit);

    // Moves one range of a file on the calling thread, without the queue. The bytes have arrived when the call returns.
    // A range of device memory must not be longer than small_bytes_max.
    IoResult transfer_small(Direction direction, File& file, std::uint64_t offset, std::uint64_t address,
                            std::uint64_t length, int device);
    static constexpr std::uint64_t small_bytes_max = 256U << 10U;
    // Up to this number of bytes, the caller should use transfer_small() for a write from host memory: one running
    // thread writes host memory into the page cache faster than two workers that must wake up first.
    static constexpr std::uint64_t small_host_write_bytes_max = 4U << 20U;

    // Waits until no job is queued or in progress, at most `timeout`. Returns false if the timeout has expired.
    bool wait_until_idle(std::chrono::nanoseconds timeout);
    // Waits for the queued jobs, ends the threads and frees all resources. A second call waits until the first call has
    // ended.
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
    bool spin_until_change(std::unique_lock<std::mutex>& lock, std::uint64_t seen_changes_count);
    void run_worker(std::size_t worker_index);
    // Returns a free buffer for a small transfer of this device, or null.
    std::unique_ptr<SmallTransferBuffer> take_small_buffer(int device);

    const Tuning tuning_;
    const int numa_node_;
    PrimaryContexts contexts_; // The CUDA contexts of the devices.
    Staging staging_;
    CoalescedCopies coalesced_copies_;
    std::mutex mutex_;                       // Protects the members below, up to threads_.
    std::condition_variable work_changed_;   // There may be new work, or the threads must end.
    std::condition_variable queue_not_full_; // The queue has space, or submit() must refuse the job.
    std::condition_variable idle_changed_;   // All workers wait for work, or close() has ended.
    std::deque<std::shared_ptr<Job>> jobs_;
    // Coalesced copies whose slices must be filled from files. Workers take these slices first, then chunks of jobs.
    std::deque<std::shared_ptr<CoalescedCopy>> copies_to_fill_;
    // Incremented, with the mutex locked, whenever new work may be available. A worker that found no work sleeps only
    // until the count changes.
    std::atomic<std::uint64_t> changes_count_{0};
    std::size_t idle_workers_count_ = 0; // Number of workers that wait for work.
    bool is_wake_pending_ = false;       // A worker was notified of a short job and has not run since.
    // True if workers may spin. On a single processor, a spinning worker would keep the caller of submit() from
    // running.
    const bool may_spin_ = std::thread::hardware_concurrency() > 1;
    bool is_last_job_short_ = false; // The job that was queued last wakes only one worker.
    bool is_spinning_ = false;       // A worker spins and looks for work.
    // Number of EngineClosing objects. It is decremented without the mutex, which a forked child cannot lock.
    std::atomic<std::size_t> closings_count_{0};
    bool is_closing_ = false; // The threads end when no work is left.
    bool is_closed_ = false;
    std::vector<std::thread> threads_;
    std::mutex small_mutex_; // Protects small_buffers_.
    // The free buffers of transfer_small(), by device.
    std::map<int, std::vector<std::unique_ptr<SmallTransferBuffer>>> small_buffers_;
};

// While an object of this class exists, the engine refuses further jobs. Afterwards the engine accepts jobs again,
// unless it is closed.
class EngineClosing {
public:
    explicit EngineClosing(Engine& engine);
    EngineClosing(const EngineClosing&) = delete;
    EngineClosing& operator=(const EngineClosing&) = delete;
    ~EngineClosing() { --engine_.closings_count_; }

private:
    Engine& engine_;
};

} // namespace gdrkit::engine
