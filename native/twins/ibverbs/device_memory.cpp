// Memory on the RDMA device itself: ibv_alloc_dm, ibv_free_dm, ibv_reg_dm_mr and the functions that copy to and from
// this memory (memcpy_to_dm, memcpy_from_dm).
#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "ibverbs/context.hpp"
#include "ibverbs/device.hpp"
#include "ibverbs/handle.hpp"
#include "ibverbs/region.hpp"
#include "ibverbs/session.hpp"

namespace gdrkit::twin::verbs {
namespace {

// Offsets and lengths of copies must be multiples of this number of bytes, as on a ConnectX.
constexpr std::uint64_t copy_alignment_bytes = 4;
// Allocations are aligned to pages of 4 KiB, so a client may request an alignment of at most 2^12 bytes.
constexpr std::uint32_t max_log_alignment = 12;
// As in the kernel, a region of device memory must be zero-based: its addresses are offsets in the region.
constexpr unsigned required_access = IBV_ACCESS_ZERO_BASED;
constexpr unsigned supported_access = required_access | IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
                                      IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_OPTIONAL_RANGE;

// An allocation of device memory. Its handle and all regions in it share the ownership.
class Allocation {
public:
    Allocation(Device* device, std::byte* address, std::uint64_t length_bytes)
        : address(address), length_bytes(length_bytes), device_(device) {}
    ~Allocation() {
        munmap(address, length_bytes);
        device_->device_memory_bytes -= length_bytes;
    }
    Allocation(const Allocation&) = delete;
    Allocation& operator=(const Allocation&) = delete;

    [[nodiscard]] bool covers(std::uint64_t offset, std::uint64_t size_bytes) const {
        return offset <= length_bytes && size_bytes <= length_bytes - offset;
    }

    std::byte* const address;
    const std::uint64_t length_bytes;

private:
    Device* const device_;
};

// The device memory of one region: the part of an allocation that begins at `offset`.
class DeviceMemory : public Memory {
public:
    DeviceMemory(std::shared_ptr<Allocation> allocation, std::uint64_t offset)
        : allocation_(std::move(allocation)), first_byte_(allocation_->address + offset) {}
    int read(std::uint64_t offset, BounceBuffer* bounce, std::size_t bounce_offset, std::size_t size_bytes) override {
        bounce->copy_in_mapped(bounce_offset, first_byte_ + offset, size_bytes);
        return 0;
    }
    int write(std::uint64_t offset, const BounceBuffer& bounce, std::size_t bounce_offset,
              std::size_t size_bytes) override {
        bounce.copy_out_mapped(bounce_offset, first_byte_ + offset, size_bytes);
        return 0;
    }
    std::byte* mapped_address(std::uint64_t offset) override { return first_byte_ + offset; }

private:
    const std::shared_ptr<Allocation> allocation_;
    std::byte* const first_byte_;
};

struct DeviceMemoryHandle {
    ibv_dm public_dm{};
    std::shared_ptr<Allocation> impl;
};

DeviceMemoryHandle* get_dm_handle(ibv_dm* dm) {
    return reinterpret_cast<DeviceMemoryHandle*>(dm);
}

int check_copy(ibv_dm* dm, std::uint64_t offset, std::size_t length) {
    if (!is_alive("ibv_dm", dm) || offset % copy_alignment_bytes != 0 || length % copy_alignment_bytes != 0) {
        return EINVAL;
    }
    return get_dm_handle(dm)->impl->covers(offset, length) ? 0 : EFAULT;
}

int copy_to_device(ibv_dm* dm, std::uint64_t offset, const void* host_addr, std::size_t length) {
    const int error = check_copy(dm, offset, length);
    if (error == 0) {
        std::memcpy(get_dm_handle(dm)->impl->address + offset, host_addr, length);
    }
    return error;
}

int copy_from_device(void* host_addr, ibv_dm* dm, std::uint64_t offset, std::size_t length) {
    const int error = check_copy(dm, offset, length);
    if (error == 0) {
        std::memcpy(host_addr, get_dm_handle(dm)->impl->address + offset, length);
    }
    return error;
}

// Return the allocation; nullptr, with errno set, if the device has not enough memory.
std::shared_ptr<Allocation> allocate(Device* device, std::uint64_t length_bytes) {
    if (device->device_memory_bytes.fetch_add(length_bytes) + length_bytes > max_device_memory_bytes) {
        device->device_memory_bytes -= length_bytes;
        return fail_null(ENOMEM);
    }
    void* const address = mmap(nullptr, length_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) {
        device->device_memory_bytes -= length_bytes;
        return nullptr;
    }
    return std::make_shared<Allocation>(device, static_cast<std::byte*>(address), length_bytes);
}

} // namespace

ibv_dm* alloc_device_memory(ibv_context* public_context, ibv_alloc_dm_attr* attr) {
    if (const auto fault = find_injected_fault("ibv_alloc_dm")) {
        return fail_null(*fault);
    }
    Context* const context = get_context(public_context);
    if (!is_alive("ibv_context", context) || attr->comp_mask != 0 || attr->log_align_req > max_log_alignment ||
        attr->length == 0 || attr->length > max_device_memory_bytes) {
        return fail_null(EINVAL);
    }
    auto allocation = allocate(context->device, attr->length);
    if (allocation == nullptr) {
        return nullptr;
    }
    auto* const handle = new DeviceMemoryHandle;
    handle->impl = std::move(allocation);
    handle->public_dm.context = public_context;
    handle->public_dm.memcpy_to_dm = copy_to_device;
    handle->public_dm.memcpy_from_dm = copy_from_device;
    handle->public_dm.handle = make_next_handle();
    ++context->child_count;
    track("ibv_dm", handle);
    return &handle->public_dm;
}

int free_device_memory(ibv_dm* dm) {
    if (const auto fault = find_injected_fault("ibv_free_dm")) {
        return *fault;
    }
    DeviceMemoryHandle* const handle = get_dm_handle(dm);
    if (!is_alive("ibv_dm", handle)) {
        return EINVAL;
    }
    // Besides the handle, each region in the memory has a reference to the allocation.
    if (handle->impl.use_count() > 1) {
        return EBUSY;
    }
    Context* const context = get_context(dm->context);
    if (!retire("ibv_dm", handle)) {
        return EINVAL;
    }
    handle->impl.reset();
    --context->child_count;
    return 0;
}

// As in the kernel, `length` may be 0 here, but not for a region of host memory.
ibv_mr* register_device_memory(ibv_pd* pd, ibv_dm* dm, std::uint64_t offset, std::size_t length, unsigned int access) {
    if (const auto fault = find_injected_fault("ibv_reg_dm_mr")) {
        return fail_null(*fault);
    }
    if (!is_alive("ibv_pd", pd) || !is_alive("ibv_dm", dm) || dm->context != pd->context ||
        (access & ~supported_access) != 0 || (access & required_access) == 0 ||
        !get_dm_handle(dm)->impl->covers(offset, length)) {
        return fail_null(EINVAL);
    }
    ibv_mr* const mr = make_region_handle(pd, nullptr, length, 0, access,
                                          std::make_unique<DeviceMemory>(get_dm_handle(dm)->impl, offset));
    get_mr_handle(mr)->has_fixed_memory = true;
    return mr;
}

} // namespace gdrkit::twin::verbs
