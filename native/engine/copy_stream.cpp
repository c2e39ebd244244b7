// The CUDA stream of one thread, and the primary contexts of the devices.
#include "engine/copy_stream.hpp"

#include <algorithm>
#include <chrono>
#include <thread>

namespace gdrkit::engine {
namespace {

// The thread queries the event this many times before it sleeps, because a short copy takes less time than the wake-up
// of a thread.
constexpr int queries_before_sleep = 4;
// Pause between queries. The device does not become idle in a pause, because it copies the other buffers meanwhile.
constexpr std::chrono::microseconds pause_min{20};
constexpr std::chrono::microseconds pause_max{80};

} // namespace

PrimaryContexts::~PrimaryContexts() {
    for (const auto& [device, context] : retained_contexts_) {
        cuda::driver().primary_release(device);
    }
}

cuda::Context PrimaryContexts::get(int ordinal) {
    const std::lock_guard lock(mutex_);
    if (const auto retained = retained_contexts_.find(ordinal); retained != retained_contexts_.end()) {
        return retained->second;
    }
    const cuda::Driver& driver = cuda::driver();
    cuda::Device device = 0;
    cuda::check("cuDeviceGet", driver.device_get(&device, ordinal));
    cuda::Context context = nullptr;
    cuda::check("cuDevicePrimaryCtxRetain", driver.primary_retain(&context, device));
    return retained_contexts_[device] = context;
}

cuda::Context PrimaryContexts::get_any() {
    const std::lock_guard lock(mutex_);
    return retained_contexts_.empty() ? nullptr : retained_contexts_.begin()->second;
}

CopyStream::CopyStream(cuda::Context context, std::size_t buffers_count, bool polls_device)
    : context_(context), polls_device_(polls_device) {
    const cuda::Driver& driver = cuda::driver();
    const unsigned flags = cuda::event_disable_timing | (polls_device ? 0 : cuda::event_blocking_sync);
    events_.reserve(buffers_count); // reserve() may throw, so it comes before the first resource that must be freed.
    make_current();
    cuda::check("cuStreamCreate", driver.stream_create(&stream_, cuda::stream_non_blocking));
    for (std::size_t index = 0; index < buffers_count; ++index) {
        cuda::Event event = nullptr;
        const cuda::Result result = driver.event_create(&event, flags);
        if (result != cuda::success) {
            for (const cuda::Event created_event : events_) {
                driver.event_destroy(created_event);
            }
            driver.stream_destroy(stream_);
            cuda::check("cuEventCreate", result);
        }
        events_.push_back(event);
    }
}

CopyStream::~CopyStream() {
    const cuda::Driver& driver = cuda::driver();
    // The destructor may run on a thread with another current context.
    driver.context_push(context_);
    drain();
    for (const cuda::Event event : events_) {
        driver.event_destroy(event);
    }
    driver.stream_destroy(stream_);
    cuda::Context popped_context = nullptr;
    driver.context_pop(&popped_context);
}

void CopyStream::copy_to_device(cuda::DevicePointer to, const std::byte* from, std::size_t length) const {
    cuda::check("cuMemcpyHtoDAsync", cuda::driver().copy_to_device(to, from, length, stream_));
}

void CopyStream::copy_to_host(std::byte* to, cuda::DevicePointer from, std::size_t length) const {
    cuda::check("cuMemcpyDtoHAsync", cuda::driver().copy_to_host(to, from, length, stream_));
}

cuda::DevicePointer CopyStream::find_allocation_end(cuda::DevicePointer address) const {
    cuda::DevicePointer begin = 0;
    std::size_t length = 0;
    const bool is_known = cuda::driver().address_range(&begin, &length, address) == cuda::success;
    return is_known ? begin + length : address;
}

void CopyStream::record_event(std::size_t buffer_index) const {
    cuda::check("cuEventRecord", cuda::driver().event_record(events_[buffer_index], stream_));
}

bool CopyStream::is_done(std::size_t buffer_index) const {
    const cuda::Result result = cuda::driver().event_query(events_[buffer_index]);
    if (result == cuda::not_ready) {
        return false;
    }
    cuda::check("cuEventQuery", result);
    return true;
}

void CopyStream::wait(std::size_t buffer_index) const {
    std::chrono::microseconds pause = pause_min;
    for (int queries_count = 0; polls_device_ || queries_count < queries_before_sleep; ++queries_count) {
        if (is_done(buffer_index)) {
            return;
        }
        if (queries_count >= queries_before_sleep) {
            std::this_thread::sleep_for(pause);
            pause = std::min(2 * pause, pause_max);
        }
    }
    cuda::check("cuEventSynchronize", cuda::driver().event_synchronize(events_[buffer_index]));
}

void CopyStream::drain() const noexcept {
    const cuda::Driver& driver = cuda::driver();
    // The call after whose failure the caller drains the stream may be cuCtxSetCurrent. The thread then has no current
    // context or another context, with which cuStreamSynchronize would fail too. Therefore this function makes the
    // context current itself.
    const bool is_pushed = driver.context_push(context_) == cuda::success;
    driver.stream_synchronize(stream_);
    if (is_pushed) {
        cuda::Context popped_context = nullptr;
        driver.context_pop(&popped_context);
    }
}

void CopyStream::synchronize() const {
    cuda::check("cuStreamSynchronize", cuda::driver().stream_synchronize(stream_));
}

} // namespace gdrkit::engine
