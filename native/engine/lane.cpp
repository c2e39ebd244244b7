#include "engine/lane.hpp"

#include <algorithm>
#include <chrono>
#include <thread>

namespace gdrkit::engine {
namespace {

// Number of queries before the thread sleeps: a short copy is done sooner than a thread wakes up.
constexpr int questions = 4;
// Pause between queries, which is short compared with the copies of the other buffers.
constexpr std::chrono::microseconds pause_least{20};
constexpr std::chrono::microseconds pause_most{80};

} // namespace

Contexts::~Contexts() {
    for (const auto& [device, context] : held_) {
        cuda::driver().primary_release(device);
    }
}

cuda::Context Contexts::of(int device) {
    const std::lock_guard lock(mutex_);
    if (const auto found = held_.find(device); found != held_.end()) {
        return found->second;
    }
    const cuda::Driver& driver = cuda::driver();
    cuda::Device number = 0;
    cuda::check("cuDeviceGet", driver.device_get(&number, device));
    cuda::Context context = nullptr;
    cuda::check("cuDevicePrimaryCtxRetain", driver.primary_retain(&context, number));
    return held_[number] = context;
}

cuda::Context Contexts::any() {
    const std::lock_guard lock(mutex_);
    return held_.empty() ? nullptr : held_.begin()->second;
}

Lane::Lane(cuda::Context context, std::size_t slots_count, bool sleeps_until_asked)
    : context_(context), sleeps_until_asked_(sleeps_until_asked) {
    const cuda::Driver& driver = cuda::driver();
    const unsigned flags = cuda::event_disable_timing | (sleeps_until_asked ? 0 : cuda::event_blocking_sync);
    events_.reserve(slots_count); // An exception must come before resources are created that must be freed.
    make_current();
    cuda::check("cuStreamCreate", driver.stream_create(&stream_, cuda::stream_non_blocking));
    for (std::size_t index = 0; index < slots_count; ++index) {
        cuda::Event event = nullptr;
        const cuda::Result result = driver.event_create(&event, flags);
        if (result != cuda::success) {
            for (const cuda::Event each : events_) {
                driver.event_destroy(each);
            }
            driver.stream_destroy(stream_);
            cuda::check("cuEventCreate", result);
        }
        events_.push_back(event);
    }
}

Lane::~Lane() {
    const cuda::Driver& driver = cuda::driver();
    // The destructor may run on a thread with another current context.
    driver.context_push(context_);
    driver.stream_synchronize(stream_);
    for (const cuda::Event each : events_) {
        driver.event_destroy(each);
    }
    driver.stream_destroy(stream_);
    cuda::Context popped = nullptr;
    driver.context_pop(&popped);
}

void Lane::to_device(cuda::DevicePointer to, const std::byte* from, std::size_t length) const {
    cuda::check("cuMemcpyHtoDAsync", cuda::driver().copy_to_device(to, from, length, stream_));
}

void Lane::to_host(std::byte* to, cuda::DevicePointer from, std::size_t length) const {
    cuda::check("cuMemcpyDtoHAsync", cuda::driver().copy_to_host(to, from, length, stream_));
}

void Lane::mark(std::size_t slot) const {
    cuda::check("cuEventRecord", cuda::driver().event_record(events_[slot], stream_));
}

bool Lane::is_done(std::size_t slot) const {
    const cuda::Result result = cuda::driver().event_query(events_[slot]);
    if (result == cuda::not_ready) {
        return false;
    }
    cuda::check("cuEventQuery", result);
    return true;
}

void Lane::wait(std::size_t slot) const {
    std::chrono::microseconds pause = pause_least;
    for (int asked = 0; sleeps_until_asked_ || asked < questions; ++asked) {
        if (is_done(slot)) {
            return;
        }
        if (asked >= questions) {
            std::this_thread::sleep_for(pause);
            pause = std::min(2 * pause, pause_most);
        }
    }
    cuda::check("cuEventSynchronize", cuda::driver().event_synchronize(events_[slot]));
}

void Lane::drain() const noexcept {
    cuda::driver().stream_synchronize(stream_);
}

void Lane::synchronize() const {
    cuda::check("cuStreamSynchronize", cuda::driver().stream_synchronize(stream_));
}

} // namespace gdrkit::engine
