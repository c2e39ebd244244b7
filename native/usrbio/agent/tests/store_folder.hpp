// A folder with a file and its checksums, for the tests of local reads.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "storage/crc32c.hpp"
#include "tests/check.hpp"
#include "usrbio/agent/local_reader.hpp"

namespace gdrkit::usrbio::agent::tests {

inline constexpr std::uint32_t chunk_bytes = 4096;
inline constexpr std::size_t file_bytes = 64 * chunk_bytes + 100;

// For LocalReader::run() and ReadHelper::run(): the thread does not move to the processor of an application.
inline constexpr int no_application_processor = -1;

// Creates the shared memory of a storage::SumsGeneration.
inline Descriptor make_generation_memory() {
    Descriptor memory(memfd_create("generation", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    CHECK(ftruncate(memory.get(), 4096) == 0 && fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    return memory;
}

// A folder with a file of random bytes. The sums files are in the same folder; add_sums() creates the sums of the file.
struct StoreFolder {
    std::string path = "/tmp/gdrkit-local_file-XXXXXX";
    Descriptor sums_folder, file;
    Descriptor generation_memory = make_generation_memory();
    storage::SumsGeneration generation;
    std::optional<storage::SumsFile> sums; // Empty: the server has not opened the sums.
    std::vector<std::byte> bytes;

    explicit StoreFolder(std::size_t length = file_bytes) : bytes(length) {
        CHECK(mkdtemp(path.data()) != nullptr);
        sums_folder = Descriptor(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
        file = Descriptor(openat(sums_folder.get(), "file", O_RDWR | O_CREAT | O_CLOEXEC, 0600));
        std::mt19937 random_number(1);
        for (auto& byte : bytes)
            byte = static_cast<std::byte>(random_number());
        CHECK(pwrite(file.get(), bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
        CHECK(generation.open(generation_memory.get(), true) == 0);
    }
    ~StoreFolder() { CHECK(std::system(("rm -r " + path).c_str()) == 0); }

    // Stores the sum of each chunk, as the server does for its writes.
    void add_sums() {
        struct stat attributes {};
        CHECK(fstat(file.get(), &attributes) == 0);
        const std::string sums_name = storage::make_sums_name(attributes.st_ino);
        CHECK(mkdirat(sums_folder.get(), sums_name.substr(0, 2).c_str(), 0700) == 0);
        CHECK(sums.emplace().open(sums_folder.get(), sums_name.c_str(), /*create=*/true, file.get(), chunk_bytes,
                                  generation) == 0);
        CHECK(sums->reserve(0, bytes.size() / chunk_bytes + 1) == 0);
        for (std::size_t begin = 0; begin < bytes.size(); begin += chunk_bytes) {
            const auto length = static_cast<std::uint32_t>(std::min<std::size_t>(chunk_bytes, bytes.size() - begin));
            sums->set(begin / chunk_bytes,
                      {storage::crc32c(bytes.data() + begin, length), length, storage::SumState::valid});
        }
    }
    std::unique_ptr<LocalFile> open_local_file() const {
        auto store = std::make_shared<LocalStore>(Descriptor(fcntl(sums_folder.get(), F_DUPFD_CLOEXEC, 0)),
                                                  Descriptor(fcntl(generation_memory.get(), F_DUPFD_CLOEXEC, 0)));
        const std::string file_path = "/proc/self/fd/" + std::to_string(file.get());
        return std::make_unique<LocalFile>(Descriptor(open(file_path.c_str(), O_RDONLY | O_CLOEXEC)), store);
    }
    // Reads locally and compares the bytes. Returns the result, or -1 if the server has to execute the read.
    std::int64_t read(LocalFile& local_file, std::size_t offset, std::size_t length) const {
        std::vector<std::byte> destination(length);
        std::uint64_t copied_bytes = 0;
        const auto result = read_into(local_file, offset, destination, copied_bytes);
        if (!result)
            return -1;
        CHECK(std::memcmp(destination.data(), bytes.data() + offset, static_cast<std::size_t>(*result)) == 0);
        return *result;
    }
    // Reads locally. Sets `copied_bytes` to the number of bytes that were copied, also if there is no result.
    static std::optional<std::int64_t> read_into(LocalFile& local_file, std::size_t offset,
                                                 std::span<std::byte> destination, std::uint64_t& copied_bytes) {
        copied_bytes = 0;
        LocalReader reader;
        if (!reader.add(local_file, offset, destination))
            return std::nullopt;
        copied_bytes = reader.run(no_application_processor);
        return reader.result(0);
    }
};

} // namespace gdrkit::usrbio::agent::tests
