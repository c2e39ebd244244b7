// Helpers of the tests of the engine: files with known bytes, and jobs in one line.
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

#include "engine/descriptor.hpp"
#include "engine/engine.hpp"
#include "tests/check.hpp"

namespace gdrkit::engine::test {

using u64 = std::uint64_t;
using Bytes = std::vector<std::byte>;

constexpr u64 kib = 1024, mib = 1024 * kib;

// The sizes are small, so that a few MiB are many pieces.
inline Tuning small_tuning() {
    Tuning tuning;
    tuning.workers_count = 3;
    tuning.slots_count = 2;
    tuning.piece_bytes = 256 * kib;
    tuning.haul_bytes = mib;
    tuning.hauls_count = 2;
    tuning.load_bytes = 100 * kib;
    return tuning;
}

// Each byte differs from its neighbours, and from the byte at the same position of another seed.
inline Bytes pattern(u64 bytes, unsigned seed) {
    Bytes all(bytes);
    for (u64 at = 0; at < bytes; ++at) {
        all[at] = static_cast<std::byte>(at * 131 + at / 251 + at / 65521 + seed);
    }
    return all;
}

inline Bytes part(const Bytes& whole, u64 at, u64 length) {
    return {whole.begin() + static_cast<std::ptrdiff_t>(at), whole.begin() + static_cast<std::ptrdiff_t>(at + length)};
}

inline u64 address_of(Bytes& memory) {
    return reinterpret_cast<std::uintptr_t>(memory.data());
}

class Folder {
public:
    Folder() {
        path_ = (std::filesystem::temp_directory_path() / "gdrkit-engine-XXXXXX").string();
        CHECK(mkdtemp(path_.data()) != nullptr);
    }
    Folder(const Folder&) = delete;
    Folder& operator=(const Folder&) = delete;
    ~Folder() { std::filesystem::remove_all(path_); }
    std::string at(const std::string& name) const { return path_ + "/" + name; }

private:
    std::string path_;
};

inline Descriptor opened(const std::string& path, int flags = O_RDWR | O_CREAT) {
    Descriptor found(open(path.c_str(), flags | O_CLOEXEC, 0600));
    CHECK(found);
    return found;
}

// Creates a file with these bytes, on the disk and in the page cache.
inline Descriptor file_of(const std::string& path, const Bytes& bytes) {
    Descriptor found = opened(path, O_RDWR | O_CREAT | O_TRUNC);
    CHECK(pwrite(found.get(), bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
    CHECK(fdatasync(found.get()) == 0);
    return found;
}

// Drops a range from the page cache if possible; a file system in memory cannot do that.
inline void forget(const Descriptor& file, u64 offset = 0, u64 length = 0) {
    CHECK(fdatasync(file.get()) == 0);
    CHECK(posix_fadvise(file.get(), static_cast<off_t>(offset), static_cast<off_t>(length), POSIX_FADV_DONTNEED) == 0);
}

inline Bytes contents(const Descriptor& file) {
    struct stat found {};
    CHECK(fstat(file.get(), &found) == 0);
    Bytes all(static_cast<u64>(found.st_size));
    CHECK(pread(file.get(), all.data(), all.size(), 0) == static_cast<ssize_t>(all.size()));
    return all;
}

inline std::size_t open_files() {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}));
}

inline std::shared_ptr<Job> started(Engine& engine, Direction direction, int device,
                                    std::vector<std::shared_ptr<File>> files, std::vector<Extent> extents,
                                    Access access = Access::automatic) {
    auto job = std::make_shared<Job>(direction, access, device, std::move(files), std::move(extents), engine.tuning());
    engine.submit(job);
    return job;
}

// Moves one range of one file and waits for it.
inline Progress moved(Engine& engine, Direction direction, int device, const std::shared_ptr<File>& file, u64 offset,
                      u64 address, u64 length, Access access = Access::automatic) {
    const auto job = started(engine, direction, device, {file}, {Extent{0, offset, address, length}}, access);
    CHECK(job->wait(-1));
    return job->progress();
}

inline bool whole(const Progress& progress, u64 bytes) {
    return !progress.failure && !progress.cancelled && progress.bytes == bytes;
}

} // namespace gdrkit::engine::test
