// GPU iovs in one process: creation, wrapping, what is refused and how, and the end.
#include <algorithm>
#include <thread>

#include "usrbio/client/gpu_target.hpp"
#include "usrbio/tests/gpu_check.hpp"

namespace {

using namespace gdrkit::usrbio;
using namespace gdrkit::usrbio::test;
namespace fs = std::filesystem;

constexpr u64 mib = 1 << 20;

std::array<std::uint8_t, 16> id_of(unsigned seed) {
    std::array<std::uint8_t, 16> id{};
    const auto bytes = pattern(id.size(), seed);
    std::ranges::copy(bytes, id.begin());
    return id;
}

bool is_zero(const hf3fs_iov& iov) {
    const hf3fs_iov zero{};
    return std::memcmp(&iov, &zero, sizeof iov) == 0;
}

void create_publishes_and_destroy_takes_everything_back() {
    const Mount mount;
    make_current(0);
    u64 free_before = 0, free_after = 0, total = 0;
    // The first iov makes what the driver keeps for itself.
    for (int round = 0; round < 2; ++round) {
        CHECK_EQUAL(cu("cuMemGetInfo_v2", &free_before, &total), 0);
        hf3fs_iov iov{};
        CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), 100'001, 0, 0), 0);
        CHECK(iov.base != nullptr && iov.size == 100'001 && iov.block_size == 0 && iov.numa == -1);
        CHECK(std::string(iov.mount_point) == mount.path());
        CHECK(hf3fs_iov_is_gpu(&iov) && hf3fs_iov_gpu_device(&iov) == 0 && hf3fs_iov_device_id(&iov) == 0);
        CHECK_EQUAL(hf3fs_iov_mem_type(&iov), HF3FS_MEM_DEVICE);
        const auto address = reinterpret_cast<u64>(iov.base);
        CHECK(synchronizes_copies(address));
        const fs::path link = mount.only_link();
        const auto id = parse_gpu_link_name(link.filename().native(), 0);
        CHECK(id.has_value() && std::memcmp(id->data(), iov.id, 16) == 0);
        CHECK((iov.id[6] & 0xf0) == 0x40);
        const auto target = parse_target(fs::read_symlink(link).native());
        CHECK(target.has_value() && target->ipc.has_value());
        CHECK(target->device == 0 && target->offset_bytes == 0 && target->size_bytes == 100'001);
        CHECK(target->allocation_bytes >= 100'001);
        write(address, pattern(100'001, 3));
        CHECK_EQUAL(hf3fs_iovsync_gpu(&iov, 0), 0);
        CHECK_EQUAL(hf3fs_iovsync(&iov, 1), 0);
        CHECK(read(address, 100'001) == pattern(100'001, 3));
        const hf3fs_iov copy = iov;
        hf3fs_iovdestroy_gpu(&iov);
        CHECK(is_zero(iov));
        CHECK_EQUAL(mount.links(), std::size_t{0});
        CHECK(!hf3fs_iov_is_gpu(&copy) && hf3fs_iov_gpu_device(&copy) == -1);
        hf3fs_iov stale = copy;
        hf3fs_iovdestroy_gpu(&stale);
        CHECK(std::memcmp(&stale, &copy, sizeof copy) == 0);
        CHECK_EQUAL(cu("cuMemGetInfo_v2", &free_after, &total), 0);
        CHECK(round == 0 || free_after == free_before);
    }
}

void the_current_context_stays() {
    const Mount mount;
    void* const mine = make_current(0);
    int count = 0;
    CHECK_EQUAL(cu("cuDeviceGetCount", &count), 0);
    hf3fs_iov iov{};
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), mib, 0, count - 1), 0);
    CHECK(current() == mine);
    CHECK_EQUAL(hf3fs_iovsync_gpu(&iov, 1), 0);
    CHECK(current() == mine);
    // A thread without a context may end the iov, and has none afterwards either.
    std::thread([&] {
        CHECK(current() == nullptr);
        CHECK_EQUAL(hf3fs_iovsync_gpu(&iov, 0), 0);
        hf3fs_iovdestroy_gpu(&iov);
        CHECK(current() == nullptr);
    }).join();
    CHECK(is_zero(iov) && current() == mine);
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, "/nonexistent", mib, 0, 0), -ENOENT);
    CHECK(current() == mine);
}

