// The failure of a verb: its name and the errno.
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

// Returns errno after a function of libibverbs that returned a null pointer; never 0.
inline int last_errno() noexcept {
    return errno != 0 ? errno : EIO;
}

} // namespace gdrkit::verbs
