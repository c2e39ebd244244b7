// The twins' dma-buf: functions that export device memory as a file descriptor, and functions that import such a
// descriptor and map the memory behind it. The CUDA and hl-thunk twins export, the verbs twin imports.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "model/sockets.hpp"

namespace gdrkit::twin {

// Create device memory: a memfd named gdrkit-gpu:<16 hex digits>, read-write, close-on-exec, with a sealed size. Return
// its descriptor or -errno.
int make_device_memory(std::uint64_t length_bytes);
// Return whether `fd` is a memfd that make_device_memory created. The size of such a memfd is sealed, so that no
// process can truncate mapped memory.
bool is_device_memory(int fd);

// A contiguous part of a device memory memfd. `fd` is borrowed, not owned.
struct Extent {
    int fd = -1;
    std::uint64_t offset_bytes = 0;
    std::uint64_t length_bytes = 0;
};

// Export the extents, in this order, as one dma-buf. Return a write-only, close-on-exec descriptor that the caller
// owns, or -errno.
int export_dmabuf(std::span<const Extent> extents);

// Export like export_dmabuf, but always create a placeholder for the dma-buf (a second memfd), and store the `id`
// that is_dmabuf_alive needs.
int export_tracked_dmabuf(std::span<const Extent> extents, std::uint64_t* id);
// Return whether any process still has a descriptor of the dma-buf `id` open or has imported it.
bool is_dmabuf_alive(std::uint64_t id);

// Export the memory as a shareable handle of CUDA's virtual memory management. The handle is a memfd named gdrkit-vmm,
// so that import_dmabuf refuses it.
int export_shareable_handle(int memory_fd);
// Return a read-write descriptor of the memory of a shareable handle. Return -EINVAL if `fd` is not a shareable handle,
// and -EBADF if `fd` is not open.
int import_shareable_handle(int fd);

struct ImportedDmabuf {
    struct OwnedExtent {
        Fd fd; // read-write
        std::uint64_t offset_bytes = 0;
        std::uint64_t length_bytes = 0;
    };
    std::vector<OwnedExtent> extents;
    std::uint64_t length_bytes = 0;
    // A descriptor of the dma-buf, which shows the exporter that the dma-buf is imported. The kernel counts attachments
    // for the same purpose.
    Fd attachment;
};

enum class DmabufOrigin { twin, kernel };

// Determine whether a twin or the kernel exported a dma-buf, and its size. Return 0, -EBADF if `fd` is not open, or
// -EINVAL if it is not a dma-buf.
int identify_dmabuf(int fd, DmabufOrigin* origin, std::uint64_t* length_bytes);

// Import a dma-buf that a twin exported. Return 0, an error of identify_dmabuf, -EINVAL for a dma-buf of the kernel, or
// -ENODEV if the exporting process is gone.
int import_dmabuf(int fd, ImportedDmabuf* imported);

// Map the extents as one contiguous read-write range of this process. Return nullptr and set errno on failure. The
// caller unmaps the range by munmap(base, imported.length_bytes).
void* map_imported_dmabuf(const ImportedDmabuf& imported);

// Return whether a dma-buf, a shareable handle or an import of this memory exists in any process. `fd` is the
// descriptor of make_device_memory; that descriptor, its duplicates and their mappings do not count.
bool has_other_references(int fd);

} // namespace gdrkit::twin
