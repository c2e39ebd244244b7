// What `iovh` of a struct hf3fs_iov stands for. It is a number that was given out once and no address, so that a stale
// or made-up struct is never followed.
#pragma once

#include "usrbio/include/hf3fs_usrbio.h"

#include <memory>

namespace gdrkit::usrbio {

class IovBacking {
public:
    virtual ~IovBacking() = default;
    // hf3fs_iovunlink
    virtual void unlink(hf3fs_iov& iov) noexcept = 0;
    // hf3fs_iovdestroy. false: it could not be done, and the handle stays valid for another try.
    virtual bool destroy(hf3fs_iov& iov) noexcept = 0;
};

// Any thread. keep() throws std::bad_alloc.
hf3fs_iov_handle keep_iov(std::shared_ptr<IovBacking> backing);
std::shared_ptr<IovBacking> find_iov(hf3fs_iov_handle handle) noexcept; // Null: none, or no longer.
void forget_iov(hf3fs_iov_handle handle) noexcept;

} // namespace gdrkit::usrbio
