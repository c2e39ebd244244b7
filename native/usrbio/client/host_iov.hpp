// An iov in shared host memory, which contains data or a ring.
#pragma once

#include "usrbio/client/borrowed_publication.hpp"
#include "usrbio/client/iov_registry.hpp"
#include "usrbio/client/names.hpp"
#include "usrbio/client/shared_memory.hpp"

#include <string>

namespace gdrkit::usrbio {

class HostIov final : public IovBacking {
public:
    HostIov(bool created, std::string mount, std::string name);
    void unlink(hf3fs_iov& iov) noexcept override;
    bool destroy(hf3fs_iov& iov) noexcept override;

    SharedMemory memory;
    BorrowedPublication borrowed; // For an iov that was opened.

private:
    bool created_;
    int process_; // A forked child does not withdraw publications of its parent.
    std::string mount_;
    std::string name_; // Name of the publication.
};

bool is_valid_mount(const char* mount) noexcept;

// ring: null for data. Returns 0 or -errno as hf3fs_iovcreate and hf3fs_iorcreate say. The caller has checked the
// arguments.
int create_host_iov(hf3fs_iov& iov, const char* mount, std::size_t size, std::size_t block_size, int numa,
                    const RingAttributes* ring) noexcept;

} // namespace gdrkit::usrbio
