// An open Gaudi of the hl-thunk twin: the state that the kernel driver keeps for an open file of /dev/accel, and the
// properties of the emulated generation.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "hlthunk/hlthunk_abi.hpp"
#include "model/dmabuf.hpp"

namespace gdrkit::twin::gaudi {

inline constexpr std::uint64_t host_page_bytes = 4096;

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

// Properties in which the generations of the Gaudi differ.
struct Properties {
    DeviceName name;
    std::uint32_t pci_id;
    const char* card_name;
    // False for the first Gaudi: programs use physical addresses of its memory, and the driver does not allocate or map
    // this memory.
    bool has_virtual_memory;
    std::uint64_t dram_base;      // physical address of device memory; the PCI BAR begins there
    std::uint64_t dram_user_base; // first address available to programs
    std::uint64_t dram_bytes;
    std::uint64_t default_page_bytes; // page size of an allocation that requests none
    std::uint64_t dram_virtual_base;  // device address from which device memory is mapped
    std::uint64_t host_virtual_base;  // device address from which host memory is mapped

    [[nodiscard]] std::uint64_t dram_end() const { return dram_base + dram_bytes; }
    // Return the number of bytes of device memory in the PCI BAR (GDRKIT_TWINS_GAUDI_BAR_MIB).
    [[nodiscard]] std::uint64_t bar_bytes() const;
};

// Return the properties of the generation that GDRKIT_TWINS_GAUDI selects.
const Properties& generation_properties();

// Physical memory that the driver has allocated (hl_vm_phys_pg_pack in the kernel driver).
struct Allocation {
    std::uint64_t handle = 0;
    std::uint64_t total_bytes = 0;
    std::uint64_t page_bytes = 0;
    std::uint64_t physical_address = 0;
    bool is_shared = false; // as the program requested it; the twin does not use this flag
    unsigned mapping_count = 0;
    Fd memfd; // contains the bytes of this memory
};

// A range of device addresses that is mapped to device or host memory (hl_vm_hash_node in the kernel driver).
struct Mapping {
    std::shared_ptr<Allocation> allocation; // null for host memory
    std::uint64_t host_address = 0;         // 0 for device memory
    std::uint64_t length_bytes = 0;
    // Ids of dma-bufs that were exported from this mapping. The id of a closed dma-buf stays in the list until the next
    // unmap or count_live_exports().
    std::vector<std::uint64_t> dmabuf_ids;
};

// A command buffer. Its bytes are in Device::file, at the offset that is its handle.
struct CommandBuffer {
    std::uint64_t size_bytes = 0;
};

// A command submission that waits for its execution.
struct Job {
    std::uint64_t sequence_number = 0;
    std::vector<LinearDma> copies;
};

// An open device: its context, its device file, and the thread that executes its submissions. `mutex` guards every
// member that changes after the construction.
class Device {
public:
    Device(unsigned index, Fd file, Fd reservation);
    ~Device();
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    // Return whether the device file is open in any process, or a live dma-buf references the device. In the kernel
    // driver, too, a dma-buf keeps its device open.
    bool is_in_use();
    // Return the number of dma-bufs of this device that a process has open or has imported.
    [[nodiscard]] std::size_t count_live_exports();

    // Queue a submission. A thread carries out the copies in order after a random delay. Return the sequence number.
    std::uint64_t submit(std::vector<LinearDma> copies);

    const unsigned index;
    const Fd file; // a memfd that stands for the device file; the client has another descriptor of it
    std::mutex mutex;
    std::condition_variable changed; // notified when a job is queued or completed, and when the device is destroyed
    bool is_operational = true;      // false after a device reset
    std::map<std::uint64_t, std::shared_ptr<Allocation>> allocations; // by handle
    std::map<std::uint64_t, Mapping> mappings;                        // by device address
    std::map<std::uint64_t, CommandBuffer> command_buffers;           // by handle
    std::vector<std::uint64_t> physical_dmabuf_ids; // first Gaudi: ids of dma-bufs exported by physical address
    std::map<std::uint64_t, std::uint64_t> allocated_ranges; // physical address -> size in bytes
    std::uint64_t last_allocation_handle = 0;
    std::uint64_t last_command_buffer_number = 0;
    std::uint64_t last_sequence_number = 0;      // newest submission
    std::uint64_t completed_sequence_number = 0; // newest submission that has been executed or aborted
    std::uint64_t aborted_sequence_number = 0;   // first submission that failed; 0: none
    Fd dram_memfd;                               // first Gaudi: a sparse memfd for all device memory

private:
    // Execute the queued jobs until the device is destroyed.
    void run_jobs();
    // Carry out a copy. Return false if an address is not mapped or the memory cannot be accessed.
    bool run_copy(const LinearDma& copy);
    // The source or the target of a copy.
    struct CopyOperand {
        int fd = -1;                         // memfd of device memory; -1 for host memory
        std::uint64_t offset_or_address = 0; // offset in the memfd, or address in host memory if `fd` is -1
    };
    // Find the memory at a device address or, on the first Gaudi, a physical address. Return false if there is none.
    // run_jobs() then emulates the page fault and the reset of the device.
    bool find_operand(std::uint64_t address, std::uint64_t length_bytes, CopyOperand* operand);

    Fd reservation_; // a listening socket; while it exists, no process can open this device again
    std::deque<Job> jobs_;
    bool is_stopping_ = false;
    std::thread job_thread_;
};

using DeviceRef = std::shared_ptr<Device>;

// Find the open device of a descriptor. On failure return null and set *error. EBADF: the descriptor is not open.
// ENOTTY: the descriptor does not refer to a device. ENODEV: the device belongs to another process.
DeviceRef find_device(int fd, int* error);
// Find the index of the device to which a descriptor of a device or of a control device belongs. Return false and set
// *error as find_device does.
bool find_device_index(int fd, unsigned* index, int* error);

// Open a device with a new context. Return the client's descriptor. Return -EBUSY if this or another process has the
// device open, and -ENOENT if there is no such device.
int open_device(unsigned index);
// Open the control device: a second file of the device, only for queries, that any number of processes can have open.
// Return a descriptor or -ENOENT.
int open_control_device(unsigned index);

// Destroy the contexts that are not used any more: no process has the device file open, and no dma-buf references the
// context.
void close_unreferenced_devices();
// Return the number of devices that this process has open, and the number of their live dma-bufs.
std::size_t count_open_devices();
std::size_t count_live_exports();

} // namespace gdrkit::twin::gaudi
