// Creates, opens and maps POSIX shared memory, with or without a name, and binds it to a NUMA node.
#include "usrbio/client/shared_memory.hpp"

#include "common/errno_text.hpp"
#include "usrbio/client/library_mutex.hpp"
#include "usrbio/client/log.hpp"
#include "usrbio/client/names.hpp"

#include <fcntl.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>

namespace gdrkit::usrbio {

void bind_to_numa_node(void* memory, std::size_t bytes, int numa) noexcept {
    if (numa < 0) {
        return;
    }
    // Make the system call directly, because libnuma would be a dependency for this line only.
    constexpr std::size_t nodes_max = 1024;
    constexpr std::size_t word_bits = 8 * sizeof(unsigned long);
    std::array<unsigned long, nodes_max / word_bits> node_mask{};
    const auto node = static_cast<std::size_t>(numa);
    const auto page_bytes = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto first_page_address = reinterpret_cast<std::uintptr_t>(memory) & ~(page_bytes - 1);
    const std::size_t length = reinterpret_cast<std::uintptr_t>(memory) + bytes - first_page_address;
    errno = EINVAL; // The error to log if the mask has no bit for `node`.
    if (node < nodes_max) {
        node_mask[node / word_bits] = 1UL << node % word_bits;
    }
    // The kernel reads one bit less than its argument maxnode.
    if (node >= nodes_max ||
        syscall(SYS_mbind, first_page_address, length, MPOL_BIND, node_mask.data(), nodes_max + 1, 0U) != 0) {
        log_line(LogLevel::warning, "mbind() to NUMA node %d failed: %s", numa, ErrnoText(errno).c_str());
    }
}

SharedMemory::~SharedMemory() {
    remove_name();
    if (base_ != nullptr) {
        munmap(base_, bytes_);
    }
}

void SharedMemory::remove_name() noexcept {
    if (!name_.empty() && creator_pid_ == getpid()) {
        shm_unlink(name_.c_str());
    }
    name_.clear();
}

Descriptor SharedMemory::reopen() const noexcept {
    return Descriptor(name_.empty() ? -1 : shm_open(name_.c_str(), O_RDWR, 0));
}

bool SharedMemory::make_writable() noexcept {
    return mprotect(base_, bytes_, PROT_READ | PROT_WRITE) == 0;
}

bool SharedMemory::may_be_mapped_by_child() const noexcept {
    return fork_count_ != fork_count();
}

int SharedMemory::map(int fd, std::size_t bytes, int numa) noexcept {
    fork_count_ = fork_count();
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) {
        return -errno;
    }
    base_ = static_cast<std::uint8_t*>(memory);
    bytes_ = bytes;
    bind_to_numa_node(memory, bytes, numa);
    return 0;
}

int SharedMemory::create(std::string name, std::size_t bytes, int numa) noexcept {
    const int fd = shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
    if (fd < 0) {
        return -errno;
    }
    name_ = std::move(name);
    creator_pid_ = getpid();
    const int status = allocate(fd, bytes, numa);
    close(fd);
    return status;
}

int SharedMemory::create_unnamed(std::string name, std::size_t bytes, int numa) noexcept {
    unnamed_descriptor_ = Descriptor(::open(shared_memory_folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
    if (unnamed_descriptor_.get() < 0) {
        return create(std::move(name), bytes, numa);
    }
    pending_name_ = std::move(name);
    return allocate(unnamed_descriptor_.get(), bytes, numa);
}

int SharedMemory::create_name() noexcept {
    char descriptor_path[32];
    std::snprintf(descriptor_path, sizeof(descriptor_path), "/proc/self/fd/%d", unnamed_descriptor_.get());
    const std::string path = shared_memory_folder + pending_name_;
    if (linkat(AT_FDCWD, descriptor_path, AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) != 0) {
        return -errno;
    }
    adopt_name();
    return 0;
}

void SharedMemory::adopt_name() noexcept {
    struct stat attributes {};
    if (fstat(unnamed_descriptor_.get(), &attributes) == 0 && attributes.st_nlink != 0) {
        name_ = std::move(pending_name_);
        creator_pid_ = getpid();
    }
    unnamed_descriptor_ = Descriptor();
}

int SharedMemory::allocate(int fd, std::size_t bytes, int numa) noexcept {
    int status = bytes > PTRDIFF_MAX ? -ENOMEM : 0;
    if (status == 0 && ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
        status = -errno;
    }
    if (status == 0) {
        status = map(fd, bytes, numa);
    }
    // Allocate the pages after map() has bound the memory to the NUMA node.
    if (status == 0) {
        status = -posix_fallocate(fd, 0, static_cast<off_t>(bytes));
    }
    return status;
}

int SharedMemory::open(const std::string& name, std::size_t bytes, int numa) noexcept {
    const int fd = shm_open(name.c_str(), O_RDWR, 0);
    if (fd < 0) {
        return -errno;
    }
    struct stat attributes {};
    int status = fstat(fd, &attributes) != 0 ? -errno : 0;
    if (status == 0 && (attributes.st_size < 0 || static_cast<std::size_t>(attributes.st_size) < bytes)) {
        status = -EIO;
    }
    if (status == 0) {
        status = map(fd, bytes, numa);
    }
    close(fd);
    return status;
}

} // namespace gdrkit::usrbio
