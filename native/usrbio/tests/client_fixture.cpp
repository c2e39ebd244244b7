#include "client_fixture.hpp"

using namespace gdrkit::usrbio::test;

// The linker puts this before shm_open (--wrap).
extern "C" int __real_shm_open(const char* name, int flags, mode_t mode);
extern "C" int __wrap_shm_open(const char* name, int flags, mode_t mode) {
    if ((flags & O_CREAT) != 0) {
        const std::lock_guard lock(created_mutex);
        created.emplace_back(name);
    }
    return __real_shm_open(name, flags, mode);
}

// Memory that was made without a name gets it so, by the library or by the agent, which is in this process.
extern "C" int __real_linkat(int from_folder, const char* from, int to_folder, const char* to, int flags);
extern "C" int __wrap_linkat(int from_folder, const char* from, int to_folder, const char* to, int flags) {
    const int status = __real_linkat(from_folder, from, to_folder, to, flags);
    const std::string_view folder = "/dev/shm";
    if (status == 0 && std::string_view(to).starts_with(folder)) {
        const std::lock_guard lock(created_mutex);
        created.emplace_back(to + folder.size());
    }
    return status;
}
