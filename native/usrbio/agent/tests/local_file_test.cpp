// Tests of reads from the page cache, with and without checksums.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
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

// A folder with a file of random bytes, and the folder of its sums, which the server has opened.
struct Folder {
    std::string path = "/tmp/gdrkit-local-XXXXXX";
    Descriptor sums_folder, file;
    SumsGeneration generation;
    SumsFile sums;
    std::vector<std::byte> bytes;

    Folder() : bytes(file_bytes) {
        CHECK(mkdtemp(path.data()) != nullptr);
        sums_folder = Descriptor(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
        file = Descriptor(openat(sums_folder.get(), "file", O_RDWR | O_CREAT | O_CLOEXEC, 0600));
        std::mt19937 chance(1);
        for (auto& byte : bytes)
            byte = static_cast<std::byte>(chance());
        CHECK(pwrite(file.get(), bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
        CHECK(generation.open(sums_folder.get(), true) == 0);
    }
    ~Folder() { CHECK(std::system(("rm -r " + path).c_str()) == 0); }

    // Stores the sum of each chunk, as the server does for its writes.
    void add_sums() {
        struct stat now {};
        CHECK(fstat(file.get(), &now) == 0);
        const std::string name = sums_name(now.st_ino);
        CHECK(mkdirat(sums_folder.get(), name.substr(0, 2).c_str(), 0700) == 0);
        CHECK(sums.open(sums_folder.get(), name.c_str(), true, file.get(), chunk_bytes, generation) == 0);
        CHECK(sums.reserve(0, file_bytes / chunk_bytes + 1) == 0);
        for (std::size_t begin = 0; begin < file_bytes; begin += chunk_bytes) {
            const auto length = static_cast<std::uint32_t>(std::min<std::size_t>(chunk_bytes, file_bytes - begin));
            sums.set(begin / chunk_bytes, {crc32c(bytes.data() + begin, length), length, SumState::valid});
        }
    }
    std::unique_ptr<LocalFile> open_local() const {
        auto store = std::make_shared<LocalStore>(Descriptor(fcntl(sums_folder.get(), F_DUPFD_CLOEXEC, 0)));
        const std::string name = "/proc/self/fd/" + std::to_string(file.get());
        return std::make_unique<LocalFile>(Descriptor(open(name.c_str(), O_RDONLY | O_CLOEXEC)), store);
    }
    // Reads locally and compares the bytes. Returns the result, or -1 if the server has to execute the read.
    std::int64_t read(LocalFile& local, std::size_t offset, std::size_t length) const {
        std::vector<std::byte> destination(length);
        const auto result = local.read(offset, destination);
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

void test_lost_memory_is_left_to_the_server() {
    const Folder folder;
    const auto local = folder.open_local();
    void* const memory = mmap(nullptr, chunk_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    CHECK(!local->read(0, {static_cast<std::byte*>(memory), chunk_bytes}));
    munmap(memory, chunk_bytes);
}

} // namespace

int main() {
    test_file_without_sums();
    test_bytes_match_their_sums();
    test_corrupt_bytes_are_not_returned();
    test_new_sums_are_noticed();
    test_sums_of_an_earlier_file_are_not_used();
    test_lost_memory_is_left_to_the_server();
    std::puts("ok");
    return 0;
}
