// Tests of GPU iovs in one process: creation, wrapping, errors and destruction.
#include <algorithm>
#include <thread>

#include "usrbio/client/gpu_target.hpp"
#include "usrbio/tests/gpu_check.hpp"

namespace {

using namespace gdrkit::usrbio;
using namespace gdrkit::usrbio::test;
namespace fs = std::filesystem;

constexpr u64 mib = 1 << 20;

std::array<std::uint8_t, 16> make_id(unsigned seed) {
    std::array<std::uint8_t, 16> id{};
    const auto bytes = make_pattern(id.size(), seed);
    std::ranges::copy(bytes, id.begin());
    return id;
}

bool is_zero(const hf3fs_iov& iov) {
    const hf3fs_iov zero_iov{};
    return std::memcmp(&iov, &zero_iov, sizeof iov) == 0;
}

void test_create_publishes_and_destroy_releases_everything() {
    const Mount mount;
    use_device(0);
    u64 free_bytes_before = 0, free_bytes_after = 0, total_bytes = 0;
    // Compare the free memory only in the second round, because in the first round the driver also allocates memory for
    // itself.
    for (int round = 0; round < 2; ++round) {
        CHECK_EQUAL(call_cuda("cuMemGetInfo_v2", &free_bytes_before, &total_bytes), 0);
        hf3fs_iov iov{};
        CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), 100'001, 0, 0), 0);
        CHECK(iov.base != nullptr && iov.size == 100'001 && iov.block_size == 0 && iov.numa == -1);
        CHECK(std::string(iov.mount_point) == mount.path());
        CHECK(hf3fs_iov_is_gpu(&iov) && hf3fs_iov_gpu_device(&iov) == 0 && hf3fs_iov_device_id(&iov) == 0);
        CHECK_EQUAL(hf3fs_iov_mem_type(&iov), HF3FS_MEM_DEVICE);
        const auto base_address = reinterpret_cast<u64>(iov.base);
        CHECK(has_sync_memops(base_address));
        const fs::path link_path = mount.get_only_link_path();
        const auto link_name = parse_gpu_link_name(link_path.filename().native());
        CHECK(link_name.has_value() && link_name->owner_device == 0 &&
              std::memcmp(link_name->id.data(), iov.id, 16) == 0);
        CHECK((iov.id[6] & 0xf0) == 0x40); // The id is a random UUID (version 4).
        const auto target = parse_target(fs::read_symlink(link_path).native());
        CHECK(target.has_value() && target->ipc.has_value());
        CHECK(target->device == 0 && target->offset_bytes == 0 && target->size_bytes == 100'001);
        CHECK(target->allocation_bytes >= 100'001);
        copy_to_device(base_address, make_pattern(100'001, 3));
        CHECK_EQUAL(hf3fs_iovsync_gpu(&iov, 0), 0);
        CHECK_EQUAL(hf3fs_iovsync(&iov, 1), 0);
        CHECK(copy_from_device(base_address, 100'001) == make_pattern(100'001, 3));
        const hf3fs_iov iov_copy = iov;
        hf3fs_iovdestroy_gpu(&iov);
        CHECK(is_zero(iov));
        CHECK_EQUAL(mount.count_links(), std::size_t{0});
        // A copy of a destroyed iov is not a GPU iov, and destroying it changes nothing.
        CHECK(!hf3fs_iov_is_gpu(&iov_copy) && hf3fs_iov_gpu_device(&iov_copy) == -1);
        hf3fs_iov stale_iov = iov_copy;
        hf3fs_iovdestroy_gpu(&stale_iov);
        CHECK(std::memcmp(&stale_iov, &iov_copy, sizeof iov_copy) == 0);
        CHECK_EQUAL(call_cuda("cuMemGetInfo_v2", &free_bytes_after, &total_bytes), 0);
        CHECK(round == 0 || free_bytes_after == free_bytes_before);
    }
}

void test_current_context_is_preserved() {
    const Mount mount;
    void* const previous_context = use_device(0);
    int device_count = 0;
    CHECK_EQUAL(call_cuda("cuDeviceGetCount", &device_count), 0);
    hf3fs_iov iov{};
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), mib, 0, device_count - 1), 0);
    CHECK(get_current_context() == previous_context);
    CHECK_EQUAL(hf3fs_iovsync_gpu(&iov, 1), 0);
    CHECK(get_current_context() == previous_context);
    // A thread without a context can destroy the iov, and has no context afterwards.
    std::thread([&] {
        CHECK(get_current_context() == nullptr);
        CHECK_EQUAL(hf3fs_iovsync_gpu(&iov, 0), 0);
        hf3fs_iovdestroy_gpu(&iov);
        CHECK(get_current_context() == nullptr);
    }).join();
    CHECK(is_zero(iov) && get_current_context() == previous_context);
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, "/nonexistent", mib, 0, 0), -ENOENT);
    CHECK(get_current_context() == previous_context);
}

