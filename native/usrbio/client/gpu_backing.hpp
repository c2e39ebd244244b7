// One GPU iov of this process: its memory, what it published, and how both end.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "usrbio/client/borrowing.hpp"
#include "usrbio/client/gpu_memory.hpp"
#include "usrbio/client/iov_registry.hpp"
#include "usrbio/include/hf3fs_usrbio_gdr.h"

namespace gdrkit::usrbio {

class GpuIov final : public IovBacking {
public:
    // What its end gives back. What is published is another question.
    enum class Memory { allocated, wrapped, opened };

    GpuIov(const cuda::Driver& driver, int device);
    GpuIov(const GpuIov&) = delete;
    GpuIov& operator=(const GpuIov&) = delete;
    ~GpuIov() override; // Gives the memory back, if that was not done.

    void unlink(hf3fs_iov& iov) noexcept override;
    bool destroy(hf3fs_iov& iov) noexcept override;

    // Made in this process, and not before a fork: a child has neither the driver nor the right to remove anything.
    [[nodiscard]] bool is_of_this_process() const noexcept;

    const cuda::Driver& driver;
    const int device;
    PrimaryContext primary;
    cuda::Context context = nullptr; // In which the memory is.
    Memory memory = Memory::wrapped;
    cuda::DevicePointer base = 0;    // Of the allocation or mapping that is given back at the end.
    cuda::DevicePointer pointer = 0; // The first byte of the iov.
    std::size_t size_bytes = 0;
    Allocation allocation;       // In which the first byte is.
    std::optional<IpcBytes> ipc; // Of `allocation`, where this kind of memory has one.
    std::string mount;
    Borrowing borrowing;   // Of what another process published.
    std::string published; // The name of its link; empty: there is none, or no longer.

private:
    int unpublish() noexcept;       // 0 too when there is no publication.
    void release_memory() noexcept; // It is nobody's afterwards, whatever the driver says.

    std::mutex ending_; // Held while it is unlinked or destroyed.
    pid_t process_;
};

// Null: the struct is none of a GPU iov, or of one that was destroyed, or this is a child that was forked since.
std::shared_ptr<GpuIov> find_gpu_iov(const hf3fs_iov* iov) noexcept;

} // namespace gdrkit::usrbio
