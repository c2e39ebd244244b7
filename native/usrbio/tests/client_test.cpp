// Tests of the functions that publish and open iovs, create rings, and register files, in mounts with and without an
// agent.
#include "client_fixture.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <numeric>
#include <thread>

using namespace gdrkit::usrbio;
using namespace gdrkit::usrbio::test;

namespace {

void test_iov_is_published_and_removed() {
    const std::size_t shm_name_count_before = count_existing_shm_names();
    Mount mount;
    Agent agent(mount);
    hf3fs_iov iov{};
    CHECK_EQUAL(hf3fs_iovcreate(&iov, mount.path(), 10000, 4096, 0), 0);
    CHECK(iov.size == 10000 && iov.block_size == 4096 && iov.numa == 0 &&
          std::strcmp(iov.mount_point, mount.path()) == 0);
    for (std::size_t i = 0; i < 10000; ++i) {
        CHECK(iov.base[i] == 0);
    }
    Uuid id;
    std::memcpy(id.data(), iov.id, 16);
    CHECK(mount.link_names() == std::vector<std::string>{to_string(id) + ".b4096"});
    CHECK_EQUAL(count_existing_shm_names(), shm_name_count_before + 1);

    hf3fs_iov opened_iov{};
    CHECK_EQUAL(hf3fs_iovopen(&opened_iov, id.data(), mount.path(), 10000, 0, -1), -ENOENT);
    CHECK_EQUAL(hf3fs_iovopen(&opened_iov, id.data(), mount.path(), 10001, 4096, -1), -EIO);
    CHECK_EQUAL(hf3fs_iovopen(&opened_iov, id.data(), mount.path(), 10000, 4096, -1), 0);
    iov.base[9999] = 42;
    CHECK_EQUAL(opened_iov.base[9999], 42);
    hf3fs_iovunlink(&opened_iov); // Does nothing, because `opened_iov` did not create the memory.
    CHECK_EQUAL(count_existing_shm_names(), shm_name_count_before + 1);
    // A process that opens its own iov borrows it, too. The test's agent counts this borrow once, however often the
    // process opens the iov, until all opened iovs are destroyed.
    hf3fs_iov second_opened_iov{};
    CHECK_EQUAL(hf3fs_iovopen(&second_opened_iov, id.data(), mount.path(), 10000, 4096, -1), 0);
    CHECK_EQUAL(agent.borrow_count.load(), 1);
    hf3fs_iovdestroy(&opened_iov);
    hf3fs_iovdestroy(&opened_iov); // Does nothing, because `opened_iov` is already destroyed.
    CHECK_EQUAL(agent.borrow_count.load(), 1);
    hf3fs_iovdestroy(&second_opened_iov);
    CHECK_EQUAL(agent.borrow_count.load(), 0);
    CHECK_EQUAL(agent.publication_count.load(), 1);
    agent.refusal_errno = EACCES;
    CHECK_EQUAL(hf3fs_iovopen(&opened_iov, id.data(), mount.path(), 10000, 4096, -1), -EACCES);
    CHECK(opened_iov.base == nullptr);
    agent.refusal_errno = 0;

    hf3fs_iov stale_copy = iov;
    hf3fs_iovunlink(&iov);
    CHECK_EQUAL(count_existing_shm_names(), shm_name_count_before);
    iov.base[0] = 1;
    CHECK_EQUAL(hf3fs_iovopen(&opened_iov, id.data(), mount.path(), 10000, 4096, -1), -ENOENT);
    hf3fs_iovdestroy(&iov);
    hf3fs_iovdestroy(&stale_copy); // The library detects that this copy of a destroyed struct is stale.
    CHECK_EQUAL(agent.publication_count.load(), 0);
    CHECK(mount.link_names().empty());

    agent.refusal_errno = EPERM;
    CHECK_EQUAL(hf3fs_iovcreate(&iov, mount.path(), 10000, 0, -1), -EPERM);
    hf3fs_ior ior{};
    CHECK_EQUAL(hf3fs_iorcreate(&ior, mount.path(), 4, true, 0, -1), -EPERM);
    CHECK_EQUAL(count_existing_shm_names(), shm_name_count_before);
    const std::string link_path = mount.link_path(to_string(id));
    CHECK_EQUAL(symlink("/etc/passwd", link_path.c_str()), 0);
    CHECK_EQUAL(hf3fs_iovopen(&opened_iov, id.data(), mount.path(), 1, 0, -1), -EINVAL);
    CHECK_EQUAL(unlink(link_path.c_str()), 0);
    CHECK_EQUAL(symlink("/dev/shm/../../etc/passwd", link_path.c_str()), 0);
    CHECK_EQUAL(hf3fs_iovopen(&opened_iov, id.data(), mount.path(), 1, 0, -1), -EINVAL);
}

void test_wrapped_memory_is_published_by_its_link() {
    Mount mount;
    Agent agent(mount);
    const Uuid id = make_random_uuid();
    SharedMemory memory;
    CHECK_EQUAL(memory.create(make_shared_memory_name(id), 8192, -1), 0);
    hf3fs_iov iov{};
    CHECK_EQUAL(hf3fs_iovwrap(&iov, memory.base(), id.data(), mount.path(), 8192, 0, -1), -ENOENT);
    CHECK_EQUAL(agent.publication_count.load(), 0);
    CHECK_EQUAL(symlink(("/dev/shm" + make_shared_memory_name(id)).c_str(), mount.link_path(to_string(id)).c_str()), 0);
    agent.refusal_errno = ENOSPC;
    CHECK_EQUAL(hf3fs_iovwrap(&iov, memory.base(), id.data(), mount.path(), 8192, 0, -1), -ENOSPC);
    agent.refusal_errno = 0;
    CHECK_EQUAL(hf3fs_iovwrap(&iov, memory.base(), id.data(), mount.path(), 8192, 0, -1), 0);
    CHECK_EQUAL(agent.publication_count.load(), 1);
    CHECK(iov.iovh == nullptr && iov.base == memory.base());
    hf3fs_iovdestroy(&iov);
    CHECK_EQUAL(agent.publication_count.load(), 0);
    memory.base()[0] = 1; // The memory is still mapped.
}

void test_wrapped_memory_has_the_block_size_of_its_link() {
    Mount mount;
    Agent agent(mount);
    SharedMemory memory;
    const Uuid id = make_random_uuid();
    CHECK_EQUAL(memory.create(make_shared_memory_name(id), 8192, -1), 0);
    hf3fs_iov iov{};
    for (const std::size_t link_block_size : {std::size_t{0}, std::size_t{4096}}) {
        const std::string link_path = mount.link_path(make_link_name(id, link_block_size, nullptr));
        for (const std::size_t block_size : {std::size_t{0}, std::size_t{100}, std::size_t{4096}}) {
            CHECK_EQUAL(symlink(("/dev/shm" + make_shared_memory_name(id)).c_str(), link_path.c_str()), 0);
            CHECK_EQUAL(hf3fs_iovwrap(&iov, memory.base(), id.data(), mount.path(), 8192, block_size, -1), 0);
            CHECK_EQUAL(iov.block_size, link_block_size);
            CHECK_EQUAL(agent.publication_count.load(), 1);
            hf3fs_iovdestroy(&iov);
            CHECK_EQUAL(agent.publication_count.load(), 0);
            unlink(link_path.c_str());
        }
    }
    // A link whose name only begins with the name of the memory belongs to another object, such as a ring.
    CHECK_EQUAL(symlink("/dev/shm/other", mount.link_path(to_string(id) + ".r0").c_str()), 0);
    CHECK_EQUAL(hf3fs_iovwrap(&iov, memory.base(), id.data(), mount.path(), 8192, 0, -1), -ENOENT);
}

void test_ring_name_contains_its_attributes() {
    Mount mount;
    Agent agent(mount);
    const std::size_t shm_name_count_before = count_existing_shm_names();
    hf3fs_ior ior{};
    const auto check_name_and_destroy = [&](const char* suffix) {
        const auto ring_link_names = mount.link_names();
        CHECK_EQUAL(ring_link_names.size(), 1u);
        CHECK(ring_link_names[0].substr(36) == suffix); // The name begins with a UUID of 36 characters.
        CHECK_EQUAL(count_existing_shm_names(), shm_name_count_before);
        hf3fs_iordestroy(&ior);
        hf3fs_iordestroy(&ior);
        CHECK(mount.link_names().empty());
    };
    // The suffixes: `r` or `w` and the io_depth, `ph` or `pl` for a high or low priority, `t` and the timeout in ms,
    // and `f` and the flags in base 2.
    CHECK_EQUAL(hf3fs_iorcreate(&ior, mount.path(), 16, true, 0, -1), 0);
    CHECK(ior.for_read && ior.io_depth == 0 && hf3fs_io_entries(&ior) == 16);
    check_name_and_destroy(".r0.t0");
    CHECK_EQUAL(hf3fs_iorcreate2(&ior, mount.path(), 16, false, 16, -3, -1), 0);
    CHECK(!ior.for_read && ior.priority == -3);
    check_name_and_destroy(".w16.ph.t0");
    CHECK_EQUAL(hf3fs_iorcreate3(&ior, mount.path(), 16, true, -16, 2, 250, -1), 0);
    CHECK_EQUAL(ior.timeout, 250);
    check_name_and_destroy(".r-16.pl.t250");
    CHECK_EQUAL(hf3fs_iorcreate4(&ior, mount.path(), 16, true, 1, 7, -1, HF3FS_IOR_FORBID_READ_HOLES), 0);
    CHECK(ior.flags == 2 && ior.priority == 0);
    check_name_and_destroy(".r1.t7.f10");

    const std::string semaphore_link_path = mount.link_path("submit-ios.ph");
    CHECK_EQUAL(unlink(semaphore_link_path.c_str()), 0);
    CHECK_EQUAL(hf3fs_iorcreate2(&ior, mount.path(), 4, true, 0, -1, -1), -ENOENT);
    CHECK_EQUAL(symlink("/etc/passwd", semaphore_link_path.c_str()), 0);
    CHECK_EQUAL(hf3fs_iorcreate2(&ior, mount.path(), 4, true, 0, -1, -1), -EIO);
    CHECK_EQUAL(unlink(semaphore_link_path.c_str()), 0);
    CHECK_EQUAL(symlink("/dev/shm/sem.hf3fs-none-such", semaphore_link_path.c_str()), 0);
    CHECK_EQUAL(hf3fs_iorcreate2(&ior, mount.path(), 4, true, 0, -1, -1), -ENOENT);
    CHECK(mount.link_names().empty());
}

void test_files_are_registered() {
    Mount mount;
    Agent agent(mount);
    File file(mount, "a");
    CHECK(hf3fs_is_hf3fs(file.fd));
    const int first_registered_fd = hf3fs_reg_fd(file.fd, 0);
    CHECK(first_registered_fd <= 0 && fcntl(-first_registered_fd, F_GETFD) == FD_CLOEXEC);
    CHECK_EQUAL(hf3fs_reg_fd(file.fd, 0), EINVAL);
    CHECK_EQUAL(hf3fs_reg_fd(-first_registered_fd, 0), EINVAL);
    File reader(mount, "a", O_RDONLY);
    const int reader_registered_fd = hf3fs_reg_fd(reader.fd, 0);
    CHECK(reader_registered_fd <= 0);
    CHECK_EQUAL(agent.registered_file_count.load(), 1);
    hf3fs_dereg_fd(file.fd);
    CHECK_EQUAL(fcntl(-first_registered_fd, F_GETFD), -1);
    CHECK_EQUAL(agent.registered_file_count.load(), 1); // The other descriptor is still registered.
    hf3fs_dereg_fd(reader_registered_fd);
    CHECK_EQUAL(agent.registered_file_count.load(), 0);
    hf3fs_dereg_fd(reader_registered_fd);

    agent.refusal_errno = EACCES;
    CHECK_EQUAL(hf3fs_reg_fd(file.fd, 0), EACCES);
    agent.refusal_errno = 0;
    const int outside_fd = open("/dev/null", O_RDWR);
    CHECK_EQUAL(hf3fs_reg_fd(outside_fd, 0), EBADF);
    close(outside_fd);

    // A descriptor that was closed without hf3fs_dereg_fd stays registered. A duplicate that the library makes never
    // gets the number of this descriptor.
    const int closed_fd = dup(file.fd);
    const int closed_registered_fd = hf3fs_reg_fd(closed_fd, 0);
    CHECK(closed_registered_fd <= 0);
    close(closed_fd);
    const int second_registered_fd = hf3fs_reg_fd(file.fd, 0);
    CHECK(second_registered_fd <= 0 && -second_registered_fd != closed_fd);
    hf3fs_dereg_fd(closed_registered_fd);
    hf3fs_dereg_fd(second_registered_fd);
    CHECK_EQUAL(agent.registered_file_count.load(), 0);
}

void test_mount_point_is_found() {
    Mount mount;
    char mount_point[300] = "";
    const int path_length = static_cast<int>(std::strlen(mount.path()));
    std::filesystem::create_directories(mount.file_path("deep/down"));
    CHECK_EQUAL(hf3fs_extract_mount_point(mount_point, sizeof(mount_point), mount.path()), -1);
    Agent agent(mount);
    CHECK_EQUAL(hf3fs_extract_mount_point(mount_point, sizeof(mount_point), mount.file_path("deep/down").c_str()),
                path_length + 1);
    CHECK(std::strcmp(mount_point, mount.path()) == 0);
    CHECK_EQUAL(hf3fs_extract_mount_point(mount_point, sizeof(mount_point), mount.path()), path_length + 1);
    // If the buffer is too small for the path and its zero byte, the function only returns the necessary size.
    std::strcpy(mount_point, "untouched");
    CHECK_EQUAL(hf3fs_extract_mount_point(mount_point, path_length, mount.path()), path_length + 1);
    CHECK(std::strcmp(mount_point, "untouched") == 0);
    CHECK_EQUAL(hf3fs_extract_mount_point(nullptr, 0, mount.path()), path_length + 1);
    CHECK_EQUAL(hf3fs_extract_mount_point(mount_point, sizeof(mount_point), mount.file_path("none").c_str()), -1);
}

void test_hard_links_and_holes() {
    Mount mount;
    Agent agent(mount);
    File file(mount, "a");
    const std::string data(3 * 65536, 'x');
    CHECK_EQUAL(write(file.fd, data.data(), data.size()), static_cast<ssize_t>(data.size()));
    CHECK_EQUAL(hf3fs_hardlink(file.path.c_str(), mount.file_path("b").c_str()), 0);
    CHECK_EQUAL(hf3fs_hardlink(file.path.c_str(), mount.file_path("b").c_str()), EEXIST);
    CHECK_EQUAL(hf3fs_hardlink(file.path.c_str(), "/tmp/usrbio-elsewhere"), EXDEV);
    CHECK_EQUAL(hf3fs_hardlink(file.path.c_str(), mount.file_path("").c_str()), EINVAL);
    CHECK_EQUAL(hf3fs_hardlink(file.path.c_str(), mount.file_path(std::string(256, 'n')).c_str()), ENAMETOOLONG);
    struct stat attributes {};
    CHECK_EQUAL(stat(mount.file_path("b").c_str(), &attributes), 0);
    CHECK_EQUAL(attributes.st_nlink, 2u);

    const std::size_t hole_begins[] = {65536, 0};
    const std::size_t hole_ends[] = {131072, 0};
    CHECK_EQUAL(hf3fs_punchhole(file.fd, 2, hole_begins, hole_ends, 0), 0);
    char byte = 1;
    CHECK_EQUAL(pread(file.fd, &byte, 1, 65536), 1);
    CHECK_EQUAL(byte, 0);
    CHECK_EQUAL(pread(file.fd, &byte, 1, 131072), 1);
    CHECK_EQUAL(byte, 'x');
    const std::vector<std::size_t> empty_range_bounds(1000, 5); // 1000 empty ranges, the largest number of ranges.
    CHECK_EQUAL(hf3fs_punchhole(file.fd, 1000, empty_range_bounds.data(), empty_range_bounds.data(), 0), 0);
    File reader(mount, "a", O_RDONLY);
    CHECK_EQUAL(hf3fs_punchhole(reader.fd, 1, hole_begins, hole_ends, 0), EBADF);
    const int outside_fd = open("/dev/null", O_RDWR);
    CHECK_EQUAL(hf3fs_punchhole(outside_fd, 1, hole_begins, hole_ends, 0), ENOTTY);
    close(outside_fd);
    CHECK_EQUAL(hf3fs_hardlink("/dev/null", "/dev/shm/usrbio-elsewhere"), ENOTTY);
}

// Reads the first three bytes of the session's file into `iov`, and returns the result of the operation.
std::int64_t read_three_bytes(Session& session, const hf3fs_iov& iov) {
    hf3fs_cqe cqe;
    CHECK(hf3fs_prep_io(&session.read_ring, &iov, true, iov.base, session.registered_fd, 0, 3, nullptr) >= 0);
    CHECK_EQUAL(hf3fs_submit_ios(&session.read_ring), 0);
    CHECK_EQUAL(hf3fs_wait_for_ios(&session.read_ring, &cqe, 1, 1, nullptr), 1);
    return cqe.result;
}

// The child opens an iov of its parent and reads into it. As long as the iov is open, the child borrows the memory. In
// the first round the child ends the borrow. In the second round the parent ends the borrow by destroying the iov.
[[maybe_unused]] void test_other_process_borrows_memory() {
    Mount mount;
    Agent agent(mount);
    hf3fs_iov iov{};
    CHECK_EQUAL(hf3fs_iovcreate(&iov, mount.path(), 4096, 0, -1), 0);
    int sockets[2];
    CHECK_EQUAL(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets), 0);
    // Returns when the other process has called this function, too.
    const auto meet_other_process = [&](int socket_index) {
        char byte = 1;
        CHECK_EQUAL(write(sockets[socket_index], &byte, 1), 1);
        CHECK_EQUAL(read(sockets[socket_index], &byte, 1), 1);
    };
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        Session session(mount);
        CHECK_EQUAL(pwrite(session.file.fd, "abc", 3, 0), 3);
        hf3fs_iov opened_iov{};
        // The child has inherited the struct and the memory, but not the permission.
        CHECK_EQUAL(read_three_bytes(session, iov), -EACCES);
        for (int round = 0; round < 2; ++round) {
            CHECK_EQUAL(hf3fs_iovopen(&opened_iov, reinterpret_cast<std::uint8_t*>(iov.id), mount.path(), 4096, 0, -1),
                        0);
            CHECK_EQUAL(read_three_bytes(session, opened_iov), 3);
            if (round == 0) {
                hf3fs_iovdestroy(&opened_iov);
            }
        }
        meet_other_process(1);
        meet_other_process(1); // The owner withdraws the publication between these two calls.
        CHECK_EQUAL(read_three_bytes(session, opened_iov), -EACCES);
        hf3fs_iovdestroy(&opened_iov);
        hf3fs_iov borrowed_iov{};
        std::memcpy(&borrowed_iov, &opened_iov, sizeof(borrowed_iov));
        Uuid id;
        CHECK_EQUAL(read(sockets[1], id.data(), id.size()), 16);
        CHECK_EQUAL(hf3fs_iovopen(&borrowed_iov, id.data(), mount.path(), 4096, 0, -1), 0);
        _exit(0); // The process ends while it has borrowed the iov.
    }
    meet_other_process(0);
    CHECK(std::memcmp(iov.base, "abc", 3) == 0);
    CHECK_EQUAL(agent.borrow_count.load(), 1);
    hf3fs_iovdestroy(&iov);
    CHECK_EQUAL(agent.borrow_count.load(), 0);
    CHECK_EQUAL(hf3fs_iovcreate(&iov, mount.path(), 4096, 0, -1), 0);
    meet_other_process(0);
    CHECK_EQUAL(write(sockets[0], iov.id, 16), 16);
    int status = -1;
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    CHECK_EQUAL(status, 0);
    wait_until_true([&] { return agent.connection_count == 1; });
    CHECK_EQUAL(agent.borrow_count.load(), 0);
    CHECK_EQUAL(agent.publication_count.load(), 1);
    CHECK(mount.link_names().size() == 1);
    hf3fs_iovdestroy(&iov);
    close(sockets[0]);
    close(sockets[1]);
}

