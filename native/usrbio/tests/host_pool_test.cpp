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
constexpr std::size_t iov_bytes = 4 * mib;         // The smallest iov whose memory is kept.
constexpr char idle_bytes_max_text[] = "16777216"; // Limit of idle bytes in the pool: 16 MiB.

// Creates an iov, checks that its memory contains only zeros, and fills it with 'x'.
hf3fs_iov create_filled_iov(const Mount& mount, std::size_t size_bytes = iov_bytes, int numa = -1) {
    hf3fs_iov iov{};
    CHECK_EQUAL(hf3fs_iovcreate(&iov, mount.path(), size_bytes, 0, numa), 0);
    // memcmp is fast even in an instrumented build. In a slow test, the pool would free idle memory (after 3 s) too
    // early.
    CHECK(iov.base[0] == 0 && std::memcmp(iov.base, iov.base + 1, size_bytes - 1) == 0);
    std::memset(iov.base, 'x', size_bytes);
    return iov;
}

// Returns the path of the memory of an iov in /dev/shm.
std::string get_memory_path(const Mount& mount, const hf3fs_iov& iov) {
    Uuid id;
    std::memcpy(id.data(), iov.id, id.size());
    return std::filesystem::read_symlink(mount.link_path(to_string(id)));
}

void test_next_iov_gets_the_memory_with_zeros() {
    const std::size_t shm_name_count_before = count_existing_shm_names();
    Mount mount;
    Agent agent(mount);
    agent.keeps_registrations = true;
    hf3fs_iov iov = create_filled_iov(mount);
    const std::string memory_path = get_memory_path(mount, iov);
    const std::uint8_t* const base = iov.base;
    hf3fs_iovdestroy(&iov);
    CHECK(mount.link_names().empty());
    CHECK_EQUAL(agent.kept_registration_count.load(), 1);
    CHECK_EQUAL(count_existing_shm_names(), shm_name_count_before + 1);
    hf3fs_iov larger_iov = create_filled_iov(mount, 2 * iov_bytes);
    hf3fs_iov bound_iov = create_filled_iov(mount, iov_bytes, 0); // It is bound to NUMA node 0.
    CHECK(get_memory_path(mount, larger_iov) != memory_path && get_memory_path(mount, bound_iov) != memory_path);
    hf3fs_iovdestroy(&larger_iov);
    hf3fs_iovdestroy(&bound_iov);
    CHECK_EQUAL(agent.kept_registration_count.load(), 3);
    iov = create_filled_iov(mount);
    CHECK(iov.base == base && get_memory_path(mount, iov) == memory_path);
    CHECK_EQUAL(agent.publication_count.load(), 1);
    hf3fs_iovdestroy(&iov);
    // The thread of the pool frees memory that is idle for 3 s.
    wait_until_true([&] { return count_existing_shm_names() == shm_name_count_before; });
    wait_until_true([&] { return agent.connection_count == 0; });
    // The test's agent does not decrement kept_registration_count when an iov uses a registration again, so it counted
    // `iov` twice.
    CHECK_EQUAL(agent.kept_registration_count.load(), 1);
}

void test_memory_is_not_kept_without_name_or_agent() {
    const std::size_t shm_name_count_before = count_existing_shm_names();
    Mount mount;
    {
        hf3fs_iov iov = create_filled_iov(mount);
        hf3fs_iovdestroy(&iov);
        CHECK_EQUAL(count_existing_shm_names(), shm_name_count_before);
    }
    Agent agent(mount);
    hf3fs_iov iov = create_filled_iov(mount);
    hf3fs_iovdestroy(&iov); // This agent does not report that it keeps registrations.
    agent.keeps_registrations = true;
    iov = create_filled_iov(mount, iov_bytes - 1); // It is smaller than the smallest iov whose memory is kept.
    hf3fs_iovdestroy(&iov);
    iov = create_filled_iov(mount);
    hf3fs_iovunlink(&iov); // Its memory has no name any more.
    hf3fs_iovdestroy(&iov);
    iov = create_filled_iov(mount, 16 * mib + 1); // Its memory exceeds the limit of idle bytes.
    hf3fs_iovdestroy(&iov);
    CHECK_EQUAL(count_existing_shm_names(), shm_name_count_before);
    CHECK_EQUAL(agent.kept_registration_count.load(), 0);
}

