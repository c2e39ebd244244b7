// Helpers for the tests of the copy engine: files with known bytes, and functions that start a job and wait for it.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "common/descriptor.hpp"
#include "engine/engine.hpp"
#include "tests/check.hpp"

namespace gdrkit::engine::test {

using gdrkit::Descriptor;

using u64 = std::uint64_t;
using Bytes = std::vector<std::byte>;

constexpr u64 kib = 1024, mib = 1024 * kib;

// The tests let the engine use any NUMA node.
constexpr int any_node = -1;

// Returns settings with small sizes, so that a job of a few MiB has many chunks.
inline Tuning small_tuning() {
    Tuning tuning;
    tuning.workers_count = 3;
    tuning.buffers_count = 2;
    tuning.chunk_bytes = 256 * kib;
    tuning.coalesced_bytes = mib;
    tuning.coalesced_count = 2;
    tuning.slice_bytes = 100 * kib;
    return tuning;
}

// Returns test data. Each byte differs from the bytes beside it, and from the byte at the same position for another
// seed.
inline Bytes pattern(u64 length, unsigned seed) {
    Bytes data(length);
    for (u64 index = 0; index < length; ++index) {
        data[index] = static_cast<std::byte>(index * 131 + index / 251 + index / 65521 + seed);
    }
    return data;
}

inline Bytes sub_range(const Bytes& bytes, u64 begin, u64 length) {
    return {bytes.begin() + static_cast<std::ptrdiff_t>(begin),
            bytes.begin() + static_cast<std::ptrdiff_t>(begin + length)};
}

inline u64 address_of(Bytes& memory) {
    return reinterpret_cast<std::uintptr_t>(memory.data());
}

// A temporary folder, which the destructor removes.
class Folder {
public:
    Folder() {
        path_ = (std::filesystem::temp_directory_path() / "gdrkit-engine-XXXXXX").string();
        CHECK(mkdtemp(path_.data()) != nullptr);
    }
    Folder(const Folder&) = delete;
    Folder& operator=(const Folder&) = delete;
    ~Folder() { std::filesystem::remove_all(path_); }
    std::string path_of(const std::string& name) const { return path_ + "/" + name; }

private:
    std::string path_;
};

inline Descriptor open_file(const std::string& path, int flags = O_RDWR | O_CREAT) {
    Descriptor descriptor(open(path.c_str(), flags | O_CLOEXEC, 0600));
    CHECK(descriptor);
    return descriptor;
}

// Creates a file with these bytes, on the disk and in the page cache.
inline Descriptor create_file(const std::string& path, const Bytes& bytes) {
    Descriptor descriptor = open_file(path, O_RDWR | O_CREAT | O_TRUNC);
    CHECK(pwrite(descriptor.get(), bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
    CHECK(fdatasync(descriptor.get()) == 0);
    return descriptor;
}

// Returns a second descriptor of an open file. A File closes the descriptor that it gets, so tests pass the
// duplicate to it.
inline Descriptor duplicate(const Descriptor& descriptor) {
    return Descriptor(fcntl(descriptor.get(), F_DUPFD_CLOEXEC, 0));
}

// Drops a range from the page cache. The length 0 means up to the end of the file. A file on tmpfs stays cached.
inline void drop_cache(const Descriptor& file, u64 offset = 0, u64 length = 0) {
    CHECK(fdatasync(file.get()) == 0);
    CHECK(posix_fadvise(file.get(), static_cast<off_t>(offset), static_cast<off_t>(length), POSIX_FADV_DONTNEED) == 0);
}

// Returns all bytes of a file.
inline Bytes contents(const Descriptor& file) {
    struct stat status {};
    CHECK(fstat(file.get(), &status) == 0);
    Bytes data(static_cast<u64>(status.st_size));
    CHECK(pread(file.get(), data.data(), data.size(), 0) == static_cast<ssize_t>(data.size()));
    return data;
}

inline std::size_t count_open_files() {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}));
}

// Queues a job and returns it. The fields of an Extent are: index of the file, offset in the file, address, and length.
inline std::shared_ptr<Job> start_job(Engine& engine, Direction direction, int device,
                                      std::vector<std::shared_ptr<File>> files, std::vector<Extent> extents,
                                      Access access = Access::automatic) {
    auto job = std::make_shared<Job>(direction, access, device, std::move(files), std::move(extents), engine.tuning());
    engine.submit(job);
    return job;
}

// Transfers one range of one file, waits for the end, and returns the progress.
inline Progress transfer(Engine& engine, Direction direction, int device, const std::shared_ptr<File>& file, u64 offset,
                         u64 address, u64 length, Access access = Access::automatic) {
    const auto job = start_job(engine, direction, device, {file}, {Extent{0, offset, address, length}}, access);
    CHECK(job->wait(-1));
    return job->progress();
}

// Returns whether a job moved exactly `bytes` without a failure or a cancellation.
inline bool is_complete(const Progress& progress, u64 bytes) {
    return !progress.failure && !progress.is_cancelled && progress.bytes == bytes;
}

} // namespace gdrkit::engine::test
