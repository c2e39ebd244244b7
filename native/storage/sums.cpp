// The file with the checksums ("sums") of one inode: its layout, its mapping, and when its sums are discarded as
// outdated.
#include "storage/sums.hpp"

#include <fcntl.h>
#include <linux/stat.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <utility>

#include "storage/open_beneath.hpp"

namespace gdrkit::storage {

namespace {

constexpr std::uint64_t page_bytes = 4096, entries_per_page = page_bytes / sizeof(std::uint64_t);
constexpr char magic[8] = {'G', 'D', 'R', 'S', 'U', 'M', 'S', '1'};
// If a server is killed during a change, the file's mtime is earlier or later than the start of the change by at most
// these times. The mtime may be earlier than the start, because the kernel's clock for mtimes ticks every 1 to 10 ms.
constexpr std::int64_t mtime_before_change_max_ns = 20'000'000, mtime_after_change_max_ns = 200'000'000;

// Packs a sum into 64 bits: from the lowest bit, 32 bits of CRC, 2 bits of state and 30 bits of length.
std::uint64_t pack_sum(const Sum& sum) {
    return sum.crc | std::uint64_t{static_cast<std::uint32_t>(sum.state)} << 32 | std::uint64_t{sum.length} << 34;
}

Sum unpack_sum(std::uint64_t entry) {
    return {static_cast<std::uint32_t>(entry), static_cast<std::uint32_t>(entry >> 34),
            static_cast<SumState>(entry >> 32 & 3)};
}

// The next two functions access a field of the mapped file atomically.
template <typename T> void store_atomically(T& field, T value) {
    std::atomic_ref<T>(field).store(value, std::memory_order_release);
}
template <typename T> T load_atomically(const T& field) {
    return std::atomic_ref<T>(const_cast<T&>(field)).load(std::memory_order_acquire);
}

std::int64_t get_realtime_ns() {
    timespec now{};
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

struct FileIdentity {
    std::uint64_t inode_number = 0;
    std::int64_t birth_seconds = 0, birth_nanoseconds = 0;
    bool operator==(const FileIdentity&) const = default;
};

// Returns the inode number and the birth time. If the kernel reuses the inode number of a deleted file, only the birth
// time differs.
FileIdentity query_identity(int file_fd) {
    struct statx inode_info {};
    if (syscall(SYS_statx, file_fd, "", AT_EMPTY_PATH, STATX_INO | STATX_BTIME, &inode_info) != 0) {
        return {};
    }
    return {inode_info.stx_ino, inode_info.stx_btime.tv_sec, inode_info.stx_btime.tv_nsec};
}

} // namespace

// The header is in the first page of the sums file. The entries follow from the second page on: 8 bytes for each chunk,
// as pack_sum() returns them.
struct SumsFile::Header {
    char magic[8];
    std::uint32_t chunk_bytes, reserved;
    FileIdentity identity;
    FileVersion version;
    std::int64_t change_begin_ns; // Time at which the change in progress began, or 0 if no change is in progress.
};

std::string make_sums_name(std::uint64_t inode_number) {
    char name[32];
    std::snprintf(name, sizeof name, "%02" PRIx64 "/%016" PRIx64, inode_number & 255, inode_number);
    return name;
}

SumsGeneration::~SumsGeneration() {
    if (counter_ != nullptr) {
        munmap(counter_, page_bytes);
    }
}

int SumsGeneration::open(int memory_fd, bool may_advance) {
    struct stat memory_stat {};
    const int seals = fcntl(memory_fd, F_GET_SEALS);
    if (seals < 0 || fstat(memory_fd, &memory_stat) != 0) {
        return -errno;
    }
    if (memory_stat.st_size < static_cast<off_t>(page_bytes) || (seals & F_SEAL_SHRINK) == 0) {
        return -EINVAL;
    }
    void* const mapped_address =
        mmap(nullptr, page_bytes, may_advance ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, memory_fd, 0);
    if (mapped_address == MAP_FAILED) {
        return -errno;
    }
    counter_ = static_cast<std::atomic<std::uint64_t>*>(mapped_address);
    return 0;
}

SumsFile::~SumsFile() {
    unmap();
}

void SumsFile::unmap() noexcept {
    if (header_ != nullptr) {
        munmap(header_, page_bytes + capacity_ * sizeof(std::uint64_t));
        header_ = nullptr;
        entries_ = nullptr;
        capacity_ = 0;
    }
}

int SumsFile::map(std::uint64_t chunks_count) {
    const std::uint64_t pages_count = (chunks_count + entries_per_page - 1) / entries_per_page;
    const std::uint64_t mapped_bytes = page_bytes + pages_count * page_bytes; // The header takes the first page.
    struct stat file_stat {};
    if (fstat(fd_.get(), &file_stat) != 0 || (static_cast<std::uint64_t>(file_stat.st_size) < mapped_bytes &&
                                              ftruncate(fd_.get(), static_cast<off_t>(mapped_bytes)) != 0)) {
        return -errno;
    }
    if (static_cast<std::uint64_t>(file_stat.st_size) < mapped_bytes) {
        generation_->advance();
    }
    void* const mapped_address = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
    if (mapped_address == MAP_FAILED) {
        return -errno;
    }
    unmap();
    header_ = static_cast<Header*>(mapped_address);
    entries_ = reinterpret_cast<std::uint64_t*>(static_cast<std::byte*>(mapped_address) + page_bytes);
    capacity_ = pages_count * entries_per_page;
    has_disk_space_.resize(pages_count, false);
    return 0;
}

int SumsFile::open(int folder_fd, const char* name, bool create, int file_fd, std::uint32_t chunk_bytes,
                   SumsGeneration& generation) {
    generation_ = &generation;
    const int descriptor = open_beneath(folder_fd, name, O_RDWR | (create ? O_CREAT : 0), 0600);
    if (descriptor < 0) {
        return descriptor;
    }
    fd_ = Descriptor(descriptor);
    // Allocate the first page, which has the header, before the first write to it. Otherwise the write would raise
    // SIGBUS if the disk is full.
    int status = fallocate(descriptor, 0, 0, page_bytes) != 0 ? -errno : 0;
    struct stat file_stat {};
    if (status == 0 && fstat(descriptor, &file_stat) != 0) {
        status = -errno;
    }
    if (status == 0) {
        status = map((static_cast<std::uint64_t>(file_stat.st_size) - page_bytes) / sizeof(std::uint64_t));
    }
    if (status == 0) {
        status = discard_if_outdated(file_fd, chunk_bytes);
    }
    if (status != 0) {
        unmap();
        fd_ = Descriptor();
    }
    return status;
}

int SumsFile::discard_if_outdated(int file_fd, std::uint32_t chunk_bytes) {
    struct stat file_stat {};
    if (fstat(file_fd, &file_stat) != 0) {
        return -errno;
    }
    const FileIdentity identity = query_identity(file_fd);
    const FileVersion current_version = FileVersion::of(file_stat);
    if (std::memcmp(header_->magic, magic, sizeof magic) != 0 || header_->chunk_bytes != chunk_bytes ||
        !(header_->identity == identity)) {
        reset(current_version);
        header_->chunk_bytes = chunk_bytes;
        header_->reserved = 0;
        header_->identity = identity;
        // The magic is written last. If the process is killed earlier, the header is invalid and will be ignored.
        std::atomic_signal_fence(std::memory_order_seq_cst);
        std::memcpy(header_->magic, magic, sizeof magic);
        return 0;
    }
    const std::int64_t change_begin_ns = load_atomically(header_->change_begin_ns);
    if (change_begin_ns != 0) {
        // The server was killed during a change, so the changed chunks have no valid sums. If the mtime of the file is
        // near the start of this change, no other program has changed the file, and the other sums stay valid.
        const std::int64_t mtime_ns =
            current_version.mtime_seconds * 1'000'000'000LL + current_version.mtime_nanoseconds;
        if (mtime_ns >= change_begin_ns - mtime_before_change_max_ns &&
            mtime_ns <= change_begin_ns + mtime_after_change_max_ns) {
            end_change(current_version);
            return 0;
        }
    }
    if (!(version() == current_version)) {
        reset(current_version);
    }
    store_atomically(header_->change_begin_ns, std::int64_t{0});
    return 0;
}

int SumsFile::reserve(std::uint64_t first_chunk, std::uint64_t end_chunk) {
    if (end_chunk > capacity_) {
        // The capacity grows by at least half each time, so that a growing file is not mapped again for every chunk.
        if (const int status = map(std::max(end_chunk, capacity_ + capacity_ / 2)); status != 0) {
            return status;
        }
    }
    for (std::uint64_t page_index = first_chunk / entries_per_page; page_index * entries_per_page < end_chunk;
         ++page_index) {
        if (!has_disk_space_[page_index]) {
            if (fallocate(fd_.get(), 0, static_cast<off_t>((page_index + 1) * page_bytes), page_bytes) != 0) {
                return -errno;
            }
            has_disk_space_[page_index] = true;
        }
    }
    return 0;
}

Sum SumsFile::get(std::uint64_t chunk) const noexcept {
    if (chunk >= capacity_) {
        return {};
    }
    return unpack_sum(load_atomically(entries_[chunk]));
}

void SumsFile::set(std::uint64_t chunk, const Sum& sum) noexcept {
    if (chunk < capacity_) {
        store_atomically(entries_[chunk], sum.state == SumState::unknown ? std::uint64_t{0} : pack_sum(sum));
    }
}

void SumsFile::discard_from(std::uint64_t first_chunk) noexcept {
    if (first_chunk >= capacity_) {
        return;
    }
    // The page of `first_chunk` may also have earlier entries, so its entries from `first_chunk` on are set to 0. The
    // whole pages after it are discarded.
    const std::uint64_t first_whole_page = (first_chunk + entries_per_page - 1) / entries_per_page;
    for (std::uint64_t chunk = first_chunk; chunk < std::min(capacity_, first_whole_page * entries_per_page); ++chunk) {
        if (load_atomically(entries_[chunk]) != 0) {
            store_atomically(entries_[chunk], std::uint64_t{0});
        }
    }
    const std::uint64_t pages_count = capacity_ / entries_per_page;
    if (first_whole_page < pages_count) {
        if (fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                      static_cast<off_t>((first_whole_page + 1) * page_bytes),
                      static_cast<off_t>((pages_count - first_whole_page) * page_bytes)) == 0) {
            std::fill(has_disk_space_.begin() + static_cast<std::ptrdiff_t>(first_whole_page), has_disk_space_.end(),
                      false);
        } else {
            // Not every file system can punch holes. Entries that are 0 are not written: if their page had no disk
            // space and the disk were full, the write would raise SIGBUS.
            for (std::uint64_t chunk = first_whole_page * entries_per_page; chunk < capacity_; ++chunk) {
                if (load_atomically(entries_[chunk]) != 0) {
                    store_atomically(entries_[chunk], std::uint64_t{0});
                }
            }
        }
    }
}

FileVersion SumsFile::version() const noexcept {
    return header_->version;
}

void SumsFile::begin_change() noexcept {
    store_atomically(header_->change_begin_ns, get_realtime_ns());
}

void SumsFile::end_change(const FileVersion& version) noexcept {
    store_atomically(header_->version.mtime_seconds, version.mtime_seconds);
    store_atomically(header_->version.mtime_nanoseconds, version.mtime_nanoseconds);
    store_atomically(header_->version.size_bytes, version.size_bytes);
    store_atomically(header_->change_begin_ns, std::int64_t{0});
}

void SumsFile::reset(const FileVersion& version) noexcept {
    discard_from(0);
    end_change(version);
}

std::int64_t read_cached(int file_fd, void* destination, std::size_t length, std::uint64_t offset) noexcept {
    static_assert(sizeof(long) == 8, "the offset must fit into one argument of the system call");
    // The kernel ignores the upper half of the offset (0L), because the lower half has 64 bits.
    const iovec destination_vector{destination, length};
    for (;;) {
        const long read_bytes = syscall(SYS_preadv2, file_fd, &destination_vector, 1L, offset, 0L, RWF_NOWAIT);
        if (read_bytes >= 0 || errno != EINTR) {
            return read_bytes < 0 ? -errno : read_bytes;
        }
    }
}

int SumsReader::open(int sums_folder_fd, int file_fd) {
    fd_ = Descriptor();
    struct stat file_stat {};
    if (fstat(file_fd, &file_stat) != 0) {
        return -errno;
    }
    Descriptor sums_fd(open_beneath(sums_folder_fd, make_sums_name(file_stat.st_ino), O_RDONLY, 0));
    if (!sums_fd) {
        return sums_fd.get(); // The value is -errno.
    }
    SumsFile::Header header{};
    const std::int64_t read_bytes = read_cached(sums_fd.get(), &header, sizeof header, 0);
    if (read_bytes < 0) {
        return static_cast<int>(read_bytes);
    }
    // A short header means that the server is creating the file at this moment.
    if (read_bytes != sizeof header || std::memcmp(header.magic, magic, sizeof magic) != 0 ||
        !(header.identity == query_identity(file_fd)) || header.chunk_bytes < page_bytes ||
        header.chunk_bytes > chunk_bytes_max || !std::has_single_bit(header.chunk_bytes)) {
        return -ESTALE;
    }
    chunk_bytes_ = header.chunk_bytes;
    fd_ = std::move(sums_fd);
    return 0;
}

bool SumsReader::read(std::uint64_t first_chunk, std::span<Sum> sums) const noexcept {
    std::array<std::uint64_t, sums_per_read_max> entries{};
    if (sums.size() > entries.size()) {
        return false;
    }
    const std::span bytes = std::as_writable_bytes(std::span(entries).first(sums.size()));
    // A short read may end at a page that is not in the page cache. Only 0 bytes mean the end of the file.
    for (std::size_t done_bytes = 0; done_bytes < bytes.size();) {
        const std::int64_t read_bytes = read_cached(fd_.get(), bytes.data() + done_bytes, bytes.size() - done_bytes,
                                                    page_bytes + first_chunk * sizeof entries[0] + done_bytes);
        if (read_bytes < 0) {
            return false;
        }
        if (read_bytes == 0) {
            break;
        }
        done_bytes += static_cast<std::size_t>(read_bytes);
    }
    std::transform(sums.begin(), sums.end(), entries.begin(), sums.begin(),
                   [](const Sum&, std::uint64_t entry) { return unpack_sum(entry); });
    return true;
}

} // namespace gdrkit::storage
