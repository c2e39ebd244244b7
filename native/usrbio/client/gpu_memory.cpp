// Calls of the CUDA driver for GPU iovs: contexts, checks of memory, IPC handles and dma-bufs.
#include "usrbio/client/gpu_memory.hpp"

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <utility>

#include "usrbio/client/log.hpp"
#include "usrbio/host_page.hpp"

namespace gdrkit::usrbio {
namespace {

int log_failure(const cuda::Driver& driver, const char* function_name, cuda::DevicePointer pointer,
                cuda::Result result) {
    log_line(LogLevel::error, "%s failed for device memory at 0x%" PRIx64 ": %s (%d)", function_name, pointer,
             cuda::result_name(driver, result), result);
    return cuda::convert_to_errno(result);
}

template <typename Value>
cuda::Result query_attribute(const cuda::Driver& driver, cuda::PointerAttribute attribute, cuda::DevicePointer pointer,
                             Value* value) {
    return driver.pointer_get(static_cast<void*>(value), attribute, pointer);
}

// Returns null if a NIC can access the byte at `pointer` as memory of `device`, else the reason why not.
const char* find_dma_obstacle(const cuda::Driver& driver, int device, cuda::DevicePointer pointer) {
    std::uint32_t memory_type = 0, is_managed = 0;
    int owner_device = -1;
    // For host memory that CUDA does not know, the driver returns an error.
    if (query_attribute(driver, cuda::pointer_memory_type, pointer, &memory_type) != cuda::success ||
        memory_type != cuda::memory_device) {
        return "the address is host memory, or not mapped";
    }
    if (query_attribute(driver, cuda::pointer_is_managed, pointer, &is_managed) != cuda::success || is_managed != 0) {
        return "managed memory moves between host and device, so a NIC cannot pin it";
    }
    if (query_attribute(driver, cuda::pointer_device_ordinal, pointer, &owner_device) != cuda::success ||
        owner_device != device) {
        return "the address is memory of another device";
    }
    return nullptr;
}

} // namespace

PrimaryContext::PrimaryContext(PrimaryContext&& other) noexcept
    : driver_(std::exchange(other.driver_, nullptr)), device_(other.device_), context_(other.context_) {}

PrimaryContext& PrimaryContext::operator=(PrimaryContext&& other) noexcept {
    std::swap(driver_, other.driver_);
    std::swap(device_, other.device_);
    std::swap(context_, other.context_);
    return *this;
}

PrimaryContext::~PrimaryContext() {
    if (driver_ == nullptr) {
        return;
    }
    if (const cuda::Result result = driver_->primary_release(device_); result != cuda::success) {
        log_line(LogLevel::error, "cuDevicePrimaryCtxRelease(%d) failed: %s (%d)", device_,
                 cuda::result_name(*driver_, result), result);
    }
}

int PrimaryContext::retain(const cuda::Driver& driver, int device) {
    int device_count = 0;
    if (driver.device_count(&device_count) != cuda::success || device < 0 || device >= device_count) {
        log_line(LogLevel::error, "CUDA device %d does not exist; this process has %d devices", device, device_count);
        return -ENODEV;
    }
    cuda::Context context = nullptr;
    if (const cuda::Result result = driver.primary_retain(&context, device); result != cuda::success) {
        log_line(LogLevel::error, "cuDevicePrimaryCtxRetain(%d) failed: %s (%d)", device,
                 cuda::result_name(driver, result), result);
        return result == cuda::out_of_memory ? -ENOMEM : -ENODEV;
    }
    driver_ = &driver;
    device_ = device;
    context_ = context;
    return 0;
}

CurrentContext::CurrentContext(const cuda::Driver& driver, cuda::Context context) : driver_(driver) {
    if (const cuda::Result result = driver.context_push(context); result != cuda::success) {
        log_line(LogLevel::error, "cuCtxPushCurrent() failed: %s (%d)", cuda::result_name(driver, result), result);
        error_ = -ENODEV;
    }
}

CurrentContext::~CurrentContext() {
    cuda::Context popped_context = nullptr;
    if (error_ == 0 && driver_.context_pop(&popped_context) != cuda::success) {
        log_line(LogLevel::error, "cuCtxPopCurrent() failed");
    }
}

cuda::Context find_context(const cuda::Driver& driver, cuda::DevicePointer pointer, cuda::Context fallback) {
    cuda::Context context = nullptr;
    const cuda::Result result = query_attribute(driver, cuda::pointer_context, pointer, &context);
    return result == cuda::success && context != nullptr ? context : fallback;
}

int check_device_memory(const cuda::Driver& driver, int device, cuda::DevicePointer pointer, std::size_t size_bytes,
                        Allocation* allocation) {
    const auto log_refusal = [&](const char* obstacle) {
        log_line(LogLevel::error, "%zu bytes at 0x%" PRIx64 " are not memory of CUDA device %d: %s", size_bytes,
                 pointer, device, obstacle);
        return -EINVAL;
    };
    if (size_bytes - 1 > UINT64_MAX - pointer) {
        return log_refusal("the range extends beyond the last address");
    }
    // The driver reports only the allocation or VMM chunk at an address, so check the range chunk by chunk.
    const cuda::DevicePointer last_address = pointer + (size_bytes - 1);
    for (cuda::DevicePointer address = pointer;;) {
        if (const char* const obstacle = find_dma_obstacle(driver, device, address); obstacle != nullptr) {
            return log_refusal(obstacle);
        }
        Allocation chunk;
        if (driver.address_range(&chunk.base, &chunk.bytes, address) != cuda::success || chunk.bytes == 0) {
            return log_refusal("the memory ends before the end of the range");
        }
        if (address == pointer) {
            *allocation = chunk;
        }
        if (last_address - chunk.base < chunk.bytes) {
            return 0;
        }
        address = chunk.base + chunk.bytes;
    }
}

int enable_sync_memops(const cuda::Driver& driver, cuda::DevicePointer pointer) {
    const std::uint32_t enabled = 1;
    const cuda::Result result = driver.pointer_set(&enabled, cuda::pointer_sync_memops, pointer);
    if (result == cuda::success) {
        return 0;
    }
    if (result != cuda::not_supported) {
        return log_failure(driver, "cuPointerSetAttribute(SYNC_MEMOPS)", pointer, result);
    }
    // This memory does not have the attribute. Set the flag of the context, unless it is set already.
    unsigned flags = 0;
    if (const cuda::Result flags_result = driver.context_flags(&flags); flags_result != cuda::success) {
        return log_failure(driver, "cuCtxGetFlags()", pointer, flags_result);
    }
    if ((flags & cuda::context_sync_memops) != 0) {
        return 0;
    }
    if (driver.context_set_flags == nullptr) {
        log_line(LogLevel::error,
                 "memory at 0x%" PRIx64 " needs CU_CTX_SYNC_MEMOPS, which this driver does not support", pointer);
        return -ENOTSUP;
    }
    const cuda::Result set_result = driver.context_set_flags(flags | cuda::context_sync_memops);
    return set_result == cuda::success ? 0
                                       : log_failure(driver, "cuCtxSetFlags(CU_CTX_SYNC_MEMOPS)", pointer, set_result);
}

int export_ipc(const cuda::Driver& driver, cuda::DevicePointer pointer, IpcBytes* ipc) {
    cuda::IpcHandle handle{};
    const cuda::Result result = driver.ipc_get(&handle, pointer);
    // The driver returns CUDA_ERROR_INVALID_VALUE for memory of cuMemAllocAsync, VMM memory (cuMemCreate) and imported
    // memory.
    if (result == cuda::invalid_value || result == cuda::not_supported) {
        return -ENOTSUP;
    }
    if (result != cuda::success) {
        return log_failure(driver, "cuIpcGetMemHandle()", pointer, result);
    }
    std::ranges::copy(handle.bytes, ipc->begin());
    return 0;
}

int export_dmabuf(const cuda::Driver& driver, cuda::DevicePointer pointer, std::size_t size_bytes, Dmabuf* dmabuf) {
    if (driver.range_handle == nullptr) {
        return -ENOTSUP;
    }
    // The driver can export only whole pages, but allocations are aligned to 512 bytes, so a range may begin and end
    // inside a page. Therefore export all pages that contain a byte of the range.
    const std::uint64_t page_bytes = host_page_bytes();
    const cuda::DevicePointer base = pointer / page_bytes * page_bytes;
    const cuda::DevicePointer last_address = pointer + (size_bytes - 1);
    const std::uint64_t exported_bytes = (last_address - base) / page_bytes * page_bytes + page_bytes;
    int fd = -1;
    const cuda::Result result = driver.range_handle(&fd, base, exported_bytes, cuda::range_handle_dmabuf, 0);
    if (result == cuda::invalid_value || result == cuda::not_supported) {
        return -ENOTSUP;
    }
    if (result != cuda::success) {
        return log_failure(driver, "cuMemGetHandleForAddressRange()", pointer, result);
    }
    *dmabuf = {Descriptor(fd), exported_bytes, pointer - base};
    return 0;
}

int find_ipc_device(const cuda::Driver& driver, const IpcBytes& ipc, int device_hint, int* device) {
    int device_count = 0;
    if (driver.device_count(&device_count) != cuda::success || device_count == 0) {
        log_line(LogLevel::error, "this process has no CUDA device");
        return -ENODEV;
    }
    const int first_device = device_hint >= 0 && device_hint < device_count ? device_hint : 0;
    for (int attempt = 0; attempt < device_count; ++attempt) {
        const int candidate_device = (first_device + attempt) % device_count;
        PrimaryContext primary_context;
        if (const int error = primary_context.retain(driver, candidate_device); error != 0) {
            continue;
        }
        const CurrentContext current_context(driver, primary_context.get());
        cuda::DevicePointer base = 0;
        if (current_context.error() != 0 || open_ipc(driver, ipc, &base) != cuda::success) {
            continue;
        }
        // The driver may also open the handle on another device that can access the memory.
        const cuda::Result result = query_attribute(driver, cuda::pointer_device_ordinal, base, device);
        driver.ipc_close(base);
        return result == cuda::success ? 0 : log_failure(driver, "cuPointerGetAttribute(DEVICE_ORDINAL)", base, result);
    }
    return -EINVAL;
}

cuda::Result open_ipc(const cuda::Driver& driver, const IpcBytes& ipc, cuda::DevicePointer* base) {
    cuda::IpcHandle handle{};
    std::ranges::copy(ipc, handle.bytes);
    const cuda::Result result = driver.ipc_open(base, handle, cuda::ipc_lazy_enable_peer_access);
    if (result != cuda::success) {
        log_line(
            LogLevel::error,
            "cuIpcOpenMemHandle() failed: %s (%d). Possible causes: the owner is this process, the owner has ended, "
            "the owner has freed the memory, or CUDA_VISIBLE_DEVICES hides its device from this process",
            cuda::result_name(driver, result), result);
    }
    return result;
}

} // namespace gdrkit::usrbio
