#include "storage/store_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <system_error>
#include <vector>

#include "storage/crc32c.hpp"

namespace gdrkit::storage {

namespace {

constexpr std::size_t chunk_bytes_max = 65536, chunks_at_once = 64;

// Reads as many bytes as the file has there, fewer only at its end. Returns -errno on failure.
std::int64_t read_fully(int file, std::uint64_t offset, std::span<std::byte> into) {
    std::size_t done = 0;
    while (done < into.size()) {
        const ssize_t count = pread(file, into.data() + done, into.size() - done, static_cast<off_t>(offset + done));
        if (count < 0 && errno == EINTR) {
            continue;
        }
        if (count < 0) {
            return -errno;
        }
        if (count == 0) {
            break;
        }
        done += static_cast<std::size_t>(count);
    }
    return static_cast<std::int64_t>(done);
}

bool is_zero(std::span<const std::byte> bytes) {
    return bytes.empty() ||
           (bytes.front() == std::byte{0} && std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) == 0);
}

} // namespace

struct Inode::Edge {
    std::size_t length = 0; // Length that the chunk had before.
    std::array<std::byte, chunk_bytes_max> bytes;
};

Store::Store(int sums_folder, std::uint32_t chunk_bytes) : sums_folder_(sums_folder), chunk_bytes_(chunk_bytes) {
    if (chunk_bytes < 4096 || chunk_bytes > chunk_bytes_max || (chunk_bytes & (chunk_bytes - 1)) != 0) {
        throw std::system_error(EINVAL, std::generic_category(), "chunk_bytes");
    }
}

std::shared_ptr<OpenFile> Store::adopt(Descriptor fd, bool read, bool write) {
    struct stat found {};
    if (fstat(fd.get(), &found) != 0) {
        throw std::system_error(errno, std::generic_category(), "fstat");
    }
    if (!S_ISREG(found.st_mode)) {
        throw std::system_error(S_ISDIR(found.st_mode) ? EISDIR : EINVAL, std::generic_category(), "not a file");
    }
    std::shared_ptr<Inode> inode;
    {
        const std::lock_guard guard(lock_);
        auto& place = inodes_[found.st_ino];
        inode = place.lock();
        if (!inode) {
            inode = std::make_shared<Inode>(*this, found.st_ino);
            place = inode;
        }
        std::erase_if(inodes_, [](const auto& each) { return each.second.expired(); });
    }
    {
        const std::unique_lock guard(inode->lock_);
        if (!inode->sums_.is_open() && !inode->nameless_) {
            // There are no sums yet, or the store is read-only: every chunk is unknown.
            (void)inode->open_sums(fd.get(), false);
        }
    }
    auto file = std::make_shared<OpenFile>();
    file->fd = std::move(fd);
    file->inode = std::move(inode);
    file->may_read = read;
    file->may_write = write;
    return file;
}

void Store::forget(std::uint64_t number) {
    std::shared_ptr<Inode> inode;
    {
        const std::lock_guard guard(lock_);
        if (const auto found = inodes_.find(number); found != inodes_.end()) {
            inode = found->second.lock();
        }
    }
    if (!inode) {
        inode = std::make_shared<Inode>(*this, number);
    }
    inode->forget_name();
}

std::string Inode::sums_name() const {
    char name[32];
    std::snprintf(name, sizeof name, "%02" PRIx64 "/%016" PRIx64, number_ & 255, number_);
    return name;
}

int Inode::open_sums(int file, bool create) {
    const std::string name = sums_name();
    if (create && mkdirat(store_.sums_folder_, name.substr(0, 2).c_str(), 0700) != 0 && errno != EEXIST) {
        return -errno;
    }
    return sums_.open(store_.sums_folder_, name.c_str(), create, file, store_.chunk_bytes_);
}

void Inode::forget_name() {
    const std::unique_lock guard(lock_);
    nameless_ = true;
    const std::string name = sums_name();
    const std::size_t slash = name.find('/');
    // If this inode's group has no folder, there is nothing to remove. A symbolic link in its place is not followed.
    if (const Descriptor group(open_beneath(store_.sums_folder_, name.substr(0, slash), O_PATH | O_DIRECTORY, 0));
        group) {
        unlinkat(group.get(), name.c_str() + slash + 1, 0);
    }
}

void Inode::notice_outside_change(const struct stat& file) {
    const Version now = Version::of(file);
    if (!(sums_.version() == now)) {
        sums_.reset(now);
        ++store_.counters_.outside_changes;
    }
}

