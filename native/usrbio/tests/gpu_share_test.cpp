// GPU iovs of two processes: what one publishes or exports, the other opens or imports, at the right byte.
#include <algorithm>

#include "usrbio/client/gpu_target.hpp"
#include "usrbio/tests/gpu_check.hpp"

namespace {

using namespace gdrkit::usrbio;
using namespace gdrkit::usrbio::test;
namespace fs = std::filesystem;

constexpr u64 mib = 1 << 20;
constexpr std::size_t size = 70'001;

// ---- the other process ----------------------------------------------------------------------------------------------

// It finds the pattern, and leaves one that the owner looks for.
void use(hf3fs_iov& iov, unsigned seed) {
    CHECK(hf3fs_iov_is_gpu(&iov) && iov.size == size && iov.numa == -1);
    make_current(hf3fs_iov_gpu_device(&iov));
    const auto address = reinterpret_cast<u64>(iov.base);
    CHECK(synchronizes_copies(address));
    CHECK(read(address, size) == pattern(size, seed));
    write(address, pattern(size, seed + 1));
    // It borrows: its unlink takes no publication away.
    const auto links = std::distance(fs::directory_iterator(std::string(iov.mount_point) + "/3fs-virt/iovs"), {});
    hf3fs_iovunlink_gpu(&iov);
    hf3fs_iov copy = iov;
    hf3fs_iovdestroy_gpu(&iov);
    CHECK(!hf3fs_iov_is_gpu(&copy) && iov.base == nullptr);
    CHECK_EQUAL(std::distance(fs::directory_iterator(std::string(copy.mount_point) + "/3fs-virt/iovs"), {}), links);
}

int peer(const std::string& what, const char* mount, const std::string& bytes, const std::string& id, int expected) {
    hf3fs_iov iov{};
    int error = 0;
    const auto given = from_hex(bytes), expected_id = from_hex(id);
    if (what == "open") {
        error = hf3fs_iovopen_gpu(&iov, expected_id.data(), mount, size, 0, 0);
    } else if (what == "open_other_size") {
        error = hf3fs_iovopen_device(&iov, expected_id.data(), mount, size - 1, 0, 0);
    } else if (what == "import") {
        hf3fs_gpu_ipc_handle_t handle;
        CHECK_EQUAL(given.size(), sizeof handle);
        std::ranges::copy(given, handle.data);
        error = hf3fs_iov_import_gpu(&iov, &handle, mount);
    } else {
        gdrkit_share_handle_t handle;
        CHECK(what == "import_share" && given.size() == sizeof handle);
        std::ranges::copy(given, handle.data);
        error = gdrkit_iov_import_share(&iov, &handle, mount);
    }
    CHECK_EQUAL(error, expected);
    if (error != 0) {
        const hf3fs_iov zero{};
        CHECK(std::memcmp(&iov, &zero, sizeof iov) == 0);
        return 0;
    }
    CHECK(std::memcmp(iov.id, expected_id.data(), sizeof iov.id) == 0);
    use(iov, 5);
    return 0;
}

// ---- this process ---------------------------------------------------------------------------------------------------

void ask_peer(const char* what, const Mount& mount, const std::string& bytes, const void* id, int expected = 0) {
    CHECK_EQUAL(run_peer({what, mount.path(), bytes, hex(id, 16), std::to_string(expected)}), 0);
}

void check_used(u64 address) {
    CHECK(read(address, size) == pattern(size, 6));
    write(address, pattern(size, 5));
}

void created_memory_goes_by_every_way() {
    const Mount mount;
    make_current(0);
    hf3fs_iov iov{};
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), size, 0, 0), 0);
    const auto address = reinterpret_cast<u64>(iov.base);
    write(address, pattern(size, 5));
    ask_peer("open", mount, "", iov.id);
    check_used(address);
    ask_peer("open_other_size", mount, "", iov.id, -EINVAL);
    hf3fs_gpu_ipc_handle_t handle{};
    CHECK_EQUAL(hf3fs_iov_export_gpu(&iov, &handle), 0);
    u64 said[2];
    std::memcpy(said, handle.data + 64, sizeof said);
    CHECK(said[0] == size && said[1] == 0);
    // Its id is that of the publication, so that the importer can use it with a ring.
    ask_peer("import", mount, hex(handle.data, sizeof handle), iov.id);
    check_used(address);
    gdrkit_share_handle_t share{};
    CHECK_EQUAL(gdrkit_iov_export_share(&iov, &share), 0);
    ask_peer("import_share", mount, hex(share.data, sizeof share), iov.id);
    check_used(address);
    // Nobody publishes it any more: the import works, and has no id.
    hf3fs_iovunlink_gpu(&iov);
    const std::uint8_t none[16] = {};
    ask_peer("open", mount, "", iov.id, -ENOENT);
    ask_peer("import", mount, hex(handle.data, sizeof handle), none);
    check_used(address);
    hf3fs_iovdestroy_gpu(&iov);
    // The memory is gone, and nobody gets a handle that means nothing.
    ask_peer("import", mount, hex(handle.data, sizeof handle), none, -EINVAL);
    ask_peer("import_share", mount, hex(share.data, sizeof share), none, -EINVAL);
}

