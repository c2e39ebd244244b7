// Registration and deregistration of memory regions: ibv_reg_mr*, ibv_reg_dmabuf_mr, ibv_rereg_mr and ibv_dereg_mr.

#include <unistd.h>

#include "ibverbs/cuda_driver.hpp"
#include "ibverbs/handle.hpp"
#include "ibverbs/region.hpp"
#include "ibverbs/session.hpp"
#include "model/config.hpp"
#include "model/dmabuf.hpp"
#include "model/trace.hpp"
#include "model/usage.hpp"

namespace gdrkit::twin::verbs {
namespace {

// Access flags with which a peer can write to the memory.
constexpr unsigned remote_write_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
// Access flags for which the memory must be writable.
constexpr unsigned write_flags = remote_write_flags | IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND;
// Access flags that ibv_reg_mr* knows, and access flags that ibv_reg_dmabuf_mr accepts. ibv_reg_mr* still refuses two
// of the flags that it knows: IBV_ACCESS_ON_DEMAND with EINVAL, and IBV_ACCESS_ZERO_BASED with EOPNOTSUPP.
constexpr unsigned reg_mr_flags = write_flags | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_ZERO_BASED | IBV_ACCESS_ON_DEMAND |
                                  IBV_ACCESS_HUGETLB | IBV_ACCESS_OPTIONAL_RANGE;
constexpr unsigned reg_dmabuf_mr_flags =
    remote_write_flags | IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_RELAXED_ORDERING;

bool have_same_page_offset(std::uint64_t left, std::uint64_t right) {
    const auto mask = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE)) - 1;
    return (left & mask) == (right & mask);
}

bool overflows(std::uint64_t begin, std::uint64_t length) {
    return begin + length < begin;
}

// As in the kernel, a region that a peer may write needs IBV_ACCESS_LOCAL_WRITE too.
bool lacks_local_write(unsigned access) {
    return (access & remote_write_flags) != 0 && (access & IBV_ACCESS_LOCAL_WRITE) == 0;
}

bool is_valid_access(unsigned access) {
    return (access & ~reg_mr_flags) == 0 && !lacks_local_write(access) && (access & IBV_ACCESS_ON_DEMAND) == 0;
}

// Create the memory of a region. An address that the loaded CUDA driver knows is device memory; others are host memory.
int make_memory(void* address, std::uint64_t length, bool must_be_writable, std::unique_ptr<Memory>* memory) {
    const CudaDriver* const driver = CudaDriver::find_loaded();
    const auto device_address = reinterpret_cast<std::uint64_t>(address);
    if (driver == nullptr || !driver->is_device_memory(device_address)) {
        return make_host_memory(address, length, must_be_writable, memory);
    }
    // Without a peer memory module the kernel cannot pin pages at a device address.
    if (!config().has_peermem || make_cuda_memory(device_address, length, memory) != 0) {
        return EFAULT;
    }
    return 0;
}

ibv_mr* register_memory(ibv_pd* pd, void* address, std::size_t length, std::uint64_t iova, unsigned access) {
    const auto begin = reinterpret_cast<std::uint64_t>(address);
    if (!is_alive("ibv_pd", pd) || !have_same_page_offset(begin, iova) || !is_valid_access(access) || length == 0 ||
        overflows(begin, length) || overflows(iova, length)) {
        return fail_null(EINVAL);
    }
    if ((access & IBV_ACCESS_ZERO_BASED) != 0) {
        return fail_null(EOPNOTSUPP);
    }
    std::unique_ptr<Memory> memory;
    if (const int error = make_memory(address, length, (access & write_flags) != 0, &memory); error != 0) {
        return fail_null(error);
    }
    return make_region_handle(pd, address, length, iova, access, std::move(memory));
}

// Arguments of ibv_rereg_mr.
struct Reregistration {
    bool changes_memory, changes_domain, changes_access;
    ibv_pd* pd;
    void* address;
    std::size_t length;
    unsigned access;
};

// Return whether the arguments pass the checks that the kernel makes before it changes the region.
bool is_valid_reregistration(const ibv_mr& mr, const Reregistration& request) {
    return (request.changes_memory || request.changes_domain || request.changes_access) &&
           (!request.changes_domain || (is_alive("ibv_pd", request.pd) && request.pd->context == mr.context)) &&
           (!request.changes_access || is_valid_access(request.access)) &&
           (!request.changes_memory || !overflows(reinterpret_cast<std::uint64_t>(request.address), request.length));
}

