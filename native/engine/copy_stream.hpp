// The CUDA stream on which one thread copies to and from a device, with an event for each staging buffer.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <vector>

#include "engine/cuda_driver.hpp"

namespace gdrkit::engine {

// The primary contexts of the devices in use, each retained once.
class Contexts {
public:
    Contexts() = default;
    Contexts(const Contexts&) = delete;
    Contexts& operator=(const Contexts&) = delete;
    // Releases all contexts. No thread may use one any more.
    ~Contexts();
    // Returns the primary context of the device with this ordinal. Throws Error.
    cuda::Context of(int ordinal);
    // Returns any retained context, or null.
    cuda::Context any();

private:
    std::mutex mutex_;
    std::map<int, cuda::Context> retained_;
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
        cuda::Context popped = nullptr;
        cuda::driver().context_pop(&popped);
    }
};

class CopyStream {
public:
    // The context becomes and stays current on this thread. `polls_device` selects how `wait` waits. Throws Error.
    CopyStream(cuda::Context context, std::size_t buffers_count, bool polls_device = false);
    ~CopyStream();
    CopyStream(const CopyStream&) = delete;
    CopyStream& operator=(const CopyStream&) = delete;

    void make_current() const { cuda::check("cuCtxSetCurrent", cuda::driver().context_set(context_)); }
    cuda::Context context() const noexcept { return context_; }
    // to_device and to_host queue a copy. record marks the end of the copies of a buffer, for `wait`. All throw Error.
    void to_device(cuda::DevicePointer to, const std::byte* from, std::size_t length) const;
    void to_host(std::byte* to, cuda::DevicePointer from, std::size_t length) const;
    void record(std::size_t buffer) const;
    // Returns whether the device has reached the event of a buffer. Throws Error like `wait`.
    bool is_done(std::size_t buffer) const;
    // Waits for the event of a buffer: by short sleeps between queries, or until the interrupt of the device. An
    // interrupt after each copy delays the device's next copy a little. Throws Error if one of the copies failed.
    void wait(std::size_t buffer) const;
    // Waits for all queued work. Throws Error.
    void synchronize() const;
    // Waits for all queued work after a failure, before the memory is used again. Its result is ignored, because the
    // failure is already reported.
    void drain() const noexcept;

private:
    cuda::Context context_;
    bool polls_device_;
    cuda::Stream stream_ = nullptr;
    std::vector<cuda::Event> events_;
};

} // namespace gdrkit::engine
