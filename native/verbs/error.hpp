// The exception that native/verbs throws. It has an errno and the name of the failed function or refused request.
#pragma once

#include <cerrno>
#include <stdexcept>
#include <string>

namespace gdrkit::verbs {

class Error : public std::runtime_error {
public:
    Error(const std::string& operation, int error_number, const std::string& detail = {})
        : std::runtime_error(operation + (detail.empty() ? "" : " (" + detail + ")")), error_number_(error_number) {}

    int error_number() const noexcept { return error_number_; }

private:
    int error_number_;
};

// Returns the errno of the call that has just failed, or EIO if the call did not set errno.
inline int last_errno() noexcept {
    return errno != 0 ? errno : EIO;
}

} // namespace gdrkit::verbs
