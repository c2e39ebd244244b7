// One open device: what the kernel keeps for a file of /dev/accel, and the properties of its generation.
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

// What distinguishes the generations.
struct Properties {
    DeviceName name;
    std::uint32_t pci_id;
    const char* card_name;
    // False of Gaudi1: its memory is named by physical addresses, and the driver neither allocates nor maps it.
    bool has_virtual_memory;
    std::uint64_t dram_base;      // physical, where the BAR begins
    std::uint64_t dram_user_base; // the first byte that a program may have
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

// A node of the context's hash of mapped addresses (hl_vm_hash_node).
struct Mapping {
    std::shared_ptr<Allocation> allocation; // of device memory; null of host memory
    std::uint64_t host_address = 0;
    std::uint64_t length_bytes = 0;
    std::vector<std::uint64_t> exports; // dma-bufs made from it; those that are gone are dropped when somebody asks
};

struct CommandBuffer {
    std::uint64_t size_bytes = 0;
};

struct Job {
    std::uint64_t sequence = 0;
    std::vector<LinearDma> copies;
};

// A context and its file. Everything but `file` and `index` is guarded by `mutex`.
class Device {
public:
    Device(unsigned index, Fd file, Fd claim);
    ~Device();
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    // Whether the file is open somewhere, or a dma-buf holds it as the kernel's holds its device file.
    bool in_use();
    [[nodiscard]] std::size_t live_exports();

    // The device's own copies, in order, on a thread of their own and late. Gives the number of the submission.
    std::uint64_t submit(std::vector<LinearDma> copies);

    const unsigned index;
    const Fd file; // the memfd; what the client has is a reopening of it
    std::mutex mutex;
    std::condition_variable changed;
    bool operational = true;
    std::map<std::uint64_t, std::shared_ptr<Allocation>> allocations; // by handle
    std::map<std::uint64_t, Mapping> mappings;                        // by device address
    std::map<std::uint64_t, CommandBuffer> buffers;                   // by handle
    std::vector<std::uint64_t> physical_exports;                      // Gaudi1: dma-bufs of memory without a mapping
    std::map<std::uint64_t, std::uint64_t> physical_used;             // physical address -> bytes
    std::uint64_t last_handle = 0, last_buffer = 0, last_sequence = 0;
    std::uint64_t completed_sequence = 0;
    std::uint64_t aborted_sequence = 0; // the first that failed; 0: none
    Fd dram;                            // Gaudi1: all of it, sparse

private:
    void run();
    bool carry_out(const LinearDma& copy);
    struct Place {
        int fd = -1; // of device memory; -1 of the host's
        std::uint64_t at = 0;
    };
    bool resolve(std::uint64_t address, std::uint64_t length_bytes, Place* place);

    Fd claim_; // while it listens, no other process opens this device
    std::deque<Job> jobs_;
    bool ending_ = false;
    std::thread worker_;
};

using DeviceRef = std::shared_ptr<Device>;

// The open device behind a descriptor; null and an errno (EBADF: not open; ENOTTY: a file of something else; ENODEV:
// of another process).
DeviceRef find_device(int fd, int* error);
// The same for what a control device may ask too; `index` is set then also.
bool find_index(int fd, unsigned* index, int* error);

// A new context on the device, and the descriptor for the client; -EBUSY when somebody has it, -ENOENT when there is
// no such device.
int open_device(unsigned index);
int open_control(unsigned index);

// Lets go of contexts whose file nobody has open any more, and which no dma-buf holds.
void release_unused();
// How many devices are open, and how many dma-bufs are alive.
std::size_t open_devices();
std::size_t live_exports();

} // namespace gdrkit::twin::gaudi
