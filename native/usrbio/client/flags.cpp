#include "usrbio/client/names.hpp"

#include <bit>

namespace gdrkit::usrbio {

std::string flag_digits(std::uint64_t flags) {
    std::string digits;
    for (int bit = std::bit_width(flags) - 1; bit >= 0; --bit) {
        digits += (flags >> bit & 1) != 0 ? '1' : '0';
    }
    return digits;
}

} // namespace gdrkit::usrbio