void test_invalid_arguments_have_error_codes() {
    const Mount mount;
    const std::string too_long_mount(256, 'm');
    int device_count = 0;
    use_device(0);
    CHECK_EQUAL(call_cuda("cuDeviceGetCount", &device_count), 0);
    hf3fs_iov iov{};
    iov.numa = 77;
    const hf3fs_iov iov_before = iov;
    const auto id = make_id(1);
    CHECK_EQUAL(hf3fs_iovcreate_gpu(nullptr, mount.path(), mib, 0, 0), -EINVAL);
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, nullptr, mib, 0, 0), -EINVAL);
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, "", mib, 0, 0), -EINVAL);
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, too_long_mount.c_str(), mib, 0, 0), -EINVAL);
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), 0, 0, 0), -EINVAL);
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), mib, 0, -1), -ENODEV);
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), mib, 0, device_count), -ENODEV);
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), u64{1} << 60, 0, 0), -ENOMEM);
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), SIZE_MAX, 0, 0), -ENOMEM);
    CHECK_EQUAL(hf3fs_iovcreate_device(&iov, mount.path(), mib, 4096, 0), -EINVAL);
    const u64 memory_address = allocate_device_memory(mib);
    void* const pointer = to_pointer(memory_address);
    CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, nullptr, id.data(), mount.path(), mib, 0, 0), -EINVAL);
    CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, pointer, nullptr, mount.path(), mib, 0, 0), -EINVAL);
    CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, pointer, id.data(), mount.path(), 0, 0, 0), -EINVAL);
    CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, pointer, id.data(), mount.path(), SIZE_MAX, 0, 0), -EINVAL);
    CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, pointer, id.data(), mount.path(), mib, 0, device_count), -ENODEV);
    CHECK_EQUAL(hf3fs_iovwrap_device(&iov, pointer, id.data(), mount.path(), mib, 1, 0), -EINVAL);
    CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, to_pointer(memory_address + 1), id.data(), mount.path(), 64 * mib, 0, 0),
                -EINVAL);
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
    CHECK(std::memcmp(&iov, &iov_before, sizeof iov) == 0);
    CHECK_EQUAL(mount.count_links(), std::size_t{0});
    free_device_memory(memory_address);
}

void test_other_structs_are_ignored() {
    hf3fs_iov zero_iov{};
    hf3fs_iov invalid_iov{}; // It gets values that the library never writes.
    invalid_iov.iovh = &invalid_iov;
    invalid_iov.numa = -0x6472;
    for (hf3fs_iov* const iov : {static_cast<hf3fs_iov*>(nullptr), &zero_iov, &invalid_iov}) {
        hf3fs_iovunlink_gpu(iov);
        hf3fs_iovdestroy_gpu(iov);
        CHECK(!hf3fs_iov_is_gpu(iov) && hf3fs_iov_gpu_device(iov) == -1);
        CHECK_EQUAL(hf3fs_iov_mem_type(iov), HF3FS_MEM_HOST);
    }
    CHECK_EQUAL(hf3fs_iovsync(&zero_iov, 0), 0);
    CHECK_EQUAL(hf3fs_iovsync(&zero_iov, 2), -EINVAL);
    CHECK_EQUAL(hf3fs_iovsync(nullptr, 0), -EINVAL);
}

void test_sync_direction_is_checked() {
    const Mount mount;
    hf3fs_iov iov{};
    CHECK_EQUAL(hf3fs_iovcreate_device(&iov, mount.path(), 4096, 0, 0), 0);
    CHECK_EQUAL(hf3fs_iovsync_gpu(&iov, 2), -EINVAL);
    CHECK_EQUAL(hf3fs_iovsync_gpu(&iov, -1), -EINVAL);
    hf3fs_iovdestroy_gpu(&iov);
}

