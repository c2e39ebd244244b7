// The view that a GPU has of its memory. Memory has a view only if the attribute GPU_DIRECT_RDMA_WRITES_ORDERING of the
// GPU says that writes of a NIC need a flush. A NIC writes to the memory. The work of a stream reads the view, into
// which a flush copies the bytes of the NIC. So a program without the flush always reads old data.
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
    // Make the view of new memory if GPUs need flushes. Both contain only zeros at first.
    GpuView(std::byte* memory, std::uint64_t length_bytes);
    GpuView(const GpuView&) = delete;
    GpuView& operator=(const GpuView&) = delete;
    ~GpuView();

    // Return the byte of the view for this byte of the memory, or nullptr if there is no view.
    [[nodiscard]] std::byte* at(const std::byte* byte) const {
        return bytes_ == nullptr ? nullptr : bytes_ + (byte - memory_);
    }

private:
    friend void flush_remote_writes();
    std::byte* memory_;
    std::uint64_t length_bytes_;
    std::byte* bytes_ = nullptr;
};

// Bytes of memory that the GPU writes, and the same bytes of its view.
struct ViewedBytes {
    std::span<std::byte> bytes;
    std::byte* view;
};

// Lock all views, if there are any, while a copy reads or changes them.
std::unique_lock<std::mutex> lock_views();

// Copy bytes that the GPU has just written to its view.
void update_view(const ViewedBytes& written);

// Copy the content of all memory, with the bytes that NICs have written, to the views.
void flush_remote_writes();

} // namespace gdrkit::twin::cuda