void changed_handles_are_refused() {
    const Mount mount;
    make_current(0);
    hf3fs_iov iov{};
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), size, 0, 0), 0);
    hf3fs_gpu_ipc_handle_t handle{};
    CHECK_EQUAL(hf3fs_iov_export_gpu(&iov, &handle), 0);
    const auto with = [&](std::size_t at, u64 value) {
        hf3fs_gpu_ipc_handle_t changed = handle;
        std::memcpy(changed.data + at, &value, sizeof value);
        return hex(changed.data, sizeof changed);
    };
    ask_peer("import", mount, with(64, 0), iov.id, -EINVAL);
    ask_peer("import", mount, with(64, 1 << 30), iov.id, -EINVAL);
    ask_peer("import", mount, with(64, u64{1} << 63), iov.id, -EINVAL);
    ask_peer("import", mount, with(72, 1000), iov.id, -ENODEV);
    ask_peer("import", mount, with(72, UINT64_MAX), iov.id, -EINVAL);
    gdrkit_share_handle_t share{};
    CHECK_EQUAL(gdrkit_iov_export_share(&iov, &share), 0);
    share.data[100] ^= 1;
    ask_peer("import_share", mount, hex(share.data, sizeof share), iov.id, -EINVAL);
    // Memory of this very process.
    hf3fs_iov mine{};
    CHECK_EQUAL(hf3fs_iovopen_gpu(&mine, reinterpret_cast<std::uint8_t*>(iov.id), mount.path(), size, 0, 0), -EIO);
    CHECK_EQUAL(hf3fs_iov_import_gpu(&mine, &handle, mount.path()), -EINVAL);
    hf3fs_iovdestroy_gpu(&iov);
}

void interior_memory_arrives_at_the_right_byte() {
    const Mount mount;
    make_current(0);
    const u64 memory = allocate(mib);
    const std::uint8_t id[16] = {0xab, 1, 2};
    for (const u64 offset : {u64{0}, u64{1}, u64{512}, u64{4096}, u64{65537}, mib - size}) {
        write(memory, std::vector<std::uint8_t>(mib, 0xee));
        hf3fs_iov iov{};
        CHECK_EQUAL(hf3fs_iovwrap_gpu(&iov, pointer_of(memory + offset), id, mount.path(), size, 0, 0), 0);
        write(memory + offset, pattern(size, 5));
        ask_peer("open", mount, "", id);
        check_used(memory + offset);
        gdrkit_share_handle_t share{};
        CHECK_EQUAL(gdrkit_iov_export_share(&iov, &share), 0);
        ask_peer("import_share", mount, hex(share.data, sizeof share), id);
        check_used(memory + offset);
        CHECK(read(memory, offset) == std::vector<std::uint8_t>(offset, 0xee));
        hf3fs_iovdestroy_gpu(&iov);
    }
    release(memory);
}

void targets_of_others_are_not_believed() {
    const Mount mount;
    make_current(0);
    hf3fs_iov iov{};
    CHECK_EQUAL(hf3fs_iovcreate_gpu(&iov, mount.path(), size, 0, 0), 0);
    const fs::path link = mount.only_link();
    const auto honest = parse_target(fs::read_symlink(link).native()).value();
    const auto say = [&](const std::string& text) {
        fs::remove(link);
        fs::create_symlink(text, link);
    };
    const auto changed = [&](auto&& change) {
        GpuTarget target = honest;
        change(target);
        return format_target(target);
    };
    say("/dev/shm/hf3fs-iov-0");
    ask_peer("open", mount, "", iov.id, -EINVAL);
    say("gdr://device/0/ptr/140737488355328/size/70001");
    ask_peer("open", mount, "", iov.id, -EINVAL);
    say(changed([](GpuTarget& target) { target.device = 1; }));
    ask_peer("open", mount, "", iov.id, -EINVAL);
    say(changed([](GpuTarget& target) { target.allocation_bytes *= 2; }));
    ask_peer("open", mount, "", iov.id, -EINVAL);
    say(changed([](GpuTarget& target) { target.ipc->fill(0x5a); }));
    ask_peer("open", mount, "", iov.id, -EIO);
    say(changed([](GpuTarget& target) { target.ipc.reset(); }));
    ask_peer("open", mount, "", iov.id, -ENOTSUP);
    fs::remove(link);
    hf3fs_iovdestroy_gpu(&iov);
    CHECK(iov.base == nullptr);
}

} // namespace

int main(int count, char** arguments) {
    if (count == 6) {
        return peer(arguments[1], arguments[2], arguments[3], arguments[4], std::stoi(arguments[5]));
    }
    created_memory_goes_by_every_way();
    changed_handles_are_refused();
    interior_memory_arrives_at_the_right_byte();
    targets_of_others_are_not_believed();
}