void bad_arguments_have_their_codes() {
    const Mount mount;
    const std::string too_long(256, 'm');
    int count = 0;
    make_current(0);
    CHECK_EQUAL(cu("cuDeviceGetCount", &count), 0);
    hf3fs_iov iov{};
    iov.numa = 77;
    const hf3fs_iov before = iov;
    const auto id = id_of(1);
    CHECK_EQUAL(hf3fs_iovcreate_gpu(nullptr, mount.path(), mib, 0, 0), -EINVAL);
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, nullptr, mib, 0, 0), -EINVAL);
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, "", mib, 0, 0), -EINVAL);
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, too_long.c_str(), mib, 0, 0), -EINVAL);
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), 0, 0, 0), -EINVAL);
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), mib, 0, -1), -ENODEV);
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), mib, 0, count), -ENODEV);
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), u64{1} << 60, 0, 0), -ENOMEM);
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), SIZE_MAX, 0, 0), -ENOMEM);
    CHECK_EQUAL(hf3fs_iovcreate_device(&iov, mount.path(), mib, 4096, 0), -EINVAL);
    const u64 memory = allocate(mib);
    void* const pointer = pointer_of(memory);
    CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, nullptr, id.data(), mount.path(), mib, 0, 0), -EINVAL);
    CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, pointer, nullptr, mount.path(), mib, 0, 0), -EINVAL);
    CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, pointer, id.data(), mount.path(), 0, 0, 0), -EINVAL);
    CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, pointer, id.data(), mount.path(), SIZE_MAX, 0, 0), -EINVAL);
    CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, pointer, id.data(), mount.path(), mib, 0, count), -ENODEV);
    CHECK_EQUAL(hf3fs_iovwrap_device(&iov, pointer, id.data(), mount.path(), mib, 1, 0), -EINVAL);
    CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, pointer_of(memory + 1), id.data(), mount.path(), 64 * mib, 0, 0), -EINVAL);
    CHECK_EQUAL(hf3fs_iovopen_gpu(&iov, nullptr, mount.path(), mib, 0, 0), -EINVAL);
    CHECK_EQUAL(hf3fs_iovopen_gpu(&iov, id.data(), mount.path(), 0, 0, 0), -EINVAL);
    CHECK_EQUAL(hf3fs_iovopen_gpu(&iov, id.data(), mount.path(), mib, 0, 0), -ENOENT);
    CHECK_EQUAL(hf3fs_iovopen_gpu(&iov, id.data(), mount.path(), mib, 0, -1), -ENODEV);
    CHECK_EQUAL(hf3fs_iovopen_device(&iov, id.data(), mount.path(), mib, 2, 0), -EINVAL);
    hf3fs_gpu_ipc_handle_t handle{};
    CHECK_EQUAL(hf3fs_iov_import_gpu(&iov, nullptr, mount.path()), -EINVAL);
    CHECK_EQUAL(hf3fs_iov_import_gpu(&iov, &handle, mount.path()), -EINVAL);
    CHECK_EQUAL(hf3fs_iov_export_gpu(&iov, &handle), -EINVAL);
    CHECK_EQUAL(hf3fs_iov_export_gpu(nullptr, &handle), -EINVAL);
    CHECK_EQUAL(hf3fs_iovsync_gpu(&iov, 0), -EINVAL);
    CHECK_EQUAL(hf3fs_iovsync_gpu(nullptr, 0), -EINVAL);
    CHECK(std::memcmp(&iov, &before, sizeof iov) == 0);
    CHECK_EQUAL(mount.links(), std::size_t{0});
    release(memory);
}

