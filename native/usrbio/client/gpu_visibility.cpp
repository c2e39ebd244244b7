#include "usrbio/client/gpu_visibility.hpp"

#include <atomic>
#include <cerrno>
#include <map>
#include <mutex>

#include "usrbio/client/log.hpp"

namespace gdrkit::usrbio {
namespace {

struct MarkedContexts {
    std::mutex mutex;
    std::map<cuda::Context, unsigned> mark_counts;
};

// Never destroyed, because iovs may be destroyed while the process exits.
MarkedContexts& marked_contexts() {
    static auto* const instance = new MarkedContexts;
    return *instance;
}

std::atomic<unsigned> mark_count{0};

} // namespace

bool needs_flush(const cuda::Driver& driver, int device) {
    int ordering = 0, options = 0;
    return driver.flush_writes != nullptr &&
           driver.device_attribute(&ordering, cuda::device_writes_ordering, device) == cuda::success &&
           driver.device_attribute(&options, cuda::device_flush_writes_options, device) == cuda::success &&
           ordering < cuda::writes_ordering_owner && (options & 1) != 0;
}

FlushedContext::FlushedContext(cuda::Context context) : context_(context) {
    std::lock_guard lock(marked_contexts().mutex);
    ++marked_contexts().mark_counts[context];
    ++mark_count;
}

FlushedContext::~FlushedContext() {
    std::lock_guard lock(marked_contexts().mutex);
    const auto found = marked_contexts().mark_counts.find(context_);
    if (--found->second == 0) {
        marked_contexts().mark_counts.erase(found);
    }
    --mark_count;
}

bool has_flushed_context() noexcept {
    return mark_count.load(std::memory_order_relaxed) != 0;
}

int flush_remote_writes(const cuda::Driver& driver, cuda::Context context) {
    const CurrentContext current_context(driver, context);
    if (current_context.error() != 0) {
        return -EIO;
    }
    const cuda::Result result = driver.flush_writes(cuda::flush_current_context, cuda::flush_to_owner);
    if (result != cuda::success) {
        log_line(LogLevel::error, "cuFlushGPUDirectRDMAWrites() failed: %s (%d)", cuda::result_name(driver, result),
                 result);
    }
    return result == cuda::success ? 0 : -EIO;
}

int flush_marked_contexts() noexcept {
    std::lock_guard lock(marked_contexts().mutex);
    int error = 0;
    for (const auto& [context, count] : marked_contexts().mark_counts) {
        error = flush_remote_writes(*cuda::driver(), context) == 0 ? error : -EIO;
    }
    return error;
}

} // namespace gdrkit::usrbio
