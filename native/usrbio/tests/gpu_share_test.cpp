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
constexpr std::size_t size = 70'001;

// ---- functions of the second process --------------------------------------------------------------------------------

// Checks the pattern of the owner and writes another pattern, which the owner checks. Then destroys the iov.
void check_and_replace_pattern(hf3fs_iov& iov, unsigned seed) {
    CHECK(hf3fs_iov_is_gpu(&iov) && iov.size == size && iov.numa == -1);
    use_device(hf3fs_iov_gpu_device(&iov));
    const auto address = reinterpret_cast<u64>(iov.base);
    CHECK(has_sync_memops(address));
    CHECK(copy_from_device(address, size) == make_pattern(size, seed));
    copy_to_device(address, make_pattern(size, seed + 1));
    // The publication belongs to the first process, so hf3fs_iovunlink_gpu does not withdraw it.
    const auto links = std::distance(fs::directory_iterator(std::string(iov.mount_point) + "/3fs-virt/iovs"), {});
    hf3fs_iovunlink_gpu(&iov);
    hf3fs_iov copy = iov;
    hf3fs_iovdestroy_gpu(&iov);
    CHECK(!hf3fs_iov_is_gpu(&copy) && iov.base == nullptr);
    CHECK_EQUAL(std::distance(fs::directory_iterator(std::string(copy.mount_point) + "/3fs-virt/iovs"), {}), links);
}

int run_as_peer(const std::string& action, const char* mount, const std::string& bytes, const std::string& id,
                int expected_result) {
    hf3fs_iov iov{};
    int error = 0;
    const auto handle_bytes = parse_hex(bytes), expected_id = parse_hex(id);
    if (action == "open") {
        error = hf3fs_iovopen_gpu(&iov, expected_id.data(), mount, size, 0, 0);
    } else if (action == "open_other_size") {
        error = hf3fs_iovopen_device(&iov, expected_id.data(), mount, size - 1, 0, 0);
    } else if (action == "import") {
        hf3fs_gpu_ipc_handle_t handle;
        CHECK_EQUAL(handle_bytes.size(), sizeof handle);
        std::ranges::copy(handle_bytes, handle.data);
        error = hf3fs_iov_import_gpu(&iov, &handle, mount);
    } else {
        gdrkit_share_handle_t handle;
        CHECK(action == "import_share" && handle_bytes.size() == sizeof handle);
        std::ranges::copy(handle_bytes, handle.data);
        error = gdrkit_iov_import_share(&iov, &handle, mount);
    }
    CHECK_EQUAL(error, expected_result);
    if (error != 0) {
        const hf3fs_iov zero{};
        CHECK(std::memcmp(&iov, &zero, sizeof iov) == 0);
        return 0;
    }
    CHECK(std::memcmp(iov.id, expected_id.data(), sizeof iov.id) == 0);
    check_and_replace_pattern(iov, 5);
    return 0;
}

// ---- functions of the first process ---------------------------------------------------------------------------------

// Runs `action` in the second process, and checks that the function of the library returns `expected_result`.

void run_and_check(const char* action, const Mount& mount, const std::string& bytes, const void* id,
                   int expected_result = 0) {
    CHECK_EQUAL(run_peer({action, mount.path(), bytes, format_hex(id, 16), std::to_string(expected_result)}), 0);
}

// Checks the pattern that the second process wrote, and writes the first pattern again.
void check_and_restore_pattern(u64 address) {
    CHECK(copy_from_device(address, size) == make_pattern(size, 6));
    copy_to_device(address, make_pattern(size, 5));
}

void test_created_memory_is_opened_and_imported() {
    const Mount mount;
    use_device(0);
    hf3fs_iov iov{};
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), size, 0, 0), 0);
    const auto address = reinterpret_cast<u64>(iov.base);
    copy_to_device(address, make_pattern(size, 5));
    run_and_check("open", mount, "", iov.id);
    check_and_restore_pattern(address);
    run_and_check("open_other_size", mount, "", iov.id, -EINVAL);
    hf3fs_gpu_ipc_handle_t handle{};
    CHECK_EQUAL(hf3fs_iov_export_gpu(&iov, &handle), 0);
    u64 fields[2];
    std::memcpy(fields, handle.data + 64, sizeof fields);
    CHECK(fields[0] == size && fields[1] == 0);
    // The importer gets the id of the publication, so that it can use the iov with a ring.
    run_and_check("import", mount, format_hex(handle.data, sizeof handle), iov.id);
    check_and_restore_pattern(address);
    gdrkit_share_handle_t share{};
    CHECK_EQUAL(gdrkit_iov_export_share(&iov, &share), 0);
    run_and_check("import_share", mount, format_hex(share.data, sizeof share), iov.id);
    check_and_restore_pattern(address);
    // Memory that is not published any more can be imported, and the iov has an id of zeros.
    hf3fs_iovunlink_gpu(&iov);
    const std::uint8_t zeros[16] = {};
    run_and_check("open", mount, "", iov.id, -ENOENT);
    run_and_check("import", mount, format_hex(handle.data, sizeof handle), zeros);
    check_and_restore_pattern(address);
    hf3fs_iovdestroy_gpu(&iov);
    // The memory was freed, so its handles are invalid.
    run_and_check("import", mount, format_hex(handle.data, sizeof handle), zeros, -EINVAL);
    run_and_check("import_share", mount, format_hex(share.data, sizeof share), zeros, -EINVAL);
}

