// Tests of GPU iovs in two processes. The first process publishes or exports memory. The second process, which
// run_peer() starts, opens or imports this memory and must see the same bytes.
#include <algorithm>

#include "usrbio/client/gpu_target.hpp"
#include "usrbio/tests/gpu_check.hpp"

namespace {

using namespace gdrkit::usrbio;
using namespace gdrkit::usrbio::test;
namespace fs = std::filesystem;

constexpr u64 mib = 1 << 20;
constexpr std::size_t iov_bytes = 70'001;
// Seeds of the patterns that the first process (the owner) and the second process (the peer) write.
constexpr unsigned owner_seed = 5, peer_seed = 6;

// ---- functions of the second process --------------------------------------------------------------------------------

// Checks the owner's pattern and writes the peer's pattern, which the owner checks. Then destroys the iov.
void check_and_replace_pattern(hf3fs_iov& iov) {
    CHECK(hf3fs_iov_is_gpu(&iov) && iov.size == iov_bytes && iov.numa == -1);
    use_device(hf3fs_iov_gpu_device(&iov));
    const auto address = reinterpret_cast<u64>(iov.base);
    CHECK(has_sync_memops(address));
    CHECK(copy_from_device(address, iov_bytes) == make_pattern(iov_bytes, owner_seed));
    copy_to_device(address, make_pattern(iov_bytes, peer_seed));
    // The publication belongs to the first process, so hf3fs_iovunlink_gpu does not withdraw it.
    const auto link_count_before =
        std::distance(fs::directory_iterator(std::string(iov.mount_point) + "/3fs-virt/iovs"), {});
    hf3fs_iovunlink_gpu(&iov);
    hf3fs_iov stale_copy = iov;
    hf3fs_iovdestroy_gpu(&iov);
    CHECK(!hf3fs_iov_is_gpu(&stale_copy) && iov.base == nullptr);
    CHECK_EQUAL(std::distance(fs::directory_iterator(std::string(stale_copy.mount_point) + "/3fs-virt/iovs"), {}),
                link_count_before);
}

// The main function of the second process, which opens or imports an iov of the first process. The actions "open" and
// "open_other_size" do not use `handle_hex`.
int peer_main(const std::string& action, const char* mount, const std::string& handle_hex, const std::string& id_hex,
              int expected_result) {
    hf3fs_iov iov{};
    int status = 0;
    const auto handle_bytes = parse_hex(handle_hex), expected_id = parse_hex(id_hex);
    if (action == "open") {
        status = hf3fs_iovopen_gpu(&iov, expected_id.data(), mount, iov_bytes, 0, 0);
    } else if (action == "open_other_size") {
        status = hf3fs_iovopen_device(&iov, expected_id.data(), mount, iov_bytes - 1, 0, 0);
    } else if (action == "import") {
        hf3fs_gpu_ipc_handle_t handle;
        CHECK_EQUAL(handle_bytes.size(), sizeof handle);
        std::ranges::copy(handle_bytes, handle.data);
        status = hf3fs_iov_import_gpu(&iov, &handle, mount);
    } else {
        gdrkit_share_handle_t handle;
        CHECK(action == "import_share" && handle_bytes.size() == sizeof handle);
        std::ranges::copy(handle_bytes, handle.data);
        status = gdrkit_iov_import_share(&iov, &handle, mount);
    }
    CHECK_EQUAL(status, expected_result);
    if (status != 0) {
        const hf3fs_iov zero_iov{};
        CHECK(std::memcmp(&iov, &zero_iov, sizeof iov) == 0);
        return 0;
    }
    CHECK(std::memcmp(iov.id, expected_id.data(), sizeof iov.id) == 0);
    check_and_replace_pattern(iov);
    return 0;
}

// ---- functions of the first process ---------------------------------------------------------------------------------

// Runs `action` in the second process, and checks that the function of the library returns `expected_result`.
void check_result_in_peer(const char* action, const Mount& mount, const std::string& handle_hex, const void* id,
                          int expected_result = 0) {
    CHECK_EQUAL(run_peer({action, mount.path(), handle_hex, format_hex(id, 16), std::to_string(expected_result)}), 0);
}

// Checks the pattern that the second process wrote, and writes the owner's pattern again.
void check_and_restore_pattern(u64 address) {
    CHECK(copy_from_device(address, iov_bytes) == make_pattern(iov_bytes, peer_seed));
    copy_to_device(address, make_pattern(iov_bytes, owner_seed));
}

void test_created_memory_is_opened_and_imported() {
    const Mount mount;
    use_device(0);
    hf3fs_iov iov{};
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), iov_bytes, 0, 0), 0);
    const auto address = reinterpret_cast<u64>(iov.base);
    copy_to_device(address, make_pattern(iov_bytes, owner_seed));
    check_result_in_peer("open", mount, "", iov.id);
    check_and_restore_pattern(address);
    check_result_in_peer("open_other_size", mount, "", iov.id, -EINVAL);
    hf3fs_gpu_ipc_handle_t handle{};
    CHECK_EQUAL(hf3fs_iov_export_gpu(&iov, &handle), 0);
    // After the 64 bytes of the CUDA IPC handle, the handle has the size and the number of the device.
    u64 size_and_device[2];
    std::memcpy(size_and_device, handle.data + 64, sizeof size_and_device);
    CHECK(size_and_device[0] == iov_bytes && size_and_device[1] == 0);
    // The importer gets the id of the publication, so that it can use the iov with a ring.
    check_result_in_peer("import", mount, format_hex(handle.data, sizeof handle), iov.id);
    check_and_restore_pattern(address);
    gdrkit_share_handle_t share_handle{};
    CHECK_EQUAL(gdrkit_iov_export_share(&iov, &share_handle), 0);
    check_result_in_peer("import_share", mount, format_hex(share_handle.data, sizeof share_handle), iov.id);
    check_and_restore_pattern(address);
    // Memory that is not published any more can be imported, and the iov has an id of zeros.
    hf3fs_iovunlink_gpu(&iov);
    const std::uint8_t zeros[16] = {};
    check_result_in_peer("open", mount, "", iov.id, -ENOENT);
    check_result_in_peer("import", mount, format_hex(handle.data, sizeof handle), zeros);
    check_and_restore_pattern(address);
    hf3fs_iovdestroy_gpu(&iov);
    // The memory was freed, so its handles are invalid.
    check_result_in_peer("import", mount, format_hex(handle.data, sizeof handle), zeros, -EINVAL);
    check_result_in_peer("import_share", mount, format_hex(share_handle.data, sizeof share_handle), zeros, -EINVAL);
}