bool Inode::is_right(std::uint64_t chunk, std::span<const std::byte> bytes) const {
    const Sum sum = sums_.get(chunk);
    if (sum.state != SumState::valid) {
        return true;
    }
    return sum.length <= bytes.size() && crc32c(bytes.data(), sum.length) == sum.crc &&
           is_zero(bytes.subspan(sum.length));
}

int Inode::corrupt(std::uint64_t chunk) {
    ++store_.counters_.corruptions;
    std::fprintf(stderr, "gdrkit serve: inode %" PRIu64 ", bytes from %" PRIu64 ": not what was written (CRC32C)\n",
                 number_, chunk * store_.chunk_bytes_);
    return -EIO;
}

Inode::Found Inode::read(int file, std::uint64_t offset, std::size_t length, std::span<std::byte> slot) {
    const std::size_t chunk_bytes = store_.chunk_bytes_;
    const std::uint64_t first = offset / chunk_bytes;
    const std::size_t skip = offset % chunk_bytes;
    for (bool again = false;; again = true) {
        std::uint64_t wrong = 0;
        {
            const std::shared_lock guard(lock_);
            const bool has_sums = sums_.is_open();
            const std::size_t wanted =
                has_sums ? (skip + length + chunk_bytes - 1) / chunk_bytes * chunk_bytes : skip + length;
            const std::int64_t got = read_fully(file, first * chunk_bytes, slot.first(wanted));
            if (got < 0) {
                return {got, 0};
            }
            const auto present = static_cast<std::size_t>(got);
            const std::size_t count = has_sums ? (present + chunk_bytes - 1) / chunk_bytes : 0;
            std::size_t bad = count;
            for (std::size_t begin = 0; begin < count && bad == count; begin += chunks_at_once) {
                const std::size_t part = std::min(chunks_at_once, count - begin);
                const std::size_t whole =
                    std::min(part, present / chunk_bytes - std::min(begin, present / chunk_bytes));
                std::array<std::uint32_t, chunks_at_once> values;
                bool any = false;
                for (std::size_t index = 0; index < part && !any; ++index) {
                    any = sums_.get(first + begin + index).state == SumState::valid;
                }
                if (!any) {
                    continue;
                }
                crc32c_chunks(slot.data() + begin * chunk_bytes, chunk_bytes, whole, values.data());
                for (std::size_t index = 0; index < part && bad == count; ++index) {
                    const std::size_t at = (begin + index) * chunk_bytes;
                    const Sum sum = sums_.get(first + begin + index);
                    const bool is_plain = index < whole && sum.length == chunk_bytes;
                    if (sum.state == SumState::valid &&
                        (is_plain ? sum.crc != values[index]
                                  : !is_right(first + begin + index,
                                              slot.subspan(at, std::min(chunk_bytes, present - at))))) {
                        bad = begin + index;
                    }
                }
            }
            if (bad == count) {
                return {present <= skip ? 0 : static_cast<std::int64_t>(std::min(length, present - skip)), skip};
            }
            wrong = first + bad;
        }
        // Either another program changed the file, which its times show, or the bytes are corrupt.
        const std::unique_lock guard(lock_);
        struct stat now {};
        if (fstat(file, &now) != 0) {
            return {-errno, 0};
        }
        if (sums_.version() == Version::of(now)) {
            if (again) {
                return {corrupt(wrong), 0};
            }
        } else {
            notice_outside_change(now);
        }
    }
}

int Inode::load_edge(int file, std::uint64_t chunk, std::uint64_t size, Edge& edge) {
    const std::size_t chunk_bytes = store_.chunk_bytes_;
    const std::uint64_t begin = chunk * chunk_bytes;
    edge.length = begin >= size ? 0 : std::min<std::uint64_t>(chunk_bytes, size - begin);
    const std::span<std::byte> bytes(edge.bytes.data(), edge.length);
    const std::int64_t got = read_fully(file, begin, bytes);
    if (got < 0) {
        return static_cast<int>(got);
    }
    edge.length = static_cast<std::size_t>(got);
    // A change of a part would give a new sum to the rest, even if the rest is corrupt.
    return is_right(chunk, bytes.first(edge.length)) ? 0 : corrupt(chunk);
}

int Inode::write_all(int file, std::uint64_t offset, std::span<const std::byte> data, std::size_t& written) const {
    written = 0;
    while (written < data.size()) {
        const ssize_t count =
            pwrite(file, data.data() + written, data.size() - written, static_cast<off_t>(offset + written));
        if (count < 0 && errno == EINTR) {
            continue;
        }
        if (count <= 0) {
            return count == 0 ? -ENOSPC : -errno;
        }
        written += static_cast<std::size_t>(count);
    }
    return 0;
}

