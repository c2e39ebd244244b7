// Creates the link of a publication, if no agent does.
#pragma once

#include <string>

namespace gdrkit::usrbio {

// Returns 0 or the -errno of symlink(2); -EEXIST: the link belongs to another publication.
int make_link(const std::string& target, const std::string& path) noexcept;

} // namespace gdrkit::usrbio