void test_changed_handles_are_refused() {
    const Mount mount;
    use_device(0);
    hf3fs_iov iov{};
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), iov_bytes, 0, 0), 0);
    hf3fs_gpu_ipc_handle_t handle{};
    CHECK_EQUAL(hf3fs_iov_export_gpu(&iov, &handle), 0);
    // Returns the handle with `value` in the 8 bytes at `byte_offset`: 64 for the size, 72 for the device number.
    const auto make_changed_handle = [&](std::size_t byte_offset, u64 value) {
        hf3fs_gpu_ipc_handle_t changed_handle = handle;
        std::memcpy(changed_handle.data + byte_offset, &value, sizeof value);
        return format_hex(changed_handle.data, sizeof changed_handle);
    };
    check_result_in_peer("import", mount, make_changed_handle(64, 0), iov.id, -EINVAL);
    check_result_in_peer("import", mount, make_changed_handle(64, 1 << 30), iov.id, -EINVAL);
    check_result_in_peer("import", mount, make_changed_handle(64, u64{1} << 63), iov.id, -EINVAL);
    check_result_in_peer("import", mount, make_changed_handle(72, UINT64_MAX), iov.id, -EINVAL);
    // The handle contains the number of the device in the owner. The importer may number the devices differently, so it
    // ignores a wrong number and queries the driver.
    copy_to_device(reinterpret_cast<u64>(iov.base), make_pattern(iov_bytes, owner_seed));
    check_result_in_peer("import", mount, make_changed_handle(72, 1000), iov.id);
    gdrkit_share_handle_t share_handle{};
    CHECK_EQUAL(gdrkit_iov_export_share(&iov, &share_handle), 0);
    share_handle.data[100] ^= 1; // The checksum does not match the damaged handle.
    check_result_in_peer("import_share", mount, format_hex(share_handle.data, sizeof share_handle), iov.id, -EINVAL);
    // A process cannot open memory that it published itself.
    hf3fs_iov opened_iov{};
    CHECK_EQUAL(hf3fs_iovopen_gpu(&opened_iov, reinterpret_cast<std::uint8_t*>(iov.id), mount.path(), iov_bytes, 0, 0),
                -EIO);
    CHECK_EQUAL(hf3fs_iov_import_gpu(&opened_iov, &handle, mount.path()), -EINVAL);
    hf3fs_iovdestroy_gpu(&iov);
}

