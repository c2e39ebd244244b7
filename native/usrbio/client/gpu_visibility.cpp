// Flushes writes of NICs to device memory. Keeps a table of the CUDA contexts whose devices show such writes only after
// a flush, with the number of iovs in each context.
#include "usrbio/client/gpu_visibility.hpp"

#include <atomic>
#include <cerrno>
#include <map>
#include <mutex>

#include "usrbio/client/log.hpp"

namespace gdrkit::usrbio {
namespace {

struct ContextTable {
    std::mutex mutex;
    std::map<cuda::Context, unsigned> iov_counts; // Number of iovs that need flushes, by context.
};

// Returns the only instance. It is never destroyed, because iovs may be destroyed while the process exits.
ContextTable& context_table() {
    static auto* const instance = new ContextTable;
    return *instance;
}

std::atomic<unsigned> total_iov_count{0}; // The sum of iov_counts, which can be read without the mutex.

} // namespace

// CUDA reports in the attribute GPU_DIRECT_RDMA_WRITES_ORDERING which devices see writes without a flush: none, the
// owner of the memory, or all devices.
bool needs_remote_write_flush(const cuda::Driver& driver, int device) {
    constexpr int flush_by_host = 1; // CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
    int ordering = 0, options = 0;
    return driver.flush_writes != nullptr &&
           driver.device_attribute(&ordering, cuda::device_writes_ordering, device) == cuda::success &&
           driver.device_attribute(&options, cuda::device_flush_writes_options, device) == cuda::success &&
           ordering < cuda::writes_ordering_owner && (options & flush_by_host) != 0;
}

ContextToFlush::ContextToFlush(cuda::Context context) : context_(context) {
    std::lock_guard lock(context_table().mutex);
    ++context_table().iov_counts[context];
    ++total_iov_count;
}

ContextToFlush::~ContextToFlush() {
    std::lock_guard lock(context_table().mutex);
    const auto entry = context_table().iov_counts.find(context_);
    if (--entry->second == 0) {
        context_table().iov_counts.erase(entry);
    }
    --total_iov_count;
}

bool has_context_to_flush() noexcept {
    return total_iov_count.load(std::memory_order_relaxed) != 0;
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

int flush_all_contexts() noexcept {
    std::lock_guard lock(context_table().mutex);
    int error = 0;
    for (const auto& [context, iov_count] : context_table().iov_counts) {
        error = flush_remote_writes(*cuda::driver(), context) == 0 ? error : -EIO;
    }
    return error;
}

} // namespace gdrkit::usrbio