void test_longest_idle_memory_is_freed_at_the_limit() {
    Mount mount;
    Agent agent(mount);
    agent.keeps_registrations = true;
    std::vector<hf3fs_iov> iovs(5);
    std::vector<std::string> memory_paths;
    for (hf3fs_iov& iov : iovs) {
        iov = create_filled_iov(mount);
        memory_paths.push_back(get_memory_path(mount, iov));
    }
    for (hf3fs_iov& iov : iovs) {
        hf3fs_iovdestroy(&iov);
    }
    CHECK_EQUAL(agent.kept_registration_count.load(), 4); // The limit of 16 MiB is the memory of four iovs.
    CHECK(!std::filesystem::exists(memory_paths[0]));
    CHECK(std::all_of(memory_paths.begin() + 1, memory_paths.end(),
                      [](const auto& memory_path) { return std::filesystem::exists(memory_path); }));
    CHECK_EQUAL(gdrkit_host_pool_trim(2 * iov_bytes), 0);
    CHECK_EQUAL(agent.kept_registration_count.load(), 2);
    CHECK(std::filesystem::exists(memory_paths[4]) && !std::filesystem::exists(memory_paths[2]));
    // If an iov cannot be published, the library frees the idle memory and tries once more.
    agent.refusal_errno = EDQUOT;
    hf3fs_iov iov{};
    CHECK_EQUAL(hf3fs_iovcreate(&iov, mount.path(), mib, 0, -1), -EDQUOT);
    CHECK_EQUAL(agent.kept_registration_count.load(), 0);
    CHECK(std::none_of(memory_paths.begin(), memory_paths.end(),
                       [](const auto& memory_path) { return std::filesystem::exists(memory_path); }));
}

void test_memory_of_an_ended_agent_is_not_used() {
    Mount mount;
    std::string memory_path;
    {
        Agent agent(mount);
        agent.keeps_registrations = true;
        hf3fs_iov iov = create_filled_iov(mount);
        memory_path = get_memory_path(mount, iov);
        hf3fs_iovdestroy(&iov);
    }
    Agent agent(mount);
    agent.keeps_registrations = true;
    hf3fs_iov iov = create_filled_iov(mount);
    CHECK(get_memory_path(mount, iov) != memory_path);
    // An agent removes the name of memory whose registration it has ended. The library does not use such memory again.
    const std::string removed_path = get_memory_path(mount, iov);
    hf3fs_iovdestroy(&iov);
    CHECK(std::filesystem::remove(removed_path));
    iov = create_filled_iov(mount);
    CHECK(get_memory_path(mount, iov) != removed_path);
    CHECK_EQUAL(agent.kept_registration_count.load(), 0);
    hf3fs_iovdestroy(&iov);
}

void test_registration_ends_although_the_name_was_removed() {
    Mount mount;
    Agent agent(mount);
    agent.keeps_registrations = true;
    for (const bool is_pool_trimmed : {true, false}) {
        hf3fs_iov iov = create_filled_iov(mount);
        const std::string memory_path = get_memory_path(mount, iov);
        hf3fs_iovdestroy(&iov);
        CHECK_EQUAL(agent.kept_registration_count.load(), 1);
        CHECK(std::filesystem::remove(memory_path));
        if (is_pool_trimmed) {
            CHECK_EQUAL(gdrkit_host_pool_trim(0), 0);
            CHECK_EQUAL(agent.kept_registration_count.load(), 0);
        }
    }
    wait_until_true([&] { return agent.kept_registration_count == 0; });
}

void test_protection_and_holes_of_the_application() {
    Mount mount;
    Agent agent(mount);
    agent.keeps_registrations = true;
    hf3fs_iov iov = create_filled_iov(mount);
    const std::string memory_path = get_memory_path(mount, iov);
    // Memory that the application has protected is writable again in the next iov.
    CHECK_EQUAL(mprotect(iov.base, iov_bytes, PROT_READ), 0);
    hf3fs_iovdestroy(&iov);
    iov = create_filled_iov(mount);
    CHECK(get_memory_path(mount, iov) == memory_path);
    // Memory that the application has partly unmapped is not used again.
    CHECK_EQUAL(munmap(iov.base + mib, mib), 0);
    hf3fs_iovdestroy(&iov);
    // The test's agent does not decrement kept_registration_count when an iov uses a registration again. So 1 means
    // that the second hf3fs_iovdestroy kept nothing.
    CHECK_EQUAL(agent.kept_registration_count.load(), 1);
    iov = create_filled_iov(mount);
    CHECK(get_memory_path(mount, iov) != memory_path);
    hf3fs_iovdestroy(&iov);
}

