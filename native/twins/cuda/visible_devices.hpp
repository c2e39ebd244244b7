// The devices that CUDA_VISIBLE_DEVICES shows to this process, and their order. A physical number identifies a device
// of the emulated machine in all processes. An ordinal (Device) is the index of a device in the list of this process.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "cuda/cuda_abi.hpp"

namespace gdrkit::twin::cuda {

struct VisibleDevices {
    // Result of cuInit. If it is not success, there are no devices.
    Result init_result = success;
    // The physical number of each ordinal.
    std::vector<int> physical_numbers;
};

// Return the UUID of a device of the emulated machine. The UUID is the same in every process of a domain
// (GDRKIT_TWINS_DOMAIN).
Uuid get_uuid_of_physical_device(int physical_number);

// Return the devices that a value of CUDA_VISIBLE_DEVICES selects on a machine whose devices have these UUIDs.
VisibleDevices select_devices(std::string_view value, const std::vector<Uuid>& uuids);

// Return the devices that this process sees. CUDA_VISIBLE_DEVICES is read once.
const VisibleDevices& visible_devices();

// Return the physical number of a device that exists.
int get_physical_number(Device device);

// Return the ordinal of a physical device, or nullopt if this process does not see the device.
std::optional<Device> find_ordinal(int physical_number);

} // namespace gdrkit::twin::cuda
