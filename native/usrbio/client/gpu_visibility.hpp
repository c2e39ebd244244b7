// Visibility of the writes of NICs. On some devices, a kernel that starts after the completion of a read may still see
// the old data until the writes are flushed. hf3fs_wait_for_ios flushes for the iovs on such devices.
#pragma once

#include "usrbio/client/gpu_memory.hpp"

namespace gdrkit::usrbio {

// Returns whether the device needs a flush, and can flush from the host.
bool needs_flush(const cuda::Driver& driver, int device);

// A mark that memory of the device of this context needs flushes. It exists as long as an iov has such memory, and the
// context is the primary one, which the iov keeps.
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

// Makes all earlier writes of NICs to the memory of a device visible to its work: the device of `context`, or those of
// the marked contexts. Returns 0 or -EIO.
int flush_remote_writes(const cuda::Driver& driver, cuda::Context context);
int flush_marked_contexts() noexcept;

} // namespace gdrkit::usrbio
