// Visibility of the writes of NICs. On some devices, a CUDA kernel that starts after the completion of a read may still
// see the old data until the writes are flushed. On such devices, hf3fs_wait_for_ios flushes the writes.
#pragma once

#include "usrbio/client/gpu_memory.hpp"

namespace gdrkit::usrbio {

// Returns whether the device needs a flush, and can flush from the host.
bool needs_flush(const cuda::Driver& driver, int device);

// Marks that an iov has memory on the device of this context, and that this device needs flushes. The context is the
// primary context, which the iov retains.
class FlushedContext {
public:
    explicit FlushedContext(cuda::Context context);
    FlushedContext(const FlushedContext&) = delete;
    FlushedContext& operator=(const FlushedContext&) = delete;
    ~FlushedContext();

private:
    cuda::Context context_;
};

// Returns whether a context is marked. It takes no lock, because each wait calls it.
bool has_flushed_context() noexcept;

// Makes all earlier writes of NICs to the memory of a device visible to the work of the device. The first function does
// so for the device of `context`, the second one for the devices of all marked contexts. Returns 0 or -EIO.
int flush_remote_writes(const cuda::Driver& driver, cuda::Context context);
int flush_marked_contexts() noexcept;

} // namespace gdrkit::usrbio