void test_interior_memory_keeps_its_offset() {
    const Mount mount;
    use_device(0);
    const u64 memory_address = allocate_device_memory(mib);
    const std::uint8_t id[16] = {0xab, 1, 2};
    for (const u64 offset : {u64{0}, u64{1}, u64{512}, u64{4096}, u64{65537}, mib - iov_bytes}) {
        copy_to_device(memory_address, std::vector<std::uint8_t>(mib, 0xee));
        hf3fs_iov iov{};
        CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, to_pointer(memory_address + offset), id, mount.path(), iov_bytes, 0, 0), 0);
        copy_to_device(memory_address + offset, make_pattern(iov_bytes, owner_seed));
        check_result_in_peer("open", mount, "", id);
        check_and_restore_pattern(memory_address + offset);
        gdrkit_share_handle_t share_handle{};
        CHECK_EQUAL(gdrkit_iov_export_share(&iov, &share_handle), 0);
        check_result_in_peer("import_share", mount, format_hex(share_handle.data, sizeof share_handle), id);
        check_and_restore_pattern(memory_address + offset);
        CHECK(copy_from_device(memory_address, offset) == std::vector<std::uint8_t>(offset, 0xee));
        hf3fs_iovdestroy_gpu(&iov);
    }
    free_device_memory(memory_address);
}

void test_forged_targets_are_refused() {
    const Mount mount;
    use_device(0);
    hf3fs_iov iov{};
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), iov_bytes, 0, 0), 0);
    const fs::path link_path = mount.get_only_link_path();
    const auto original_target = parse_target(fs::read_symlink(link_path).native()).value();
    const auto replace_link_target = [&](const std::string& text) {
        fs::remove(link_path);
        fs::create_symlink(text, link_path);
    };
    const auto make_changed_target = [&](auto&& change) {
        GpuTarget target = original_target;
        change(target);
        return format_target(target);
    };
    replace_link_target("/dev/shm/hf3fs-iov-0");
    check_result_in_peer("open", mount, "", iov.id, -EINVAL);
    replace_link_target("gdr://device/0/ptr/140737488355328/size/70001");
    check_result_in_peer("open", mount, "", iov.id, -EINVAL);
    replace_link_target(make_changed_target([](GpuTarget& target) { target.device = 1; }));
    check_result_in_peer("open", mount, "", iov.id, -EINVAL);
    replace_link_target(make_changed_target([](GpuTarget& target) { target.allocation_bytes *= 2; }));
    check_result_in_peer("open", mount, "", iov.id, -EINVAL);
    replace_link_target(make_changed_target([](GpuTarget& target) { target.ipc->fill(0x5a); }));
    check_result_in_peer("open", mount, "", iov.id, -EIO);
    replace_link_target(make_changed_target([](GpuTarget& target) { target.ipc.reset(); }));
    check_result_in_peer("open", mount, "", iov.id, -ENOTSUP);
    fs::remove(link_path);
    hf3fs_iovdestroy_gpu(&iov);
    CHECK(iov.base == nullptr);
}

} // namespace

int main(int argument_count, char** arguments) {
    if (argument_count == 6) { // This is the second process, which run_peer() started with five arguments.
        return peer_main(arguments[1], arguments[2], arguments[3], arguments[4], std::stoi(arguments[5]));
    }
    test_created_memory_is_opened_and_imported();
    test_changed_handles_are_refused();
    test_interior_memory_keeps_its_offset();
    test_forged_targets_are_refused();
}
