// Tests of the pool of host memory: which iovs get the memory of an earlier iov, what forks change, and the limits.
#include "client_fixture.hpp"
#include "usrbio/include/hf3fs_usrbio_gdr.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

using namespace gdrkit::usrbio;
using namespace gdrkit::usrbio::test;

namespace {

constexpr std::size_t mib = 1 << 20;
constexpr std::size_t iov_bytes = 4 * mib; // The smallest iov whose memory is kept.
constexpr char pool_bytes[] = "16777216";  // 16 MiB

hf3fs_iov create_filled_iov(const Mount& mount, std::size_t bytes = iov_bytes, int numa = -1) {
    hf3fs_iov iov{};
    CHECK_EQUAL(hf3fs_iovcreate(&iov, mount.path(), bytes, 0, numa), 0);
    // memcmp is fast in an instrumented build, too. A slow test would wait until idle memory is freed.
    CHECK(iov.base[0] == 0 && std::memcmp(iov.base, iov.base + 1, bytes - 1) == 0);
    std::memset(iov.base, 'x', bytes);
    return iov;
}

// Returns the file in /dev/shm with the memory of an iov.
std::string get_file_name(const Mount& mount, const hf3fs_iov& iov) {
    Uuid id;
    std::memcpy(id.data(), iov.id, id.size());
    return std::filesystem::read_symlink(mount.link(to_string(id)));
}

void test_next_iov_gets_the_memory_with_zeros() {
    const std::size_t memory_count_before = count_existing_shm_names();
    Mount mount;
    Agent agent(mount);
    agent.keeps_registrations = true;
    hf3fs_iov iov = create_filled_iov(mount);
    const std::string file = get_file_name(mount, iov);
    const std::uint8_t* const base = iov.base;
    hf3fs_iovdestroy(&iov);
    CHECK(mount.links().empty());
    CHECK_EQUAL(agent.kept_count.load(), 1);
    CHECK_EQUAL(count_existing_shm_names(), memory_count_before + 1);
    hf3fs_iov larger_iov = create_filled_iov(mount, 2 * iov_bytes);
    hf3fs_iov bound_iov = create_filled_iov(mount, iov_bytes, 0);
    CHECK(get_file_name(mount, larger_iov) != file && get_file_name(mount, bound_iov) != file);
    hf3fs_iovdestroy(&larger_iov);
    hf3fs_iovdestroy(&bound_iov);
    CHECK_EQUAL(agent.kept_count.load(), 3);
    iov = create_filled_iov(mount);
    CHECK(iov.base == base && get_file_name(mount, iov) == file);
    CHECK_EQUAL(agent.publications.load(), 1);
    hf3fs_iovdestroy(&iov);
    // The thread of the pool frees memory that is idle for 3 s.
    wait_until_true([&] { return count_existing_shm_names() == memory_count_before; });
    wait_until_true([&] { return agent.connections == 0; });
    CHECK_EQUAL(agent.kept_count.load(), 1); // This agent still counts the registration that the second iov used again.
}

void test_memory_is_not_kept_without_name_or_agent() {
    const std::size_t memory_count_before = count_existing_shm_names();
    Mount mount;
    {
        hf3fs_iov iov = create_filled_iov(mount);
        hf3fs_iovdestroy(&iov);
        CHECK_EQUAL(count_existing_shm_names(), memory_count_before);
    }
    Agent agent(mount);
    hf3fs_iov iov = create_filled_iov(mount);
    hf3fs_iovdestroy(&iov); // This agent does not report that it keeps registrations.
    agent.keeps_registrations = true;
    iov = create_filled_iov(mount, iov_bytes - 1);
    hf3fs_iovdestroy(&iov);
    iov = create_filled_iov(mount);
    hf3fs_iovunlink(&iov);
    hf3fs_iovdestroy(&iov);
    iov = create_filled_iov(mount, 16 * mib + 1); // More than the limit of idle bytes.
    hf3fs_iovdestroy(&iov);
    CHECK_EQUAL(count_existing_shm_names(), memory_count_before);
    CHECK_EQUAL(agent.kept_count.load(), 0);
}

void test_longest_idle_memory_is_freed_at_the_limit() {
    Mount mount;
    Agent agent(mount);
    agent.keeps_registrations = true;
    std::vector<hf3fs_iov> iovs(5);
    std::vector<std::string> files;
    for (hf3fs_iov& iov : iovs) {
        iov = create_filled_iov(mount);
        files.push_back(get_file_name(mount, iov));
    }
    for (hf3fs_iov& iov : iovs) {
        hf3fs_iovdestroy(&iov);
    }
    CHECK_EQUAL(agent.kept_count.load(), 4);
    CHECK(!std::filesystem::exists(files[0]));
    CHECK(std::all_of(files.begin() + 1, files.end(), [](const auto& file) { return std::filesystem::exists(file); }));
    CHECK_EQUAL(gdrkit_host_pool_trim(2 * iov_bytes), 0);
    CHECK_EQUAL(agent.kept_count.load(), 2);
    CHECK(std::filesystem::exists(files[4]) && !std::filesystem::exists(files[2]));
    // If an iov cannot be published, idle memory is freed before the second attempt.
    agent.refusal_errno = EDQUOT;
    hf3fs_iov iov{};
    CHECK_EQUAL(hf3fs_iovcreate(&iov, mount.path(), mib, 0, -1), -EDQUOT);
    CHECK_EQUAL(agent.kept_count.load(), 0);
    CHECK(std::none_of(files.begin(), files.end(), [](const auto& file) { return std::filesystem::exists(file); }));
}

void test_memory_of_an_ended_agent_is_not_used() {
    Mount mount;
    std::string file;
    {
        Agent agent(mount);
        agent.keeps_registrations = true;
        hf3fs_iov iov = create_filled_iov(mount);
        file = get_file_name(mount, iov);
        hf3fs_iovdestroy(&iov);
    }
    Agent agent(mount);
    agent.keeps_registrations = true;
    hf3fs_iov iov = create_filled_iov(mount);
    CHECK(get_file_name(mount, iov) != file);
    // The next agent does not know memory whose name was removed.
    const std::string removed_file = get_file_name(mount, iov);
    hf3fs_iovdestroy(&iov);
    CHECK(std::filesystem::remove(removed_file));
    iov = create_filled_iov(mount);
    CHECK(get_file_name(mount, iov) != removed_file);
    CHECK_EQUAL(agent.kept_count.load(), 0);
    hf3fs_iovdestroy(&iov);
}

void test_registration_ends_although_the_name_was_removed() {
    Mount mount;
    Agent agent(mount);
    agent.keeps_registrations = true;
    for (const bool is_trimmed : {true, false}) {
        hf3fs_iov iov = create_filled_iov(mount);
        const std::string file = get_file_name(mount, iov);
        hf3fs_iovdestroy(&iov);
        CHECK_EQUAL(agent.kept_count.load(), 1);
        CHECK(std::filesystem::remove(file));
        if (is_trimmed) {
            CHECK_EQUAL(gdrkit_host_pool_trim(0), 0);
            CHECK_EQUAL(agent.kept_count.load(), 0);
        }
    }
    wait_until_true([&] { return agent.kept_count == 0; });
}

void test_protection_and_holes_of_the_application() {
    Mount mount;
    Agent agent(mount);
    agent.keeps_registrations = true;
    hf3fs_iov iov = create_filled_iov(mount);
    const std::string file = get_file_name(mount, iov);
    CHECK_EQUAL(mprotect(iov.base, iov_bytes, PROT_READ), 0);
    hf3fs_iovdestroy(&iov);
    iov = create_filled_iov(mount);
    CHECK(get_file_name(mount, iov) == file);
    CHECK_EQUAL(munmap(iov.base + mib, mib), 0);
    hf3fs_iovdestroy(&iov);
    CHECK_EQUAL(agent.kept_count.load(), 1); // This agent still counts the registration that the second iov used again.
    iov = create_filled_iov(mount);
    CHECK(get_file_name(mount, iov) != file);
    hf3fs_iovdestroy(&iov);
}

void test_threads_wait_for_memory_that_is_being_freed() {
    // Each mount has its own connection, so that the requests of the threads do not wait for each other.
    Mount mounts[2];
    Agent agents[2] = {Agent(mounts[0]), Agent(mounts[1])};
    for (Agent& agent : agents) {
        agent.keeps_registrations = true;
    }
    for (int round = 0; round < 5; ++round) {
        for (Agent& agent : agents) {
            agent.refuses_while_kept = false;
        }
        std::vector<hf3fs_iov> iovs = {create_filled_iov(mounts[0]), create_filled_iov(mounts[0]),
                                       create_filled_iov(mounts[0]), create_filled_iov(mounts[1])};
        for (hf3fs_iov& iov : iovs) {
            hf3fs_iovdestroy(&iov);
        }
        for (Agent& agent : agents) {
            agent.refuses_while_kept = true;
        }
        std::vector<std::thread> threads;
        for (const Mount& mount : mounts) {
            threads.emplace_back([&mount] {
                hf3fs_iov iov{};
                CHECK_EQUAL(hf3fs_iovcreate(&iov, mount.path(), mib, 0, -1), 0);
                hf3fs_iovdestroy(&iov);
            });
        }
        for (std::thread& thread : threads) {
            thread.join();
        }
    }
}

#ifndef __SANITIZE_THREAD__ // tsan does not support threads in a child of a process with threads.

// Destroys an iov, and returns the file of the next one with the same size.
std::string get_next_file_name(const Mount& mount, hf3fs_iov& iov) {
    hf3fs_iovdestroy(&iov);
    hf3fs_iov next = create_filled_iov(mount);
    const std::string file = get_file_name(mount, next);
    hf3fs_iovunlink(&next); // Memory without a name is not kept.
    hf3fs_iovdestroy(&next);
    return file;
}

// Runs `function` in a forked child while the parent runs `parent_function`.
template <typename Function, typename Meanwhile> void run_in_child(Function function, Meanwhile parent_function) {
    int pipe_fds[2];
    CHECK_EQUAL(pipe(pipe_fds), 0);
    const pid_t child = fork();
    if (child == 0) {
        char byte = 0;
        close(pipe_fds[1]);
        CHECK_EQUAL(read(pipe_fds[0], &byte, 1), 0); // The read returns when the parent closes its end.
        function();
        _exit(0);
    }
    close(pipe_fds[0]);
    parent_function();
    close(pipe_fds[1]);
    int status = -1;
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    CHECK_EQUAL(status, 0);
}

void test_memory_that_a_child_has_mapped_is_not_used() {
    Mount mount;
    Agent agent(mount);
    agent.keeps_registrations = true;
    hf3fs_iov iov = create_filled_iov(mount);
    std::uint8_t* const base = iov.base;
    const std::string file = get_file_name(mount, iov);
    run_in_child([&] { CHECK_EQUAL(base[1], 'x'); }, [&] { CHECK(get_next_file_name(mount, iov) != file); });
    CHECK_EQUAL(agent.kept_count.load(), 0);
}

void test_child_does_not_map_idle_memory() {
    Mount mount;
    Agent agent(mount);
    agent.keeps_registrations = true;
    hf3fs_iov iov = create_filled_iov(mount);
    const std::string file = get_file_name(mount, iov);
    struct stat attributes {};
    CHECK_EQUAL(stat(file.c_str(), &attributes), 0);
    // /proc/self/maps shows the name that the file had when it was opened, so search for the inode.
    const std::string inode = " " + std::to_string(attributes.st_ino) + " ";
    hf3fs_iovdestroy(&iov);
    CHECK_EQUAL(agent.kept_count.load(), 1);
    run_in_child(
        [&] {
            std::ifstream maps("/proc/self/maps");
            const std::string text{std::istreambuf_iterator<char>(maps), {}};
            CHECK(text.find(inode) == std::string::npos);
            hf3fs_iov child_iov = create_filled_iov(mount);
            const std::string child_file = get_file_name(mount, child_iov);
            CHECK(child_file != file);
            hf3fs_iovdestroy(&child_iov);
            child_iov = create_filled_iov(mount);
            CHECK(get_file_name(mount, child_iov) == child_file);
            hf3fs_iovunlink(&child_iov);
            hf3fs_iovdestroy(&child_iov);
        },
        [] {});
    iov = create_filled_iov(mount);
    CHECK(get_file_name(mount, iov) != file);
    hf3fs_iovdestroy(&iov);
}

#endif

void test_threads_share_the_pool() {
    Mount mount;
    Agent agent(mount);
    agent.keeps_registrations = true;
    std::vector<std::thread> threads;
    for (int number = 0; number < 4; ++number) {
        threads.emplace_back([&] {
            for (int turn = 0; turn < 20; ++turn) {
                hf3fs_iov iov = create_filled_iov(mount);
                hf3fs_iovdestroy(&iov);
            }
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    CHECK_EQUAL(agent.publications.load(), 0);
}

} // namespace

int main() {
    setenv("GDRKIT_USRBIO_HOST_POOL_BYTES", pool_bytes, 1);
    test_next_iov_gets_the_memory_with_zeros();
    test_memory_is_not_kept_without_name_or_agent();
    test_longest_idle_memory_is_freed_at_the_limit();
    test_memory_of_an_ended_agent_is_not_used();
    test_registration_ends_although_the_name_was_removed();
    test_protection_and_holes_of_the_application();
    test_threads_wait_for_memory_that_is_being_freed();
#ifndef __SANITIZE_THREAD__
    test_memory_that_a_child_has_mapped_is_not_used();
    test_child_does_not_map_idle_memory();
#endif
    test_threads_share_the_pool();
    return 0;
}
