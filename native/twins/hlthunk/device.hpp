// An open device: the state that the kernel driver keeps for a file of /dev/accel, and the properties of the device's
// generation.
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

// Properties in which the generations differ.
struct Properties {
    DeviceName name;
    std::uint32_t pci_id;
    const char* card_name;
    // False for the first Gaudi: programs use physical addresses, and the driver neither allocates nor maps its memory.
    bool has_virtual_memory;
    std::uint64_t dram_base;      // physical address at which the BAR begins
    std::uint64_t dram_user_base; // first address available to programs
    std::uint64_t dram_bytes;
    std::uint64_t default_page_bytes;
    std::uint64_t dram_virtual_base;
    std::uint64_t host_virtual_base;

    [[nodiscard]] std::uint64_t dram_end() const { return dram_base + dram_bytes; }
    [[nodiscard]] std::uint64_t bar_bytes() const;
};

const Properties& properties();

// Physical memory that the driver has allocated (hl_vm_phys_pg_pack).
struct Allocation {
    std::uint64_t handle = 0;
    std::uint64_t total_bytes = 0;
    std::uint64_t page_bytes = 0;
    std::uint64_t physical = 0;
    bool shared = false;
    unsigned mapping_count = 0;
    Fd memory;
};

// A mapped address range (hl_vm_hash_node in the kernel driver).
struct Mapping {
    std::shared_ptr<Allocation> allocation; // null for host memory
    std::uint64_t host_address = 0;
    std::uint64_t length_bytes = 0;
    std::vector<std::uint64_t> exports; // ids of dma-bufs exported from it; closed ones are removed at the next query
};

struct CommandBuffer {
    std::uint64_t size_bytes = 0;
};

struct Job {
    std::uint64_t sequence = 0;
    std::vector<LinearDma> copies;
};

// A context and its device file. `mutex` guards every member except `file` and `index`.
class Device {
public:
    Device(unsigned index, Fd file, Fd reservation);
    ~Device();
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    // Return whether the device file is open in any process, or a live dma-buf references the device, as the kernel's
    // dma-bufs do.
    bool is_in_use();
    [[nodiscard]] std::size_t live_export_count();

    // Queue copies that a thread carries out in order after a random delay. Return the sequence number.
    std::uint64_t submit(std::vector<LinearDma> copies);

    const unsigned index;
    const Fd file; // the memfd; the client has a reopened descriptor of it
    std::mutex mutex;
    std::condition_variable changed;
    bool operational = true;
    std::map<std::uint64_t, std::shared_ptr<Allocation>> allocations; // by handle
    std::map<std::uint64_t, Mapping> mappings;                        // by device address
    std::map<std::uint64_t, CommandBuffer> buffers;
    std::vector<std::uint64_t> physical_exports;          // first Gaudi: ids of dma-bufs of physical memory
    std::map<std::uint64_t, std::uint64_t> physical_used; // physical address -> bytes
    std::uint64_t last_handle = 0, last_buffer = 0, last_sequence = 0;
    std::uint64_t completed_sequence = 0;
    std::uint64_t aborted_sequence = 0; // first submission that failed; 0: none
    Fd dram;                            // first Gaudi: the whole memory, sparse

private:
    void run();
    bool run_copy(const LinearDma& copy);
    struct CopyOperand {
        int fd = -1; // memfd of device memory; -1 for host memory
        std::uint64_t offset = 0;
    };
    bool resolve(std::uint64_t address, std::uint64_t length_bytes, CopyOperand* operand);

    Fd reservation_; // listening socket: while it exists, no other process can open this device
    std::deque<Job> jobs_;
    bool stopping_ = false;
    std::thread worker_;
};

using DeviceRef = std::shared_ptr<Device>;

// Find the open device of a descriptor. Return null and set *error: EBADF if it is not open, ENOTTY if it is another
// type of file, ENODEV if the device belongs to another process.
DeviceRef find_device(int fd, int* error);
// Find the index of a device descriptor or a control device descriptor. Return false and set *error as above.
bool find_index(int fd, unsigned* index, int* error);

// Open a device with a new context. Return the client's descriptor; -EBUSY if another process has it open, -ENOENT if
// it does not exist. open_control opens the control device, which any number of processes can do.
int open_device(unsigned index);
int open_control(unsigned index);

// Destroy contexts whose device file is not open in any process and which no dma-buf references.
void close_unreferenced_devices();
// Return the numbers of open devices and of live dma-bufs.
std::size_t open_device_count();
std::size_t live_export_count();

} // namespace gdrkit::twin::gaudi
