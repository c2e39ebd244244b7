// The part of the binary interface of hl-thunk (the library of Intel Gaudi accelerators) that the twin implements,
// written from hlthunk.h of 2023-05 and, for command submissions, the kernel's habanalabs_accel.h.
// tests/hlthunk_symbols_test.cpp compares hl_cs_chunk, the text lengths and the device states with the kernel's header
// if that is installed.
#pragma once

#include <cstddef>
#include <cstdint>

#define GDRKIT_HLTHUNK_ENTRY extern "C" [[gnu::visibility("default")]]

namespace gdrkit::twin::gaudi {

// enum hlthunk_device_name. Only newer headers have `gaudi3`.
enum DeviceName : int {
    goya = 0,
    gaudi1 = 2,
    invalid = 3,
    dont_care = 4,
    gaudi2 = 5,
    gaudi3 = 7,
    device_name_end = 13
};

// enum hl_pci_ids
inline constexpr std::uint32_t pci_id_gaudi1 = 0x1000;
inline constexpr std::uint32_t pci_id_gaudi2 = 0x1020;
inline constexpr std::uint32_t pci_id_gaudi3 = 0x1060;

// struct hlthunk_hw_ip_info
struct HardwareInfo {
    std::uint64_t sram_base_address;
    std::uint64_t dram_base_address;
    std::uint64_t dram_size;
    std::uint32_t sram_size;
    std::uint32_t num_of_events;
    std::uint32_t device_id;
    std::uint32_t cpld_version;
    std::uint32_t psoc_pci_pll[4];
    std::uint16_t tpc_enabled_mask;
    std::uint8_t dram_enabled;
    std::uint8_t cpucp_version[128];
    std::uint32_t module_id;
    std::uint8_t card_name[16];
    std::uint32_t decoder_enabled_mask;
    std::uint8_t mme_master_slave_mode;
    std::uint64_t tpc_enabled_mask_ext;
    std::uint64_t dram_page_size;
    std::uint16_t first_available_interrupt_id;
    std::uint32_t edma_enabled_mask;
    std::uint16_t server_type;
    std::uint64_t reserved1;
    std::uint16_t number_of_user_interrupts;
    std::uint64_t device_mem_alloc_default_page_size;
    std::uint64_t reserved2;
    std::uint8_t reserved3, reserved4;
    std::uint64_t reserved5;
    std::uint32_t reserved6;
    std::uint8_t reserved7;
    std::uint8_t security_enabled;
    std::uint8_t revision_id;
    std::uint16_t tpc_interrupt_id;
    std::uint64_t engine_core_interrupt_reg_addr;
    std::uint32_t rotator_enabled_mask;
    std::uint32_t reserved8;
    std::uint64_t reserved_dram_size;
};
static_assert(sizeof(HardwareInfo) == 336);
static_assert(offsetof(HardwareInfo, dram_size) == 16 && offsetof(HardwareInfo, device_id) == 32);
static_assert(offsetof(HardwareInfo, dram_enabled) == 58 && offsetof(HardwareInfo, module_id) == 188);
static_assert(offsetof(HardwareInfo, card_name) == 192 && offsetof(HardwareInfo, dram_page_size) == 224);
static_assert(offsetof(HardwareInfo, device_mem_alloc_default_page_size) == 264);
static_assert(offsetof(HardwareInfo, revision_id) == 302 && offsetof(HardwareInfo, reserved_dram_size) == 328);

// struct hlthunk_hw_ip_info of 2021. Programs that were built with that header request the symbol version HLTNK_1.0.
struct HardwareInfo2021 {
    std::uint64_t sram_base_address;
    std::uint64_t dram_base_address;
    std::uint64_t dram_size;
    std::uint32_t sram_size;
    std::uint32_t num_of_events;
    std::uint32_t device_id;
    std::uint32_t cpld_version;
    std::uint32_t psoc_pci_pll[4];
    std::uint8_t tpc_enabled_mask;
    std::uint8_t dram_enabled;
    std::uint8_t cpucp_version[128];
    std::uint32_t module_id;
    std::uint8_t card_name[16];
    std::uint64_t dram_page_size;
};
static_assert(sizeof(HardwareInfo2021) == 216 && offsetof(HardwareInfo2021, dram_enabled) == 57);
static_assert(offsetof(HardwareInfo2021, module_id) == 188 && offsetof(HardwareInfo2021, dram_page_size) == 208);

// struct hlthunk_dram_usage_info
struct DramUsage {
    std::uint64_t dram_free_mem;
    std::uint64_t ctx_dram_mem;
};
static_assert(sizeof(DramUsage) == 16);

// struct hlthunk_cs_in
struct SubmissionIn {
    void* chunks_restore;
    void* chunks_execute;
    std::uint32_t num_chunks_restore;
    std::uint32_t num_chunks_execute;
    std::uint32_t flags;
};
static_assert(sizeof(SubmissionIn) == 32 && offsetof(SubmissionIn, chunks_execute) == 8 &&
              offsetof(SubmissionIn, num_chunks_execute) == 20 && offsetof(SubmissionIn, flags) == 24);

// struct hlthunk_cs_out
struct SubmissionOut {
    std::uint64_t seq;
    std::uint32_t status;
    std::uint16_t sob_count_before_submission;
};
static_assert(sizeof(SubmissionOut) == 16 && offsetof(SubmissionOut, status) == 8);

// struct hl_cs_chunk
struct Chunk {
    std::uint64_t cb_handle;
    std::uint32_t queue_index;
    std::uint32_t cb_size;
    std::uint32_t cs_chunk_flags;
    std::uint32_t collective_engine_id;
    std::uint32_t pad[10];
};
static_assert(sizeof(Chunk) == 64 && offsetof(Chunk, queue_index) == 8 && offsetof(Chunk, cb_size) == 12 &&
              offsetof(Chunk, cs_chunk_flags) == 16);
inline constexpr std::uint32_t chunk_flag_user_buffer = 1; // HL_CS_CHUNK_FLAGS_USER_ALLOC_CB
inline constexpr std::uint32_t max_chunk_count = 512;      // HL_MAX_JOBS_PER_CS
// Number of PCI DMA queues. Their queue indexes are 0 to 7: GAUDI_QUEUE_ID_DMA_0_0 to _DMA_1_3 on the first Gaudi,
// GAUDI2_QUEUE_ID_PDMA_0_0 to _PDMA_1_3 on Gaudi 2.
inline constexpr std::uint32_t dma_queue_count = 8;

// enum hl_wait_cs_status as hlthunk_wait_for_cs returns it
enum WaitStatus : std::uint32_t { wait_completed = 0, wait_busy = 1, wait_timed_out = 2, wait_aborted = 3 };

// enum hl_device_status
enum DeviceStatus : int { device_operational = 0, device_malfunction = 2 };

// struct packet_lin_dma. Only its control word differs between the generations.
struct LinearDma {
    std::uint32_t tsize; // bytes to copy
    std::uint32_t ctl;
    std::uint64_t src_addr;
    std::uint64_t dst_addr; // first Gaudi: 56 address bits and a part of the context id
};
static_assert(sizeof(LinearDma) == 24);
inline constexpr unsigned opcode_lin_dma = 9; // PACKET_LIN_DMA
inline constexpr unsigned opcode_nop = 10;    // PACKET_NOP
// Bits of the control word `ctl`. The first Gaudi requires `linear` (`lin` in the kernel's header) and `reg_barrier`.
inline constexpr std::uint32_t ctl_gaudi1_linear = 1U << 3;
inline constexpr std::uint32_t ctl_memset = 1U << 4;
inline constexpr std::uint32_t ctl_gaudi1_reg_barrier = 1U << 30;

constexpr unsigned get_opcode(std::uint32_t ctl) {
    return (ctl >> 24) & 0x1f;
}

} // namespace gdrkit::twin::gaudi
