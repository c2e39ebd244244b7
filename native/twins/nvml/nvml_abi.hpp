// The part of NVML's binary interface that the twin implements, written from the structures in pynvml.py of
// nvidia-ml-py 13.615.71 and from NVML's public documentation.
#pragma once

#include <cstdint>

namespace gdrkit::twin::nvml {

// The codes of nvmlReturn_t that the twin returns. init.cpp has the texts of all codes.
enum Result : int {
    success = 0,
    uninitialized = 1,
    invalid_argument = 2,
    unsupported = 3,
    not_found = 6,
    insufficient_size = 7,
    timeout = 10,
    unknown = 999,
    argument_version_mismatch = 25,
};

// The objects to which the handles of GPUs (nvmlDevice_t) and of event sets (nvmlEventSet_t) point. Only the twin knows
// their contents.
struct Gpu;
struct EventSet;

// In the structures below, a field `version` contains the size of the structure in bytes (lower 24 bits) and its
// version number (upper 8 bits). The caller sets this field, and the functions refuse other values.

struct SystemEventSetRequest { // to create and to free an event set
    std::uint32_t version;
    EventSet* set;
};
struct SystemEventRegistration {
    std::uint32_t version;
    std::uint64_t event_types;
    EventSet* set;
};
struct SystemEventWait {
    std::uint32_t version, timeout_ms;
    EventSet* set;
    void* event_data; // a buffer of the caller
    std::uint32_t event_capacity, event_count;
};
static_assert(sizeof(SystemEventSetRequest) == 16 && sizeof(SystemEventRegistration) == 24 &&
              sizeof(SystemEventWait) == 32);

struct Memory {
    std::uint64_t total, free, used; // in bytes
};
struct MemoryV2 {
    std::uint32_t version;
    std::uint64_t total, reserved, free, used; // in bytes
};
static_assert(sizeof(MemoryV2) == 40);
inline constexpr std::uint32_t memory_v2_version = sizeof(MemoryV2) | 2U << 24;

struct Utilization {
    std::uint32_t gpu_percent, memory_percent;
};

struct PciInfo {
    char bus_id_legacy[16];
    std::uint32_t domain, bus, device, pci_device_id;
    // Version 1 of the structure ends before this field.
    std::uint32_t pci_subsystem_id;
    union {
        std::uint32_t reserved[4]; // the last field of version 2
        char bus_id[32];           // the last field of version 3
    };
};
static_assert(sizeof(PciInfo) == 68);
inline constexpr std::size_t pci_info_v1_bytes = 32, pci_info_v2_bytes = 52;

struct PciInfoExt {
    std::uint32_t version, domain, bus, device, pci_device_id, pci_subsystem_id, base_class, sub_class;
    char bus_id[32];
};
inline constexpr std::uint32_t pci_info_ext_version = sizeof(PciInfoExt) | 1U << 24;
inline constexpr std::uint32_t class_display = 3, subclass_3d_controller = 2; // PCI class codes
static_assert(pci_info_ext_version == 0x01000040);

struct Pdi { // per-device identifier, a unique number of a GPU
    std::uint32_t version;
    std::uint64_t value;
};
inline constexpr std::uint32_t pdi_version = sizeof(Pdi) | 1U << 24;
static_assert(pdi_version == 0x01000010);

struct Uuid {
    std::uint32_t version, type;
    union {
        char text[41];
        std::uint8_t bytes[16];
    };
};
inline constexpr std::uint32_t uuid_version = sizeof(Uuid) | 1U << 24, uuid_text_type = 1, uuid_bytes_type = 2;
static_assert(uuid_version == 0x01000034);

struct DriverBranch {
    std::uint32_t version;
    char text[80];
};
inline constexpr std::uint32_t driver_branch_version = sizeof(DriverBranch) | 1U << 24;
static_assert(driver_branch_version == 0x01000054);

struct VersionedValue { // nvmlDeviceAddressingMode_v1_t and nvmlDeviceCapabilities_v1_t
    std::uint32_t version, value;
};
inline constexpr std::uint32_t versioned_value_version = sizeof(VersionedValue) | 1U << 24;
static_assert(versioned_value_version == 0x01000008);

struct RepairStatus {
    std::uint32_t version, is_channel_pending, is_tpc_pending;
};
inline constexpr std::uint32_t repair_status_version = sizeof(RepairStatus) | 1U << 24;
static_assert(repair_status_version == 0x0100000c);

struct LicensableFeatures { // the first members of nvmlGridLicensableFeatures_v4_t
    std::int32_t is_supported;
    std::uint32_t count;
};

struct DynamicPstates {
    std::uint32_t flags;
    struct {
        std::uint32_t is_present, percent, threshold_up, threshold_down;
    } utilization[8];
};
static_assert(sizeof(DynamicPstates) == 132);

struct ProcessInfoV1 {
    std::uint32_t pid;
    std::uint64_t used_bytes;
};
struct ProcessInfo {
    std::uint32_t pid;
    std::uint64_t used_bytes;
    std::uint32_t gpu_instance, compute_instance; // ids of the MIG instances that the process uses
};
static_assert(sizeof(ProcessInfoV1) == 16 && sizeof(ProcessInfo) == 24);
inline constexpr std::uint32_t no_instance = 0xffffffff; // value of both ids if the GPU is not in MIG mode

struct FieldValue {
    std::uint32_t field_id, scope_id;
    std::int64_t timestamp_us, latency_us;
    std::uint32_t value_type;
    std::int32_t result;
    std::uint64_t value;
};
static_assert(sizeof(FieldValue) == 40);

struct FabricInfo {
    std::uint8_t cluster_uuid[16];
    std::int32_t status;
    std::uint32_t clique_id;
    std::uint8_t state; // 0: NVML_GPU_FABRIC_STATE_NOT_SUPPORTED, the GPU has no fabric
};
static_assert(sizeof(FabricInfo) == 28);
struct FabricInfoV2 {
    std::uint32_t version;
    std::uint8_t cluster_uuid[16];
    std::int32_t status;
    std::uint32_t clique_id;
    std::uint8_t state;
    std::uint32_t health_mask;
};
struct FabricInfoV3 {
    FabricInfoV2 base;
    std::uint8_t health_summary;
};
inline constexpr std::uint32_t fabric_v2_version = sizeof(FabricInfoV2) | 2U << 24;
inline constexpr std::uint32_t fabric_v3_version = sizeof(FabricInfoV3) | 3U << 24;
static_assert(fabric_v2_version == 0x02000024 && fabric_v3_version == 0x03000028);

inline constexpr int architecture_hopper = 9;   // NVML_DEVICE_ARCH_HOPPER: compute capability 9.0
inline constexpr int topology_host_bridge = 30; // NVML_TOPOLOGY_HOSTBRIDGE: the GPUs are below one PCIe host bridge
// NVML_P2P_STATUS_* and NVML_P2P_CAPS_INDEX_*. `p2p_end` is the first value that is not a capability.
enum P2pStatus { p2p_ok = 0, p2p_not_supported = 5 };
enum P2pCapability { p2p_read = 0, p2p_write = 1, p2p_nvlink = 2, p2p_atomics = 3, p2p_pci = 4, p2p_end = 5 };

// Marks an exported function of the library.
#define GDRKIT_NVML_ENTRY extern "C" [[gnu::visibility("default")]]

} // namespace gdrkit::twin::nvml
