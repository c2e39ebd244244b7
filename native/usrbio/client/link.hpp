// The link of a publication, where no agent makes it.
#pragma once

#include <string>

namespace gdrkit::usrbio {

// 0 or -errno of symlink(2), -EEXIST too: what is there is somebody else's.
int make_link(const std::string& target, const std::string& path) noexcept;

} // namespace gdrkit::usrbio
