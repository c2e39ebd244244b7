// Memory of a region that the twin can access directly: host memory, counted against RLIMIT_MEMLOCK, and dma-bufs of
// the twins, which it maps.

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <string>

#include "ibverbs/memory.hpp"
#include "model/dmabuf.hpp"
#include "model/host_pages.hpp"

namespace gdrkit::twin::verbs {
namespace {

struct LockedMemory {
    std::mutex mutex;
    std::uint64_t bytes = 0;
};

LockedMemory& locked_memory() {
    static auto* const all = new LockedMemory;
    return *all;
}

std::uint64_t page_bytes() {
    static const auto size = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
    return size;
}

struct Pages {
    std::uint64_t begin, end;
};

Pages pages_of(const void* address, std::uint64_t length_bytes) {
    const auto first = reinterpret_cast<std::uint64_t>(address);
    const std::uint64_t mask = page_bytes() - 1;
    return {first & ~mask, (first + length_bytes + mask) & ~mask};
}

bool has_cap_ipc_lock() {
    constexpr unsigned cap_ipc_lock = 14;
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
        if (line.starts_with("CapEff:")) {
            return ((std::strtoull(line.c_str() + 7, nullptr, 16) >> cap_ipc_lock) & 1) != 0;
        }
    }
    return false;
}

// Count the pages of every region again, as the kernel does. The limit is read each time because it may change while
// the process runs.
int charge_locked_bytes(std::uint64_t bytes) {
    LockedMemory& all = locked_memory();
    std::lock_guard lock(all.mutex);
    rlimit limit{};
    if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
        all.bytes + bytes > limit.rlim_cur && !has_cap_ipc_lock()) {
        return limit.rlim_cur == 0 ? EPERM : ENOMEM;
    }
    all.bytes += bytes;
    return 0;
}

void uncharge_locked_bytes(std::uint64_t bytes) {
    LockedMemory& all = locked_memory();
    std::lock_guard lock(all.mutex);
    all.bytes -= bytes;
}

class HostMemory : public Memory {
public:
    HostMemory(void* address, std::uint64_t locked_bytes)
        : address_(static_cast<std::byte*>(address)), locked_bytes_(locked_bytes) {}
    ~HostMemory() override { uncharge_locked_bytes(locked_bytes_); }

    int read(std::uint64_t offset, BounceBuffer* bounce, std::size_t at, std::size_t size) override {
        return bounce->copy_in(at, address_ + offset, size);
    }
    int write(std::uint64_t offset, const BounceBuffer& bounce, std::size_t at, std::size_t size) override {
        return bounce.copy_out(at, address_ + offset, size);
    }
    std::byte* mapped(std::uint64_t offset) override { return address_ + offset; }

private:
    std::byte* const address_;
    const std::uint64_t locked_bytes_;
};

// A mapped dma-buf. The mapping keeps the pages alive after the exporter has freed the memory and closed the dma-buf,
// as an attachment does.
class MappedDmabuf : public Memory {
public:
    MappedDmabuf(void* base, std::uint64_t mapped_bytes, std::uint64_t offset_bytes, Fd attachment)
        : base_(static_cast<std::byte*>(base)), mapped_bytes_(mapped_bytes), offset_bytes_(offset_bytes),
          attachment_(std::move(attachment)) {}
    ~MappedDmabuf() override { munmap(base_, mapped_bytes_); }

    int read(std::uint64_t offset, BounceBuffer* bounce, std::size_t at, std::size_t size) override {
        bounce->copy_in_mapped(at, base_ + offset_bytes_ + offset, size);
        return 0;
    }
    int write(std::uint64_t offset, const BounceBuffer& bounce, std::size_t at, std::size_t size) override {
        bounce.copy_out_mapped(at, base_ + offset_bytes_ + offset, size);
        return 0;
    }
    std::byte* mapped(std::uint64_t offset) override { return base_ + offset_bytes_ + offset; }

private:
    std::byte* const base_;
    const std::uint64_t mapped_bytes_;
    const std::uint64_t offset_bytes_;
    const Fd attachment_;
};

// Keep only the extents that overlap [*offset_bytes, *offset_bytes + length_bytes), and make *offset_bytes relative to
// the first of them.
void trim_to_range(ImportedDmabuf* imported, std::uint64_t* offset_bytes, std::uint64_t length_bytes) {
    ImportedDmabuf kept;
    std::uint64_t begin = 0;
    std::uint64_t skipped = 0;
    for (ImportedDmabuf::OwnedExtent& sge : imported->extents) {
        const std::uint64_t end = begin + sge.length_bytes;
        if (end <= *offset_bytes) {
            skipped = end;
        } else if (begin < *offset_bytes + length_bytes) {
            kept.length_bytes += sge.length_bytes;
            kept.extents.push_back(std::move(sge));
        }
        begin = end;
    }
    *offset_bytes -= skipped;
    *imported = std::move(kept);
}

} // namespace

int make_host_memory(void* address, std::uint64_t length_bytes, bool writable, std::unique_ptr<Memory>* memory) {
    const Pages pages = pages_of(address, length_bytes);
    const std::uint64_t bytes = pages.end - pages.begin;
    if (const int error = charge_locked_bytes(bytes); error != 0) {
        return error;
    }
    auto created = std::make_unique<HostMemory>(address, bytes);
    if (const int error = check_mapped(pages.begin, pages.end, writable); error != 0) {
        return error;
    }
    *memory = std::move(created);
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
    void* const base = map_imported(imported);
    if (base == nullptr) {
        return errno;
    }
    *memory = std::make_unique<MappedDmabuf>(base, imported.length_bytes, offset_bytes, std::move(attachment));
    return 0;
}

} // namespace gdrkit::twin::verbs
