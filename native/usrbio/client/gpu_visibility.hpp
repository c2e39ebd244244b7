// Visibility of the writes of NICs. On some devices, a CUDA kernel that starts after the completion of a read may still
// see the old data until the writes are flushed. On such devices, hf3fs_wait_for_ios flushes the writes.
#pragma once

#include "usrbio/client/gpu_memory.hpp"

namespace gdrkit::usrbio {

// Returns whether the device needs flushes and the host can order them.
bool needs_flush(const cuda::Driver& driver, int device);

// An iov holds a ContextToFlush as long as it has memory on a device that needs flushes. The context is the primary
// context of the device, which the iov retains.
class ContextToFlush {
public:
    explicit ContextToFlush(cuda::Context context);
    ContextToFlush(const ContextToFlush&) = delete;
    ContextToFlush& operator=(const ContextToFlush&) = delete;
    ~ContextToFlush();

private:
    cuda::Context context_;
};

// Returns whether any iov needs flushes. It takes no lock, because each wait calls it.
bool has_context_to_flush() noexcept;

// Makes all earlier writes of NICs to the memory of a device visible to the work of the device. The first function does
// so for the device of `context`, the second one for the devices of all contexts to flush. Returns 0 or -EIO.
int flush_remote_writes(const cuda::Driver& driver, cuda::Context context);
int flush_all_contexts() noexcept;

} // namespace gdrkit::usrbio
