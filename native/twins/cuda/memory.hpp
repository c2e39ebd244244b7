// Device and host memory of the twin: physical allocations (Memory) and the address ranges that map them (Range).
#pragma once

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "cuda/arena.hpp"
#include "cuda/context.hpp"
#include "cuda/cuda_abi.hpp"
#include "cuda/gpu_view.hpp"
#include "cuda/managed.hpp"
#include "model/sockets.hpp"

namespace gdrkit::twin::cuda {

// Physical memory of a device, or memory of the host that processes can share: a memfd, and the mapping through which
// the twin copies. Ranges, queued work of streams and handles hold references to this memory. When the last reference
// is dropped, a dma-buf or another process may still have a descriptor of the memfd. The bytes of device memory then
// count as used until that descriptor is closed.
class Memory {
public:
    // Allocate memory of a device. Fail with out_of_memory if the device or the machine has too little free memory.
    static Result make(Device device, std::uint64_t length_bytes, std::shared_ptr<Memory>* memory);
    // Map a memfd of another process, or a memfd with memory of the host. Its bytes do not count as used memory of a
    // device in this process.
    static Result adopt(Fd fd, std::uint64_t length_bytes, Device device, std::shared_ptr<Memory>* memory);

    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    ~Memory();

    [[nodiscard]] int fd() const { return fd_.get(); }
    [[nodiscard]] std::byte* data() const { return data_; }
    [[nodiscard]] std::uint64_t length_bytes() const { return length_bytes_; }
    [[nodiscard]] Device device() const { return device_; }
    // Return the address in the GPU's view (gpu_view.hpp) of this byte of data(), or nullptr if the GPU has no view and
    // reads data() itself.
    [[nodiscard]] std::byte* find_view(const std::byte* byte) const {
        return gpu_view_ ? gpu_view_->at(byte) : nullptr;
    }

private:
    Memory(Fd fd, std::byte* data, std::uint64_t length_bytes, Device device, bool is_owner);

    Fd fd_;
    std::byte* data_;
    std::uint64_t length_bytes_; // a multiple of the page size
    Device device_;
    bool is_owner_;                   // true after make(): the bytes count as used memory of the device
    std::optional<GpuView> gpu_view_; // empty after adopt()
};
using MemoryRef = std::shared_ptr<Memory>;

// Return the free memory of the device, after reclaiming freed memory that is no longer referenced.
std::uint64_t count_free_bytes(Device device);

// Reclaim, on every device, freed memory that is no longer referenced.
void reclaim_unreferenced_memory();

// The comments name the functions that allocate, map or register memory of each kind.
enum class MemoryKind {
    device,          // cuMemAlloc, cuArrayCreate and related functions
    pool,            // cuMemAllocAsync, cuMemPoolImportPointer, and allocation nodes of graphs
    vmm,             // cuMemMap
    ipc,             // cuIpcOpenMemHandle
    managed,         // cuMemAllocManaged
    host_alloc,      // cuMemHostAlloc
    host_registered, // cuMemHostRegister
};

// An allocated address range and the memory that it maps. Fields that are not atomic are set before the range becomes
// visible to other threads. The exceptions are `access`, which the mutex of ranges.cpp guards, and `advice`.
struct Range {
    MemoryKind kind = MemoryKind::device;
    std::uint64_t base = 0;
    std::uint64_t length_bytes = 0; // the requested size: bounds are checked to the byte
    std::uint64_t buffer_id = 0;
    Device device = 0;
    Handle context = 0;                   // 0: no context (pools, VMM)
    std::atomic<bool> sync_memops{false}; // CU_POINTER_ATTRIBUTE_SYNC_MEMOPS

    MemoryRef memory;                    // null for managed and host memory
    std::uint64_t memory_offset = 0;     // offset of the range in `memory`, in bytes
    AddressSlot slot;                    // addresses of the range in the arena; empty (base 0) for other memory
    std::shared_ptr<void> owning_object; // keeps the host pages, the VMM allocation or the pool alive

    std::byte* host = nullptr;    // CPU address of managed and host memory, equal to base; else null
    std::uint32_t host_flags = 0; // CU_MEMHOSTALLOC_* or CU_MEMHOSTREGISTER_*

    Handle pool = 0;                // the pool of the memory, or 0
    std::uint32_t handle_types = 0; // CUmemAllocationHandleType bits that the program requested
    bool gpu_direct_rdma_capable = false;
    // For VMM memory: the reserved address range (cuMemAddressReserve) that contains this mapping.
    std::uint64_t reservation_base = 0, reservation_bytes = 0;
    // For VMM memory: the CUmemAccess_flags of each device for which the program has called cuMemSetAccess.
    std::map<Device, int> access;
    // For managed memory: the advice about the pages from each key address up to the next key. The mutex of managed.cpp
    // guards this map.
    std::map<std::uint64_t, Advice> advice;

    [[nodiscard]] bool is_host() const { return host != nullptr; }
    // Return the pointer with which the twin accesses the byte at `address`.
    [[nodiscard]] std::byte* bytes(std::uint64_t address) const {
        return is_host() ? host + (address - base) : memory->data() + memory_offset + (address - base);
    }
};
using RangeRef = std::shared_ptr<Range>;

// Return a new buffer id, larger than all earlier ones of this process.
std::uint64_t make_buffer_id();

// Return the range that contains this address, or null.
RangeRef find_range(std::uint64_t address);
// Return the range that begins at this address, or null.
RangeRef find_range_by_base(std::uint64_t base);
// Return the ranges that overlap [base, base + length_bytes), in order.
std::vector<RangeRef> list_ranges(std::uint64_t base, std::uint64_t length_bytes);

void add_range(const RangeRef& range);
// Add the range and return true, or return false if another range overlaps it.
bool add_range_unless_overlapping(const RangeRef& range);

// Get and set the CUmemAccess_flags with which a device may access the range.
int get_access(const Range& range, Device device);
void set_access(const RangeRef& range, Device device, int flags);

// Allocate memory (kinds device and pool) at a new address. The caller adds the range to the address space.
Result allocate(MemoryKind kind, Device device, std::uint64_t length_bytes, RangeRef* range);
// Do the same as allocate() at the address of a slot that the caller has allocated.
Result make_range(MemoryKind kind, Device device, std::uint64_t length_bytes, const AddressSlot& slot, RangeRef* range);
// Allocate host memory (kinds managed and host_alloc); null on failure. The caller adds the range to the address space.
RangeRef make_host_range(MemoryKind kind, std::uint64_t length_bytes);
// Allocate memory of the host (kind pool) that processes can share. `device` is only stored in the range, because every
// range names a device.
Result make_shared_host_range(Device device, std::uint64_t length_bytes, RangeRef* range);
// Return a range for memory that make_shared_host_range has allocated in this or another process.
RangeRef map_shared_host_memory(MemoryRef memory, std::uint64_t length_bytes);
// Remove a range (an allocation or a mapping) from the address space and the ledger. Fail with invalid_value if no
// range of one of these kinds begins at `address`. If the program frees a range twice, the ledger ends the process.
Result remove_range(std::uint64_t address, std::initializer_list<MemoryKind> kinds, RangeRef* range);
// Return the name under which the ledger counts ranges of this memory kind.
std::string_view get_ledger_kind(MemoryKind kind);

// Destroy all memory of a context that ends.
void destroy_context_memory(Handle context);

} // namespace gdrkit::twin::cuda
