// Many threads that make, open and end iovs and rings, while the agent of their mount dies and another one comes. Every
// answer is a documented one, and nothing is left. It is most telling under tsan.
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

constexpr int threads_in_all = 6;
constexpr int rounds = 40;

// -EACCES: an operation of a ring of the new agent names memory of the old one, or the other way round.
bool is_documented(std::int64_t status) {
    for (const int known : {EREMOTEIO, ENOENT, EACCES, EBADF}) {
        if (status == -known) {
            return true;
        }
    }
    return status >= 0;
}

void one_read(hf3fs_ior& ring, hf3fs_iov& iov, int registered) {
    const int index = hf3fs_prep_io(&ring, &iov, true, iov.base, registered, 0, 16, nullptr);
    CHECK(is_documented(index));
    if (index < 0 || hf3fs_submit_ios(&ring) != 0) {
        return;
    }
    hf3fs_cqe cqe{};
    const int count = hf3fs_wait_for_ios(&ring, &cqe, 1, 1, nullptr);
    CHECK(count == 1 || count == -EREMOTEIO);
    CHECK(count != 1 || is_documented(cqe.result));
}

void live(const Mount& mount, std::atomic<int>& reads) {
    const int fd = open(mount.file("data").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
    for (int round = 0; round < rounds; ++round) {
        hf3fs_iov iov{}, opened{};
        hf3fs_ior ring{};
        const int made = hf3fs_iovcreate(&iov, mount.path(), 8192, 0, -1);
        CHECK(is_documented(made));
        if (made != 0) {
            continue;
        }
        const int borrowed = hf3fs_iovopen(&opened, reinterpret_cast<std::uint8_t*>(iov.id), mount.path(), 8192, 0, -1);
        CHECK(is_documented(borrowed));
        const int registered = hf3fs_reg_fd(fd, 0);
        // EBADF: between two agents there may be no socket, and a folder without one is no mount.
        if (registered > 0 && registered != EBADF) {
            CHECK_EQUAL(registered, EREMOTEIO);
        }
        if (hf3fs_iorcreate4(&ring, mount.path(), 4, true, 0, 0, -1, 0) == 0) {
            if (registered <= 0) {
                one_read(ring, iov, registered);
                reads += 1;
            }
            if (registered <= 0 && borrowed == 0) {
                one_read(ring, opened, registered);
            }
            hf3fs_iordestroy(&ring);
        }
        if (registered <= 0) {
            hf3fs_dereg_fd(registered);
        }
        // Now its owner ends first, now who has opened it.
        if (round % 2 == 0 && borrowed == 0) {
            hf3fs_iovdestroy(&opened);
        }
        hf3fs_iovdestroy(&iov);
        if (round % 2 != 0 && borrowed == 0) {
            hf3fs_iovdestroy(&opened);
        }
    }
    close(fd);
}

} // namespace

int main() {
    Mount mount;
    auto agent = std::make_unique<Agent>(mount);
    std::atomic<int> reads{0}, living{threads_in_all};
    std::vector<std::thread> threads;
    for (int number = 0; number < threads_in_all; ++number) {
        threads.emplace_back([&] {
            live(mount, reads);
            --living;
        });
    }
    int deaths = 0;
    for (; living > 0 && deaths < 5; ++deaths) {
        const int before = reads;
        while (living > 0 && reads < before + 10) {
            usleep(500);
        }
        agent.reset();
        agent = std::make_unique<Agent>(mount);
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    CHECK(deaths > 0 && reads > 0);
    for (int turn = 0; turn < 10000 && agent->connections != 0; ++turn) {
        usleep(1000);
    }
    CHECK_EQUAL(agent->connections.load(), 0);
    CHECK_EQUAL(agent->publications.load(), 0);
    CHECK_EQUAL(agent->borrowings.load(), 0);
    CHECK(mount.links().empty());
    return 0;
}
