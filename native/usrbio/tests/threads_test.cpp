// A test of the client library with several threads. The threads create, open and destroy iovs and rings while the
// agent of their mount dies and another agent starts. Every result must be documented in hf3fs_usrbio.h, and no
// publication may be left. The test is most useful with the thread sanitizer.
#include "test_mount.hpp"
#include "tests/check.hpp"
#include "usrbio/include/hf3fs_usrbio.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <initializer_list>

using namespace gdrkit::usrbio;
using namespace gdrkit::usrbio::test;

namespace {

constexpr int thread_count = 6;
constexpr int round_count = 40;

// Returns whether `status` is a success or a documented error that can occur here. For example, -EACCES occurs if an
// operation in a ring of the new agent uses memory that was published to the old agent, or vice versa.
bool is_documented(std::int64_t status) {
    for (const int documented_errno : {EREMOTEIO, ENOENT, EACCES, EBADF}) {
        if (status == -documented_errno) {
            return true;
        }
    }
    return status >= 0;
}

// Reads 16 bytes of the file into `iov` by one operation in `ring`.
void read_once(hf3fs_ior& ring, hf3fs_iov& iov, int registered_fd) {
    const int operation_index = hf3fs_prep_io(&ring, &iov, true, iov.base, registered_fd, 0, 16, nullptr);
    CHECK(is_documented(operation_index));
    if (operation_index < 0 || hf3fs_submit_ios(&ring) != 0) {
        return;
    }
    hf3fs_cqe cqe{};
    const int completion_count = hf3fs_wait_for_ios(&ring, &cqe, 1, 1, nullptr);
    CHECK(completion_count == 1 || completion_count == -EREMOTEIO);
    CHECK(completion_count != 1 || is_documented(cqe.result));
}

// Creates, opens, uses and destroys iovs and rings on the mount, `round_count` times.
void use_mount(const Mount& mount, std::atomic<int>& read_count) {
    const int fd = open(mount.file_path("data").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
    for (int round = 0; round < round_count; ++round) {
        hf3fs_iov iov{}, opened_iov{};
        hf3fs_ior ring{};
        const int create_status = hf3fs_iovcreate(&iov, mount.path(), 8192, 0, -1);
        CHECK(is_documented(create_status));
        if (create_status != 0) {
            continue;
        }
        const int open_status =
            hf3fs_iovopen(&opened_iov, reinterpret_cast<std::uint8_t*>(iov.id), mount.path(), 8192, 0, -1);
        CHECK(is_documented(open_status));
        const int registered_fd = hf3fs_reg_fd(fd, 0);
        // A result > 0 is an errno. EBADF: while the agent is replaced, its socket may not exist, and a folder without
        // the socket is not a mount.
        if (registered_fd > 0 && registered_fd != EBADF) {
            CHECK_EQUAL(registered_fd, EREMOTEIO);
        }
        // The ring is for reads, and has 4 entries.
        if (hf3fs_iorcreate4(&ring, mount.path(), 4, true, 0, 0, -1, 0) == 0) {
            if (registered_fd <= 0) {
                read_once(ring, iov, registered_fd);
                read_count += 1;
            }
            if (registered_fd <= 0 && open_status == 0) {
                read_once(ring, opened_iov, registered_fd);
            }
            hf3fs_iordestroy(&ring);
        }
        if (registered_fd <= 0) {
            hf3fs_dereg_fd(registered_fd);
        }
        // In even rounds the opened iov is destroyed first, in odd rounds the iov that owns the memory.
        if (round % 2 == 0 && open_status == 0) {
            hf3fs_iovdestroy(&opened_iov);
        }
        hf3fs_iovdestroy(&iov);
        if (round % 2 != 0 && open_status == 0) {
            hf3fs_iovdestroy(&opened_iov);
        }
    }
    close(fd);
}

} // namespace

int main() {
    Mount mount;
    auto agent = std::make_unique<Agent>(mount);
    std::atomic<int> read_count{0}, running_thread_count{thread_count};
    std::vector<std::thread> threads;
    for (int thread_index = 0; thread_index < thread_count; ++thread_index) {
        threads.emplace_back([&] {
            use_mount(mount, read_count);
            --running_thread_count;
        });
    }
    int agent_death_count = 0;
    for (; running_thread_count > 0 && agent_death_count < 5; ++agent_death_count) {
        const int read_count_before = read_count;
        while (running_thread_count > 0 && read_count < read_count_before + 10) {
            usleep(500);
        }
        agent.reset();
        agent = std::make_unique<Agent>(mount);
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    CHECK(agent_death_count > 0 && read_count > 0);
    // The agent's threads see the end of a connection a little later than the clients.
    for (int attempt = 0; attempt < 10000 && agent->connection_count != 0; ++attempt) {
        usleep(1000);
    }
    CHECK_EQUAL(agent->connection_count.load(), 0);
    CHECK_EQUAL(agent->publication_count.load(), 0);
    CHECK_EQUAL(agent->borrow_count.load(), 0);
    CHECK(mount.link_names().empty());
    return 0;
}
