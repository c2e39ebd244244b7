// Changes of the table of registered files. Look-ups are inline in the header.
#include "usrbio/client/file_table.hpp"

#include <new>

namespace gdrkit::usrbio {

constinit FileTable global_file_table;

bool FileTable::set(int fd, const File& file) noexcept {
    std::atomic<Page*>& page_pointer = pages_[static_cast<unsigned>(fd) / entries_per_page];
    Page* page = page_pointer.load(std::memory_order_acquire);
    if (page == nullptr) {
        page = new (std::nothrow) Page; // Never freed, because another thread may read the page at any time.
        if (page == nullptr) {
            return false;
        }
        page_pointer.store(page, std::memory_order_release);
    }
    Entry& entry = page->entries[static_cast<unsigned>(fd) % entries_per_page];
    const std::uint32_t next_generation =
        (entry.state.load(std::memory_order_relaxed) & ~(generation_step - 1)) + generation_step;
    entry.inode.store(file.inode, std::memory_order_release);
    entry.state.store(next_generation | registered_bit | static_cast<std::uint32_t>(file.access),
                      std::memory_order_release);
    return true;
}

void FileTable::clear(int fd) noexcept {
    Page* page = pages_[static_cast<unsigned>(fd) / entries_per_page].load(std::memory_order_acquire);
    if (page != nullptr) {
        Entry& entry = page->entries[static_cast<unsigned>(fd) % entries_per_page];
        const std::uint32_t state = entry.state.load(std::memory_order_relaxed);
        entry.state.store(state & ~(generation_step - 1), std::memory_order_release);
    }
}

} // namespace gdrkit::usrbio
