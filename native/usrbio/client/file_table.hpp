// The registered files: what hf3fs_prep_io looks up by a descriptor's number. Looking up takes no lock and follows no
// pointer that could be freed meanwhile.
#pragma once

#include <fcntl.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace gdrkit::usrbio {

enum class FileAccess : std::uint32_t { none = 0, read = 1, write = 2, both = 3 };

constexpr FileAccess access_of(int status_flags) noexcept {
    switch (status_flags & O_ACCMODE) {
    case O_RDONLY:
        return FileAccess::read;
    case O_WRONLY:
        return FileAccess::write;
    case O_RDWR:
        return FileAccess::both;
    default:
        return FileAccess::none;
    }
}

class FileTable {
public:
    struct File {
        std::uint64_t inode;
        FileAccess access;
    };

    // false: none is registered under that number, which is 0 or above.
    bool find(int number, File& file) const noexcept {
        const Page* page = pages_[static_cast<unsigned>(number) / page_entries].load(std::memory_order_acquire);
        if (page == nullptr) {
            return false;
        }
        const Entry& entry = page->entries[static_cast<unsigned>(number) % page_entries];
        for (;;) {
            const std::uint32_t before = entry.state.load(std::memory_order_acquire);
            if ((before & registered) == 0) {
                return false;
            }
            file.inode = entry.inode.load(std::memory_order_acquire);
            file.access = static_cast<FileAccess>(before & access_mask);
            // The same generation before and after: the inode belongs to it.
            if (entry.state.load(std::memory_order_relaxed) == before) {
                return true;
            }
        }
    }

    // One writer at a time. false: no memory.
    bool set(int number, const File& file) noexcept;
    void clear(int number) noexcept;

private:
    static constexpr std::uint32_t access_mask = 3;
    static constexpr std::uint32_t registered = 4;
    static constexpr std::uint32_t generation = 8;
    struct Entry {
        std::atomic<std::uint64_t> inode{0};
        std::atomic<std::uint32_t> state{0};
    };
    static constexpr std::size_t page_entries = 4096;
    struct Page {
        std::array<Entry, page_entries> entries;
    };
    static constexpr std::size_t numbers = std::size_t{1} << 31;
    // Zero pages of the binary until somebody has that many descriptors.
    std::array<std::atomic<Page*>, numbers / page_entries> pages_{};
};

extern constinit FileTable the_file_table;
inline FileTable& file_table() noexcept {
    return the_file_table;
}

} // namespace gdrkit::usrbio
