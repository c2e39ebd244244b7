// The GPUs of the emulated machine. The twins of CUDA and NVML describe the same GPUs.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

namespace gdrkit::twin {

inline constexpr std::string_view gpu_name = "gdrkit twin GPU";
inline constexpr std::uint64_t gpu_memory_bytes = std::uint64_t{8} << 30;
inline constexpr int gpu_memory_bus_bits = 1024;
inline constexpr int gpu_compute_major = 9, gpu_compute_minor = 0;
// The GPU with number n has the PCI address 0000:<first bus + n>:00.0.
inline constexpr int first_gpu_pci_bus = 0xa0;
// No product has this device id.
inline constexpr std::uint32_t gpu_pci_vendor_id = 0x10de, gpu_pci_device_id = 0xfff1;
inline constexpr int cuda_driver_version = 13000; // 1000 * major + 10 * minor

inline constexpr unsigned max_gpu_count = 16;

using GpuUuid = std::array<char, 16>;

// Return the UUID of a GPU by its number in the machine. The UUID is the same in every process of a domain
// (GDRKIT_TWINS_DOMAIN).
GpuUuid make_gpu_uuid(int number);

inline constexpr int no_pci_bus = -1;

// Return the PCI bus of an address in the form domain:bus:device.function, domain:bus:device or bus:device.function.
// Return nullopt if the text has another form, and no_pci_bus if domain, device or function is not 0, because no GPU
// has such an address.
std::optional<int> parse_pci_bus(std::string_view text);

} // namespace gdrkit::twin
