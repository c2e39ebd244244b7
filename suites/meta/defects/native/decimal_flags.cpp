// Defect o: the flags of a ring are written in base 10, but the agent reads base 2.
#include "usrbio/client/names.hpp"

namespace gdrkit::usrbio {

std::string flag_digits(std::uint64_t flags) {
    return std::to_string(flags);
}

} // namespace gdrkit::usrbio
