// Files with sums, without a network. The tests of a kill end a process in the middle of a change.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <system_error>
#include <vector>

#include "storage/open_beneath.hpp"
#include "storage/store_file.hpp"
#include "tests/check.hpp"

using gdrkit::Descriptor;
using namespace gdrkit::storage;

namespace {

constexpr std::size_t chunk = 4096;

struct Folder {
    std::string path = "/tmp/gdrkit-files-XXXXXX";
    Descriptor fd, sums;
    Folder() {
        CHECK(mkdtemp(path.data()) != nullptr);
        fd = Descriptor(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
        CHECK(mkdirat(fd.get(), "sums", 0700) == 0);
        sums = Descriptor(openat(fd.get(), "sums", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    }
    ~Folder() { CHECK(std::system(("rm -r " + path).c_str()) == 0); }
    std::shared_ptr<OpenFile> open_file(Store& store) const {
        return store.adopt(Descriptor(openat(fd.get(), "file", O_RDWR | O_CREAT | O_CLOEXEC, 0600)), true, true);
    }
};

std::vector<std::byte> pattern(std::size_t size, unsigned seed) {
    std::mt19937 chance(seed);
    std::vector<std::byte> bytes(size);
    for (auto& byte : bytes) {
        byte = static_cast<std::byte>(chance());
    }
    return bytes;
}

std::int64_t read(OpenFile& file, std::uint64_t offset, std::vector<std::byte>& into) {
    std::vector<std::byte> buffer(into.size() + 2 * chunk);
    const auto result = file.inode->read(file.fd.get(), offset, into.size(), buffer);
    if (result.result > 0) {
        std::memcpy(into.data(), buffer.data() + result.buffer_offset, static_cast<std::size_t>(result.result));
    }
    return result.result;
}

// Random changes through the server are compared with a copy in memory.
void test_random_changes_match_a_model() {
    const Folder folder;
    Store store(folder.sums.get(), chunk);
    const auto file = folder.open_file(store);
    std::vector<std::byte> model;
    std::mt19937 chance(3);
    for (unsigned round = 0; round < 1500; ++round) {
        const std::size_t offset = chance() % 60000;
        switch (chance() % 8) {
        case 0: {
            model.resize(offset);
            CHECK(file->inode->truncate(file->fd.get(), offset) == 0);
            break;
        }
        case 1: {
            const std::size_t end = offset + chance() % 20000;
            for (std::size_t at = offset; at < std::min(end, model.size()); ++at) {
                model[at] = std::byte{0};
            }
            CHECK(file->inode->punch(file->fd.get(), offset, end) == 0);
            break;
        }
        default: {
            const auto data = pattern(1 + chance() % 12000, round);
            model.resize(std::max(model.size(), offset + data.size()));
            std::copy(data.begin(), data.end(), model.begin() + static_cast<std::ptrdiff_t>(offset));
            CHECK(file->inode->write(file->fd.get(), offset, data) == static_cast<std::int64_t>(data.size()));
        }
        }
        std::vector<std::byte> data_read(1 + chance() % 70000);
        const std::size_t begin = chance() % 60000;
        const std::int64_t count = read(*file, begin, data_read);
        const std::size_t expected = begin >= model.size() ? 0 : std::min(data_read.size(), model.size() - begin);
        CHECK(count == static_cast<std::int64_t>(expected));
        CHECK(std::equal(data_read.begin(), data_read.begin() + count,
                         model.begin() + static_cast<std::ptrdiff_t>(begin)));
    }
    CHECK(store.counters().corruptions == 0 && store.counters().outside_changes == 0);
}

void corrupt(const Folder& folder, off_t offset) {
    const Descriptor plain(openat(folder.fd.get(), "file", O_RDWR | O_CLOEXEC));
    struct stat before {};
    CHECK(fstat(plain.get(), &before) == 0);
    std::byte byte;
    CHECK(pread(plain.get(), &byte, 1, offset) == 1);
    byte ^= std::byte{4};
    CHECK(pwrite(plain.get(), &byte, 1, offset) == 1);
    const timespec times[] = {before.st_atim, before.st_mtim};
    CHECK(futimens(plain.get(), times) == 0);
}

// A change by another program is detected, however soon it follows one of the server. On a plain mount, applications
// write files themselves.
void test_change_by_another_program_is_not_corruption() {
    const Folder folder;
    Store store(folder.sums.get(), chunk);
    const auto file = folder.open_file(store);
    const Descriptor plain(openat(folder.fd.get(), "file", O_RDWR | O_CLOEXEC));
    for (unsigned round = 0; round < 100; ++round) {
        const auto ours = pattern(4 * chunk, round), theirs = pattern(chunk, round + 1000);
        CHECK(file->inode->write(file->fd.get(), 0, ours) == static_cast<std::int64_t>(ours.size()));
        CHECK(pwrite(plain.get(), theirs.data(), chunk, chunk) == static_cast<ssize_t>(chunk));
        std::vector<std::byte> data_read(chunk);
        CHECK(read(*file, chunk, data_read) == static_cast<std::int64_t>(chunk) && data_read == theirs);
    }
    CHECK(store.counters().corruptions == 0 && store.counters().outside_changes == 100);
}

// A process that is killed at any moment of a write causes no false corruption, and hides none.
void test_killed_write_leaves_valid_sums() {
    for (unsigned round = 0; round < 20; ++round) {
        const Folder folder;
        const auto first = pattern(64 * chunk, round);
        {
            Store store(folder.sums.get(), chunk);
            const auto file = folder.open_file(store);
            CHECK(file->inode->write(file->fd.get(), 0, first) == static_cast<std::int64_t>(first.size()));
        }
        int ready[2];
        CHECK(pipe(ready) == 0);
        const pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            Store store(folder.sums.get(), chunk);
            const auto file = folder.open_file(store);
            for (unsigned again = 0;; ++again) {
                const auto data = pattern(20 * chunk + 100, again + 1000);
                file->inode->write(file->fd.get(), 10 * chunk + 7, data);
                if (again == round) {
                    CHECK(::write(ready[1], "x", 1) == 1);
                }
            }
        }
        char byte;
        CHECK(::read(ready[0], &byte, 1) == 1);
        CHECK(kill(child, SIGKILL) == 0);
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
        close(ready[0]);
        close(ready[1]);
        Store store(folder.sums.get(), chunk);
        std::vector<std::byte> all(first.size());
        {
            const auto file = folder.open_file(store);
            CHECK(read(*file, 0, all) == static_cast<std::int64_t>(all.size()));
            CHECK(std::equal(all.begin(), all.begin() + 10 * chunk, first.begin()));
        }
        corrupt(folder, 50 * chunk);
        const auto file = folder.open_file(store);
        std::vector<std::byte> part(chunk);
        CHECK(read(*file, 50 * chunk, part) == -EIO);
        CHECK(store.counters().corruptions == 1);
    }
}

// The disk is full in the middle of a chunk. The chunks before it have the new sums, those behind it the old ones, and
// that chunk has none.
void test_partly_written_chunk_has_no_sum() {
    constexpr std::size_t limit = 5 * chunk + 100;
    const Folder folder;
    Store store(folder.sums.get(), chunk);
    const auto file = folder.open_file(store);
    const auto before = pattern(16 * chunk, 1), after = pattern(16 * chunk, 2);
    CHECK(file->inode->write(file->fd.get(), 0, before) == static_cast<std::int64_t>(before.size()));
    rlimit allowed{};
    CHECK(std::signal(SIGXFSZ, SIG_IGN) != SIG_ERR && getrlimit(RLIMIT_FSIZE, &allowed) == 0);
    const rlimit smaller{limit, allowed.rlim_max};
    CHECK(setrlimit(RLIMIT_FSIZE, &smaller) == 0);
    CHECK(file->inode->write(file->fd.get(), 0, after) == -EFBIG);
    CHECK(setrlimit(RLIMIT_FSIZE, &allowed) == 0);
    auto expected = before;
    std::copy(after.begin(), after.begin() + limit, expected.begin());
    std::vector<std::byte> data_read(expected.size());
    CHECK(read(*file, 0, data_read) == static_cast<std::int64_t>(data_read.size()) && data_read == expected);
    CHECK(store.counters().corruptions == 0);
    std::vector<std::byte> part(chunk);
    for (const std::size_t index : {4U, 5U, 6U}) {
        corrupt(folder, static_cast<off_t>(index * chunk + 17));
        const std::int64_t count = read(*file, index * chunk, part);
        CHECK(count == (index == 5 ? static_cast<std::int64_t>(chunk) : -EIO));
    }
}

// Sums are not written through a symbolic link in the place of their folder.
void test_sums_are_not_written_through_a_link() {
    const Folder folder;
    CHECK(mkdirat(folder.fd.get(), "elsewhere", 0700) == 0);
    Store store(folder.sums.get(), chunk);
    const auto file = folder.open_file(store);
    struct stat info {};
    CHECK(fstat(file->fd.get(), &info) == 0);
    char group[3], name[17];
    std::snprintf(group, sizeof group, "%02x", static_cast<unsigned>(info.st_ino & 255));
    std::snprintf(name, sizeof name, "%016llx", static_cast<unsigned long long>(info.st_ino));
    CHECK(symlinkat("../elsewhere", folder.sums.get(), group) == 0);
    CHECK(file->inode->write(file->fd.get(), 0, pattern(chunk, 1)) == -ELOOP);
    const std::string there = std::string("elsewhere/") + name;
    CHECK(faccessat(folder.fd.get(), there.c_str(), F_OK, 0) != 0);
    CHECK(close(openat(folder.fd.get(), there.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600)) == 0);
    store.remove_sums(info.st_ino);
    CHECK(faccessat(folder.fd.get(), there.c_str(), F_OK, 0) == 0);
}

void test_open_stays_below_the_folder() {
    const Folder folder;
    CHECK(mkdirat(folder.fd.get(), "a", 0700) == 0 && symlinkat("a", folder.fd.get(), "link") == 0);
    CHECK(close(openat(folder.fd.get(), "a/file", O_CREAT | O_WRONLY | O_CLOEXEC, 0600)) == 0);
    for (const auto open_function : {&open_beneath, &open_beneath_by_steps}) {
        const auto number = [&](const char* path, int flags = O_RDONLY) {
            const Descriptor opened(open_function(folder.fd.get(), path, flags, 0600));
            return opened ? 0 : [&] {
                const int again = open_function(folder.fd.get(), path, flags, 0600);
                CHECK(again < 0);
                return -again;
            }();
        };
        CHECK(number("a/file") == 0 && number("", O_DIRECTORY) == 0 && number("a", O_DIRECTORY) == 0);
        CHECK(number("link/file") == ELOOP && number("link") == ELOOP);
        CHECK(number("../x") == EXDEV && number("/etc") == EXDEV && number("a/../../etc") == EXDEV);
        CHECK(number("b") == ENOENT && number("a/file/x") == ENOTDIR);
    }
}

} // namespace

int main() {
    test_random_changes_match_a_model();
    test_change_by_another_program_is_not_corruption();
    test_killed_write_leaves_valid_sums();
    test_partly_written_chunk_has_no_sum();
    test_sums_are_not_written_through_a_link();
    test_open_stays_below_the_folder();
}
