// A device as one thread uses it: its context, a stream of its own, an event for each piece of staging.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <vector>

#include "engine/cuda_driver.hpp"

namespace gdrkit::engine {

// The primary contexts of the devices that were used, each retained once.
class Contexts {
public:
    Contexts() = default;
    Contexts(const Contexts&) = delete;
    Contexts& operator=(const Contexts&) = delete;
    // Gives every context back; nothing may use one any more.
    ~Contexts();
    // Throws Error.
    cuda::Context of(int device);
    // Any that is retained; null when none is.
    cuda::Context any();

private:
    std::mutex mutex_;
    std::map<int, cuda::Context> held_;
};

// Makes a context current on this thread for as long as it lives, whatever ends the block. Throws Error.
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

class Lane {
public:
    // The context becomes current on this thread, and stays so. `sleeps_until_asked` says how `wait` waits. Throws
    // Error.
    Lane(cuda::Context context, std::size_t slots_count, bool sleeps_until_asked = false);
    ~Lane();
    Lane(const Lane&) = delete;
    Lane& operator=(const Lane&) = delete;

    void make_current() const { cuda::check("cuCtxSetCurrent", cuda::driver().context_set(context_)); }
    cuda::Context context() const noexcept { return context_; }
    // Queue a copy, and after all copies of a slot the mark that `wait` waits for. Throw Error.
    void to_device(cuda::DevicePointer to, const std::byte* from, std::size_t length) const;
    void to_host(std::byte* to, cuda::DevicePointer from, std::size_t length) const;
    void mark(std::size_t slot) const;
    // Whether the device has come to the mark of a slot. Throws Error, as `wait`.
    bool is_done(std::size_t slot) const;
    // Waits for the mark of a slot: sleeps a little between questions, or, where those are not wanted, until the device
    // interrupts. An interrupt after each copy keeps the device from the next one for a moment. Throws Error: the
    // device refused one of the copies.
    void wait(std::size_t slot) const;
    // Waits for everything that was queued. Throws Error.
    void synchronize() const;
    // The same after a failure, before the memory is used again. What it gives is no news: the failure is told.
    void drain() const noexcept;

private:
    cuda::Context context_;
    bool sleeps_until_asked_;
    cuda::Stream stream_ = nullptr;
    std::vector<cuda::Event> events_;
};

} // namespace gdrkit::engine
