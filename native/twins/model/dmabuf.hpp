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
// Return whether `fd` is such a memfd. Its size is sealed, so no process can truncate it under a mapping.
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

// Export like export_dmabuf, but always as a separate descriptor memfd, and store the `id` under which is_dmabuf_alive
// finds it.
int export_tracked_dmabuf(std::span<const Extent> extents, std::uint64_t* id);
// Return whether any process still has a descriptor of that dma-buf open or has imported it.
bool is_dmabuf_alive(std::uint64_t id);

// Export the memory as a shareable CUDA VMM handle. Its memfd is named gdrkit-vmm, so that it cannot be imported as a
// dma-buf.
int export_shareable(int memory_fd);
// Return a read-write descriptor of the memory behind a shareable handle; -EINVAL if `fd` is not a shareable handle,
// -EBADF if it is not open.
int import_shareable(int fd);

struct ImportedDmabuf {
    struct OwnedExtent {
        Fd fd; // read-write
        std::uint64_t offset_bytes = 0;
        std::uint64_t length_bytes = 0;
    };
    std::vector<OwnedExtent> extents;
    std::uint64_t length_bytes = 0;
    // The dma-buf itself. While it is open the exporter sees that the dma-buf is imported, as the kernel counts an
    // attachment.
    Fd attachment;
};

enum class DmabufOrigin { twin, kernel };

// Find out who exported a dma-buf, and its size. Return 0, -EBADF if `fd` is not open, or -EINVAL if it is not a
// dma-buf.
int identify_dmabuf(int fd, DmabufOrigin* origin, std::uint64_t* length_bytes);

// Import a dma-buf that a twin exported. Return 0, -EBADF or -EINVAL as above, or -ENODEV if the process that owns its
// extents is gone.
int import_dmabuf(int fd, ImportedDmabuf* imported);

// Map the extents as one contiguous read-write range of this process. Return nullptr and set errno on failure. The
// caller unmaps it by munmap(base, imported.length_bytes).
void* map_imported(const ImportedDmabuf& imported);

// Return whether a dma-buf, a shareable handle or an import of this memory exists in any process. `fd` is the
// descriptor of make_device_memory; that descriptor, its duplicates and their mappings do not count.
bool has_other_references(int fd);

} // namespace gdrkit::twin
