#include "usrbio/client/file_table.hpp"

#include <new>

namespace gdrkit::usrbio {

constinit FileTable global_file_table;

bool FileTable::set(int number, const File& file) noexcept {
    std::atomic<Page*>& page_pointer = pages_[static_cast<unsigned>(number) / page_entries];
    Page* page = page_pointer.load(std::memory_order_acquire);
    if (page == nullptr) {
        page = new (std::nothrow) Page; // It is never freed: another thread may be reading it at any time.
        if (page == nullptr) {
            return false;
        }
        page_pointer.store(page, std::memory_order_release);
    }
    Entry& entry = page->entries[static_cast<unsigned>(number) % page_entries];
    const std::uint32_t next = (entry.state.load(std::memory_order_relaxed) & ~(generation - 1)) + generation;
    entry.inode.store(file.inode, std::memory_order_release);
    entry.state.store(next | registered | static_cast<std::uint32_t>(file.access), std::memory_order_release);
    return true;
}

void FileTable::clear(int number) noexcept {
    Page* page = pages_[static_cast<unsigned>(number) / page_entries].load(std::memory_order_acquire);
    if (page != nullptr) {
        Entry& entry = page->entries[static_cast<unsigned>(number) % page_entries];
        const std::uint32_t state = entry.state.load(std::memory_order_relaxed);
        entry.state.store(state & ~(generation - 1), std::memory_order_release);
    }
}

} // namespace gdrkit::usrbio
