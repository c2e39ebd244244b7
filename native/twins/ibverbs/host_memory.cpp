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

struct Pinned {
    std::mutex mutex;
    std::uint64_t bytes = 0;
};

Pinned& pinned() {
    static auto* const all = new Pinned;
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

bool may_lock_without_limit() {
    constexpr unsigned cap_ipc_lock = 14;
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
        if (line.starts_with("CapEff:")) {
            return ((std::strtoull(line.c_str() + 7, nullptr, 16) >> cap_ipc_lock) & 1) != 0;
        }
    }
    return false;
}

// Counts as the kernel does: by pages, for each region again. The limit may change while the process runs.
int account(std::uint64_t bytes) {
    Pinned& all = pinned();
    std::lock_guard lock(all.mutex);
    rlimit limit{};
    if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
        all.bytes + bytes > limit.rlim_cur && !may_lock_without_limit()) {
        return limit.rlim_cur == 0 ? EPERM : ENOMEM;
    }
    all.bytes += bytes;
    return 0;
}

void unaccount(std::uint64_t bytes) {
    Pinned& all = pinned();
    std::lock_guard lock(all.mutex);
    all.bytes -= bytes;
}

class HostMemory : public Memory {
public:
    HostMemory(void* address, std::uint64_t accounted_bytes)
        : address_(static_cast<std::byte*>(address)), accounted_bytes_(accounted_bytes) {}
    ~HostMemory() override { unaccount(accounted_bytes_); }

    int read(std::uint64_t offset, Bounce* bounce, std::size_t at, std::size_t size) override {
        return bounce->load(at, address_ + offset, size);
    }
    int write(std::uint64_t offset, const Bounce& bounce, std::size_t at, std::size_t size) override {
        return bounce.store(at, address_ + offset, size);
    }
    std::byte* mapped(std::uint64_t offset) override { return address_ + offset; }

private:
    std::byte* const address_;
    const std::uint64_t accounted_bytes_;
};

// The mapping keeps the pages alive after the exporter freed the memory and closed the dma-buf, as an attachment does.
class MappedDmabuf : public Memory {
public:
    MappedDmabuf(void* base, std::uint64_t mapped_bytes, std::uint64_t offset_bytes, Fd attachment)
        : base_(static_cast<std::byte*>(base)), mapped_bytes_(mapped_bytes), offset_bytes_(offset_bytes),
          attachment_(std::move(attachment)) {}
    ~MappedDmabuf() override { munmap(base_, mapped_bytes_); }

    int read(std::uint64_t offset, Bounce* bounce, std::size_t at, std::size_t size) override {
        bounce->load_mapped(at, base_ + offset_bytes_ + offset, size);
        return 0;
    }
    int write(std::uint64_t offset, const Bounce& bounce, std::size_t at, std::size_t size) override {
        bounce.store_mapped(at, base_ + offset_bytes_ + offset, size);
        return 0;
    }
    std::byte* mapped(std::uint64_t offset) override { return base_ + offset_bytes_ + offset; }

private:
    std::byte* const base_;
    const std::uint64_t mapped_bytes_;
    const std::uint64_t offset_bytes_;
    const Fd attachment_;
};

// Leaves only the pieces that hold a part of [*offset, *offset + length), and makes *offset count from the first of
// them.
void keep_overlapping(Imported* imported, std::uint64_t* offset_bytes, std::uint64_t length_bytes) {
    Imported kept;
    std::uint64_t begin = 0;
    std::uint64_t skipped = 0;
    for (Imported::Piece& piece : imported->pieces) {
        const std::uint64_t end = begin + piece.length_bytes;
        if (end <= *offset_bytes) {
            skipped = end;
        } else if (begin < *offset_bytes + length_bytes) {
            kept.length_bytes += piece.length_bytes;
            kept.pieces.push_back(std::move(piece));
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
    if (const int error = account(bytes); error != 0) {
        return error;
    }
    auto made = std::make_unique<HostMemory>(address, bytes);
    if (const int error = check_mapped(pages.begin, pages.end, writable); error != 0) {
        return error;
    }
    *memory = std::move(made);
    return 0;
}

int make_mapped_dmabuf(int fd, std::uint64_t offset_bytes, std::uint64_t length_bytes,
                       std::unique_ptr<Memory>* memory) {
    Imported imported;
    if (const int error = import_dmabuf(fd, &imported); error != 0) {
        return -error;
    }
    if (offset_bytes > imported.length_bytes || length_bytes > imported.length_bytes - offset_bytes) {
        return EINVAL;
    }
    Fd attachment = std::move(imported.attachment);
    keep_overlapping(&imported, &offset_bytes, length_bytes);
    void* const base = map_imported(imported);
    if (base == nullptr) {
        return errno;
    }
    *memory = std::make_unique<MappedDmabuf>(base, imported.length_bytes, offset_bytes, std::move(attachment));
    return 0;
}

} // namespace gdrkit::twin::verbs
