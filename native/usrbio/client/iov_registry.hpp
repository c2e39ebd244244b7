// The table of the objects to which `iovh` of struct hf3fs_iov refers. `iovh` is not an address but a number, and no
// two iovs of a process get the same number. So the library never dereferences a stale or invalid handle.
#pragma once

#include "usrbio/include/hf3fs_usrbio.h"

#include <memory>

namespace gdrkit::usrbio {

// The memory and the publication of one iov. HostIov and GpuIov implement this interface.
class IovBacking {
public:
    virtual ~IovBacking() = default;
    // Implements hf3fs_iovunlink.
    virtual void unlink(hf3fs_iov& iov) noexcept = 0;
    // Implements hf3fs_iovdestroy. Returns false on failure; the handle then stays valid for another attempt.
    virtual bool destroy(hf3fs_iov& iov) noexcept = 0;
};

// Any thread may call these functions. register_iov throws std::bad_alloc.
hf3fs_iov_handle register_iov(std::shared_ptr<IovBacking> backing);
std::shared_ptr<IovBacking> find_iov(hf3fs_iov_handle handle) noexcept; // Returns null if the handle is not registered.
void unregister_iov(hf3fs_iov_handle handle) noexcept;

} // namespace gdrkit::usrbio
