// The table of registered files, in which hf3fs_prep_io finds a file by the number of its descriptor. A look-up takes
// no lock and follows no pointer that could be freed meanwhile.
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

    // Returns false if no file is registered under that number, which must be 0 or above.
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
            // The inode belongs to this generation, because it is the same before and after.
            if (entry.state.load(std::memory_order_relaxed) == before) {
                return true;
            }
        }
    }

    // Only one thread may write at a time. Returns false if memory is exhausted.
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
    static constexpr std::size_t descriptors_max = std::size_t{1} << 31;
    // These are zero pages of the binary until the process has that many descriptors.
    std::array<std::atomic<Page*>, descriptors_max / page_entries> pages_{};
};

extern constinit FileTable global_file_table;
inline FileTable& file_table() noexcept {
    return global_file_table;
}

} // namespace gdrkit::usrbio
