// Devices: how many, what they are, what they say of themselves.
#include <cstring>

#include "cuda_driver.hpp"

using namespace gdrkit::twin::cuda;

namespace {

// Runs the body in a child that meets the library with these variables.
template <typename Body> void with_environment(const char* variable, const char* value, Body&& body) {
    const int status = status_of_child([&] {
        setenv(variable, value, 1);
        body();
    });
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int attribute(int number, int device = 0) {
    int value = -99;
    WORKS("cuDeviceGetAttribute", &value, number, device);
    return value;
}

void environment_decides() {
    with_environment("GDRKIT_TWINS_GPUS", "0", [] { ANSWERS(no_device, "cuInit", 0U); });
    with_environment("GDRKIT_TWINS_GPUS", "many", [] { ANSWERS(invalid_value, "cuInit", 0U); });
    with_environment("GDRKIT_TWINS_DOMAIN", "a b", [] { ANSWERS(invalid_value, "cuInit", 0U); });
    with_environment("GDRKIT_TWINS_GPUS", "5", [] {
        int count = 0;
        WORKS("cuInit", 0U);
        WORKS("cuDeviceGetCount", &count);
        CHECK(count == 5);
    });
}

void identity() {
    char name[32] = {}, first_bus[16] = {}, second_bus[16] = {};
    WORKS("cuDeviceGetName", name, 32, 0);
    CHECK(std::string(name) == "gdrkit twin GPU");
    WORKS("cuDeviceGetPCIBusId", first_bus, 16, 0);
    WORKS("cuDeviceGetPCIBusId", second_bus, 16, 1);
    CHECK(std::string(first_bus) != second_bus);
    ANSWERS(invalid_value, "cuDeviceGetPCIBusId", first_bus, 5, 0);
    int device = -1;
    WORKS("cuDeviceGetByPCIBusId", &device, static_cast<const char*>(second_bus));
    CHECK(device == 1);
    WORKS("cuDeviceGetByPCIBusId", &device, "a0:00.0");
    CHECK(device == 0);
    WORKS("cuDeviceGetByPCIBusId", &device, "0000:a1:00");
    CHECK(device == 1);
    for (const char* bad : {"", "x", "0000:a1", "0001:a0:00.0", "a0:01.0", "0000:a0:00.0.0", "-1:0.0"}) {
        ANSWERS(invalid_value, "cuDeviceGetByPCIBusId", &device, bad);
    }
    ANSWERS(invalid_device, "cuDeviceGetByPCIBusId", &device, "0000:c0:00.0");
    Uuid first{}, again{}, second{};
    WORKS("cuDeviceGetUuid_v2", &first, 0);
    WORKS("cuDeviceGetUuid", &again, 0);
    WORKS("cuDeviceGetUuid_v2", &second, 1);
    CHECK(std::memcmp(&first, &again, sizeof first) == 0 && std::memcmp(&first, &second, sizeof first) != 0);
    u64 total = 0;
    WORKS("cuDeviceTotalMem_v2", &total, 0);
    CHECK(total == u64{8} << 30);
}

void attributes() {
    CHECK(attribute(device_dmabuf_supported) == 1 && attribute(device_gpu_direct_rdma_supported) == 1);
    CHECK(attribute(device_gpu_direct_rdma_with_vmm_supported) == 1 && attribute(device_flush_writes_options) == 1);
    CHECK(attribute(device_writes_ordering) == 100 && attribute(device_posix_fd_handles_supported) == 1);
    CHECK(attribute(device_fabric_handles_supported) == 0 && attribute(device_multicast_supported) == 0);
    CHECK(attribute(device_unified_addressing) == 1 && attribute(device_vmm_supported) == 1);
    CHECK(attribute(device_memory_pools_supported) == 1 && attribute(device_compute_capability_major) == 9);
    CHECK(attribute(device_pci_bus_id, 1) == attribute(device_pci_bus_id, 0) + 1);
    for (int number = 1; number <= device_attribute_last; ++number) {
        attribute(number);
    }
    int value = 0, major = 0, minor = -1;
    ANSWERS(invalid_value, "cuDeviceGetAttribute", &value, 0, 0);
    ANSWERS(invalid_value, "cuDeviceGetAttribute", &value, 148, 0);
    ANSWERS(invalid_device, "cuDeviceGetAttribute", &value, 1, 9);
    ANSWERS(invalid_device, "cuDeviceGet", &value, 2);
    WORKS("cuDeviceComputeCapability", &major, &minor, 0);
    CHECK(major == 9 && minor == 0);
    DeviceProperties properties{};
    WORKS("cuDeviceGetProperties", &properties, 0);
    CHECK(properties.simd_width == 32);
}

void peers() {
    int can = -1;
    WORKS("cuDeviceCanAccessPeer", &can, 0, 1);
    CHECK(can == 1);
    WORKS("cuDeviceCanAccessPeer", &can, 0, 0);
    CHECK(can == 0);
    WORKS("cuDeviceGetP2PAttribute", &can, static_cast<int>(p2p_access_supported), 0, 1);
    CHECK(can == 1);
    ANSWERS(invalid_device, "cuDeviceGetP2PAttribute", &can, static_cast<int>(p2p_access_supported), 0, 0);
}

} // namespace

int main() {
    environment_decides();
    WORKS("cuInit", 0U);
    identity();
    attributes();
    peers();
}
