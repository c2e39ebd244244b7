// Tests of reads from the page cache, with and without checksums.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "storage/crc32c.hpp"
#include "tests/check.hpp"
#include "usrbio/agent/local_file.hpp"

using gdrkit::Descriptor;
using namespace gdrkit::storage;
using namespace gdrkit::usrbio::agent;

namespace {

constexpr std::uint32_t chunk_bytes = 4096;
constexpr std::size_t file_bytes = 64 * chunk_bytes + 100;

Descriptor make_generation() {
    Descriptor memory(memfd_create("generation", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    CHECK(ftruncate(memory.get(), 4096) == 0 && fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    return memory;
}

// A folder with a file of random bytes, and the folder of its sums, which the server has opened.
struct Folder {
    std::string path = "/tmp/gdrkit-local-XXXXXX";
    Descriptor sums_folder, file;
    Descriptor generation_memory = make_generation();
    SumsGeneration generation;
    SumsFile sums;
    std::vector<std::byte> bytes;

    explicit Folder(std::size_t length = file_bytes) : bytes(length) {
        CHECK(mkdtemp(path.data()) != nullptr);
        sums_folder = Descriptor(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
        file = Descriptor(openat(sums_folder.get(), "file", O_RDWR | O_CREAT | O_CLOEXEC, 0600));
        std::mt19937 chance(1);
        for (auto& byte : bytes)
            byte = static_cast<std::byte>(chance());
        CHECK(pwrite(file.get(), bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
        CHECK(generation.open(generation_memory.get(), true) == 0);
    }
    ~Folder() { CHECK(std::system(("rm -r " + path).c_str()) == 0); }

    // Stores the sum of each chunk, as the server does for its writes.
    void add_sums() {
        struct stat now {};
        CHECK(fstat(file.get(), &now) == 0);
        const std::string name = sums_name(now.st_ino);
        CHECK(mkdirat(sums_folder.get(), name.substr(0, 2).c_str(), 0700) == 0);
        CHECK(sums.open(sums_folder.get(), name.c_str(), true, file.get(), chunk_bytes, generation) == 0);
        CHECK(sums.reserve(0, bytes.size() / chunk_bytes + 1) == 0);
        for (std::size_t begin = 0; begin < bytes.size(); begin += chunk_bytes) {
            const auto length = static_cast<std::uint32_t>(std::min<std::size_t>(chunk_bytes, bytes.size() - begin));
            sums.set(begin / chunk_bytes, {crc32c(bytes.data() + begin, length), length, SumState::valid});
        }
    }
    std::unique_ptr<LocalFile> open_local() const {
        auto store = std::make_shared<LocalStore>(Descriptor(fcntl(sums_folder.get(), F_DUPFD_CLOEXEC, 0)),
                                                  Descriptor(fcntl(generation_memory.get(), F_DUPFD_CLOEXEC, 0)));
        const std::string name = "/proc/self/fd/" + std::to_string(file.get());
        return std::make_unique<LocalFile>(Descriptor(open(name.c_str(), O_RDONLY | O_CLOEXEC)), store);
    }
    // Reads locally and compares the bytes. Returns the result, or -1 if the server has to execute the read.
    std::int64_t read(LocalFile& local, std::size_t offset, std::size_t length) const {
        std::vector<std::byte> destination(length);
        ReadHelper helper;
        const auto result = local.read(offset, destination, helper);
        if (!result)
            return -1;
        CHECK(std::memcmp(destination.data(), bytes.data() + offset, static_cast<std::size_t>(*result)) == 0);
        return *result;
    }
};

void test_file_without_sums() {
    const Folder folder;
    const auto local = folder.open_local();
    CHECK(folder.read(*local, 0, chunk_bytes) == chunk_bytes && folder.read(*local, 5, 300) == 300);
    CHECK(folder.read(*local, 0, file_bytes + 1) == file_bytes);
    CHECK(folder.read(*local, file_bytes - 10, 100) == 10 && folder.read(*local, file_bytes, 100) == 0);
}

void test_bytes_match_their_sums() {
    Folder folder;
    folder.add_sums();
    const auto local = folder.open_local();
    CHECK(folder.read(*local, 0, chunk_bytes) == chunk_bytes);
    CHECK(folder.read(*local, chunk_bytes, 40 * chunk_bytes) == 40 * chunk_bytes);
    CHECK(folder.read(*local, 64 * chunk_bytes, chunk_bytes) == 100);
    // A part of a chunk cannot be verified.
    CHECK(folder.read(*local, 1, chunk_bytes) == -1 && folder.read(*local, 0, chunk_bytes + 1) == -1);
    folder.sums.set(1, {0, 0, SumState::unknown});
    CHECK(folder.read(*local, 0, chunk_bytes + 1) == chunk_bytes + 1);
    // The server writes the chunk now.
    folder.sums.set(2, {0, 0, SumState::being_written});
    CHECK(folder.read(*local, 2 * chunk_bytes, chunk_bytes) == -1);
}

void test_corrupt_bytes_are_not_returned() {
    Folder folder;
    folder.add_sums();
    const auto local = folder.open_local();
    for (const std::size_t offset : {std::size_t{0}, 63 * std::size_t{chunk_bytes} + 7, file_bytes - 1}) {
        const std::byte flipped = folder.bytes[offset] ^ std::byte{4};
        CHECK(pwrite(folder.file.get(), &flipped, 1, static_cast<off_t>(offset)) == 1);
        CHECK(folder.read(*local, 0, file_bytes + 1) == -1);
        CHECK(pwrite(folder.file.get(), &folder.bytes[offset], 1, static_cast<off_t>(offset)) == 1);
        CHECK(folder.read(*local, 0, file_bytes + 1) == file_bytes);
    }
}

// The server creates the sums file with the first write. A reader must notice the sums at once.
void test_new_sums_are_noticed() {
    Folder folder;
    const auto local = folder.open_local();
    CHECK(folder.read(*local, 1, 10) == 10);
    folder.add_sums();
    CHECK(folder.read(*local, 1, 10) == -1 && folder.read(*local, 0, chunk_bytes) == chunk_bytes);
}

// The inode number of a deleted file is used again, and its sums are still there.
void test_sums_of_an_earlier_file_are_not_used() {
    Folder folder;
    folder.add_sums();
    struct stat now {};
    CHECK(fstat(folder.file.get(), &now) == 0);
    const Descriptor sums(openat(folder.sums_folder.get(), sums_name(now.st_ino).c_str(), O_RDWR | O_CLOEXEC));
    const std::uint64_t other_inode = now.st_ino + 1;
    CHECK(pwrite(sums.get(), &other_inode, sizeof other_inode, 16) == sizeof other_inode);
    const auto local = folder.open_local();
    CHECK(folder.read(*local, 0, chunk_bytes) == -1);
}

// A long read has several pieces, and the helper reads some of them.
void test_pieces_of_a_long_read_are_verified() {
    constexpr std::size_t long_bytes = std::size_t{3} * 1024 * 1024 + 5 * chunk_bytes + 100;
    Folder folder(long_bytes);
    folder.add_sums();
    const auto local = folder.open_local();
    CHECK(folder.read(*local, 0, long_bytes + chunk_bytes) == static_cast<std::int64_t>(long_bytes));
    CHECK(folder.read(*local, 3 * chunk_bytes, 700 * chunk_bytes) == 700 * chunk_bytes);
    CHECK(folder.read(*local, 0, std::size_t{5} * 1024 * 1024) == -1); // The loop would work too long.
    for (const std::size_t offset : {std::size_t{0}, std::size_t{1} << 20, long_bytes - 1}) {
        const std::byte flipped = folder.bytes[offset] ^ std::byte{1};
        CHECK(pwrite(folder.file.get(), &flipped, 1, static_cast<off_t>(offset)) == 1);
        CHECK(folder.read(*local, 0, long_bytes) == -1);
        CHECK(pwrite(folder.file.get(), &folder.bytes[offset], 1, static_cast<off_t>(offset)) == 1);
    }
    CHECK(folder.read(*local, 0, long_bytes) == static_cast<std::int64_t>(long_bytes));
}

// The kernel returns fewer bytes if a later page is not in the page cache. That is not the end of the file. The reads
// are so short that they have one piece. On tmpfs, all pages are always cached.
void test_uncached_bytes_are_not_the_end_of_the_file() {
    const Folder folder;
    const auto local = folder.open_local();
    constexpr std::size_t read_bytes = 16 * chunk_bytes;
    std::vector<char> cached(read_bytes);
    for (std::size_t chunk = 1; chunk < 16; ++chunk) {
        CHECK(fsync(folder.file.get()) == 0);
        CHECK(posix_fadvise(folder.file.get(), 0, 0, POSIX_FADV_DONTNEED) == 0);
        // Without this advice, the kernel would also read the pages that follow.
        CHECK(posix_fadvise(folder.file.get(), 0, 0, POSIX_FADV_RANDOM) == 0);
        CHECK(pread(folder.file.get(), cached.data(), chunk * chunk_bytes, 0) > 0);
        const std::int64_t result = folder.read(*local, 0, read_bytes);
        CHECK(result == -1 || result == static_cast<std::int64_t>(read_bytes));
    }
}

void test_memory_that_can_shrink_is_no_counter() {
    const Descriptor memory(memfd_create("generation", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    CHECK(ftruncate(memory.get(), 4096) == 0);
    SumsGeneration generation;
    CHECK(generation.open(memory.get(), true) == -EINVAL);
}

void test_helper_executes_each_index_once() {
    ReadHelper helper;
    std::size_t helped_jobs = 0;
    for (std::size_t job = 0; job < 2000; ++job) {
        std::vector<std::atomic<int>> calls(1 + job % 40);
        std::atomic<bool> has_helped{false};
        const auto caller = std::this_thread::get_id();
        helper.run(calls.size(), [&](std::size_t index) {
            ++calls[index];
            if (std::this_thread::get_id() != caller)
                has_helped = true;
            if (job % 100 == 39) // Give the helper time to begin.
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
        });
        for (const auto& count : calls)
            CHECK(count == 1);
        helped_jobs += has_helped ? 1 : 0;
    }
    CHECK(helped_jobs != 0);
}

void test_lost_memory_is_left_to_the_server() {
    const Folder folder;
    const auto local = folder.open_local();
    void* const memory = mmap(nullptr, chunk_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    ReadHelper helper;
    CHECK(!local->read(0, {static_cast<std::byte*>(memory), chunk_bytes}, helper));
    munmap(memory, chunk_bytes);
}

} // namespace

int main() {
    test_file_without_sums();
    test_bytes_match_their_sums();
    test_corrupt_bytes_are_not_returned();
    test_new_sums_are_noticed();
    test_sums_of_an_earlier_file_are_not_used();
    test_pieces_of_a_long_read_are_verified();
    test_uncached_bytes_are_not_the_end_of_the_file();
    test_memory_that_can_shrink_is_no_counter();
    test_helper_executes_each_index_once();
    test_lost_memory_is_left_to_the_server();
    std::puts("ok");
    return 0;
}
