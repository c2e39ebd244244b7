// Tests of LocalFile, which reads the page cache, with and without checksums. If StoreFolder::read() returns -1, the
// storage server has to execute the read.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "usrbio/agent/tests/store_folder.hpp"

using gdrkit::Descriptor;
using namespace gdrkit::storage;
using namespace gdrkit::usrbio::agent;
using namespace gdrkit::usrbio::agent::tests;

namespace {

void test_file_without_sums() {
    const StoreFolder folder;
    const auto local_file = folder.open_local_file();
    CHECK(folder.read(*local_file, 0, chunk_bytes) == chunk_bytes && folder.read(*local_file, 5, 300) == 300);
    CHECK(folder.read(*local_file, 0, file_bytes + 1) == file_bytes);
    CHECK(folder.read(*local_file, file_bytes - 10, 100) == 10 && folder.read(*local_file, file_bytes, 100) == 0);
}

void test_bytes_match_their_sums() {
    StoreFolder folder;
    folder.add_sums();
    const auto local_file = folder.open_local_file();
    CHECK(folder.read(*local_file, 0, chunk_bytes) == chunk_bytes);
    CHECK(folder.read(*local_file, chunk_bytes, 40 * chunk_bytes) == 40 * chunk_bytes);
    CHECK(folder.read(*local_file, 64 * chunk_bytes, chunk_bytes) == 100);
    // A part of a chunk cannot be verified.
    CHECK(folder.read(*local_file, 1, chunk_bytes) == -1 && folder.read(*local_file, 0, chunk_bytes + 1) == -1);
    // A chunk with an unknown sum needs no verification, so a read may end inside the chunk.
    folder.sums->set(1, {0, 0, SumState::unknown});
    CHECK(folder.read(*local_file, 0, chunk_bytes + 1) == chunk_bytes + 1);
    // While the server writes a chunk, its bytes cannot be verified.
    folder.sums->set(2, {0, 0, SumState::being_written});
    CHECK(folder.read(*local_file, 2 * chunk_bytes, chunk_bytes) == -1);
}

void test_corrupt_bytes_are_not_returned() {
    StoreFolder folder;
    folder.add_sums();
    const auto local_file = folder.open_local_file();
    for (const std::size_t offset : {std::size_t{0}, 63 * std::size_t{chunk_bytes} + 7, file_bytes - 1}) {
        const std::byte flipped_byte = folder.bytes[offset] ^ std::byte{4};
        CHECK(pwrite(folder.file.get(), &flipped_byte, 1, static_cast<off_t>(offset)) == 1);
        CHECK(folder.read(*local_file, 0, file_bytes + 1) == -1);
        CHECK(pwrite(folder.file.get(), &folder.bytes[offset], 1, static_cast<off_t>(offset)) == 1);
        CHECK(folder.read(*local_file, 0, file_bytes + 1) == file_bytes);
    }
}

// The server creates the sums file with the first write. A reader must notice the sums at once.
void test_new_sums_are_noticed() {
    StoreFolder folder;
    const auto local_file = folder.open_local_file();
    CHECK(folder.read(*local_file, 1, 10) == 10);
    folder.add_sums();
    CHECK(folder.read(*local_file, 1, 10) == -1 && folder.read(*local_file, 0, chunk_bytes) == chunk_bytes);
}

// If a new file gets the inode number of a deleted file, the sums of the deleted file may still exist.
void test_sums_of_an_earlier_file_are_not_used() {
    StoreFolder folder;
    folder.add_sums();
    struct stat attributes {};
    CHECK(fstat(folder.file.get(), &attributes) == 0);
    const Descriptor sums_file(
        openat(folder.sums_folder.get(), make_sums_name(attributes.st_ino).c_str(), O_RDWR | O_CLOEXEC));
    const std::uint64_t other_inode = attributes.st_ino + 1;
    // The header of the sums file has the inode number at offset 16.
    CHECK(pwrite(sums_file.get(), &other_inode, sizeof other_inode, 16) == sizeof other_inode);
    const auto local_file = folder.open_local_file();
    CHECK(folder.read(*local_file, 0, chunk_bytes) == -1);
    // The server discards the old sums when it opens the file, and it opens the file for each read that the loop leaves
    // to it.
    const std::string sums_name = make_sums_name(attributes.st_ino);
    CHECK(folder.sums.emplace().open(folder.sums_folder.get(), sums_name.c_str(), /*create=*/false, folder.file.get(),
                                     chunk_bytes, folder.generation) == 0);
    CHECK(folder.read(*local_file, 1, chunk_bytes) == chunk_bytes);
}

// If the sums are not in the page cache, the server executes the read and thereby loads the sums. On tmpfs, the sums
// are always cached.
void test_sums_are_used_when_they_are_cached() {
    StoreFolder folder;
    folder.add_sums();
    folder.sums.reset();
    struct stat attributes {};
    CHECK(fstat(folder.file.get(), &attributes) == 0);
    const std::string sums_name = make_sums_name(attributes.st_ino);
    const Descriptor sums_file(openat(folder.sums_folder.get(), sums_name.c_str(), O_RDONLY | O_CLOEXEC));
    CHECK(fsync(sums_file.get()) == 0 && posix_fadvise(sums_file.get(), 0, 0, POSIX_FADV_DONTNEED) == 0);
    const auto local_file = folder.open_local_file();
    const std::int64_t result = folder.read(*local_file, 0, chunk_bytes);
    CHECK(result == -1 || result == chunk_bytes);
    CHECK(folder.sums.emplace().open(folder.sums_folder.get(), sums_name.c_str(), /*create=*/false, folder.file.get(),
                                     chunk_bytes, folder.generation) == 0);
    CHECK(folder.sums->get(0).state == SumState::valid);
    CHECK(folder.read(*local_file, 0, chunk_bytes) == chunk_bytes);
}

// A read whose first or last chunk cannot be verified copies no bytes, because the server will execute the whole read.
void test_unverifiable_reads_copy_nothing() {
    StoreFolder folder;
    folder.add_sums();
    const auto local_file = folder.open_local_file();
    for (const auto& [offset, length] : {std::pair<std::size_t, std::size_t>{0, 1},
                                         {chunk_bytes, 40 * chunk_bytes + 1},
                                         {chunk_bytes - 1, 4 * chunk_bytes + 1}}) {
        std::vector<std::byte> destination(length, std::byte{0});
        std::uint64_t copied_bytes = 0;
        CHECK(!StoreFolder::read_into(*local_file, offset, destination, copied_bytes) && copied_bytes == 0);
        CHECK(std::all_of(destination.begin(), destination.end(), [](std::byte byte) { return byte == std::byte{0}; }));
    }
    // The sum of a chunk at the end of the file covers fewer bytes than the chunk has.
    CHECK(folder.read(*local_file, 63 * chunk_bytes, chunk_bytes + 200) == chunk_bytes + 100);
}

// A long read has several pieces, and the helper reads some of them.
void test_pieces_of_a_long_read_are_verified() {
    constexpr std::size_t long_file_bytes = std::size_t{3} * 1024 * 1024 + 5 * chunk_bytes + 100;
    StoreFolder folder(long_file_bytes);
    folder.add_sums();
    const auto local_file = folder.open_local_file();
    CHECK(folder.read(*local_file, 0, long_file_bytes + chunk_bytes) == static_cast<std::int64_t>(long_file_bytes));
    CHECK(folder.read(*local_file, 3 * chunk_bytes, 700 * chunk_bytes) == 700 * chunk_bytes);
    CHECK(folder.read(*local_file, 0, std::size_t{5} * 1024 * 1024) == -1); // More than local_read_bytes_max.
    for (const std::size_t offset : {std::size_t{0}, std::size_t{1} << 20, long_file_bytes - 1}) {
        const std::byte flipped_byte = folder.bytes[offset] ^ std::byte{1};
        CHECK(pwrite(folder.file.get(), &flipped_byte, 1, static_cast<off_t>(offset)) == 1);
        CHECK(folder.read(*local_file, 0, long_file_bytes) == -1);
        CHECK(pwrite(folder.file.get(), &folder.bytes[offset], 1, static_cast<off_t>(offset)) == 1);
    }
    CHECK(folder.read(*local_file, 0, long_file_bytes) == static_cast<std::int64_t>(long_file_bytes));
}

// The kernel returns fewer bytes if a later page is not in the page cache. Such a short result is not the end of the
// file. Each read here is so short that it is a single piece. On tmpfs, all pages are always cached.
void test_uncached_bytes_are_not_the_end_of_the_file() {
    const StoreFolder folder;
    const auto local_file = folder.open_local_file();
    constexpr std::size_t read_bytes = 16 * chunk_bytes;
    std::vector<char> read_buffer(read_bytes);
    for (std::size_t cached_chunk_count = 1; cached_chunk_count < 16; ++cached_chunk_count) {
        CHECK(fsync(folder.file.get()) == 0);
        CHECK(posix_fadvise(folder.file.get(), 0, 0, POSIX_FADV_DONTNEED) == 0);
        // Without this advice, the kernel would also read the pages that follow.
        CHECK(posix_fadvise(folder.file.get(), 0, 0, POSIX_FADV_RANDOM) == 0);
        CHECK(pread(folder.file.get(), read_buffer.data(), cached_chunk_count * chunk_bytes, 0) > 0);
        const std::int64_t result = folder.read(*local_file, 0, read_bytes);
        CHECK(result == -1 || result == static_cast<std::int64_t>(read_bytes));
    }
}

void test_memory_that_can_shrink_is_no_counter() {
    const Descriptor memory(memfd_create("generation", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    CHECK(ftruncate(memory.get(), 4096) == 0);
    SumsGeneration generation;
    CHECK(generation.open(memory.get(), true) == -EINVAL);
}

// Linux 5.9 and 5.10 also return 0 bytes for a page that is not in the page cache.
void test_empty_read_before_the_end_is_left_to_the_server() {
    const StoreFolder folder;
    const auto local_file = folder.open_local_file();
    std::vector<std::byte> destination(chunk_bytes);
    CHECK(local_file->complete_piece(file_bytes - chunk_bytes, destination, 0) < 0);
    CHECK(local_file->complete_piece(file_bytes, destination, 0) == 0);
}

} // namespace

int main() {
    test_file_without_sums();
    test_bytes_match_their_sums();
    test_corrupt_bytes_are_not_returned();
    test_new_sums_are_noticed();
    test_sums_of_an_earlier_file_are_not_used();
    test_sums_are_used_when_they_are_cached();
    test_unverifiable_reads_copy_nothing();
    test_pieces_of_a_long_read_are_verified();
    test_uncached_bytes_are_not_the_end_of_the_file();
    test_memory_that_can_shrink_is_no_counter();
    test_empty_read_before_the_end_is_left_to_the_server();
    std::puts("ok");
    return 0;
}