void test_memory_of_host_or_other_device_is_refused() {
    const Mount mount;
    use_device(0);
    const auto id = make_id(2);
    hf3fs_iov iov{};
    std::vector<std::uint8_t> host_memory(4096);
    CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, host_memory.data(), id.data(), mount.path(), host_memory.size(), 0, 0),
                -EINVAL);
    u64 managed_address = 0;
    CHECK_EQUAL(call_cuda("cuMemAllocManaged", &managed_address, u64{65536}, 1U), 0); // CU_MEM_ATTACH_GLOBAL
    CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, to_pointer(managed_address), id.data(), mount.path(), 4096, 0, 0), -EINVAL);
    free_device_memory(managed_address);
    void* pinned_memory = nullptr;
    CHECK_EQUAL(call_cuda("cuMemHostAlloc", &pinned_memory, u64{4096}, 0U), 0);
    CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, pinned_memory, id.data(), mount.path(), 4096, 0, 0), -EINVAL);
    CHECK_EQUAL(call_cuda("cuMemFreeHost", pinned_memory), 0);
    const u64 freed_address = allocate_device_memory(mib);
    free_device_memory(freed_address);
    CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, to_pointer(freed_address), id.data(), mount.path(), 4096, 0, 0), -EINVAL);
    int device_count = 0;
    CHECK_EQUAL(call_cuda("cuDeviceGetCount", &device_count), 0);
    if (device_count > 1) {
        const u64 memory_address = allocate_device_memory(mib);
        CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, to_pointer(memory_address), id.data(), mount.path(), mib, 0, 1), -EINVAL);
        free_device_memory(memory_address);
    }
    CHECK_EQUAL(mount.count_links(), std::size_t{0});
}

void test_wrapped_memory_belongs_to_its_owner() {
    const Mount mount;
    use_device(0);
    const u64 memory_address = allocate_device_memory(mib);
    copy_to_device(memory_address, make_pattern(mib, 9));
    const auto id = make_id(3), other_id = make_id(4);
    hf3fs_iov first_iov{}, second_iov{}, duplicate_iov{};
    CHECK_EQUAL(hf3fs_iovwrap_gpu(&first_iov, to_pointer(memory_address), id.data(), mount.path(), mib, 0, 0), 0);
    CHECK(has_sync_memops(memory_address));
    CHECK_EQUAL(hf3fs_iovwrap_gpu(&duplicate_iov, to_pointer(memory_address), id.data(), mount.path(), mib, 0, 0),
                -EEXIST);
    CHECK(is_zero(duplicate_iov));
    CHECK_EQUAL(
        hf3fs_iovwrap_device(&second_iov, to_pointer(memory_address + 4099), other_id.data(), mount.path(), 1000, 0, 0),
        0);
    const auto target =
        parse_target(fs::read_symlink(mount.iovs_folder() / make_gpu_link_name(other_id.data(), 0)).native());
    CHECK(target.has_value() && target->offset_bytes >= 4099 && target->size_bytes == 1000);
    // hf3fs_gpu_ipc_handle_t contains no offset, so memory that begins inside its allocation cannot be exported with
    // it.
    hf3fs_gpu_ipc_handle_t handle{};
    CHECK_EQUAL(hf3fs_iov_export_gpu(&second_iov, &handle), -EINVAL);
    CHECK_EQUAL(hf3fs_iov_export_gpu(&first_iov, nullptr), -EINVAL);
    gdrkit_share_handle_t share_handle{};
    CHECK_EQUAL(gdrkit_iov_export_share(&second_iov, &share_handle), 0);
    // Destroying one iov does not affect the other, nor the memory.
    hf3fs_iovdestroy_gpu(&first_iov);
    CHECK_EQUAL(mount.count_links(), std::size_t{1});
    CHECK_EQUAL(hf3fs_iovsync_gpu(&second_iov, 1), 0);
    hf3fs_iovdestroy_gpu(&second_iov);
    CHECK(copy_from_device(memory_address, mib) == make_pattern(mib, 9));
    free_device_memory(memory_address);
}

