// cuStreamWaitValue32: a stream waits until a word of device memory has a value, and can then flush the writes of NICs.
#include <chrono>
#include <cstring>
#include <thread>

#include "cuda/entry.hpp"
#include "cuda/gpu_view.hpp"
#include "cuda/memory.hpp"
#include "cuda/stream.hpp"
#include "model/config.hpp"

namespace gdrkit::twin::cuda {
namespace {

bool is_satisfied(std::uint32_t word, std::uint32_t value, std::uint32_t condition) {
    switch (condition) {
    case wait_geq:
        return static_cast<std::int32_t>(word - value) >= 0; // the comparison wraps around at 2^32, as CUDA defines it
    case wait_eq:
        return word == value;
    case wait_and:
        return (word & value) != 0;
    default: // wait_nor
        return ~(word | value) != 0;
    }
}

// Load a word that other streams, the host and NICs may change at the same time, as on a GPU. They write with plain
// stores, so ThreadSanitizer would report a data race.
__attribute__((no_sanitize("thread"))) std::uint32_t load_word(const std::byte* address) {
    return __atomic_load_n(reinterpret_cast<const std::uint32_t*>(address), __ATOMIC_ACQUIRE);
}

// Return the word at an address as the GPU sees it.
std::uint32_t read_word(const Range& range, std::uint64_t address) {
    const auto lock = lock_views();
    const std::byte* const bytes = range.bytes(address);
    const std::byte* const view = range.memory ? range.memory->find_view(bytes) : nullptr;
    return load_word(view == nullptr ? bytes : view);
}

Result enqueue_value_wait(const ContextRef& context, const StreamRef& stream, DevicePointer address,
                          std::uint32_t value, std::uint32_t flags) {
    const bool is_flushing = (flags & wait_flush) != 0;
    const std::uint32_t condition = flags & ~wait_flush;
    const RangeRef range = find_range(address);
    if (condition > wait_nor || address % sizeof value != 0 || !range || range->is_host() ||
        (get_access(*range, context->device) & access_read) == 0) {
        return invalid_value;
    }
    if (is_flushing && (config().flush_options & flush_option_memops) == 0) {
        return not_supported;
    }
    const auto wait = [=] {
        constexpr std::chrono::microseconds poll_interval(50);
        while (!is_satisfied(read_word(*range, address), value, condition)) {
            std::this_thread::sleep_for(poll_interval);
        }
        if (is_flushing) {
            flush_remote_writes();
        }
    };
    enqueue(stream, wait, Timing::delayed);
    return success;
}

} // namespace

GDRKIT_CUDA_ENTRY Result cuStreamWaitValue32_v2(Handle handle, DevicePointer address, std::uint32_t value,
                                                unsigned flags) {
    return run_entry_in_context("cuStreamWaitValue32_v2", [&](const ContextRef& context) {
        StreamRef stream;
        const Result result = find_stream(handle, context, &stream);
        return result == success ? enqueue_value_wait(context, stream, address, value, flags) : result;
    });
}

} // namespace gdrkit::twin::cuda
