// A GPU iov of this process: its memory and its publication, and their end.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "usrbio/client/borrowed_publication.hpp"
#include "usrbio/client/gpu_memory.hpp"
#include "usrbio/client/iov_registry.hpp"
#include "usrbio/include/hf3fs_usrbio_gdr.h"

namespace gdrkit::usrbio {

class GpuIov final : public IovBacking {
public:
    // Origin of the memory, which decides how it is released. The publication is independent of it.
    enum class Memory { allocated, wrapped, opened };

    GpuIov(const cuda::Driver& driver, int device);
    GpuIov(const GpuIov&) = delete;
    GpuIov& operator=(const GpuIov&) = delete;
    ~GpuIov() override; // Releases the memory, if that was not done.

    void unlink(hf3fs_iov& iov) noexcept override;
    bool destroy(hf3fs_iov& iov) noexcept override;

    // False in a child that was forked since: a child can neither use the driver nor withdraw the publication.
    [[nodiscard]] bool belongs_to_this_process() const noexcept;

    const cuda::Driver& driver;
    const int device;
    PrimaryContext primary;
    cuda::Context context = nullptr; // The context that holds the memory.
    Memory memory = Memory::wrapped;
    cuda::DevicePointer base = 0;    // Base of the allocation or mapping that is released at the end.
    cuda::DevicePointer pointer = 0; // Address of the first byte of the iov.
    std::size_t size_bytes = 0;
    Allocation allocation;       // The allocation that contains the first byte.
    std::optional<IpcBytes> ipc; // IPC handle of `allocation`, if this type of memory has one.
    std::string mount;
    BorrowedPublication borrowed; // The publication of another process, for opened memory.
    std::string publication_name; // Name of its link; empty: it is not published.

private:
    int unpublish() noexcept;       // Returns 0 also if there is no publication.
    void release_memory() noexcept; // After it, this object does not own the memory, even if the driver failed.

    std::mutex end_mutex_; // Locked during unlink and destroy.
    pid_t process_;
};

// Returns null if the struct is not of a GPU iov, or of one that was destroyed, or if this is a child that was forked
// since.
std::shared_ptr<GpuIov> find_gpu_iov(const hf3fs_iov* iov) noexcept;

} // namespace gdrkit::usrbio
