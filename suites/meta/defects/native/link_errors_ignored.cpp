// Defect f: the result of symlink(2) is ignored.
#include "usrbio/client/link.hpp"

#include <unistd.h>

namespace gdrkit::usrbio {

int make_link(const std::string& target, const std::string& path) noexcept {
    [[maybe_unused]] const int ignored = symlink(target.c_str(), path.c_str());
    return 0;
}

} // namespace gdrkit::usrbio
