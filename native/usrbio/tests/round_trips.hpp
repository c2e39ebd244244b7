// Round trips of a cache line between two processors, for the benchmark of the I/O path (path_bench.cpp). A round trip
// takes several times longer between processors that share no cache. The processors of a virtual machine may share one
// at one time and none at another.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "bare_copies.hpp"

namespace gdrkit::usrbio::bench {

class RoundTrips {
public:
    // This thread runs on the first of the processors, and the answering thread on the last, until the destructor. The
    // two must differ.
    explicit RoundTrips(const std::vector<int>& processors) {
        if (sched_getaffinity(0, sizeof previous_processors_, &previous_processors_) != 0) {
            exit_with_errno("sched_getaffinity");
        }
        pin_thread(pthread_self(), processors.front());
        answerer_ = std::thread([this] { answer(); });
        pin_thread(answerer_.native_handle(), processors.back());
    }
    ~RoundTrips() {
        is_ending_ = true;
        answerer_.join();
        pthread_setaffinity_np(pthread_self(), sizeof previous_processors_, &previous_processors_);
    }
    RoundTrips(const RoundTrips&) = delete;
    RoundTrips& operator=(const RoundTrips&) = delete;

    // Makes some round trips and returns their number.
    unsigned run_step() {
        constexpr unsigned count = 100;
        for (unsigned index = 0; index < count; ++index) {
            const std::uint32_t question = counter_.load() + 1;
            counter_.store(question);
            while (counter_.load() == question) {
            }
        }
        return count;
    }

private:
    // The answering thread advances every odd count.
    void answer() {
        while (!is_ending_.load(std::memory_order_relaxed)) {
            if (const std::uint32_t question = counter_.load(); question % 2 == 1) {
                counter_.store(question + 1);
            }
        }
    }

    alignas(64) std::atomic<std::uint32_t> counter_{0};
    alignas(64) std::atomic<bool> is_ending_{false};
    cpu_set_t previous_processors_{};
    std::thread answerer_;
};

} // namespace gdrkit::usrbio::bench
