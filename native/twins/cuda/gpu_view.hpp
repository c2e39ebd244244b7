// The view that a GPU has of its memory: a second copy of the bytes. Memory has a view only if the attribute
// GPU_DIRECT_RDMA_WRITES_ORDERING of the GPU says that the GPU sees the writes of a NIC only after a flush. A NIC
// writes to the memory, and the work of a stream reads the view. A flush (cuFlushGPUDirectRDMAWrites) copies the memory
// to the view. So a program that forgets the flush always reads old data.
//
// Only the process that allocated the memory has a view of it. A process that imports the memory reads it directly.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>

namespace gdrkit::twin::cuda {

class GpuView {
public:
    // Make the view of new memory if GPUs need flushes. The memory and its view contain only zeros at first.
    GpuView(std::byte* memory, std::uint64_t length_bytes);
    GpuView(const GpuView&) = delete;
    GpuView& operator=(const GpuView&) = delete;
    ~GpuView();

    // Return the byte of the view for this byte of the memory, or nullptr if there is no view.
    [[nodiscard]] std::byte* at(const std::byte* byte) const {
        return view_ == nullptr ? nullptr : view_ + (byte - memory_);
    }

private:
    friend void flush_remote_writes();
    std::byte* memory_;
    std::uint64_t length_bytes_;
    std::byte* view_ = nullptr;
};

// Bytes of memory that a copy or memset of the GPU writes, and the address of the same bytes in the view.
struct ViewedBytes {
    std::span<std::byte> bytes;
    std::byte* view;
};

// Lock all views and return the lock, which is empty if the GPUs have no views. A copy, memset or flush holds the lock
// while it uses the views.
std::unique_lock<std::mutex> lock_views();

// Copy bytes that the GPU has just written to memory, from the memory to the view.
void update_view(const ViewedBytes& written_bytes);

// Copy all memory that has a view to its view, so that the GPU sees the bytes that NICs have written.
void flush_remote_writes();

} // namespace gdrkit::twin::cuda
