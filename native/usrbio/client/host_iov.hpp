// HostIov: the memory and the publication of an iov in shared host memory. The memory contains data or a ring.
#pragma once

#include "usrbio/client/borrowed_publication.hpp"
#include "usrbio/client/iov_registry.hpp"
#include "usrbio/client/names.hpp"
#include "usrbio/client/shared_memory.hpp"

#include <memory>
#include <string>

namespace gdrkit::usrbio {

class HostIov final : public IovBacking {
public:
    // `is_creator`: this process creates the memory and publishes it as `link_name`. Otherwise this process opens the
    // publication `link_name` of another process.
    HostIov(bool is_creator, std::string mount, std::string link_name);
    void unlink(hf3fs_iov& iov) noexcept override;
    bool destroy(hf3fs_iov& iov) noexcept override;

    std::shared_ptr<SharedMemory> memory = std::make_shared<SharedMemory>();
    bool may_keep_memory = false; // True: when the iov ends, the pool may keep the memory for a later iov.
    int numa = -1;                // NUMA node of the memory; -1: any.
    // Used if another process published the memory and this process opened it.
    BorrowedPublication borrowed_publication;

private:
    bool is_creator_;
    int creator_pid_; // In a forked child, getpid() differs. A child must not withdraw the publication of its parent.
    std::string mount_;
    std::string link_name_; // Name of the publication: of its link in the mount.
};

// Returns whether the path is not empty and fits into hf3fs_iov::mount_point. Does not access the file system.
bool is_valid_mount(const char* mount) noexcept;

// Creates shared memory and publishes it. `ring_attributes` is null if the memory is for data, not for a ring. Returns
// 0 or -errno as hf3fs_usrbio.h documents for hf3fs_iovcreate and hf3fs_iorcreate. Does not check its arguments.
int create_host_iov(hf3fs_iov& iov, const char* mount, std::size_t size, std::size_t block_size, int numa,
                    const RingAttributes* ring_attributes) noexcept;

} // namespace gdrkit::usrbio
