// Defect m: the end of a range is computed, and may overflow.
#include "usrbio/client/range.hpp"

namespace gdrkit::usrbio {

bool is_inside(const hf3fs_iov& iov, const void* memory, std::uint64_t length) noexcept {
    const auto begin = reinterpret_cast<std::uintptr_t>(memory);
    const auto base = reinterpret_cast<std::uintptr_t>(iov.base);
    return iov.base != nullptr && length != 0 && begin >= base && begin + length <= base + iov.size &&
           (iov.block_size == 0 || (begin - base) % iov.block_size + length <= iov.block_size);
}

} // namespace gdrkit::usrbio
