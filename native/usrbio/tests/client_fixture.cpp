// Wrappers of shm_open and linkat, which record the names of the shared memory that a test creates.
#include "client_fixture.hpp"

using namespace gdrkit::usrbio::test;

// The linker option --wrap replaces calls of shm_open by calls of __wrap_shm_open, which records the name.
extern "C" int __real_shm_open(const char* name, int flags, mode_t mode);
extern "C" int __wrap_shm_open(const char* name, int flags, mode_t mode) {
    if ((flags & O_CREAT) != 0) {
        const std::lock_guard lock(created_shm_names_mutex);
        created_shm_names.emplace_back(name);
    }
    return __real_shm_open(name, flags, mode);
}

// Memory that was opened with O_TMPFILE has no name until the library or the agent in this process calls linkat.
extern "C" int __real_linkat(int old_folder_fd, const char* old_path, int new_folder_fd, const char* new_path,
                             int flags);
extern "C" int __wrap_linkat(int old_folder_fd, const char* old_path, int new_folder_fd, const char* new_path,
                             int flags) {
    const int status = __real_linkat(old_folder_fd, old_path, new_folder_fd, new_path, flags);
    const std::string_view shm_folder = "/dev/shm";
    if (status == 0 && std::string_view(new_path).starts_with(shm_folder)) {
        const std::lock_guard lock(created_shm_names_mutex);
        created_shm_names.emplace_back(new_path + shm_folder.size());
    }
    return status;
}