void test_threads_wait_for_memory_that_is_being_freed() {
    // Each agent refuses publications while it keeps registrations, and takes 5 ms to end one. So each thread succeeds
    // only if it waits until all idle memory is free, also memory that the other thread is freeing. Each mount has its
    // own connection, so that the requests of the threads do not wait for each other.
    Mount mounts[2];
    Agent agents[2] = {Agent(mounts[0]), Agent(mounts[1])};
    for (Agent& agent : agents) {
        agent.keeps_registrations = true;
    }
    for (int round = 0; round < 5; ++round) {
        for (Agent& agent : agents) {
            agent.refuses_publish_while_kept = false;
        }
        std::vector<hf3fs_iov> iovs = {create_filled_iov(mounts[0]), create_filled_iov(mounts[0]),
                                       create_filled_iov(mounts[0]), create_filled_iov(mounts[1])};
        for (hf3fs_iov& iov : iovs) {
            hf3fs_iovdestroy(&iov);
        }
        for (Agent& agent : agents) {
            agent.refuses_publish_while_kept = true;
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

// Destroys an iov, and returns the path of the memory of the next iov with the same size.
std::string get_next_memory_path(const Mount& mount, hf3fs_iov& iov) {
    hf3fs_iovdestroy(&iov);
    hf3fs_iov next_iov = create_filled_iov(mount);
    const std::string memory_path = get_memory_path(mount, next_iov);
    hf3fs_iovunlink(&next_iov); // Memory without a name is not kept.
    hf3fs_iovdestroy(&next_iov);
    return memory_path;
}

// Forks a child. Runs `parent_function` in the parent while the child waits, and then `child_function` in the child.
template <typename ChildFunction, typename ParentFunction>
void run_in_parent_then_child(ChildFunction child_function, ParentFunction parent_function) {
    int pipe_ends[2];
    CHECK_EQUAL(pipe(pipe_ends), 0);
    const pid_t child = fork();
    if (child == 0) {
        char byte = 0;
        close(pipe_ends[1]);
        CHECK_EQUAL(read(pipe_ends[0], &byte, 1), 0); // The read returns when the parent closes its end.
        child_function();
        _exit(0);
    }
    close(pipe_ends[0]);
    parent_function();
    close(pipe_ends[1]);
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
    const std::string memory_path = get_memory_path(mount, iov);
    run_in_parent_then_child([&] { CHECK_EQUAL(base[1], 'x'); },
                             [&] { CHECK(get_next_memory_path(mount, iov) != memory_path); });
    CHECK_EQUAL(agent.kept_registration_count.load(), 0);
}

void test_child_does_not_map_idle_memory() {
    Mount mount;
    Agent agent(mount);
    agent.keeps_registrations = true;
    hf3fs_iov iov = create_filled_iov(mount);
    const std::string memory_path = get_memory_path(mount, iov);
    struct stat attributes {};
    CHECK_EQUAL(stat(memory_path.c_str(), &attributes), 0);
    // /proc/self/maps shows the name that the file had when it was opened, so search for the inode.
    const std::string inode_word = " " + std::to_string(attributes.st_ino) + " ";
    hf3fs_iovdestroy(&iov);
    CHECK_EQUAL(agent.kept_registration_count.load(), 1);
    run_in_parent_then_child(
        [&] {
            std::ifstream maps("/proc/self/maps");
            const std::string maps_text{std::istreambuf_iterator<char>(maps), {}};
            CHECK(maps_text.find(inode_word) == std::string::npos);
            hf3fs_iov child_iov = create_filled_iov(mount);
            const std::string child_memory_path = get_memory_path(mount, child_iov);
            CHECK(child_memory_path != memory_path);
            hf3fs_iovdestroy(&child_iov);
            child_iov = create_filled_iov(mount);
            CHECK(get_memory_path(mount, child_iov) == child_memory_path);
            hf3fs_iovunlink(&child_iov);
            hf3fs_iovdestroy(&child_iov);
        },
        [] {});
    iov = create_filled_iov(mount);
    CHECK(get_memory_path(mount, iov) != memory_path);
    hf3fs_iovdestroy(&iov);
}

#endif

void test_threads_share_the_pool() {
    Mount mount;
    Agent agent(mount);
    agent.keeps_registrations = true;
    std::vector<std::thread> threads;
    for (int thread_index = 0; thread_index < 4; ++thread_index) {
        threads.emplace_back([&] {
            for (int round = 0; round < 20; ++round) {
                hf3fs_iov iov = create_filled_iov(mount);
                hf3fs_iovdestroy(&iov);
            }
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    CHECK_EQUAL(agent.publication_count.load(), 0);
}

} // namespace

int main() {
    setenv("GDRKIT_USRBIO_HOST_POOL_BYTES", idle_bytes_max_text, 1);
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
