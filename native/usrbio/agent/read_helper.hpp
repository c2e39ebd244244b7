// A second thread for long reads of the loop. One thread copies less than the memory of a machine can deliver.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

namespace gdrkit::usrbio::agent {

class ReadHelper {
public:
    ReadHelper() = default;
    ~ReadHelper();
    ReadHelper(const ReadHelper&) = delete;
    ReadHelper& operator=(const ReadHelper&) = delete;

    // Calls work(index) for each index below `count`, in this thread, and if there are many indices also in the thread
    // of the helper. Returns after the last call has returned. This thread never waits for an index that the helper has
    // not begun, so a helper that gets no processor only fails to help. Only one thread may call this function.
    void run(std::size_t count, const std::function<void(std::size_t)>& work);

private:
    struct Job {
        const std::function<void(std::size_t)>* work = nullptr;
        std::size_t count = 0;
        std::atomic<std::size_t> next{0}; // The next index that no thread has begun.
        std::size_t helped_count = 0;     // Number of indices that the helper executed.
    };

    bool share(Job& job);
    void finish(Job& job);
    void help();

    std::mutex lock_;
    std::condition_variable changed_;
    Job* job_ = nullptr;                  // The job that the helper may begin. Guarded by lock_.
    std::atomic<bool> is_helping_{false}; // The helper executes indices of a job. Set and cleared with lock_ held.
    bool is_stopping_ = false;
    bool has_failed_to_start_ = false;
    std::thread thread_;
    // If the helper came too late for a job, no other processor was free. The next jobs are not shared then.
    std::uint32_t jobs_to_skip_ = 0, last_skip_ = 0;
};

} // namespace gdrkit::usrbio::agent
