// Visibility of the writes of NICs. On some devices, a CUDA kernel that starts after the completion of a read may still
// see the old data until the writes are flushed. On such devices, hf3fs_wait_for_ios flushes the writes.
#pragma once

#include "usrbio/client/gpu_memory.hpp"

namespace gdrkit::usrbio {

// Returns whether the device needs flushes, and supports cuFlushGPUDirectRDMAWrites().
bool needs_remote_write_flush(const cuda::Driver& driver, int device);

// A request to flush a context after reads. An iov holds a ContextToFlush as long as it has memory on a device that
// needs flushes. The context is the primary context of the device; the iov keeps it alive.
class ContextToFlush {
public:
    explicit ContextToFlush(cuda::Context context);
    ContextToFlush(const ContextToFlush&) = delete;
    ContextToFlush& operator=(const ContextToFlush&) = delete;
    ~ContextToFlush();

private:
    cuda::Context context_;
};

// Returns whether any iov needs flushes. Takes no lock, because each hf3fs_wait_for_ios calls this function.
bool has_context_to_flush() noexcept;

// These functions make all earlier writes of NICs to the memory of a device visible to the work of the device.
// flush_remote_writes() flushes the device of `context`, flush_all_contexts() the device of each ContextToFlush. They
// return 0 or -EIO.
int flush_remote_writes(const cuda::Driver& driver, cuda::Context context);
int flush_all_contexts() noexcept;

} // namespace gdrkit::usrbio
