// The exception for a failed libibverbs call: the name of the function and its errno.
#pragma once

#include <cerrno>
#include <stdexcept>
#include <string>

namespace gdrkit::verbs {

class Error : public std::runtime_error {
public:
    Error(const std::string& operation, int number, const std::string& detail = {})
        : std::runtime_error(operation + (detail.empty() ? "" : " (" + detail + ")")), number_(number) {}

    int number() const noexcept { return number_; }

private:
    int number_;
};

// Returns errno after a libibverbs function that returned a null pointer. Returns EIO if the function did not set
// errno.
inline int last_errno() noexcept {
    return errno != 0 ? errno : EIO;
}

} // namespace gdrkit::verbs
