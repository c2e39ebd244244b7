// cuDeviceGetGraphMemAttribute: the memory of a device that graphs have allocated. The twin keeps no memory that a
// graph has freed, so the reserved memory equals the used memory.
#include <algorithm>
#include <array>
#include <map>

#include "cuda/device.hpp"
#include "cuda/graph.hpp"

namespace gdrkit::twin::cuda {
namespace {

// CUgraphMem_attribute
enum GraphMemoryAttribute : int { graph_used = 0, graph_used_high = 1, graph_reserved = 2, graph_reserved_high = 3 };

// The high-water marks of each device in bytes, since the program last reset them: [0] of used, [1] of reserved memory.
// graph_mutex() guards them.
std::map<Device, std::array<std::uint64_t, 2>>& high_water_marks() {
    static auto* const instance = new std::map<Device, std::array<std::uint64_t, 2>>;
    return *instance;
}

} // namespace

void record_graph_memory_use(Device device) {
    const std::uint64_t used_bytes = count_graph_memory_bytes(device);
    for (std::uint64_t& mark : high_water_marks()[device]) {
        mark = std::max(mark, used_bytes);
    }
}

GDRKIT_CUDA_ENTRY Result cuDeviceGetGraphMemAttribute(Device device, int attribute, std::uint64_t* value) {
    return run_entry_with_graph_lock("cuDeviceGetGraphMemAttribute", [&] {
        if (!device_exists(device)) {
            return invalid_device;
        }
        if (value == nullptr || attribute < graph_used || attribute > graph_reserved_high) {
            return invalid_value;
        }
        const bool is_current = attribute == graph_used || attribute == graph_reserved;
        *value = is_current ? count_graph_memory_bytes(device)
                            : high_water_marks()[device][attribute == graph_used_high ? 0 : 1];
        return success;
    });
}

// A program can change only the high-water marks, and only by writing 0, which resets the mark to the current use.
GDRKIT_CUDA_ENTRY Result cuDeviceSetGraphMemAttribute(Device device, int attribute, const std::uint64_t* value) {
    return run_entry_with_graph_lock("cuDeviceSetGraphMemAttribute", [&] {
        if (!device_exists(device)) {
            return invalid_device;
        }
        if (value == nullptr || *value != 0 || (attribute != graph_used_high && attribute != graph_reserved_high)) {
            return invalid_value;
        }
        high_water_marks()[device][attribute == graph_used_high ? 0 : 1] = count_graph_memory_bytes(device);
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuDeviceGraphMemTrim(Device device) {
    return run_entry_with_graph_lock("cuDeviceGraphMemTrim",
                                     [&] { return device_exists(device) ? success : invalid_device; });
}

} // namespace gdrkit::twin::cuda
