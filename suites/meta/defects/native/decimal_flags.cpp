// Defect o: the flags of a ring go out in base 10, where the other side reads base 2.
#include "usrbio/client/names.hpp"

namespace gdrkit::usrbio {

std::string flag_digits(std::uint64_t flags) {
    return std::to_string(flags);
}

} // namespace gdrkit::usrbio
