// Round trips of a cache line between two processors, for the benchmark of the I/O path (path_bench.cpp). A round trip
// takes several times longer between processors that share no cache. In a virtual machine, whether two processors share
// a cache can change at any time, so the benchmark measures the round trips before each of its points.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "bare_copies.hpp"

namespace gdrkit::usrbio::bench {

// Two threads that increment a shared counter in turn. The calling thread asks by making the counter odd. The answering
// thread replies by making the counter even.
class RoundTrips {
public:
    // Pins the calling thread to the first of `processors`, and the answering thread to the last, which must differ
    // from the first. The destructor ends the answering thread and restores the processors of the calling thread.
    explicit RoundTrips(const std::vector<int>& processors) {
        if (sched_getaffinity(0, sizeof previous_processors_, &previous_processors_) != 0) {
            exit_with_errno("sched_getaffinity");
        }
        pin_thread(pthread_self(), processors.front());
        answering_thread_ = std::thread([this] { answer(); });
        pin_thread(answering_thread_.native_handle(), processors.back());
    }
    ~RoundTrips() {
        is_ending_ = true;
        answering_thread_.join();
        pthread_setaffinity_np(pthread_self(), sizeof previous_processors_, &previous_processors_);
    }
    RoundTrips(const RoundTrips&) = delete;
    RoundTrips& operator=(const RoundTrips&) = delete;

    // Makes some round trips and returns their number.
    unsigned run_step() {
        constexpr unsigned round_trip_count = 100;
        for (unsigned index = 0; index < round_trip_count; ++index) {
            const std::uint32_t question = counter_.load() + 1;
            counter_.store(question);
            while (counter_.load() == question) {
            }
        }
        return round_trip_count;
    }

private:
    // Runs on the answering thread: replies to each question until the destructor runs.
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
    std::thread answering_thread_;
};

} // namespace gdrkit::usrbio::bench
