#include "usrbio/client/range.hpp"

namespace gdrkit::usrbio {

bool is_inside(const hf3fs_iov& iov, const void* memory, std::uint64_t length) noexcept {
    // Compare offsets, so that no sum can overflow. Device addresses are compared as numbers too.
    const std::uint64_t offset = reinterpret_cast<std::uintptr_t>(memory) - reinterpret_cast<std::uintptr_t>(iov.base);
    return iov.base != nullptr && length != 0 && offset < iov.size && length <= iov.size - offset &&
           (iov.block_size == 0 || length <= iov.block_size - offset % iov.block_size);
}

} // namespace gdrkit::usrbio