void what_is_no_gpu_iov_is_left_alone() {
    hf3fs_iov zero{};
    hf3fs_iov made_up{};
    made_up.iovh = &made_up;
    made_up.numa = -0x6472;
    for (hf3fs_iov* const iov : {static_cast<hf3fs_iov*>(nullptr), &zero, &made_up}) {
        hf3fs_iovunlink_gpu(iov);
        hf3fs_iovdestroy_gpu(iov);
        CHECK(!hf3fs_iov_is_gpu(iov) && hf3fs_iov_gpu_device(iov) == -1);
        CHECK_EQUAL(hf3fs_iov_mem_type(iov), HF3FS_MEM_HOST);
    }
    CHECK_EQUAL(hf3fs_iovsync(&zero, 0), 0);
    CHECK_EQUAL(hf3fs_iovsync(&zero, 2), -EINVAL);
    CHECK_EQUAL(hf3fs_iovsync(nullptr, 0), -EINVAL);
}

void directions_are_checked() {
    const Mount mount;
    hf3fs_iov iov{};
    CHECK_EQUAL(hf3fs_iovcreate_device(&iov, mount.path(), 4096, 0, 0), 0);
    CHECK_EQUAL(hf3fs_iovsync_gpu(&iov, 2), -EINVAL);
    CHECK_EQUAL(hf3fs_iovsync_gpu(&iov, -1), -EINVAL);
    hf3fs_iovdestroy_gpu(&iov);
}

void foreign_memory_is_refused() {
    const Mount mount;
    make_current(0);
    const auto id = id_of(2);
    hf3fs_iov iov{};
    std::vector<std::uint8_t> host(4096);
    CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, host.data(), id.data(), mount.path(), host.size(), 0, 0), -EINVAL);
    u64 managed = 0;
    CHECK_EQUAL(cu("cuMemAllocManaged", &managed, u64{65536}, 1U), 0);
    CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, pointer_of(managed), id.data(), mount.path(), 4096, 0, 0), -EINVAL);
    release(managed);
    void* pinned = nullptr;
    CHECK_EQUAL(cu("cuMemHostAlloc", &pinned, u64{4096}, 0U), 0);
    CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, pinned, id.data(), mount.path(), 4096, 0, 0), -EINVAL);
    CHECK_EQUAL(cu("cuMemFreeHost", pinned), 0);
    const u64 freed = allocate(mib);
    release(freed);
    CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, pointer_of(freed), id.data(), mount.path(), 4096, 0, 0), -EINVAL);
    int count = 0;
    CHECK_EQUAL(cu("cuDeviceGetCount", &count), 0);
    if (count > 1) {
        const u64 memory = allocate(mib);
        CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, pointer_of(memory), id.data(), mount.path(), mib, 0, 1), -EINVAL);
        release(memory);
    }
    CHECK_EQUAL(mount.links(), std::size_t{0});
}

void wrapped_memory_stays_its_owners() {
    const Mount mount;
    make_current(0);
    const u64 memory = allocate(mib);
    write(memory, pattern(mib, 9));
    const auto id = id_of(3), other = id_of(4);
    hf3fs_iov whole{}, part{}, again{};
    CHECK_EQUAL(hf3fs_iovwrap_gpu(&whole, pointer_of(memory), id.data(), mount.path(), mib, 0, 0), 0);
    CHECK(synchronizes_copies(memory));
    CHECK_EQUAL(hf3fs_iovwrap_gpu(&again, pointer_of(memory), id.data(), mount.path(), mib, 0, 0), -EEXIST);
    CHECK(is_zero(again));
    CHECK_EQUAL(hf3fs_iovwrap_device(&part, pointer_of(memory + 4099), other.data(), mount.path(), 1000, 0, 0), 0);
    const auto target = parse_target(fs::read_symlink(mount.iovs() / gpu_link_name(other.data(), 0)).native());
    CHECK(target.has_value() && target->offset_bytes >= 4099 && target->size_bytes == 1000);
    // Interior memory does not go into a handle without an offset.
    hf3fs_gpu_ipc_handle_t handle{};
    CHECK_EQUAL(hf3fs_iov_export_gpu(&part, &handle), -EINVAL);
    CHECK_EQUAL(hf3fs_iov_export_gpu(&whole, nullptr), -EINVAL);
    gdrkit_share_handle_t share{};
    CHECK_EQUAL(gdrkit_iov_export_share(&part, &share), 0);
    // What ends one iov leaves the other and the memory alone.
    hf3fs_iovdestroy_gpu(&whole);
    CHECK_EQUAL(mount.links(), std::size_t{1});
    CHECK_EQUAL(hf3fs_iovsync_gpu(&part, 1), 0);
    hf3fs_iovdestroy_gpu(&part);
    CHECK(read(memory, mib) == pattern(mib, 9));
    release(memory);
}