void test_replaced_link_stays() {
    const Mount mount;
    hf3fs_iov iov{};
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), mib, 0, 0), 0);
    const fs::path link_path = mount.get_only_link_path();
    hf3fs_iovunlink_gpu(&iov);
    CHECK_EQUAL(mount.count_links(), std::size_t{0});
    CHECK(hf3fs_iov_is_gpu(&iov));
    fs::create_symlink("another process's", link_path);
    hf3fs_iovunlink_gpu(&iov);
    hf3fs_iovdestroy_gpu(&iov);
    CHECK(is_zero(iov));
    CHECK(fs::read_symlink(link_path) == "another process's");
}

void test_undeletable_link_keeps_the_iov() {
    const Mount mount;
    use_device(0);
    hf3fs_iov iov{};
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), mib, 0, 0), 0);
    const auto address = reinterpret_cast<u64>(iov.base);
    // Replace the link by a folder: unlink(2) then fails with EISDIR for every user.
    const fs::path link_path = mount.get_only_link_path();
    fs::remove(link_path);
    fs::create_directory(link_path);
    hf3fs_iovdestroy_gpu(&iov);
    CHECK(hf3fs_iov_is_gpu(&iov) && reinterpret_cast<u64>(iov.base) == address);
    copy_to_device(address, make_pattern(mib, 1));
    CHECK(copy_from_device(address, mib) == make_pattern(mib, 1));
    fs::remove(link_path);
    hf3fs_iovdestroy_gpu(&iov);
    CHECK(is_zero(iov));
}

void test_concurrent_destroy_ends_the_iov_once() {
    const Mount mount;
    hf3fs_iov iov{};
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), mib, 0, 0), 0);
    std::vector<hf3fs_iov> iov_copies(8, iov);
    std::vector<std::thread> threads;
    for (hf3fs_iov& iov_copy : iov_copies) {
        threads.emplace_back([&iov_copy] { hf3fs_iovdestroy_gpu(&iov_copy); });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    CHECK(!hf3fs_iov_is_gpu(&iov));
    CHECK_EQUAL(mount.count_links(), std::size_t{0});
}

void test_forked_child_removes_nothing() {
    const Mount mount;
    hf3fs_iov iov{};
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), mib, 0, 0), 0);
    std::fflush(nullptr);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        const bool is_gpu_iov_in_child = hf3fs_iov_is_gpu(&iov);
        hf3fs_iovdestroy_gpu(&iov);
        _exit(is_gpu_iov_in_child ? 1 : 0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK_EQUAL(mount.count_links(), std::size_t{1});
    hf3fs_iovdestroy_gpu(&iov);
    CHECK_EQUAL(mount.count_links(), std::size_t{0});
}

void test_device_is_available_after_a_nic_moved_bytes() {
    const Mount mount;
    const std::string state_folder = std::string(mount.path()) + "/state";
    CHECK_EQUAL(setenv("GDRKIT_STATE", state_folder.c_str(), 1), 0);
    CHECK(!hf3fs_gdr_available() && hf3fs_gdr_device_count() == 0);
    write_reach_file(state_folder, 0, false);
    CHECK(!hf3fs_gdr_available() && hf3fs_gdr_device_count() == 0);
    write_reach_file(state_folder, 0, true, 0666); // The library ignores a file that other users can write.
    CHECK(!hf3fs_gdr_available());
    write_reach_file(state_folder, 0, true);
    CHECK(hf3fs_gdr_available());
    CHECK_EQUAL(hf3fs_gdr_device_count(), 1);
    CHECK_EQUAL(unsetenv("GDRKIT_STATE"), 0);
}

} // namespace

int main() {
    test_device_is_available_after_a_nic_moved_bytes();
    test_create_publishes_and_destroy_releases_everything();
    test_current_context_is_preserved();
    test_invalid_arguments_have_error_codes();
    test_other_structs_are_ignored();
    test_sync_direction_is_checked();
    test_memory_of_host_or_other_device_is_refused();
    test_wrapped_memory_belongs_to_its_owner();
    test_replaced_link_stays();
    test_undeletable_link_keeps_the_iov();
    test_concurrent_destroy_ends_the_iov_once();
    test_forked_child_removes_nothing();
}
