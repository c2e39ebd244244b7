// Tests of a file of the copy engine: residency in the page cache, unaligned O_DIRECT ranges, and the lifetime of
// descriptors.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "engine/tests/fixture.hpp"

using namespace gdrkit::engine;
using namespace gdrkit::engine::test;

namespace {

constexpr u64 offsets[] = {0, 1, 511, 512, 4095, 4096, 4097, 12288};
constexpr u64 lengths[] = {1, 4095, 4096, 4097, 8192, 65536, 100001};

// Memory that begins at a multiple of 4096 bytes, the alignment for O_DIRECT, and is filled with 0xa5.
struct AlignedMemory {
    explicit AlignedMemory(u64 length)
        : length(length), bytes(static_cast<std::byte*>(std::aligned_alloc(4096, length))) {
        CHECK(bytes);
        std::memset(bytes.get(), 0xa5, length);
    }
    // Frees `bytes`.
    struct Free {
        void operator()(std::byte* memory) const { std::free(memory); }
    };
    u64 length;
    std::unique_ptr<std::byte, Free> bytes;
};

// Returns memory for a range of `length` bytes, with space for one more block at both ends.
AlignedMemory make_aligned_memory(u64 length) {
    return AlignedMemory((length + 4 * 4096) / 4096 * 4096);
}

void check_unaligned_reads(const Folder& folder) {
    const Bytes data = pattern(300001, 1);
    const Descriptor fd = create_file(folder.path_of("odd"), data);
    File file(duplicate(fd));
    file.direct_fd();
    CHECK(file.alignment_bytes() <= 4096);
    for (const u64 offset : offsets) {
        for (const u64 length : lengths) {
            drop_cache(fd);
            const AlignedMemory memory = make_aligned_memory(length);
            const IoResult result = read_direct(file, offset, length, memory.bytes.get());
            CHECK(!result.failure && result.bytes == length);
            // O_DIRECT reads whole blocks, so the range begins inside the first block in memory.
            CHECK(std::memcmp(memory.bytes.get() + get_offset_in_block(file, offset), data.data() + offset, length) ==
                  0);
        }
    }
}

void check_unaligned_writes(const Folder& folder) {
    Bytes data = pattern(300001, 2);
    const Descriptor fd = create_file(folder.path_of("written"), data);
    File file(duplicate(fd));
    file.direct_fd();
    unsigned seed = 3;
    for (const u64 offset : offsets) {
        for (const u64 length : lengths) {
            const Bytes new_data = pattern(length, ++seed);
            const AlignedMemory memory = make_aligned_memory(length);
            std::memcpy(memory.bytes.get() + get_offset_in_block(file, offset), new_data.data(), length);
            const IoResult result = write_direct(file, offset, length, memory.bytes.get());
            CHECK(!result.failure && result.bytes == length);
            std::memcpy(data.data() + offset, new_data.data(), length);
        }
        CHECK(contents(fd) == data);
    }
}

// Reads that reach the end of the file, or start after the end, return only the bytes that exist.
void check_end_of_file(const Folder& folder) {
    const Bytes data = pattern(2 * 4096 + 77, 5);
    const Descriptor fd = create_file(folder.path_of("short"), data);
    File file(duplicate(fd));
    for (const u64 offset : {u64{0}, u64{1}, u64{4096}, u64{8192}, u64{8200}, u64{data.size()}, u64{1} << 40U}) {
        drop_cache(fd);
        const AlignedMemory memory = make_aligned_memory(65536);
        const u64 expected_bytes = offset < data.size() ? data.size() - offset : 0;
        const IoResult result = read_direct(file, offset, 65536, memory.bytes.get());
        CHECK(!result.failure && result.bytes == expected_bytes);
        CHECK(expected_bytes == 0 || std::memcmp(memory.bytes.get() + get_offset_in_block(file, offset),
                                                 data.data() + offset, expected_bytes) == 0);
        const IoResult buffered_result = read_buffered(file, offset, 65536, memory.bytes.get());
        CHECK(!buffered_result.failure && buffered_result.bytes == expected_bytes);
        CHECK(expected_bytes == 0 || std::memcmp(memory.bytes.get(), data.data() + offset, expected_bytes) == 0);
    }
}

void check_residency(const Folder& folder) {
    const Descriptor fd = create_file(folder.path_of("cached"), pattern(mib, 6));
    CHECK(query_residency(fd.get(), 0, mib).state == CacheState::all);
    CHECK(query_residency(fd.get(), 1, 1).pages_count == 1 && query_residency(fd.get(), 4095, 2).pages_count == 2);
    drop_cache(fd, 0, mib / 2);
    // cachestat(2), which only newer kernels have, and mincore(2) must give the same numbers.
    for (const auto& [offset, length] : {std::pair{u64{0}, mib}, {u64{5}, mib / 2}, {mib / 2 - 1, u64{2}}}) {
        const Residency by_cachestat = query_residency(fd.get(), offset, length);
        const Residency by_mincore = query_residency_by_mincore(fd.get(), offset, length);
        CHECK(by_cachestat.pages_count == by_mincore.pages_count &&
              by_cachestat.cached_pages_count == by_mincore.cached_pages_count &&
              by_cachestat.state == by_mincore.state);
    }
    File file(duplicate(fd));
    CHECK(file.residency_of(mib, mib).pages_count == 0 && file.residency_of(mib - 1, mib).pages_count == 1);
}

// A File that was made from a path closes its descriptors when no bytes are pending any more, and can open them again.
// A File that was made from a descriptor stays open.
void check_descriptors(const Folder& folder) {
    const Descriptor fd = create_file(folder.path_of("held"), pattern(mib, 7));
    const std::size_t open_files_count_before = count_open_files();
    {
        File reopenable_file(folder.path_of("held"), O_RDONLY, 0);
        reopenable_file.add_pending(10);
        CHECK(reopenable_file.buffered_fd() >= 0);
        reopenable_file.direct_fd();
        reopenable_file.remove_pending(4);
        CHECK(count_open_files() > open_files_count_before);
        reopenable_file.remove_pending(6);
        CHECK(count_open_files() == open_files_count_before);
        File descriptor_file(duplicate(fd));
        descriptor_file.direct_fd();
        descriptor_file.close_reopenable_descriptors();
        CHECK(fcntl(descriptor_file.buffered_fd(), F_GETFD) >= 0);
    }
    CHECK(count_open_files() == open_files_count_before && fcntl(fd.get(), F_GETFD) >= 0);
    File missing_file(folder.path_of("missing"), O_RDONLY, 0);
    try {
        missing_file.buffered_fd();
        CHECK(false);
    } catch (const Error& error) {
        CHECK(error.failure().number == ENOENT && std::string(error.failure().operation) == "open");
    }
}

// A file without O_DIRECT support is read through the page cache, and `used_direct` of the result is not set.
void check_without_direct() {
    const Descriptor fd(open("/proc/self/status", O_RDONLY | O_CLOEXEC));
    File file(duplicate(fd));
    const AlignedMemory memory = make_aligned_memory(65536);
    const IoResult result = read_direct(file, 0, 100, memory.bytes.get());
    CHECK(!result.failure && result.bytes == 100 && !result.used_direct);
    CHECK(file.direct_errno() != 0 && file.direct_fd() < 0);
}

// A close waits for the calls that use the descriptor. Meanwhile the file refuses new calls. If the thread that closes
// the file gives up, the file accepts calls again. Only one thread at a time may close a file.
void check_uses(const Folder& folder) {
    const std::size_t open_files_count_before = count_open_files();
    const auto file = std::make_shared<File>(open_file(folder.path_of("uses")));
    file->direct_fd();
    FileUse first_use(file);
    FileUse second_use(file);
    CHECK(first_use.file() && second_use.file() && !file->wait_until_unused(std::chrono::milliseconds(1)));
    std::atomic<bool> is_unused{false};
    {
        const FileClosing closing(*file);
        std::thread closer([&] {
            CHECK(file->wait_until_unused(gdrkit::no_limit));
            is_unused = true;
        });
        first_use.end();
        CHECK(!is_unused && !FileUse(file).file());
        second_use.end();
        closer.join();
    }
    CHECK(FileUse(file).file() && !file->is_closed());
    CHECK(file->begin_close({}) && !file->begin_close(std::chrono::milliseconds(1)));
    std::thread next_closer([&] { CHECK(file->begin_close(gdrkit::no_limit)); });
    { const FileClosing closing(*file, true); }
    next_closer.join();
    const FileClosing closing(*file, true);
    file->close();
    CHECK(file->is_closed() && !FileUse(file).file() && count_open_files() == open_files_count_before);
}

// A forked child closes the file without a wait, because no thread of the child could end the uses of the parent.
void check_fork(const Folder& folder) {
    const auto file = std::make_shared<File>(open_file(folder.path_of("forked")));
    file->direct_fd();
    const FileUse use(file);
    const pid_t child = fork();
    if (child == 0) {
        const std::size_t open_files_count_before = count_open_files();
        const int fd = file->buffered_fd();
        const std::size_t direct_descriptors_count = file->direct_fd() >= 0 ? 1 : 0;
        const auto replacement_file = file->replace_after_fork();
        const bool is_same_and_unused =
            replacement_file->buffered_fd() == fd && replacement_file->wait_until_unused(std::chrono::seconds(0));
        replacement_file->close();
        _exit(is_same_and_unused && count_open_files() == open_files_count_before - 1 - direct_descriptors_count ? 0
                                                                                                                 : 1);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(file->buffered_fd() >= 0);
}

} // namespace

int main() {
    const Folder folder;
    check_unaligned_reads(folder);
    check_unaligned_writes(folder);
    check_end_of_file(folder);
    check_residency(folder);
    check_descriptors(folder);
    check_without_direct();
    check_uses(folder);
    check_fork(folder);
}
