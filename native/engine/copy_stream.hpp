// The CUDA stream on which one thread copies to and from a device, with an event for each staging buffer.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <vector>

#include "engine/cuda_driver.hpp"

namespace gdrkit::engine {

// The primary contexts of the devices in use, each retained once.
class PrimaryContexts {
public:
    PrimaryContexts() = default;
    PrimaryContexts(const PrimaryContexts&) = delete;
    PrimaryContexts& operator=(const PrimaryContexts&) = delete;
    // Releases all contexts. No thread may still use one of them.
    ~PrimaryContexts();
    // Returns the primary context of the device with this ordinal. Throws Error.
    cuda::Context get(int ordinal);
    // Returns one of the retained contexts, or null if there is none.
    cuda::Context get_any();

private:
    std::mutex mutex_;
    std::map<int, cuda::Context> retained_contexts_;
};

// Makes a context current on this thread during its lifetime. Throws Error.
class CurrentContext {
public:
    explicit CurrentContext(cuda::Context context) {
        cuda::check("cuCtxPushCurrent", cuda::driver().context_push(context));
    }
    CurrentContext(const CurrentContext&) = delete;
    CurrentContext& operator=(const CurrentContext&) = delete;
    ~CurrentContext() {
        cuda::Context popped_context = nullptr;
        cuda::driver().context_pop(&popped_context);
    }
};

// A CUDA stream for copies, and the events of its staging buffers.
class CopyStream {
public:
    // Makes the context current on the calling thread, and leaves it current. `polls_device` selects how `wait` waits.
    // Throws Error.
    CopyStream(cuda::Context context, std::size_t buffers_count, bool polls_device = false);
    ~CopyStream();
    CopyStream(const CopyStream&) = delete;
    CopyStream& operator=(const CopyStream&) = delete;

    void make_current() const { cuda::check("cuCtxSetCurrent", cuda::driver().context_set(context_)); }
    cuda::Context context() const noexcept { return context_; }
    // copy_to_device() and copy_to_host() queue a copy. After the copies of a staging buffer, record_event() queues the
    // event of the buffer, for which wait() waits. All these functions throw Error.
    void copy_to_device(cuda::DevicePointer to, const std::byte* from, std::size_t length) const;
    void copy_to_host(std::byte* to, cuda::DevicePointer from, std::size_t length) const;
    void record_event(std::size_t buffer_index) const;
    // Returns the end address of the device allocation that contains `address`, or `address` if the driver does not
    // know the allocation.
    cuda::DevicePointer find_allocation_end(cuda::DevicePointer address) const;
    // Returns whether the device has reached the event of a buffer. Throws Error if one of the copies failed.
    bool is_done(std::size_t buffer_index) const;
    // Waits for the event of a buffer. With `polls_device`, the thread queries the event and sleeps between the
    // queries. Otherwise the thread sleeps until the interrupt of the device, and each interrupt delays the device's
    // next copy a little. Throws Error if one of the copies failed.
    void wait(std::size_t buffer_index) const;
    // Waits for all queued work. Throws Error.
    void synchronize() const;
    // Waits for all queued work after a failure, before the memory is used again. The thread needs no current context.
    // A failure of this wait is ignored, because the first failure is already reported.
    void drain() const noexcept;

private:
    cuda::Context context_;
    bool polls_device_;
    cuda::Stream stream_ = nullptr;
    std::vector<cuda::Event> events_;
};

} // namespace gdrkit::engine
