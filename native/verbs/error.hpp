// A verb that was refused: which, and the errno.
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

// What libibverbs' functions that answer with a pointer leave in errno; never 0.
inline int last_errno() noexcept {
    return errno != 0 ? errno : EIO;
}

} // namespace gdrkit::verbs
