// A second thread for the local reads of the loop. It is useful because one thread cannot use the whole memory
// bandwidth of a machine.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <thread>

namespace gdrkit::usrbio::agent {

class ReadHelper {
public:
    ReadHelper() = default;
    ~ReadHelper();
    ReadHelper(const ReadHelper&) = delete;
    ReadHelper& operator=(const ReadHelper&) = delete;

    // A function of two arguments: an index, and whether the helper's thread calls the function.
    using Work = std::function<void(std::size_t, bool)>;

    // Calls `work` for each index below `count`: this thread from 0 upwards, and, if there are several indices, the
    // helper's thread from the last index downwards. Returns after the last call has returned. This thread never waits
    // for an index that the helper has not begun, so a helper that gets no processor does not delay this thread. Only
    // one thread may call this function.
    //
    // `application_processor`: the processor of the application's thread for which the work is done, or -1. A number
    // that is not a processor has no effect. If this thread may use exactly two processors, it moves to the processor
    // of the application from time to time, and the helper uses the other one.
    void run(std::size_t count, int application_processor, const Work& work);

private:
    struct Job {
        const Work* work = nullptr;
        std::size_t count = 0;
        std::atomic<std::size_t> begun_index_count{0}; // Begun indices, plus 1 per thread that found none.
        std::size_t helped_index_count = 0;            // Number of indices that the helper executed.
    };

    bool offer(Job& job, int application_processor);
    void avoid_processor(int processor) noexcept;
    void move_to_processor(int processor) noexcept;
    void withdraw(Job& job);
    void run_helper();
    Job* wait_for_job();

    std::atomic<Job*> offered_job_{nullptr};        // The job that the helper may begin.
    std::atomic<std::uint32_t> is_asleep_{0};       // 1: the helper sleeps until this word is 0.
    std::atomic<std::uint32_t> ended_job_count_{0}; // Number of jobs that the helper has ended.
    std::atomic<bool> is_awaited_{false};           // The caller of run() sleeps until ended_job_count_ changes.
    std::atomic<bool> is_stopping_{false};
    bool has_failed_to_start_ = false;
    int avoided_processor_ = -1;      // The processor that the helper may not use, or -1 to choose again.
    bool has_two_processors_ = false; // The thread of the loop may use exactly two processors.
    std::chrono::steady_clock::time_point next_move_time_{}; // The thread of the loop does not move earlier.
    std::thread thread_;
    // If the helper came too late for a job, or did not end it in time, probably no other processor was free. Then
    // run() does not share the next jobs_to_skip_ jobs. last_skip_count_ is the number of jobs to skip after the last
    // shared job. Each further late job doubles it, and a job in time sets it to 0.
    std::uint32_t jobs_to_skip_ = 0, last_skip_count_ = 0;
    std::uint32_t begun_job_count_ = 0; // Number of jobs that the helper has begun.
};

} // namespace gdrkit::usrbio::agent