void Inode::stamp(int file) {
    // The kernel's clock for file times ticks every few milliseconds, so a change by another program in the same tick
    // would not show. A time that the server sets itself shows it. If only the owner may set times, the kernel's time
    // must do.
    timespec times[] = {{0, UTIME_OMIT}, {}};
    if (clock_gettime(CLOCK_REALTIME, &times[1]) == 0) {
        (void)futimens(file, times);
    }
}

void Inode::finish_change(int file) {
    struct stat now {};
    // fstat of an open file does not fail. If it did, the next access would find another version and trust no sum.
    sums_.end_change(fstat(file, &now) == 0 ? Version::of(now) : Version{});
}

std::int64_t Inode::write(int file, std::uint64_t offset, std::span<const std::byte> data) {
    const std::size_t chunk_bytes = store_.chunk_bytes_;
    const std::unique_lock guard(lock_);
    if (!sums_.is_open() && !nameless_) {
        if (const int status = open_sums(file, true); status != 0) {
            return status;
        }
    }
    std::size_t written = 0;
    if (!sums_.is_open()) {
        const int status = write_all(file, offset, data, written);
        return status != 0 ? status : static_cast<std::int64_t>(data.size());
    }
    struct stat before {};
    if (fstat(file, &before) != 0) {
        return -errno;
    }
    notice_outside_change(before);
    const auto size = static_cast<std::uint64_t>(before.st_size);
    const std::uint64_t end = offset + data.size(), first = offset / chunk_bytes, last = (end - 1) / chunk_bytes;
    const auto count = static_cast<std::size_t>(last - first + 1);
    if (const int status = sums_.reserve(first, last + 1); status != 0) {
        return status;
    }
    // The new sum of each chunk.
    thread_local std::vector<Sum> old, sums;
    thread_local std::vector<std::uint32_t> values;
    thread_local Edge edge;
    old.resize(count);
    sums.resize(count);
    values.resize(count);
    const auto whole_first = (offset + chunk_bytes - 1) / chunk_bytes;
    const auto whole_end = std::max(end / chunk_bytes, whole_first);
    crc32c_chunks(data.data() + (whole_first * chunk_bytes - offset), chunk_bytes, whole_end - whole_first,
                  values.data());
    for (std::size_t index = 0; index < count; ++index) {
        const std::uint64_t chunk = first + index, begin = chunk * chunk_bytes;
        old[index] = sums_.get(chunk);
        if (chunk >= whole_first && chunk < whole_end) {
            sums[index] = {values[chunk - whole_first], static_cast<std::uint32_t>(chunk_bytes), SumState::valid};
            continue;
        }
        const std::uint64_t from = std::max(offset, begin), to = std::min<std::uint64_t>(end, begin + chunk_bytes);
        if (const int status = load_edge(file, chunk, size, edge); status != 0) {
            return status;
        }
        const auto start = static_cast<std::size_t>(from - begin), stop = static_cast<std::size_t>(to - begin);
        if (edge.length < start) {
            std::memset(edge.bytes.data() + edge.length, 0, start - edge.length);
        }
        std::memcpy(edge.bytes.data() + start, data.data() + (from - offset), stop - start);
        const std::size_t length = std::max(edge.length, stop);
        sums[index] = {crc32c(edge.bytes.data(), length), static_cast<std::uint32_t>(length), SumState::valid};
    }
    sums_.begin_change();
    for (std::size_t index = 0; index < count; ++index) {
        sums_.set(first + index, {0, 0, SumState::being_written});
    }
    const int status = write_all(file, offset, data, written);
    for (std::size_t index = 0; index < count; ++index) {
        const std::uint64_t begin = (first + index) * chunk_bytes;
        const bool is_done = status == 0 || begin + chunk_bytes <= offset + written;
        const bool is_begun = written != 0 && begin < offset + written;
        sums_.set(first + index, is_done ? sums[index] : is_begun ? Sum{} : old[index]);
    }
    stamp(file);
    finish_change(file);
    return status != 0 ? status : static_cast<std::int64_t>(data.size());
}

int Inode::set_times(int file, std::optional<std::int64_t> access_ns, std::optional<std::int64_t> modification_ns) {
    const auto time_of = [](std::optional<std::int64_t> wanted) {
        constexpr std::int64_t second = 1'000'000'000;
        if (!wanted) {
            return timespec{0, UTIME_OMIT};
        }
        const std::int64_t rest = (*wanted % second + second) % second;
        return timespec{(*wanted - rest) / second, rest};
    };
    const timespec times[] = {time_of(access_ns), time_of(modification_ns)};
    const std::unique_lock guard(lock_);
    struct stat before {};
    if (sums_.is_open()) {
        if (fstat(file, &before) != 0) {
            return -errno;
        }
        notice_outside_change(before);
        sums_.begin_change();
    }
    const int status = futimens(file, times) != 0 ? -errno : 0;
    if (sums_.is_open()) {
        finish_change(file);
    }
    return status;
}

