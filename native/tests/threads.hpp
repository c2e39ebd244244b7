// Functions of native tests that find threads of this process and choose the processors of the calling thread.
#pragma once

#include <sched.h>

#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include "tests/check.hpp"

namespace gdrkit::test {

// Returns the processors that this thread may use.
inline std::vector<int> list_processors() {
    cpu_set_t allowed_processors;
    CHECK(sched_getaffinity(0, sizeof allowed_processors, &allowed_processors) == 0);
    std::vector<int> processors;
    for (int processor = 0; processor < CPU_SETSIZE; ++processor)
        if (CPU_ISSET(processor, &allowed_processors))
            processors.push_back(processor);
    return processors;
}

// Lets this thread run on `processors` only. When the function returns, the thread already runs on one of them.
inline void restrict_thread(std::span<const int> processors) {
    cpu_set_t allowed_processors;
    CPU_ZERO(&allowed_processors);
    for (const int processor : processors)
        CPU_SET(processor, &allowed_processors);
    CHECK(sched_setaffinity(0, sizeof allowed_processors, &allowed_processors) == 0);
}

// Returns whether this process has a thread with this name, as the kernel lists them. A thread that has ended may still
// be listed for a short time. A thread that names itself is found only after it has started to run.
inline bool has_thread(const std::string& name) {
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
        std::ifstream file(task.path() / "comm");
        std::string task_name;
        if (std::getline(file, task_name) && task_name == name) {
            return true;
        }
    }
    return false;
}

} // namespace gdrkit::test