void a_replaced_link_stays() {
    const Mount mount;
    hf3fs_iov iov{};
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), mib, 0, 0), 0);
    const fs::path link = mount.only_link();
    hf3fs_iovunlink_gpu(&iov);
    CHECK_EQUAL(mount.links(), std::size_t{0});
    CHECK(hf3fs_iov_is_gpu(&iov));
    fs::create_symlink("somebody else's", link);
    hf3fs_iovunlink_gpu(&iov);
    hf3fs_iovdestroy_gpu(&iov);
    CHECK(is_zero(iov));
    CHECK(fs::read_symlink(link) == "somebody else's");
}

void a_link_that_cannot_be_removed_keeps_the_iov() {
    const Mount mount;
    make_current(0);
    hf3fs_iov iov{};
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), mib, 0, 0), 0);
    const auto address = reinterpret_cast<u64>(iov.base);
    // A folder instead of the link: unlink answers EISDIR, whoever asks.
    const fs::path link = mount.only_link();
    fs::remove(link);
    fs::create_directory(link);
    hf3fs_iovdestroy_gpu(&iov);
    CHECK(hf3fs_iov_is_gpu(&iov) && reinterpret_cast<u64>(iov.base) == address);
    write(address, pattern(mib, 1));
    CHECK(read(address, mib) == pattern(mib, 1));
    fs::remove(link);
    hf3fs_iovdestroy_gpu(&iov);
    CHECK(is_zero(iov));
}

void one_destroy_of_many_ends_it() {
    const Mount mount;
    hf3fs_iov iov{};
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), mib, 0, 0), 0);
    std::vector<hf3fs_iov> copies(8, iov);
    std::vector<std::thread> threads;
    for (hf3fs_iov& copy : copies) {
        threads.emplace_back([&copy] { hf3fs_iovdestroy_gpu(&copy); });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    CHECK(!hf3fs_iov_is_gpu(&iov));
    CHECK_EQUAL(mount.links(), std::size_t{0});
}

void a_forked_child_takes_nothing_away() {
    const Mount mount;
    hf3fs_iov iov{};
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), mib, 0, 0), 0);
    std::fflush(nullptr);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        const bool mine = hf3fs_iov_is_gpu(&iov);
        hf3fs_iovdestroy_gpu(&iov);
        _exit(mine ? 1 : 0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK_EQUAL(mount.links(), std::size_t{1});
    hf3fs_iovdestroy_gpu(&iov);
    CHECK_EQUAL(mount.links(), std::size_t{0});
}

} // namespace

int main() {
    CHECK(hf3fs_gdr_available());
    CHECK(hf3fs_gdr_device_count() > 0);
    create_publishes_and_destroy_takes_everything_back();
    the_current_context_stays();
    bad_arguments_have_their_codes();
    what_is_no_gpu_iov_is_left_alone();
    directions_are_checked();
    foreign_memory_is_refused();
    wrapped_memory_stays_its_owners();
    a_replaced_link_stays();
    a_link_that_cannot_be_removed_keeps_the_iov();
    one_destroy_of_many_ends_it();
    a_forked_child_takes_nothing_away();
}