// Replace the region of `handle` by a new one. If the memory changes, the region gets new keys, because an old key must
// not reach other memory. Return 0 or an errno. The region cannot be used after an error. The caller has called
// refuse_windows().
int replace_region(RegionHandle* handle, const Reregistration& request) {
    ibv_mr& mr = handle->public_mr;
    const std::shared_ptr<Region> old_region = handle->impl;
    const unsigned access = request.changes_access ? request.access : old_region->access;
    ProtectionDomain* const domain = request.changes_domain ? get_domain(request.pd) : old_region->domain;
    void* const address = request.changes_memory ? request.address : mr.addr;
    const std::size_t length = request.changes_memory ? request.length : mr.length;
    const std::uint64_t iova =
        request.changes_memory ? reinterpret_cast<std::uint64_t>(request.address) : old_region->iova;
    std::unique_ptr<Memory> memory;
    // Memory that was registered only for reading must be checked again before it may be written.
    if (request.changes_memory || ((access & write_flags) != 0 && (old_region->access & write_flags) == 0)) {
        old_region->revoke();
        if (const int error = make_memory(address, length, (access & write_flags) != 0, &memory); error != 0) {
            return error;
        }
    } else {
        memory = old_region->take_memory();
    }
    const auto region = std::make_shared<Region>(domain, iova, length, access, std::move(memory));
    if (request.changes_memory) {
        if (!remove_keys(*old_region)) {
            return EINVAL;
        }
        assign_keys(region);
    } else {
        move_keys(*old_region, region);
    }
    ++domain->child_count;
    --old_region->domain->child_count;
    handle->impl = region;
    record_regions(0, static_cast<std::int64_t>(length) - static_cast<std::int64_t>(mr.length));
    mr.pd = request.changes_domain ? request.pd : mr.pd;
    mr.addr = address;
    mr.length = length;
    mr.lkey = region->lkey;
    mr.rkey = region->rkey;
    return 0;
}

// Create the memory of ibv_reg_dmabuf_mr. Check the arguments in the order in which the kernel checks them.
int make_dmabuf_memory(std::uint64_t offset, std::uint64_t length, std::uint64_t iova, int fd, unsigned access,
                       std::unique_ptr<Memory>* memory) {
    if (!have_same_page_offset(offset, iova) || (access & ~reg_dmabuf_mr_flags) != 0 || lacks_local_write(access) ||
        overflows(offset, length)) {
        return EINVAL;
    }
    DmabufOrigin origin{};
    std::uint64_t dmabuf_bytes = 0;
    if (const int error = identify_dmabuf(fd, &origin, &dmabuf_bytes); error != 0) {
        return -error;
    }
    if (dmabuf_bytes < offset + length || length == 0 || overflows(iova, length)) {
        return EINVAL;
    }
    // The CPU cannot map the dma-buf of a real GPU. The twin expects the device address in `iova`, and accesses the
    // memory at this address through the CUDA driver.
    return origin == DmabufOrigin::twin ? make_mapped_dmabuf(fd, offset, length, memory)
                                        : make_cuda_memory(iova, length, memory);
}

// Count a call of `function` with the NIC of the protection domain, because a rule of the fault plan can be for one
// NIC. Return the errno that the plan injects, if any.
std::optional<int> find_registration_fault(std::string_view function, const ibv_pd* pd) {
    // If the caller passes an invalid `pd`, the call belongs to no NIC.
    if (!is_alive("ibv_pd", pd)) {
        return find_injected_fault(function);
    }
    const std::string_view nic_name = pd->context->device->name;
    return find_injected_fault(function, {&nic_name, 1});
}

} // namespace

ibv_mr* make_region_handle(ibv_pd* pd, void* address, std::uint64_t length, std::uint64_t iova, unsigned access,
                           std::unique_ptr<Memory> memory) {
    ProtectionDomain* const domain = get_domain(pd);
    auto* const handle = new RegionHandle;
    handle->impl = std::make_shared<Region>(domain, iova, length, access, std::move(memory));
    assign_keys(handle->impl);
    ibv_mr& public_mr = handle->public_mr;
    public_mr.context = pd->context;
    public_mr.pd = pd;
    public_mr.addr = address;
    public_mr.length = length;
    public_mr.handle = make_next_handle();
    public_mr.lkey = handle->impl->lkey;
    public_mr.rkey = handle->impl->rkey;
    ++domain->child_count;
    track("ibv_mr", handle);
    record_regions(1, static_cast<std::int64_t>(length));
    return &public_mr;
}

} // namespace gdrkit::twin::verbs

using namespace gdrkit::twin::verbs;

