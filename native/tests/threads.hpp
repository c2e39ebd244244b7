// Finds threads of this process by name, as the kernel lists them. A thread that has ended may still be listed for a
// short time. A thread that names itself is found only after it has started to run.
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
