// Memory and the ranges of addresses over it.
#pragma once

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <string_view>
#include <vector>

#include "cuda/arena.hpp"
#include "cuda/context.hpp"
#include "cuda/cuda_abi.hpp"
#include "model/rendezvous.hpp"

namespace gdrkit::twin::cuda {

// A piece of physical device memory: a memfd, and the mapping through which the twin copies. It lives until the last
// range, work of a stream or handle lets it go; if somebody outside still holds its descriptor then (a dma-buf, another
// process), the device does not get the bytes back before they close it.
class Memory {
public:
    // New memory of a device. out_of_memory: the device (or the machine) has no more.
    static Result make(Device device, std::uint64_t length_bytes, std::shared_ptr<Memory>* memory);
    // Memory that another process owns, by its descriptor; not counted here.
    static Result adopt(Fd fd, std::uint64_t length_bytes, Device device, std::shared_ptr<Memory>* memory);

    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    ~Memory();

    [[nodiscard]] int fd() const { return fd_.get(); }
    [[nodiscard]] std::byte* data() const { return data_; }
    [[nodiscard]] std::uint64_t length_bytes() const { return length_bytes_; }
    [[nodiscard]] Device device() const { return device_; }

private:
    Memory(Fd fd, std::byte* data, std::uint64_t length_bytes, Device device, bool owned);

    Fd fd_;
    std::byte* data_;
    std::uint64_t length_bytes_; // whole pages
    Device device_;
    bool owned_;
};
using MemoryRef = std::shared_ptr<Memory>;

// How much of the device is free now. Looks first whether somebody closed what kept freed memory.
std::uint64_t free_bytes(Device device);

// Lets go, on every device, of freed memory that nobody holds any more.
void sweep();

enum class Kind { device, pool, vmm, ipc, managed, host_alloc, host_registered };

// A range of addresses with memory behind it. What is not atomic is written before anybody else sees the range, except
// `access`, which the mutex of memory.cpp guards.
struct Range {
    Kind kind = Kind::device;
    std::uint64_t base = 0;
    std::uint64_t length_bytes = 0; // what was asked for: bounds are checked by the byte
    std::uint64_t buffer_id = 0;
    Device device = 0;
    Handle context = 0; // 0: belongs to none (pools, VMM)
    std::atomic<bool> sync_memops{false};

    MemoryRef memory;                // not for managed and host memory
    std::uint64_t memory_offset = 0; // where in `memory` the range begins
    Slot slot;                       // kinds that live in the arena
    std::shared_ptr<void> kept;      // what else must live as long: pages of the host, the VMM allocation

    std::byte* host = nullptr; // managed and host memory: the same address
    std::uint32_t host_flags = 0;

    Handle pool = 0;
    std::uint32_t handle_types = 0;
    bool gpu_direct_rdma_capable = false;
    std::uint64_t reservation_base = 0, reservation_bytes = 0;
    std::map<Device, int> access;

    [[nodiscard]] bool is_host() const { return host != nullptr; }
    [[nodiscard]] std::byte* bytes(std::uint64_t address) const {
        return is_host() ? host + (address - base) : memory->data() + memory_offset + (address - base);
    }
};
using RangeRef = std::shared_ptr<Range>;

// Each range gets a buffer id of its own, larger than all before it in this process.
std::uint64_t new_buffer_id();

// The range that holds this address; null when there is none.
RangeRef find_range(std::uint64_t address);
// The range with this base.
RangeRef range_at(std::uint64_t base);
// The ranges that overlap [base, base + length), in order.
std::vector<RangeRef> ranges_in(std::uint64_t base, std::uint64_t length_bytes);

void add_range(const RangeRef& range);
// False, and nothing done, when a range overlaps it.
bool add_range_unless_overlapping(const RangeRef& range);

int access_of(const Range& range, Device device);
void set_access(const RangeRef& range, Device device, int flags);

// A cuMemAlloc-like allocation (kinds device and pool) at a new address, not yet added.
Result allocate(Kind kind, Device device, std::uint64_t length_bytes, RangeRef* range);
// Memory of the host that the driver allocates (kinds managed and host_alloc), not yet added. Null: the machine has
// none.
RangeRef host_range(Kind kind, std::uint64_t length_bytes);
// Takes the range out of the address space and the ledger. invalid_value: no range of one of these kinds begins at
// `address`. A pointer that was freed before ends the process.
Result take_allocation(std::uint64_t address, std::initializer_list<Kind> kinds, RangeRef* range);
// The ledger's name of the ranges of a kind; empty for those that are entered elsewhere.
std::string_view ledger_kind_of(Kind kind);

// The context ends, and what was allocated in it.
void release_memory_of(Handle context);

} // namespace gdrkit::twin::cuda