extern "C" {

ibv_mr* ibv_reg_mr(ibv_pd* pd, void* addr, std::size_t length, int access) {
    if (const auto fault = find_registration_fault("ibv_reg_mr", pd)) {
        return fail_null(*fault);
    }
    return register_memory(pd, addr, length, reinterpret_cast<std::uint64_t>(addr), static_cast<unsigned>(access));
}

ibv_mr* ibv_reg_mr_iova(ibv_pd* pd, void* addr, std::size_t length, std::uint64_t iova, int access) {
    if (const auto fault = find_injected_fault("ibv_reg_mr_iova")) {
        return fail_null(*fault);
    }
    return register_memory(pd, addr, length, iova, static_cast<unsigned>(access));
}

ibv_mr* ibv_reg_mr_iova2(ibv_pd* pd, void* addr, std::size_t length, std::uint64_t iova, unsigned int access) {
    if (const auto fault = find_injected_fault("ibv_reg_mr_iova2")) {
        return fail_null(*fault);
    }
    // verbs.h expands ibv_reg_mr to a call of this function if the access flags are not a constant, as in pyverbs. A
    // rule of a fault plan for ibv_reg_mr must apply to such a call too.
    if (iova == reinterpret_cast<std::uint64_t>(addr)) {
        if (const auto fault = find_registration_fault("ibv_reg_mr", pd)) {
            return fail_null(*fault);
        }
    }
    return register_memory(pd, addr, length, iova, access);
}

ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* pd, std::uint64_t offset, std::size_t length, std::uint64_t iova, int fd,
                          int access) {
    if (const auto fault = find_registration_fault("ibv_reg_dmabuf_mr", pd)) {
        return fail_null(*fault);
    }
    if (!is_alive("ibv_pd", pd)) {
        return fail_null(EINVAL);
    }
    gdrkit::twin::trace("ibv_reg_dmabuf_mr offset=%llu length=%zu iova=%#llx fd=%d access=%d",
                        static_cast<unsigned long long>(offset), length, static_cast<unsigned long long>(iova), fd,
                        access);
    const auto access_flags = static_cast<unsigned>(access);
    std::unique_ptr<Memory> memory;
    if (const int error = make_dmabuf_memory(offset, length, iova, fd, access_flags, &memory); error != 0) {
        return fail_null(error);
    }
    // The real library reports the offset as the address of the region, whatever the iova is.
    ibv_mr* const mr =
        make_region_handle(pd, reinterpret_cast<void*>(offset), length, iova, access_flags, std::move(memory));
    get_mr_handle(mr)->has_fixed_memory = true;
    return mr;
}

// As with real devices, a failure of the checks that libibverbs makes is IBV_REREG_MR_ERR_INPUT, and a failure of the
// checks that the kernel makes is IBV_REREG_MR_ERR_CMD.
int ibv_rereg_mr(ibv_mr* mr, int flags, ibv_pd* pd, void* addr, std::size_t length, int access) {
    const auto fail = [](int error, int result) {
        errno = error;
        return result;
    };
    if (const auto fault = find_injected_fault("ibv_rereg_mr")) {
        return fail(*fault, IBV_REREG_MR_ERR_CMD);
    }
    RegionHandle* const handle = get_mr_handle(mr);
    const Reregistration request{(flags & IBV_REREG_MR_CHANGE_TRANSLATION) != 0,
                                 (flags & IBV_REREG_MR_CHANGE_PD) != 0,
                                 (flags & IBV_REREG_MR_CHANGE_ACCESS) != 0,
                                 pd,
                                 addr,
                                 length,
                                 static_cast<unsigned>(access)};
    if (!is_alive("ibv_mr", mr) || handle->has_fixed_memory || (flags & ~IBV_REREG_MR_FLAGS_SUPPORTED) != 0 ||
        (request.changes_memory && (addr == nullptr || length == 0)) || (access != 0 && !request.changes_access)) {
        return fail(EINVAL, IBV_REREG_MR_ERR_INPUT);
    }
    gdrkit::twin::trace("ibv_rereg_mr flags=%d length=%zu access=%d", flags, length, access);
    // Another thread may bind a memory window to the region at this time. If one is bound already, refuse_windows()
    // returns false and the region stays as it is.
    if (!is_valid_reregistration(*mr, request) || !refuse_windows(handle->impl.get())) {
        return fail(EINVAL, IBV_REREG_MR_ERR_CMD);
    }
    const int error = replace_region(handle, request);
    return error == 0 ? 0 : fail(error, IBV_REREG_MR_ERR_CMD);
}

int ibv_dereg_mr(ibv_mr* mr) {
    if (const auto fault = find_injected_fault("ibv_dereg_mr")) {
        return *fault;
    }
    RegionHandle* const handle = get_mr_handle(mr);
    if (!is_alive("ibv_mr", handle)) {
        return EINVAL;
    }
    gdrkit::twin::trace("ibv_dereg_mr");
    const std::shared_ptr<Region> region = handle->impl;
    // rxe_dereg_mr refuses a region with bound memory windows, as section 10.6.7.2.6 of the InfiniBand specification
    // allows.
    if (!remove_keys(*region) || !retire("ibv_mr", handle)) {
        return EINVAL;
    }
    gdrkit::twin::record_regions(-1, -static_cast<std::int64_t>(region->length_bytes));
    handle->impl.reset();
    region->revoke();
    --region->domain->child_count;
    return 0;
}

} // extern "C"
