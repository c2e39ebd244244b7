// The text of an errno for messages, such as "Permission denied (EACCES)".
#pragma once

#include <cstdio>
#include <cstring>

namespace gdrkit {

class ErrnoText {
public:
    explicit ErrnoText(int number) noexcept {
        char buffer[96];
        const char* description = strerror_r(number, buffer, sizeof buffer);
#if __GLIBC_PREREQ(2, 32)
        if (const char* name = strerrorname_np(number); name != nullptr) {
            std::snprintf(text_, sizeof text_, "%s (%s)", description, name);
            return;
        }
#endif
        std::snprintf(text_, sizeof text_, "%s (errno %d)", description, number);
    }

    const char* c_str() const noexcept {
        return text_;
    }

private:
    char text_[128];
};

} // namespace gdrkit
