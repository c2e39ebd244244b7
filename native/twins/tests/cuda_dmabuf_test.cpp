// dma-buf export: what goes out, what is refused, and what becomes of memory that is freed under a live dma-buf.
#include <sys/mman.h>

#include <cerrno>
#include <memory>

#include "cuda_driver.hpp"
#include "model/dmabuf.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::cuda;

namespace {

int export_range(u64 address, u64 length_bytes, int* fd, int type = range_handle_dmabuf, u64 flags = 0) {
    return cu("cuMemGetHandleForAddressRange", static_cast<void*>(fd), address, length_bytes, type, flags);
}

Fd exported(u64 address, u64 length_bytes) {
    int fd = -1;
    CHECK(export_range(address, length_bytes, &fd) == success);
    Fd owned(fd);
    CHECK(lseek(fd, 0, SEEK_END) == static_cast<off_t>(length_bytes));
    CHECK(mmap(nullptr, 4096, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED);
    return owned;
}

// What an importer (the verbs twin) sees behind the dma-buf.
class View {
public:
    explicit View(int fd) {
        CHECK(import_dmabuf(fd, &imported_) == 0);
        base_ = static_cast<unsigned char*>(map_imported(imported_));
        CHECK(base_ != nullptr);
    }
    View(const View&) = delete;
    View& operator=(const View&) = delete;
    ~View() { munmap(base_, imported_.length_bytes); }
    unsigned char& operator[](std::size_t at) { return base_[at]; }

private:
    Imported imported_;
    unsigned char* base_ = nullptr;
};

void what_is_refused() {
    const u64 pointer = allocate(3 << 20);
    int fd = -1;
    CHECK(export_range(pointer + 512, 4096, &fd) == invalid_value);
    CHECK(export_range(pointer, 100, &fd) == invalid_value);
    CHECK(export_range(pointer, 0, &fd) == invalid_value);
    CHECK(export_range(pointer, u64{6} << 20, &fd) == invalid_value);
    CHECK(export_range(pointer, 4096, &fd, 2) == invalid_value);
    CHECK(export_range(pointer, 4096, &fd, 1, 1) == not_supported);
    CHECK(export_range(pointer, 4096, &fd, 1, 2) == invalid_value);
    CHECK(export_range(0x1000, 4096, &fd) == invalid_value);
    CHECK(export_range(pointer, ~u64{4095}, &fd) == invalid_value);
    WORKS("cuMemFree_v2", pointer);
    CHECK(export_range(pointer, 4096, &fd) == invalid_value);
    CHECK(fd == -1);
}

void whole_and_part() {
    const u64 pointer = allocate(1 << 20);
    const auto bytes = pattern(1 << 20, 4);
    write_device(pointer, bytes);
    const Fd whole = exported(pointer, 1 << 20), part = exported(pointer + 8192, 4096);
    View all(whole.get()), some(part.get());
    CHECK(all[12345] == bytes[12345] && some[100] == bytes[8192 + 100]);
    some[5] = static_cast<unsigned char>(~bytes[8192 + 5]);
    CHECK(read_device(pointer + 8192 + 5, 1)[0] == some[5]);
    WORKS("cuMemFree_v2", pointer);
}

// A small allocation that does not begin a page: its pages go out, and it lies where its address says.
void small_allocation() {
    const u64 first = allocate(100), second = allocate(5000);
    const u64 pointer = second % 4096 != 0 ? second : first;
    CHECK(pointer % 4096 != 0);
    int fd = -1;
    CHECK(export_range(pointer, 4096, &fd) == invalid_value);
    const u64 page = pointer / 4096 * 4096;
    const Fd out = exported(page, 4096);
    write_device(pointer, {42});
    View view(out.get());
    CHECK(view[pointer - page] == 42);
    WORKS("cuMemFree_v2", first);
    WORKS("cuMemFree_v2", second);
}

void free_under_a_live_dmabuf() {
    const u64 before = free_memory();
    const u64 pointer = allocate(4 << 20);
    const u64 id = buffer_id(pointer);
    write_device(pointer, {1, 2, 3});
    Fd fd = exported(pointer, 4 << 20);
    WORKS("cuMemFree_v2", pointer);
    CHECK(before - free_memory() == 4 << 20);
    // The address goes to somebody else, the old pages live on behind the dma-buf.
    const u64 again = allocate(4 << 20);
    CHECK(again == pointer && buffer_id(again) > id);
    write_device(again, {9, 9, 9});
    {
        View view(fd.get());
        CHECK(view[0] == 1 && view[2] == 3);
        view[0] = 77;
        CHECK(read_device(again, 1)[0] == 9);
        fd.reset();
        CHECK(before - free_memory() == 8 << 20); // the importer still holds it
    }
    CHECK(before - free_memory() == 4 << 20);
    WORKS("cuMemFree_v2", again);
    CHECK(free_memory() == before);
}

} // namespace

int main() {
    begin();
    // First, while nothing else was exported: it counts every byte.
    free_under_a_live_dmabuf();
    what_is_refused();
    whole_and_part();
    small_allocation();
}