void test_mount_without_agent_has_links() {
    Mount mount;
    hf3fs_iov iov{};
    CHECK_EQUAL(hf3fs_iovcreate(&iov, mount.path(), 4096, 0, -1), 0);
    Uuid id;
    std::memcpy(id.data(), iov.id, 16);
    CHECK(std::filesystem::read_symlink(mount.link_path(to_string(id))) == "/dev/shm" + make_shared_memory_name(id));
    hf3fs_ior ior{};
    CHECK_EQUAL(hf3fs_iorcreate(&ior, mount.path(), 4, true, 0, -1), 0);
    int semaphore_value = -1;
    CHECK_EQUAL(hf3fs_submit_ios(&ior), 0);
    CHECK_EQUAL(sem_getvalue(mount.submit_semaphore(1), &semaphore_value), 0);
    // No agent supports the extension of this ring, so the library posts for each submit.
    CHECK_EQUAL(semaphore_value, 1);
    hf3fs_iordestroy(&ior);
    hf3fs_iovdestroy(&iov);
    CHECK(mount.link_names().empty());
}

void test_memory_gets_no_name_if_the_agent_has_ended() {
    Mount mount;
    {
        Agent agent(mount); // The file of the agent's socket stays after its end.
    }
    const std::size_t name_count_before = created_shm_names.size();
    hf3fs_iov iov{};
    CHECK_EQUAL(hf3fs_iovcreate(&iov, mount.path(), 4096, 0, -1), -EREMOTEIO);
    CHECK_EQUAL(created_shm_names.size(), name_count_before);
}

void test_link_without_agent_is_removed_when_next_agent_dies() {
    Mount mount;
    hf3fs_iov iov{};
    CHECK_EQUAL(hf3fs_iovcreate(&iov, mount.path(), 4096, 0, -1), 0);
    Agent agent(mount);
    agent.closes_at_unpublish = true;
    hf3fs_iovdestroy(&iov);
    CHECK(mount.link_names().empty());
}

} // namespace

int main() {
    test_iov_is_published_and_removed();
    test_wrapped_memory_is_published_by_its_link();
    test_wrapped_memory_has_the_block_size_of_its_link();
    test_ring_name_contains_its_attributes();
    test_files_are_registered();
    test_mount_point_is_found();
    test_hard_links_and_holes();
#ifndef __SANITIZE_THREAD__
    test_other_process_borrows_memory();
#endif
    test_mount_without_agent_has_links();
    test_memory_gets_no_name_if_the_agent_has_ended();
    test_link_without_agent_is_removed_when_next_agent_dies();
    return 0;
}
