#include "usrbio/client/range.hpp"

namespace gdrkit::usrbio {

bool inside(const hf3fs_iov& iov, const void* memory, std::uint64_t length) noexcept {
    // By offsets, so that no sum can overflow; a device address is a number as well.
    const std::uint64_t offset = reinterpret_cast<std::uintptr_t>(memory) - reinterpret_cast<std::uintptr_t>(iov.base);
    return iov.base != nullptr && length != 0 && offset < iov.size && length <= iov.size - offset &&
           (iov.block_size == 0 || length <= iov.block_size - offset % iov.block_size);
}

} // namespace gdrkit::usrbio
