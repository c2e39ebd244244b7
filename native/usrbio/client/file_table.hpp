// The table of registered files, in which hf3fs_prep_io looks up a file by its descriptor. A look-up takes no lock, and
// follows no pointer that another thread could free.
#pragma once

#include <fcntl.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace gdrkit::usrbio {

enum class FileAccess : std::uint32_t { none = 0, read = 1, write = 2, both = 3 };

// Converts the flags of an open file, as fcntl(F_GETFL) returns them.
constexpr FileAccess get_file_access(int status_flags) noexcept {
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

    // Finds the file registered for the descriptor `fd`, which must be 0 or above. Returns false if there is none.
    bool find(int fd, File& file) const noexcept {
        const Page* page = pages_[static_cast<unsigned>(fd) / entries_per_page].load(std::memory_order_acquire);
        if (page == nullptr) {
            return false;
        }
        const Entry& entry = page->entries[static_cast<unsigned>(fd) % entries_per_page];
        for (;;) {
            const std::uint32_t state = entry.state.load(std::memory_order_acquire);
            if ((state & registered_bit) == 0) {
                return false;
            }
            file.inode = entry.inode.load(std::memory_order_acquire);
            file.access = static_cast<FileAccess>(state & access_mask);
            // If the state, which contains the generation, has not changed, the inode belongs to the same registration.
            if (entry.state.load(std::memory_order_relaxed) == state) {
                return true;
            }
        }
    }

    // Only one thread at a time may call set() and clear(). set() returns false if memory is exhausted.
    bool set(int fd, const File& file) noexcept;
    void clear(int fd) noexcept;

private:
    // Entry::state has the FileAccess (bits 0 and 1), the bit registered_bit, and the generation: the number of
    // registrations that the entry has had.
    static constexpr std::uint32_t access_mask = 3;
    static constexpr std::uint32_t registered_bit = 4;
    static constexpr std::uint32_t generation_step = 8; // The generation is in this bit and all higher bits.
    struct Entry {
        std::atomic<std::uint64_t> inode{0};
        std::atomic<std::uint32_t> state{0};
    };
    static constexpr std::size_t entries_per_page = 4096;
    struct Page {
        std::array<Entry, entries_per_page> entries;
    };
    static constexpr std::size_t descriptors_max = std::size_t{1} << 31;
    // Zero-initialized, so the unused parts of this array occupy no physical memory.
    std::array<std::atomic<Page*>, descriptors_max / entries_per_page> pages_{};
};

extern constinit FileTable global_file_table;
inline FileTable& file_table() noexcept {
    return global_file_table;
}

} // namespace gdrkit::usrbio
