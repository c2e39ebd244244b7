// The dma-buf of the twins: what an exporter hands out, and how an importer finds the memory behind it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "model/rendezvous.hpp"

namespace gdrkit::twin {

// A new piece of device memory: a memfd named gdrkit-gpu:<16 hex digits>, read-write, close-on-exec, its size sealed.
// -errno.
int make_device_memory(std::uint64_t length_bytes);
// Whether the descriptor is of such memory; then nobody can shorten it under a mapping.
bool is_device_memory(int fd);

// A contiguous part of a memfd of device memory. `fd` is borrowed.
struct Extent {
    int fd = -1;
    std::uint64_t offset_bytes = 0;
    std::uint64_t length_bytes = 0;
};

// The dma-buf over these extents, in order: a write-only descriptor that the caller owns, close-on-exec. -errno.
int export_dmabuf(std::span<const Extent> extents);

// The same as a dma-buf of its own also where it is a whole memory, and `id`, by which its exporter can ask for it.
int export_tracked_dmabuf(std::span<const Extent> extents, std::uint64_t* id);
// Whether that dma-buf is alive: somebody, in whatever process, has a descriptor of it open or has imported it.
bool dmabuf_alive(std::uint64_t id);

// The same for a shareable VMM handle (named gdrkit-vmm, so that one is not mistaken for the other).
int export_shareable(int memory_fd);
// Read-write descriptor of the memory behind a shareable handle; -EINVAL when the fd is not one, -EBADF when it is not
// open.
int import_shareable(int fd);

struct Imported {
    struct Piece {
        Fd fd; // read-write
        std::uint64_t offset_bytes = 0;
        std::uint64_t length_bytes = 0;
    };
    std::vector<Piece> pieces;
    std::uint64_t length_bytes = 0;
    // The dma-buf itself: as long as this is open its exporter counts the import, as the kernel counts an attachment.
    Fd attachment;
};

enum class DmabufOrigin { twin, kernel };

// What kind of dma-buf the fd is: 0 and the origin and its size; -EBADF: not open; -EINVAL: not a dma-buf at all.
int identify_dmabuf(int fd, DmabufOrigin* origin, std::uint64_t* length_bytes);

// The memory behind a dma-buf of a twin. -EBADF, -EINVAL as above; -ENODEV when the owner of its extents is gone.
int import_dmabuf(int fd, Imported* imported);

// Maps the pieces as one contiguous read-write range of this process; nullptr and errno. Unmap with munmap(base,
// length).
void* map_imported(const Imported& imported);

// Whether anybody still holds this memory by way of a dma-buf, a shareable handle or an import of one, in this process
// or another. `fd` is the descriptor of make_device_memory; that one, its duplicates and mappings of them do not count.
bool held_elsewhere(int fd);

} // namespace gdrkit::twin
