// The text of an errno for messages, such as "Permission denied (EACCES)".
#pragma once

#include <cstdio>
#include <cstring>

namespace gdrkit {

class ErrnoText {
public:
    explicit ErrnoText(int errno_value) noexcept {
        char buffer[96];
        const char* description = strerror_r(errno_value, buffer, sizeof buffer);
#if __GLIBC_PREREQ(2, 32)
        if (const char* name = strerrorname_np(errno_value); name != nullptr) {
            std::snprintf(text_, sizeof text_, "%s (%s)", description, name);
            return;
        }
#endif
        std::snprintf(text_, sizeof text_, "%s (errno %d)", description, errno_value);
    }

    const char* c_str() const noexcept {
        return text_;
    }

private:
    char text_[128];
};

} // namespace gdrkit