void test_changed_handles_are_refused() {
    const Mount mount;
    use_device(0);
    hf3fs_iov iov{};
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), size, 0, 0), 0);
    hf3fs_gpu_ipc_handle_t handle{};
    CHECK_EQUAL(hf3fs_iov_export_gpu(&iov, &handle), 0);
    // Returns the handle with another value in the 8 bytes at `position`: 64 is the size, 72 the device.
    const auto make_changed_handle = [&](std::size_t position, u64 value) {
        hf3fs_gpu_ipc_handle_t changed_handle = handle;
        std::memcpy(changed_handle.data + position, &value, sizeof value);
        return format_hex(changed_handle.data, sizeof changed_handle);
    };
    run_and_check("import", mount, make_changed_handle(64, 0), iov.id, -EINVAL);
    run_and_check("import", mount, make_changed_handle(64, 1 << 30), iov.id, -EINVAL);
    run_and_check("import", mount, make_changed_handle(64, u64{1} << 63), iov.id, -EINVAL);
    run_and_check("import", mount, make_changed_handle(72, UINT64_MAX), iov.id, -EINVAL);
    // The owner wrote its own number of the device. The importer may number the devices differently, so it queries the
    // driver.
    copy_to_device(reinterpret_cast<u64>(iov.base), make_pattern(size, 5));
    run_and_check("import", mount, make_changed_handle(72, 1000), iov.id);
    gdrkit_share_handle_t share{};
    CHECK_EQUAL(gdrkit_iov_export_share(&iov, &share), 0);
    share.data[100] ^= 1;
    run_and_check("import_share", mount, format_hex(share.data, sizeof share), iov.id, -EINVAL);
    // A process cannot open memory that it published itself.
    hf3fs_iov opened_iov{};
    CHECK_EQUAL(hf3fs_iovopen_gpu(&opened_iov, reinterpret_cast<std::uint8_t*>(iov.id), mount.path(), size, 0, 0),
                -EIO);
    CHECK_EQUAL(hf3fs_iov_import_gpu(&opened_iov, &handle, mount.path()), -EINVAL);
    hf3fs_iovdestroy_gpu(&iov);
}

void test_interior_memory_keeps_its_offset() {
    const Mount mount;
    use_device(0);
    const u64 memory = allocate(mib);
    const std::uint8_t id[16] = {0xab, 1, 2};
    for (const u64 offset : {u64{0}, u64{1}, u64{512}, u64{4096}, u64{65537}, mib - size}) {
        copy_to_device(memory, std::vector<std::uint8_t>(mib, 0xee));
        hf3fs_iov iov{};
        CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, to_pointer(memory + offset), id, mount.path(), size, 0, 0), 0);
        copy_to_device(memory + offset, make_pattern(size, 5));
        run_and_check("open", mount, "", id);
        check_and_restore_pattern(memory + offset);
        gdrkit_share_handle_t share{};
        CHECK_EQUAL(gdrkit_iov_export_share(&iov, &share), 0);
        run_and_check("import_share", mount, format_hex(share.data, sizeof share), id);
        check_and_restore_pattern(memory + offset);
        CHECK(copy_from_device(memory, offset) == std::vector<std::uint8_t>(offset, 0xee));
        hf3fs_iovdestroy_gpu(&iov);
    }
    release(memory);
}

void test_forged_targets_are_refused() {
    const Mount mount;
    use_device(0);
    hf3fs_iov iov{};
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), size, 0, 0), 0);
    const fs::path link = mount.get_only_link();
    const auto original_target = parse_target(fs::read_symlink(link).native()).value();
    const auto set_target = [&](const std::string& text) {
        fs::remove(link);
        fs::create_symlink(text, link);
    };
    const auto make_changed_target = [&](auto&& change) {
        GpuTarget target = original_target;
        change(target);
        return format_target(target);
    };
    set_target("/dev/shm/hf3fs-iov-0");
    run_and_check("open", mount, "", iov.id, -EINVAL);
    set_target("gdr://device/0/ptr/140737488355328/size/70001");
    run_and_check("open", mount, "", iov.id, -EINVAL);
    set_target(make_changed_target([](GpuTarget& target) { target.device = 1; }));
    run_and_check("open", mount, "", iov.id, -EINVAL);
    set_target(make_changed_target([](GpuTarget& target) { target.allocation_bytes *= 2; }));
    run_and_check("open", mount, "", iov.id, -EINVAL);
    set_target(make_changed_target([](GpuTarget& target) { target.ipc->fill(0x5a); }));
    run_and_check("open", mount, "", iov.id, -EIO);
    set_target(make_changed_target([](GpuTarget& target) { target.ipc.reset(); }));
    run_and_check("open", mount, "", iov.id, -ENOTSUP);
    fs::remove(link);
    hf3fs_iovdestroy_gpu(&iov);
    CHECK(iov.base == nullptr);
}

} // namespace

int main(int count, char** arguments) {
    if (count == 6) {
        return run_as_peer(arguments[1], arguments[2], arguments[3], arguments[4], std::stoi(arguments[5]));
    }
    test_created_memory_is_opened_and_imported();
    test_changed_handles_are_refused();
    test_interior_memory_keeps_its_offset();
    test_forged_targets_are_refused();
}
