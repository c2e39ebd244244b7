// Creation, clearing and release of a block of the GPU pool.
#include "usrbio/client/gpu_block.hpp"

#include <unistd.h>

#include <cerrno>
#include <span>

#include "common/errno_text.hpp"
#include "usrbio/client/gpu_pool.hpp"
#include "usrbio/client/log.hpp"

namespace gdrkit::usrbio {
namespace {

int log_failure(const cuda::Driver& driver, const char* function_name, cuda::Result result) {
    log_line(LogLevel::error, "%s failed: %s (%d)", function_name, cuda::result_name(driver, result), result);
    return cuda::convert_to_errno(result);
}

} // namespace

GpuBlock::GpuBlock(const cuda::Driver& block_driver, int device_number, std::size_t bytes)
    : driver(block_driver), device(device_number), block_bytes(bytes), creator_pid_(getpid()) {
    record_block(*this);
}

GpuBlock::~GpuBlock() {
    forget_block(*this);
    if (creator_pid_ != getpid()) {
        primary_context_.disown();
        return;
    }
    if (drop_registration() != 0 || base == 0 || !is_intact()) {
        return;
    }
    dmabuf.descriptor.reset();
    const CurrentContext current_context(driver, primary_context_.get());
    if (current_context.error() == 0) {
        if (const cuda::Result result = driver.free(base); result != cuda::success) {
            log_failure(driver, "cuMemFree()", result);
        }
    }
}

int GpuBlock::create(const cuda::Driver& driver, int device, std::size_t block_bytes,
                     std::unique_ptr<GpuBlock>* block) {
    std::unique_ptr<GpuBlock> new_block(new GpuBlock(driver, device, block_bytes));
    if (const int error = new_block->primary_context_.retain(driver, device); error != 0) {
        return error;
    }
    const cuda::Result result = driver.allocate(&new_block->base, block_bytes);
    if (result != cuda::success) {
        new_block->base = 0;
        return result == cuda::invalid_value ? -ENOMEM : cuda::convert_to_errno(result);
    }
    if (const int error = new_block->export_and_clear(); error != 0) {
        return error;
    }
    *block = std::move(new_block);
    return 0;
}

int GpuBlock::export_and_clear() {
    if (const cuda::Result result = driver.pointer_get(&buffer_id_, cuda::pointer_buffer_id, base);
        result != cuda::success) {
        return log_failure(driver, "cuPointerGetAttribute(BUFFER_ID)", result);
    }
    if (const int error = check_device_memory(driver, device, base, block_bytes, &allocation); error != 0) {
        return error;
    }
    if (const int error = enable_sync_memops(driver, base); error != 0) {
        return error;
    }
    if (const int error = export_ipc(driver, base, &ipc); error != 0) {
        return error;
    }
    if (const int error = export_dmabuf(driver, base, block_bytes, &dmabuf); error != 0) {
        return error;
    }
    return clear();
}

bool GpuBlock::is_intact() const noexcept {
    const CurrentContext current_context(driver, primary_context_.get());
    std::uint64_t buffer_id = 0;
    return current_context.error() == 0 &&
           driver.pointer_get(&buffer_id, cuda::pointer_buffer_id, base) == cuda::success && buffer_id == buffer_id_;
}

int GpuBlock::clear() noexcept {
    const CurrentContext current_context(driver, primary_context_.get());
    if (current_context.error() != 0) {
        return current_context.error();
    }
    // First wait for all kernels that may still use the memory, as cuMemFree() would. The default stream does not wait
    // for the kernels of non-blocking streams.
    cuda::Result result = driver.context_synchronize();
    if (result == cuda::success) {
        result = driver.fill(base, 0, block_bytes);
    }
    if (result == cuda::success) {
        result = driver.context_synchronize();
    }
    return result == cuda::success ? 0 : log_failure(driver, "the clearing of a block of the GPU pool", result);
}

int GpuBlock::drop_registration() noexcept {
    if (keeping_agent == nullptr) {
        return 0;
    }
    std::uint64_t flags = 0; // Reserved.
    const iovec payload{&flags, sizeof flags};
    const int fd = dmabuf.descriptor.get();
    const int status = keeping_agent->call(AgentRequest::drop_kept, {&payload, 1}, {&fd, 1}, {});
    // -ENOENT: the agent keeps no registration of this memory. -EREMOTEIO: if the agent has ended, its registrations
    // have ended too.
    if (status == 0 || status == -ENOENT || (status == -EREMOTEIO && keeping_agent->check_closed_by_agent())) {
        keeping_agent.reset();
        return 0;
    }
    log_line(LogLevel::error, "the agent did not end the registration of %zu bytes, which therefore stay allocated: %s",
             block_bytes, ErrnoText(-status).c_str());
    return status;
}

bool would_exhaust_memory(const cuda::Driver& driver, std::size_t bytes) noexcept {
    constexpr std::size_t reserve_divisor = 16; // A sixteenth of the memory must stay free.
    std::size_t free_bytes = 0, total_bytes = 0;
    return driver.memory_info(&free_bytes, &total_bytes) == cuda::success &&
           (free_bytes < bytes || free_bytes - bytes < total_bytes / reserve_divisor);
}

} // namespace gdrkit::usrbio
