// Tests of the files of a storage server and their checksums ("sums"), without a network.
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

constexpr std::size_t chunk_bytes = 4096;

// A temporary folder of a store, with the folder of its sums.
struct StoreFolder {
    std::string path = "/tmp/gdrkit-files-XXXXXX";
    Descriptor fd, sums_folder;
    StoreFolder() {
        CHECK(mkdtemp(path.data()) != nullptr);
        fd = Descriptor(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
        CHECK(mkdirat(fd.get(), "sums", 0700) == 0);
        sums_folder = Descriptor(openat(fd.get(), "sums", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    }
    ~StoreFolder() { CHECK(std::system(("rm -r " + path).c_str()) == 0); }
    std::shared_ptr<OpenFile> open_file(Store& store) const {
        return store.adopt(Descriptor(openat(fd.get(), "file", O_RDWR | O_CREAT | O_CLOEXEC, 0600)), true, true);
    }
};

std::vector<std::byte> make_random_bytes(std::size_t size, unsigned seed) {
    std::mt19937 random_number(seed);
    std::vector<std::byte> bytes(size);
    for (auto& byte : bytes) {
        byte = static_cast<std::byte>(random_number());
    }
    return bytes;
}

// Reads from the server's file. Returns the number of bytes, or -errno.
std::int64_t read_file(OpenFile& file, std::uint64_t offset, std::vector<std::byte>& destination) {
    std::vector<std::byte> buffer(destination.size() + 2 * chunk_bytes);
    const auto [bytes_or_error, buffer_offset] = file.inode->read(file.fd.get(), offset, destination.size(), buffer);
    if (bytes_or_error > 0) {
        std::memcpy(destination.data(), buffer.data() + buffer_offset, static_cast<std::size_t>(bytes_or_error));
    }
    return bytes_or_error;
}

// A file with random changes has the same bytes as a copy in memory with the same changes.
void test_random_changes_match_a_model() {
    const StoreFolder folder;
    Store store(folder.sums_folder.get(), chunk_bytes);
    const auto file = folder.open_file(store);
    std::vector<std::byte> model;
    std::mt19937 random_number(3);
    for (unsigned round = 0; round < 1500; ++round) {
        const std::size_t offset = random_number() % 60000;
        switch (random_number() % 8) {
        case 0: {
            model.resize(offset);
            CHECK(file->inode->truncate(file->fd.get(), offset) == 0);
            break;
        }
        case 1: {
            const std::size_t end = offset + random_number() % 20000;
            for (std::size_t index = offset; index < std::min(end, model.size()); ++index) {
                model[index] = std::byte{0};
            }
            CHECK(file->inode->punch(file->fd.get(), offset, end) == 0);
            break;
        }
        default: {
            const auto data = make_random_bytes(1 + random_number() % 12000, round);
            model.resize(std::max(model.size(), offset + data.size()));
            std::copy(data.begin(), data.end(), model.begin() + static_cast<std::ptrdiff_t>(offset));
            CHECK(file->inode->write(file->fd.get(), offset, data) == static_cast<std::int64_t>(data.size()));
        }
        }
        std::vector<std::byte> data_read(1 + random_number() % 70000);
        const std::size_t read_offset = random_number() % 60000;
        const std::int64_t read_bytes = read_file(*file, read_offset, data_read);
        const std::size_t expected_bytes =
            read_offset >= model.size() ? 0 : std::min(data_read.size(), model.size() - read_offset);
        CHECK(read_bytes == static_cast<std::int64_t>(expected_bytes));
        CHECK(std::equal(data_read.begin(), data_read.begin() + read_bytes,
                         model.begin() + static_cast<std::ptrdiff_t>(read_offset)));
    }
    CHECK(store.counters().corruptions == 0 && store.counters().outside_changes == 0);
}

// Changes one bit of the file and restores the modification time, as if the disk had corrupted the bit.
void flip_bit(const StoreFolder& folder, off_t offset) {
    const Descriptor file(openat(folder.fd.get(), "file", O_RDWR | O_CLOEXEC));
    struct stat stat_before {};
    CHECK(fstat(file.get(), &stat_before) == 0);
    std::byte byte;
    CHECK(pread(file.get(), &byte, 1, offset) == 1);
    byte ^= std::byte{4};
    CHECK(pwrite(file.get(), &byte, 1, offset) == 1);
    const timespec times[] = {stat_before.st_atim, stat_before.st_mtim};
    CHECK(futimens(file.get(), times) == 0);
}

// A change by another program is detected even if it directly follows a change by the server. Applications write to the
// store without the server if they use it as a mounted file system.
void test_change_by_another_program_is_not_corruption() {
    const StoreFolder folder;
    Store store(folder.sums_folder.get(), chunk_bytes);
    const auto file = folder.open_file(store);
    const Descriptor other_program_fd(openat(folder.fd.get(), "file", O_RDWR | O_CLOEXEC));
    for (unsigned round = 0; round < 100; ++round) {
        const auto server_data = make_random_bytes(4 * chunk_bytes, round),
                   other_program_data = make_random_bytes(chunk_bytes, round + 1000);
        CHECK(file->inode->write(file->fd.get(), 0, server_data) == static_cast<std::int64_t>(server_data.size()));
        CHECK(pwrite(other_program_fd.get(), other_program_data.data(), chunk_bytes, chunk_bytes) ==
              static_cast<ssize_t>(chunk_bytes));
        std::vector<std::byte> data_read(chunk_bytes);
        CHECK(read_file(*file, chunk_bytes, data_read) == static_cast<std::int64_t>(chunk_bytes) &&
              data_read == other_program_data);
    }
    CHECK(store.counters().corruptions == 0 && store.counters().outside_changes == 100);
}

// After a process was killed during a write, the store reports corrupt chunks, and reports no correct chunk as corrupt.
void test_killed_write_leaves_valid_sums() {
    for (unsigned round = 0; round < 20; ++round) {
        const StoreFolder folder;
        const auto initial_data = make_random_bytes(64 * chunk_bytes, round);
        {
            Store store(folder.sums_folder.get(), chunk_bytes);
            const auto file = folder.open_file(store);
            CHECK(file->inode->write(file->fd.get(), 0, initial_data) ==
                  static_cast<std::int64_t>(initial_data.size()));
        }
        int ready_pipe[2];
        CHECK(pipe(ready_pipe) == 0);
        const pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            Store store(folder.sums_folder.get(), chunk_bytes);
            const auto file = folder.open_file(store);
            // After some writes, the parent may kill this process in the middle of any later write.
            for (unsigned write_index = 0;; ++write_index) {
                const auto data = make_random_bytes(20 * chunk_bytes + 100, write_index + 1000);
                file->inode->write(file->fd.get(), 10 * chunk_bytes + 7, data);
                if (write_index == round) {
                    CHECK(::write(ready_pipe[1], "x", 1) == 1);
                }
            }
        }
        char ready_byte;
        CHECK(::read(ready_pipe[0], &ready_byte, 1) == 1);
        CHECK(kill(child, SIGKILL) == 0);
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
        close(ready_pipe[0]);
        close(ready_pipe[1]);
        Store store(folder.sums_folder.get(), chunk_bytes);
        std::vector<std::byte> data_read(initial_data.size());
        {
            const auto file = folder.open_file(store);
            CHECK(read_file(*file, 0, data_read) == static_cast<std::int64_t>(data_read.size()));
            CHECK(std::equal(data_read.begin(), data_read.begin() + 10 * chunk_bytes, initial_data.begin()));
        }
        // The child wrote only to chunks 10 to 30, so the sum of chunk 50 is still valid.
        flip_bit(folder, 50 * chunk_bytes);
        const auto file = folder.open_file(store);
        std::vector<std::byte> chunk_read(chunk_bytes);
        CHECK(read_file(*file, 50 * chunk_bytes, chunk_read) == -EIO);
        CHECK(store.counters().corruptions == 1);
    }
}

// If a write fails in the middle of a chunk, this chunk has no sum. The chunks before it have new sums, and the chunks
// after it have their old sums. So the store detects corrupt bytes in all other chunks.
void test_partly_written_chunk_has_no_sum() {
    constexpr std::size_t file_bytes_max = 5 * chunk_bytes + 100;
    const StoreFolder folder;
    Store store(folder.sums_folder.get(), chunk_bytes);
    const auto file = folder.open_file(store);
    const auto old_data = make_random_bytes(16 * chunk_bytes, 1), new_data = make_random_bytes(16 * chunk_bytes, 2);
    CHECK(file->inode->write(file->fd.get(), 0, old_data) == static_cast<std::int64_t>(old_data.size()));
    // A write beyond the limit RLIMIT_FSIZE fails in the middle.
    rlimit previous_limit{};
    CHECK(std::signal(SIGXFSZ, SIG_IGN) != SIG_ERR && getrlimit(RLIMIT_FSIZE, &previous_limit) == 0);
    const rlimit small_limit{file_bytes_max, previous_limit.rlim_max};
    CHECK(setrlimit(RLIMIT_FSIZE, &small_limit) == 0);
    CHECK(file->inode->write(file->fd.get(), 0, new_data) == -EFBIG);
    CHECK(setrlimit(RLIMIT_FSIZE, &previous_limit) == 0);
    auto expected_data = old_data;
    std::copy(new_data.begin(), new_data.begin() + file_bytes_max, expected_data.begin());
    std::vector<std::byte> data_read(expected_data.size());
    CHECK(read_file(*file, 0, data_read) == static_cast<std::int64_t>(data_read.size()) && data_read == expected_data);
    CHECK(store.counters().corruptions == 0);
    std::vector<std::byte> chunk_read(chunk_bytes);
    for (const std::size_t chunk : {4U, 5U, 6U}) { // Chunk 5 is partly written.
        flip_bit(folder, static_cast<off_t>(chunk * chunk_bytes + 17));
        const std::int64_t read_result = read_file(*file, chunk * chunk_bytes, chunk_read);
        CHECK(read_result == (chunk == 5 ? static_cast<std::int64_t>(chunk_bytes) : -EIO));
    }
}

// If a symbolic link replaces the subfolder of the sums file, no sums are written or removed through the link.
void test_sums_are_not_written_through_a_link() {
    const StoreFolder folder;
    CHECK(mkdirat(folder.fd.get(), "elsewhere", 0700) == 0);
    Store store(folder.sums_folder.get(), chunk_bytes);
    const auto file = folder.open_file(store);
    struct stat file_stat {};
    CHECK(fstat(file->fd.get(), &file_stat) == 0);
    char subfolder[3], sums_name[17];
    std::snprintf(subfolder, sizeof subfolder, "%02x", static_cast<unsigned>(file_stat.st_ino & 255));
    std::snprintf(sums_name, sizeof sums_name, "%016llx", static_cast<unsigned long long>(file_stat.st_ino));
    CHECK(symlinkat("../elsewhere", folder.sums_folder.get(), subfolder) == 0);
    CHECK(file->inode->write(file->fd.get(), 0, make_random_bytes(chunk_bytes, 1)) == -ELOOP);
    const std::string sums_path = std::string("elsewhere/") + sums_name;
    CHECK(faccessat(folder.fd.get(), sums_path.c_str(), F_OK, 0) != 0);
    CHECK(close(openat(folder.fd.get(), sums_path.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600)) == 0);
    store.remove_sums(file_stat.st_ino);
    CHECK(faccessat(folder.fd.get(), sums_path.c_str(), F_OK, 0) == 0);
}

void test_open_stays_below_the_folder() {
    const StoreFolder folder;
    CHECK(mkdirat(folder.fd.get(), "a", 0700) == 0 && symlinkat("a", folder.fd.get(), "link") == 0);
    CHECK(close(openat(folder.fd.get(), "a/file", O_CREAT | O_WRONLY | O_CLOEXEC, 0600)) == 0);
    for (const auto open_function : {&open_beneath, &open_beneath_by_component}) {
        // Opens and closes the path. Returns 0 if it can be opened, or the errno.
        const auto try_open = [&](const char* path, int flags = O_RDONLY) {
            const int fd_or_error = open_function(folder.fd.get(), path, flags, 0600);
            const Descriptor opened_file(fd_or_error);
            return opened_file ? 0 : -fd_or_error;
        };
        CHECK(try_open("a/file") == 0 && try_open("", O_DIRECTORY) == 0 && try_open("a", O_DIRECTORY) == 0);
        CHECK(try_open("link/file") == ELOOP && try_open("link") == ELOOP);
        CHECK(try_open("../x") == EXDEV && try_open("/etc") == EXDEV && try_open("a/../../etc") == EXDEV);
        CHECK(try_open("b") == ENOENT && try_open("a/file/x") == ENOTDIR);
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
