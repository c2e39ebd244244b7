#include "usrbio/client/link.hpp"

#include <unistd.h>

#include <cerrno>

namespace gdrkit::usrbio {

int make_link(const std::string& target, const std::string& path) noexcept {
    return symlink(target.c_str(), path.c_str()) == 0 ? 0 : -errno;
}

} // namespace gdrkit::usrbio
