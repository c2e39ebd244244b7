// Memory of a region that the twin accesses directly: host memory, which counts against RLIMIT_MEMLOCK, and dma-bufs
// that twins have exported, which this twin maps.

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <string>
#include <string_view>

#include "ibverbs/memory.hpp"
#include "model/dmabuf.hpp"
#include "model/host_pages.hpp"

namespace gdrkit::twin::verbs {
namespace {

// The memory of this process that a kernel driver would have pinned.
struct LockedMemory {
    std::mutex mutex;
    std::uint64_t total_bytes = 0;
};

LockedMemory& locked_memory() {
    static auto* const instance = new LockedMemory;
    return *instance;
}

std::uint64_t page_bytes() {
    static const auto size_bytes = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
    return size_bytes;
}

struct PageRange {
    std::uint64_t begin, end; // addresses
};

PageRange get_pages(const void* address, std::uint64_t length_bytes) {
    const auto first_address = reinterpret_cast<std::uint64_t>(address);
    const std::uint64_t page_mask = page_bytes() - 1;
    return {first_address & ~page_mask, (first_address + length_bytes + page_mask) & ~page_mask};
}

bool has_cap_ipc_lock() {
    constexpr unsigned cap_ipc_lock = 14; // the bit of CAP_IPC_LOCK in the mask of effective capabilities (CapEff)
    std::ifstream status_file("/proc/self/status");
    constexpr std::string_view label = "CapEff:";
    for (std::string line; std::getline(status_file, line);) {
        if (line.starts_with(label)) {
            return ((std::strtoull(line.c_str() + label.size(), nullptr, 16) >> cap_ipc_lock) & 1) != 0;
        }
    }
    return false;
}

// Add bytes to the locked memory. If the sum exceeds RLIMIT_MEMLOCK, return ENOMEM, or EPERM if the limit is 0. Like
// the kernel, count a page once for each region that contains it. The limit is read at each call because it may change
// while the process runs.
int charge_locked_bytes(std::uint64_t bytes) {
    LockedMemory& locked = locked_memory();
    std::lock_guard lock(locked.mutex);
    rlimit limit{};
    if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
        locked.total_bytes + bytes > limit.rlim_cur && !has_cap_ipc_lock()) {
        return limit.rlim_cur == 0 ? EPERM : ENOMEM;
    }
    locked.total_bytes += bytes;
    return 0;
}

void uncharge_locked_bytes(std::uint64_t bytes) {
    LockedMemory& locked = locked_memory();
    std::lock_guard lock(locked.mutex);
    locked.total_bytes -= bytes;
}

// Memory that the program has allocated in this process.
class HostMemory : public Memory {
public:
    HostMemory(void* address, std::uint64_t locked_bytes)
        : address_(static_cast<std::byte*>(address)), locked_bytes_(locked_bytes) {}
    ~HostMemory() override { uncharge_locked_bytes(locked_bytes_); }

    int read(std::uint64_t offset, BounceBuffer* bounce, std::size_t bounce_offset, std::size_t size_bytes) override {
        return bounce->copy_in(bounce_offset, address_ + offset, size_bytes);
    }
    int write(std::uint64_t offset, const BounceBuffer& bounce, std::size_t bounce_offset,
              std::size_t size_bytes) override {
        return bounce.copy_out(bounce_offset, address_ + offset, size_bytes);
    }
    std::byte* mapped_address(std::uint64_t offset) override { return address_ + offset; }

private:
    std::byte* const address_;
    const std::uint64_t locked_bytes_;
};

// A mapped dma-buf. Like the attachment of a real device, the mapping keeps the pages alive after the exporter has
// freed the memory and closed the dma-buf.
class MappedDmabuf : public Memory {
public:
    MappedDmabuf(void* base, std::uint64_t mapped_bytes, std::uint64_t offset_bytes, Fd attachment)
        : base_(static_cast<std::byte*>(base)), mapped_bytes_(mapped_bytes), offset_bytes_(offset_bytes),
          attachment_(std::move(attachment)) {}
    ~MappedDmabuf() override { munmap(base_, mapped_bytes_); }

    int read(std::uint64_t offset, BounceBuffer* bounce, std::size_t bounce_offset, std::size_t size_bytes) override {
        bounce->copy_in_mapped(bounce_offset, base_ + offset_bytes_ + offset, size_bytes);
        return 0;
    }
    int write(std::uint64_t offset, const BounceBuffer& bounce, std::size_t bounce_offset,
              std::size_t size_bytes) override {
        bounce.copy_out_mapped(bounce_offset, base_ + offset_bytes_ + offset, size_bytes);
        return 0;
    }
    std::byte* mapped_address(std::uint64_t offset) override { return base_ + offset_bytes_ + offset; }

private:
    std::byte* const base_;
    const std::uint64_t mapped_bytes_;
    const std::uint64_t offset_bytes_; // where the region begins in the mapping
    const Fd attachment_;
};

// Keep only the extents that overlap [*offset_bytes, *offset_bytes + length_bytes), and make *offset_bytes relative to
// the first of them.
void trim_to_range(ImportedDmabuf* imported, std::uint64_t* offset_bytes, std::uint64_t length_bytes) {
    ImportedDmabuf overlapping_part;
    std::uint64_t begin = 0;
    std::uint64_t skipped_bytes = 0;
    for (ImportedDmabuf::OwnedExtent& extent : imported->extents) {
        const std::uint64_t end = begin + extent.length_bytes;
        if (end <= *offset_bytes) {
            skipped_bytes = end;
        } else if (begin < *offset_bytes + length_bytes) {
            overlapping_part.length_bytes += extent.length_bytes;
            overlapping_part.extents.push_back(std::move(extent));
        }
        begin = end;
    }
    *offset_bytes -= skipped_bytes;
    *imported = std::move(overlapping_part);
}

} // namespace

int make_host_memory(void* address, std::uint64_t length_bytes, bool must_be_writable,
                     std::unique_ptr<Memory>* memory) {
    const PageRange pages = get_pages(address, length_bytes);
    const std::uint64_t locked_bytes = pages.end - pages.begin;
    if (const int error = charge_locked_bytes(locked_bytes); error != 0) {
        return error;
    }
    // If the next check fails, the destructor of `host_memory` uncharges the bytes.
    auto host_memory = std::make_unique<HostMemory>(address, locked_bytes);
    if (const int error = check_mapped(pages.begin, pages.end, must_be_writable); error != 0) {
        return error;
    }
    *memory = std::move(host_memory);
    return 0;
}

int make_mapped_dmabuf(int fd, std::uint64_t offset_bytes, std::uint64_t length_bytes,
                       std::unique_ptr<Memory>* memory) {
    ImportedDmabuf imported;
    if (const int error = import_dmabuf(fd, &imported); error != 0) {
        return -error;
    }
    if (offset_bytes > imported.length_bytes || length_bytes > imported.length_bytes - offset_bytes) {
        return EINVAL;
    }
    Fd attachment = std::move(imported.attachment);
    trim_to_range(&imported, &offset_bytes, length_bytes);
    void* const base = map_imported_dmabuf(imported);
    if (base == nullptr) {
        return errno;
    }
    *memory = std::make_unique<MappedDmabuf>(base, imported.length_bytes, offset_bytes, std::move(attachment));
    return 0;
}

} // namespace gdrkit::twin::verbs
