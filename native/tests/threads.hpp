// The threads of this process, as the kernel lists them: one that ended is listed until the kernel has buried it, and
// one that names itself is known by that name once it has run.
#pragma once

#include <filesystem>
#include <fstream>
#include <string>

namespace gdrkit::test {

inline bool has_thread(const std::string& name) {
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
        std::ifstream file(task.path() / "comm");
        std::string text;
        if (std::getline(file, text) && text == name) {
            return true;
        }
    }
    return false;
}

} // namespace gdrkit::test