int Inode::truncate(int file, std::uint64_t size) {
    const std::size_t chunk_bytes = store_.chunk_bytes_;
    const std::unique_lock guard(lock_);
    if (!sums_.is_open()) {
        return ftruncate(file, static_cast<off_t>(size)) != 0 ? -errno : 0;
    }
    struct stat before {};
    if (fstat(file, &before) != 0) {
        return -errno;
    }
    notice_outside_change(before);
    const std::uint64_t tail = size / chunk_bytes;
    const std::size_t rest = size % chunk_bytes;
    const bool shrinks = size < static_cast<std::uint64_t>(before.st_size);
    const Sum old = sums_.get(tail);
    Sum kept = old;
    thread_local Edge edge;
    if (shrinks && rest != 0 && old.state == SumState::valid) {
        if (const int status = load_edge(file, tail, static_cast<std::uint64_t>(before.st_size), edge); status != 0) {
            return status;
        }
        kept = {crc32c(edge.bytes.data(), rest), static_cast<std::uint32_t>(rest), SumState::valid};
        if (const int status = sums_.reserve(tail, tail + 1); status != 0) {
            return status;
        }
    }
    sums_.begin_change();
    if (shrinks) {
        sums_.forget(tail + (rest != 0 ? 1 : 0));
        if (rest != 0 && old.state == SumState::valid) {
            sums_.set(tail, {0, 0, SumState::being_written});
        }
    }
    const int status = ftruncate(file, static_cast<off_t>(size)) != 0 ? -errno : 0;
    if (shrinks && rest != 0 && old.state == SumState::valid) {
        sums_.set(tail, status == 0 ? kept : old);
    }
    stamp(file);
    finish_change(file);
    return status;
}

int Inode::punch(int file, std::uint64_t begin, std::uint64_t end) {
    const std::size_t chunk_bytes = store_.chunk_bytes_;
    const std::unique_lock guard(lock_);
    struct stat before {};
    if (fstat(file, &before) != 0) {
        return -errno;
    }
    const auto size = static_cast<std::uint64_t>(before.st_size);
    end = std::min(end, size);
    if (begin >= end) {
        return 0;
    }
    const auto punch_it = [&] {
        return fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(begin),
                         static_cast<off_t>(end - begin)) != 0
                   ? -errno
                   : 0;
    };
    if (!sums_.is_open()) {
        return punch_it();
    }
    notice_outside_change(before);
    const std::uint64_t first = begin / chunk_bytes, last = (end - 1) / chunk_bytes;
    thread_local Edge edge;
    std::array<Sum, 2> edges;
    for (const std::uint64_t chunk : {first, last}) {
        Sum& sum = edges[chunk == first ? 0 : 1];
        const std::uint64_t at = chunk * chunk_bytes;
        if (sums_.get(chunk).state != SumState::valid || (chunk == last && last == first && chunk != first)) {
            continue;
        }
        if (const int status = load_edge(file, chunk, size, edge); status != 0) {
            return status;
        }
        const auto start = static_cast<std::size_t>(std::max(begin, at) - at);
        const auto stop = static_cast<std::size_t>(std::min<std::uint64_t>(end, at + chunk_bytes) - at);
        std::memset(edge.bytes.data() + start, 0, stop - start);
        sum = {crc32c(edge.bytes.data(), edge.length), static_cast<std::uint32_t>(edge.length), SumState::valid};
    }
    sums_.begin_change();
    for (std::uint64_t chunk = first; chunk <= last; ++chunk) {
        if (sums_.get(chunk).state != SumState::unknown) {
            sums_.set(chunk, {0, 0, SumState::being_written});
        }
    }
    const int status = punch_it();
    for (std::uint64_t chunk = first; chunk <= last; ++chunk) {
        if (sums_.get(chunk).state != SumState::unknown) {
            // After a failure it is unknown how much was changed.
            const bool is_edge = chunk == first || chunk == last;
            sums_.set(chunk, status == 0 && is_edge ? edges[chunk == first ? 0 : 1] : Sum{});
        }
    }
    stamp(file);
    finish_change(file);
    return status;
}

} // namespace gdrkit::storage
