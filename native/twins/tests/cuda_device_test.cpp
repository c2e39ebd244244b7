// Tests of the software twin of libcuda: the number of devices, their identity, attributes and peer access.
#include <sys/socket.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <string>
#include <vector>

#include "cuda_driver.hpp"
#include "model/sockets.hpp"

using namespace gdrkit::twin::cuda;

namespace {

// Run `body` in a child process with the environment variable `variable_name` set to `value`.
template <typename Body> void run_with_variable(const char* variable_name, const char* value, Body&& body) {
    const int status = run_in_child([&] {
        setenv(variable_name, value, 1);
        body();
    });
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int query_attribute(int attribute, int device = 0) {
    int value = -99;
    EXPECT_SUCCESS("cuDeviceGetAttribute", &value, attribute, device);
    return value;
}

void test_environment_sets_device_count() {
    run_with_variable("GDRKIT_TWINS_GPUS", "0", [] { EXPECT_RESULT(no_device, "cuInit", 0U); });
    run_with_variable("GDRKIT_TWINS_GPUS", "many", [] { EXPECT_RESULT(invalid_value, "cuInit", 0U); });
    run_with_variable("GDRKIT_TWINS_DOMAIN", "a b", [] { EXPECT_RESULT(invalid_value, "cuInit", 0U); });
    run_with_variable("GDRKIT_TWINS_GPUS", "5", [] {
        int count = 0;
        EXPECT_SUCCESS("cuInit", 0U);
        EXPECT_SUCCESS("cuDeviceGetCount", &count);
        CHECK(count == 5);
    });
}

// Return the UUID of a device in the form that nvidia-smi prints: GPU- and five groups of hexadecimal digits.
std::string get_uuid_text(int device) {
    Uuid uuid{};
    EXPECT_SUCCESS("cuDeviceGetUuid_v2", &uuid, device);
    std::string uuid_text = "GPU-";
    for (int byte = 0; byte < 16; ++byte) {
        char hex_digits[4];
        std::snprintf(hex_digits, sizeof hex_digits, "%s%02x",
                      byte == 4 || byte == 6 || byte == 8 || byte == 10 ? "-" : "",
                      static_cast<unsigned char>(uuid.bytes[byte]));
        uuid_text += hex_digits;
    }
    return uuid_text;
}

// Check that a process with this value of CUDA_VISIBLE_DEVICES has exactly the devices with these UUIDs.
void expect_visible_devices(const std::string& variable_value, const std::vector<std::string>& expected_uuids) {
    run_with_variable("CUDA_VISIBLE_DEVICES", variable_value.c_str(), [&] {
        EXPECT_SUCCESS("cuInit", 0U);
        int count = -1;
        EXPECT_SUCCESS("cuDeviceGetCount", &count);
        CHECK(count == static_cast<int>(expected_uuids.size()));
        for (int device = 0; device < count; ++device) {
            CHECK(get_uuid_text(device) == expected_uuids[static_cast<std::size_t>(device)]);
        }
        EXPECT_RESULT(invalid_device, "cuDeviceGet", &count, count); // the indices are 0 to count - 1
    });
}

// For values that make at most one device visible, the expected results were observed on an H200 with driver 580.159.
void test_visible_devices_select_and_order() {
    // A child process reports the UUIDs of both devices, because this process must not call cuInit before the later
    // forks. The text of a UUID has 40 characters.
    std::string first_uuid, second_uuid;
    int sockets[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
    const int status = run_in_child([&] {
        EXPECT_SUCCESS("cuInit", 0U);
        const std::string both_uuids = get_uuid_text(0) + get_uuid_text(1);
        CHECK(gdrkit::twin::send_all(sockets[1], both_uuids.data(), both_uuids.size()));
    });
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    std::string both_uuids(80, 0);
    CHECK(gdrkit::twin::recv_all(sockets[0], both_uuids.data(), both_uuids.size()));
    first_uuid = both_uuids.substr(0, 40);
    second_uuid = both_uuids.substr(40);
    close(sockets[0]);
    close(sockets[1]);

    // An invalid first entry hides all devices.
    for (const char* value : {"", "-1", "2,0", "GPU-", "GPU", "abc", ",0", "-1,0", "NoDevFiles", "MIG-"}) {
        run_with_variable("CUDA_VISIBLE_DEVICES", value, [] { EXPECT_RESULT(no_device, "cuInit", 0U); });
    }
    // No device may occur twice.
    for (const std::string& value : {std::string("0,0"), std::string("1,0,1"), first_uuid + "," + first_uuid}) {
        run_with_variable("CUDA_VISIBLE_DEVICES", value.c_str(), [] { EXPECT_RESULT(invalid_device, "cuInit", 0U); });
    }
    // The first invalid entry ends the list. The number of an entry ends at the first character that is not a digit,
    // and the driver keeps only its low 32 bits: 4294967296 (2^32) means 0.
    for (const char* value : {"0", "0,2", " 0", "0 ", "+0", "0x0", "00", "-0", "0abc", "0;1", "0,", "0,-1", "0,abc",
                              "0,,1", "4294967296"}) {
        expect_visible_devices(value, {first_uuid});
    }
    // An entry may also be a UUID: shortened, in upper case, without hyphens, or with other characters behind it.
    std::string upper_case_uuid = first_uuid, compact_uuid = first_uuid;
    std::ranges::transform(upper_case_uuid.begin() + 4, upper_case_uuid.end(), upper_case_uuid.begin() + 4,
                           [](char c) { return static_cast<char>(std::toupper(static_cast<unsigned char>(c))); });
    std::erase(compact_uuid, '-');
    compact_uuid.insert(3, "-"); // the hyphen of the prefix "GPU-"
    for (const std::string& value : {first_uuid, first_uuid.substr(0, 12), upper_case_uuid, compact_uuid,
                                     first_uuid + "x", first_uuid + ",0", "0," + first_uuid}) {
        expect_visible_devices(value, {first_uuid});
    }
    expect_visible_devices("1,0", {second_uuid, first_uuid});
    expect_visible_devices(second_uuid + "," + first_uuid, {second_uuid, first_uuid});
    expect_visible_devices("1", {second_uuid});
}

void test_devices_have_distinct_ids() {
    char name[32] = {}, first_bus_id[16] = {}, second_bus_id[16] = {};
    EXPECT_SUCCESS("cuDeviceGetName", name, 32, 0);
    CHECK(std::string(name) == "gdrkit twin GPU");
    EXPECT_SUCCESS("cuDeviceGetPCIBusId", first_bus_id, 16, 0);
    EXPECT_SUCCESS("cuDeviceGetPCIBusId", second_bus_id, 16, 1);
    CHECK(std::string(first_bus_id) != second_bus_id);
    EXPECT_RESULT(invalid_value, "cuDeviceGetPCIBusId", first_bus_id, 5, 0); // 5 bytes are too few
    int device = -1;
    EXPECT_SUCCESS("cuDeviceGetByPCIBusId", &device, static_cast<const char*>(second_bus_id));
    CHECK(device == 1);
    // The devices have the bus ids 0000:a0:00.0 and 0000:a1:00.0. The domain and the function may be omitted.
    EXPECT_SUCCESS("cuDeviceGetByPCIBusId", &device, "a0:00.0");
    CHECK(device == 0);
    EXPECT_SUCCESS("cuDeviceGetByPCIBusId", &device, "0000:a1:00");
    CHECK(device == 1);
    for (const char* invalid_bus_id : {"", "x", "0000:a1", "0000:a0:00.0.0", "-1:0.0"}) {
        EXPECT_RESULT(invalid_value, "cuDeviceGetByPCIBusId", &device, invalid_bus_id);
    }
    for (const char* unused_bus_id : {"0000:c0:00.0", "0001:a0:00.0", "a0:01.0", "ffff:ff:1f.0"}) {
        EXPECT_RESULT(invalid_device, "cuDeviceGetByPCIBusId", &device, unused_bus_id);
    }
    Uuid first_uuid{}, first_uuid_again{}, second_uuid{};
    EXPECT_SUCCESS("cuDeviceGetUuid_v2", &first_uuid, 0);
    EXPECT_SUCCESS("cuDeviceGetUuid", &first_uuid_again, 0);
    EXPECT_SUCCESS("cuDeviceGetUuid_v2", &second_uuid, 1);
    CHECK(std::memcmp(&first_uuid, &first_uuid_again, sizeof first_uuid) == 0 &&
          std::memcmp(&first_uuid, &second_uuid, sizeof first_uuid) != 0);
    u64 total_bytes = 0;
    EXPECT_SUCCESS("cuDeviceTotalMem_v2", &total_bytes, 0);
    CHECK(total_bytes == u64{8} << 30);
}

void test_attributes_have_expected_values() {
    CHECK(query_attribute(device_dmabuf_supported) == 1 && query_attribute(device_gpu_direct_rdma_supported) == 1);
    CHECK(query_attribute(device_gpu_direct_rdma_with_vmm_supported) == 1 &&
          query_attribute(device_flush_writes_options) == 1);
    // 100 is CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER.
    CHECK(query_attribute(device_writes_ordering) == 100 && query_attribute(device_posix_fd_handles_supported) == 1);
    CHECK(query_attribute(device_fabric_handles_supported) == 0 && query_attribute(device_multicast_supported) == 0);
    CHECK(query_attribute(device_unified_addressing) == 1 && query_attribute(device_vmm_supported) == 1);
    CHECK(query_attribute(device_memory_pools_supported) == 1 && query_attribute(device_compute_capability_major) == 9);
    CHECK(query_attribute(device_pci_bus_id, 1) == query_attribute(device_pci_bus_id, 0) + 1);
    // Every attribute of the driver can be queried.
    for (int attribute = 1; attribute <= device_attribute_last; ++attribute) {
        query_attribute(attribute);
    }
    int value = 0, major = 0, minor = -1;
    EXPECT_RESULT(invalid_value, "cuDeviceGetAttribute", &value, 0, 0);
    EXPECT_RESULT(invalid_value, "cuDeviceGetAttribute", &value, 148, 0); // the last attribute is 147
    // The devices are 0 and 1.
    EXPECT_RESULT(invalid_device, "cuDeviceGetAttribute", &value, 1, 9);
    EXPECT_RESULT(invalid_device, "cuDeviceGet", &value, 2);
    EXPECT_SUCCESS("cuDeviceComputeCapability", &major, &minor, 0);
    CHECK(major == 9 && minor == 0);
    DeviceProperties properties{};
    EXPECT_SUCCESS("cuDeviceGetProperties", &properties, 0);
    CHECK(properties.simd_width == 32);
}

void test_peer_access_needs_two_devices() {
    int can_access = -1;
    EXPECT_SUCCESS("cuDeviceCanAccessPeer", &can_access, 0, 1);
    CHECK(can_access == 1);
    EXPECT_SUCCESS("cuDeviceCanAccessPeer", &can_access, 0, 0);
    CHECK(can_access == 0);
    EXPECT_SUCCESS("cuDeviceGetP2PAttribute", &can_access, static_cast<int>(p2p_access_supported), 0, 1);
    CHECK(can_access == 1);
    EXPECT_RESULT(invalid_device, "cuDeviceGetP2PAttribute", &can_access, static_cast<int>(p2p_access_supported), 0, 0);
}

} // namespace

int main() {
    // The first two tests fork, so they must run before cuInit.
    test_environment_sets_device_count();
    test_visible_devices_select_and_order();
    EXPECT_SUCCESS("cuInit", 0U);
    test_devices_have_distinct_ids();
    test_attributes_have_expected_values();
    test_peer_access_needs_two_devices();
}
