// The C functions for files: hf3fs_reg_fd, hf3fs_dereg_fd, hf3fs_hardlink, hf3fs_punchhole. As hf3fs_usrbio.h
// documents, these functions return a positive errno on failure. So do the helper functions of this file, unless their
// comment says otherwise.
#include "common/descriptor.hpp"
#include "usrbio/client/agent_connection.hpp"
#include "usrbio/client/file_table.hpp"
#include "usrbio/client/fuse_ioctl.hpp"
#include "usrbio/client/library_mutex.hpp"
#include "usrbio/client/log.hpp"
#include "usrbio/client/mounts.hpp"
#include "usrbio/include/hf3fs_usrbio.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

namespace gdrkit::usrbio {

namespace {

// A registered file. The table of registrations contains it twice: under the numbers of both descriptors.
struct Registration {
    int fd;           // The caller's descriptor.
    int duplicate_fd; // The library's duplicate of the descriptor. hf3fs_reg_fd returns -duplicate_fd.
    std::uint64_t inode;
    std::shared_ptr<AgentConnection> agent; // Null: the file is in a FUSE mount of 3FS that has no agent.
};

struct Registrations {
    std::map<int, Registration> by_fd;
};

// Locked while a descriptor is registered or deregistered, also during the request to the agent. So no thread
// deregisters a file while another thread registers it.
struct RegistrationMutex {
    std::mutex mutex;
};

RegistrationMutex& registration_mutex() {
    static auto* instance = [] {
        auto* new_mutex = new RegistrationMutex;
        // A child gets a new mutex, because a thread that exists only in the parent may have locked the old one.
        add_fork_handler([] { new (&registration_mutex()) RegistrationMutex; });
        return new_mutex;
    }();
    return *instance;
}

Registrations& registrations() {
    static auto* table = new Registrations;
    return *table;
}

// Sets `agent` to the connection of a mount. Returns 0 or an errno. The caller found the mount by the agent's socket,
// so ENOENT means that the agent has ended meanwhile.
int find_agent(const std::string& mount, std::shared_ptr<AgentConnection>& agent) noexcept {
    const int error = -find_agent_connection(mount.c_str(), agent);
    return error == ENOENT ? EREMOTEIO : error;
}

int register_with_agent(AgentConnection& agent, int fd, std::uint64_t& inode) noexcept {
    const std::uint64_t flags = 0; // Reserved.
    const iovec payload{const_cast<std::uint64_t*>(&flags), sizeof(flags)};
    return -agent.call(AgentRequest::register_file, {&payload, 1}, {&fd, 1},
                       std::as_writable_bytes(std::span(&inode, 1)));
}

void deregister_with_agent(AgentConnection& agent, std::uint64_t inode) noexcept {
    const iovec payload{&inode, sizeof(inode)};
    agent.call(AgentRequest::deregister_file, {&payload, 1}, {}, {});
}

// Registers the file with the agent, and sets `registration.inode` and `registration.agent`. In a FUSE mount of 3FS
// without an agent, sets `registration.inode` to the inode of the file.
int register_file(int fd, Registration& registration) {
    std::string mount;
    if (find_agent_mount(fd, mount)) {
        if (const int error = find_agent(mount, registration.agent); error != 0) {
            return error;
        }
        return register_with_agent(*registration.agent, fd, registration.inode);
    }
    struct stat attributes {};
    if (!is_3fs_file(fd)) {
        return EBADF;
    }
    if (fstat(fd, &attributes) != 0) {
        return errno;
    }
    registration.inode = attributes.st_ino;
    return 0;
}

// Ends one registration. The agent counts the registrations of a file, and deregisters the file with the last one.
void deregister_file(const Registration& registration) noexcept {
    if (registration.agent != nullptr) {
        deregister_with_agent(*registration.agent, registration.inode);
    }
}

int add_registration(int fd, int duplicate_fd, FileAccess access, const Registration& registration) {
    const std::lock_guard lock(library_mutex());
    Registrations& table = registrations();
    if (table.by_fd.contains(fd) || table.by_fd.contains(duplicate_fd)) {
        return EINVAL;
    }
    const FileTable::File entry{registration.inode, access};
    table.by_fd[fd] = table.by_fd[duplicate_fd] = {fd, duplicate_fd, registration.inode, registration.agent};
    if (!file_table().set(fd, entry) || !file_table().set(duplicate_fd, entry)) {
        file_table().clear(fd);
        table.by_fd.erase(fd);
        table.by_fd.erase(duplicate_fd);
        return ENOMEM;
    }
    return 0;
}

// Duplicates `fd` to a number that no registration uses. If the application closed a registered descriptor, the kernel
// may return its number again, although the number is still registered. Returns -1 and sets errno on failure.
int duplicate_to_unused_number(int fd) {
    for (int fd_min = 0;;) {
        const int duplicate_fd = fcntl(fd, F_DUPFD_CLOEXEC, fd_min);
        if (duplicate_fd < 0) {
            return -1;
        }
        {
            const std::lock_guard lock(library_mutex());
            if (!registrations().by_fd.contains(duplicate_fd)) {
                return duplicate_fd;
            }
        }
        close(duplicate_fd);
        fd_min = duplicate_fd + 1;
    }
}

// Implements hf3fs_reg_fd. Returns the negated number of the duplicate, or a positive errno.
int register_descriptor(int fd) {
    const std::lock_guard registration_lock(registration_mutex().mutex);
    const int status_flags = fcntl(fd, F_GETFL);
    if (status_flags < 0) {
        return EBADF;
    }
    {
        const std::lock_guard lock(library_mutex());
        if (registrations().by_fd.contains(fd)) {
            return EINVAL;
        }
    }
    Registration registration{};
    if (const int error = register_file(fd, registration); error != 0) {
        return error;
    }
    Descriptor duplicate(duplicate_to_unused_number(fd));
    const int error = duplicate.get() < 0
                          ? errno
                          : add_registration(fd, duplicate.get(), get_file_access(status_flags), registration);
    if (error != 0) {
        deregister_file(registration);
        return error;
    }
    log_line(LogLevel::info, "registered descriptor %d: inode %llu, %s", fd,
             static_cast<unsigned long long>(registration.inode),
             registration.agent == nullptr ? "without an agent" : "by the agent");
    return -duplicate.release();
}

void deregister_descriptor(int fd) {
    const std::lock_guard registration_lock(registration_mutex().mutex);
    Registration registration{};
    {
        const std::lock_guard lock(library_mutex());
        Registrations& table = registrations();
        const auto entry = table.by_fd.find(fd);
        if (entry == table.by_fd.end()) {
            return;
        }
        registration = entry->second;
        for (const int descriptor : {registration.fd, registration.duplicate_fd}) {
            file_table().clear(descriptor);
            table.by_fd.erase(descriptor);
        }
    }
    deregister_file(registration);
    log_line(LogLevel::info, "deregistered descriptor %d: inode %llu", registration.fd,
             static_cast<unsigned long long>(registration.inode));
    close(registration.duplicate_fd);
}

int punch_holes_by_agent(AgentConnection& agent, int fd, std::uint64_t flags, int range_count, const std::size_t* begin,
                         const std::size_t* end) {
    struct {
        std::uint64_t flags;
        std::uint32_t count;
        std::uint32_t reserved;
    } request_head{flags, static_cast<std::uint32_t>(range_count), 0};
    std::vector<std::uint64_t> ranges;
    ranges.reserve(2 * static_cast<std::size_t>(range_count));
    for (int i = 0; i < range_count; ++i) {
        ranges.push_back(begin[i]);
        ranges.push_back(end[i]);
    }
    const iovec payload[] = {{&request_head, sizeof(request_head)}, {ranges.data(), ranges.size() * sizeof(ranges[0])}};
    return -agent.call(AgentRequest::punch_hole, payload, {&fd, 1}, {});
}

int punch_holes(int fd, int range_count, const std::size_t* begin, const std::size_t* end, std::size_t flags) {
    std::string mount;
    if (find_agent_mount(fd, mount)) {
        std::shared_ptr<AgentConnection> agent;
        const int error = find_agent(mount, agent);
        return error != 0 ? error : punch_holes_by_agent(*agent, fd, flags, range_count, begin, end);
    }
    const auto request = std::make_unique<FusePunchHole>();
    request->count = range_count;
    request->flags = flags;
    std::copy_n(begin, range_count, request->begin);
    std::copy_n(end, range_count, request->end);
    return ioctl(fd, fuse_punch_hole, request.get()) == 0 ? 0 : errno;
}

int link_by_ioctl(const char* target_path, int folder_fd, const std::string& name) {
    const Descriptor file(open(target_path, O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    struct stat attributes {};
    if (file.get() < 0 || fstat(folder_fd, &attributes) != 0) {
        return errno;
    }
    FuseHardLink request{};
    if (name.size() >= sizeof(request.name)) {
        return ENAMETOOLONG;
    }
    request.folder_inode = attributes.st_ino;
    std::memcpy(request.name, name.data(), name.size());
    return ioctl(file.get(), fuse_hard_link, &request) == 0 ? 0 : errno;
}

int link_by_agent(AgentConnection& agent, int file_fd, int folder_fd, const std::string& name) {
    auto length = static_cast<std::uint16_t>(name.size());
    const iovec payload[] = {{&length, sizeof(length)}, {const_cast<char*>(name.data()), name.size()}};
    const int descriptors[] = {file_fd, folder_fd};
    return -agent.call(AgentRequest::hard_link, payload, descriptors, {});
}

// Creates the link `link_path` to the file `target_path`: by the agent, or by an ioctl in a FUSE mount of 3FS.
int hard_link(const char* target_path, const std::string& link_path) {
    const std::size_t slash_index = link_path.rfind('/');
    const std::string name = slash_index == std::string::npos ? link_path : link_path.substr(slash_index + 1);
    const std::string folder_path = slash_index == std::string::npos ? "." : link_path.substr(0, slash_index + 1);
    if (name.empty() || name == "." || name == "..") {
        return EINVAL;
    }
    if (name.size() > NAME_MAX) {
        return ENAMETOOLONG;
    }
    const Descriptor folder(open(folder_path.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
    if (folder.get() < 0) {
        return errno;
    }
    const Descriptor file(open(target_path, O_PATH | O_CLOEXEC | O_NOFOLLOW));
    if (file.get() < 0) {
        return errno;
    }
    std::string file_mount;
    std::string folder_mount;
    const bool file_has_agent = find_agent_mount(file.get(), file_mount);
    const bool folder_has_agent = find_agent_mount(folder.get(), folder_mount);
    if (file_has_agent != folder_has_agent || file_mount != folder_mount) {
        return EXDEV;
    }
    if (!file_has_agent) {
        return link_by_ioctl(target_path, folder.get(), name);
    }
    std::shared_ptr<AgentConnection> agent;
    const int error = find_agent(file_mount, agent);
    return error != 0 ? error : link_by_agent(*agent, file.get(), folder.get(), name);
}

} // namespace

} // namespace gdrkit::usrbio

using namespace gdrkit::usrbio;

extern "C" {

int hf3fs_reg_fd(int fd, uint64_t /*flags*/) {
    if (fd < 0) {
        return EBADF;
    }
    try {
        return register_descriptor(fd);
    } catch (const std::bad_alloc&) {
        return ENOMEM;
    }
}

void hf3fs_dereg_fd(int fd) {
    // A negative `fd` is a result of hf3fs_reg_fd, which returns the negated number of the duplicate. -INT_MIN would
    // overflow.
    if (fd != INT_MIN) {
        deregister_descriptor(fd < 0 ? -fd : fd);
    }
}

int hf3fs_punchhole(int fd, int n, const size_t* start, const size_t* end, size_t flags) {
    if (n < 1 || n > static_cast<int>(punch_hole_ranges_max) || start == nullptr || end == nullptr || flags != 0) {
        return EINVAL;
    }
    for (int i = 0; i < n; ++i) {
        if (end[i] < start[i]) {
            return EINVAL;
        }
    }
    const int status_flags = fcntl(fd, F_GETFL);
    if (status_flags < 0 || (status_flags & O_ACCMODE) == O_RDONLY) {
        return EBADF;
    }
    try {
        return punch_holes(fd, n, start, end, flags);
    } catch (const std::bad_alloc&) {
        return ENOMEM;
    }
}

int hf3fs_hardlink(const char* target, const char* link_name) {
    if (target == nullptr || link_name == nullptr) {
        return EINVAL;
    }
    try {
        return hard_link(target, link_name);
    } catch (const std::bad_alloc&) {
        return ENOMEM;
    }
}

} // extern "C"
