#include "usrbio/client/gpu_memory.hpp"

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <utility>

#include "usrbio/client/log.hpp"
#include "usrbio/host_page.hpp"

namespace gdrkit::usrbio {
namespace {

int failed(const cuda::Driver& driver, const char* call, cuda::DevicePointer pointer, cuda::Result result) {
    log_line(LogLevel::error, "%s of device memory at 0x%" PRIx64 " answered %d (%s)", call, pointer,
             static_cast<int>(result), cuda::name_of(driver, result));
    return cuda::errno_of(result);
}

template <typename Value>
cuda::Result ask(const cuda::Driver& driver, cuda::PointerAttribute attribute, cuda::DevicePointer pointer,
                 Value* value) {
    return driver.pointer_get(value, attribute, pointer);
}

// Why the byte at this address is no memory of the device that a NIC may have; null: it is.
const char* why_not_here(const cuda::Driver& driver, int device, cuda::DevicePointer pointer) {
    std::uint32_t type = 0, managed = 0;
    int owner = -1;
    // An address that the driver does not know is ordinary host memory, or nothing.
    if (ask(driver, cuda::pointer_memory_type, pointer, &type) != cuda::success || type != cuda::memory_device) {
        return "there is host memory, or none";
    }
    if (ask(driver, cuda::pointer_is_managed, pointer, &managed) != cuda::success || managed != 0) {
        return "managed memory moves between host and device, so that no NIC may pin it";
    }
    if (ask(driver, cuda::pointer_device_ordinal, pointer, &owner) != cuda::success || owner != device) {
        return "another device's memory";
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
        log_line(LogLevel::error, "cuDevicePrimaryCtxRelease of device %d answered %d (%s)", device_,
                 static_cast<int>(result), cuda::name_of(*driver_, result));
    }
}

int PrimaryContext::retain(const cuda::Driver& driver, int device) {
    int count = 0;
    if (driver.device_count(&count) != cuda::success || device < 0 || device >= count) {
        log_line(LogLevel::error, "there is no CUDA device %d, only %d", device, count);
        return -ENODEV;
    }
    cuda::Context context = nullptr;
    if (const cuda::Result result = driver.primary_retain(&context, device); result != cuda::success) {
        log_line(LogLevel::error, "cuDevicePrimaryCtxRetain of device %d answered %d (%s)", device,
                 static_cast<int>(result), cuda::name_of(driver, result));
        return result == cuda::out_of_memory ? -ENOMEM : -ENODEV;
    }
    driver_ = &driver;
    device_ = device;
    context_ = context;
    return 0;
}

CurrentContext::CurrentContext(const cuda::Driver& driver, cuda::Context context) : driver_(driver) {
    if (const cuda::Result result = driver.context_push(context); result != cuda::success) {
        log_line(LogLevel::error, "cuCtxPushCurrent answered %d (%s)", static_cast<int>(result),
                 cuda::name_of(driver, result));
        error_ = -ENODEV;
    }
}

CurrentContext::~CurrentContext() {
    cuda::Context popped = nullptr;
    if (error_ == 0 && driver_.context_pop(&popped) != cuda::success) {
        log_line(LogLevel::error, "cuCtxPopCurrent failed");
    }
}

cuda::Context context_of(const cuda::Driver& driver, cuda::DevicePointer pointer, cuda::Context fallback) {
    cuda::Context context = nullptr;
    const cuda::Result result = ask(driver, cuda::pointer_context, pointer, &context);
    return result == cuda::success && context != nullptr ? context : fallback;
}

int inspect(const cuda::Driver& driver, int device, cuda::DevicePointer pointer, std::size_t size_bytes,
            Allocation* first) {
    const auto refuse = [&](const char* why) {
        log_line(LogLevel::error, "%zu bytes at 0x%" PRIx64 " are no memory of CUDA device %d: %s", size_bytes, pointer,
                 device, why);
        return -EINVAL;
    };
    if (size_bytes - 1 > UINT64_MAX - pointer) {
        return refuse("it runs over the end of all addresses");
    }
    // The driver tells of one chunk of VMM memory at a time.
    const cuda::DevicePointer last = pointer + (size_bytes - 1);
    for (cuda::DevicePointer at = pointer;;) {
        if (const char* const why = why_not_here(driver, device, at); why != nullptr) {
            return refuse(why);
        }
        Allocation chunk;
        if (driver.address_range(&chunk.base, &chunk.bytes, at) != cuda::success || chunk.bytes == 0) {
            return refuse("the memory ends before");
        }
        if (at == pointer) {
            *first = chunk;
        }
        if (last - chunk.base < chunk.bytes) {
            return 0;
        }
        at = chunk.base + chunk.bytes;
    }
}

int synchronize_copies(const cuda::Driver& driver, cuda::DevicePointer pointer) {
    const std::uint32_t on = 1;
    const cuda::Result result = driver.pointer_set(&on, cuda::pointer_sync_memops, pointer);
    if (result == cuda::success) {
        return 0;
    }
    if (result != cuda::not_supported) {
        return failed(driver, "cuPointerSetAttribute(SYNC_MEMOPS)", pointer, result);
    }
    unsigned flags = 0;
    if (const cuda::Result got = driver.context_flags(&flags); got != cuda::success) {
        return failed(driver, "cuCtxGetFlags", pointer, got);
    }
    if ((flags & cuda::context_sync_memops) != 0) {
        return 0;
    }
    if (driver.context_set_flags == nullptr) {
        log_line(LogLevel::error, "memory at 0x%" PRIx64 " needs CU_CTX_SYNC_MEMOPS, which this driver does not have",
                 pointer);
        return -ENOTSUP;
    }
    const cuda::Result set = driver.context_set_flags(flags | cuda::context_sync_memops);
    return set == cuda::success ? 0 : failed(driver, "cuCtxSetFlags(CU_CTX_SYNC_MEMOPS)", pointer, set);
}

int export_ipc(const cuda::Driver& driver, cuda::DevicePointer pointer, IpcBytes* ipc) {
    cuda::IpcHandle handle{};
    const cuda::Result result = driver.ipc_get(&handle, pointer);
    // INVALID_VALUE is what it says of pools, VMM and what was itself imported.
    if (result == cuda::invalid_value || result == cuda::not_supported) {
        return -ENOTSUP;
    }
    if (result != cuda::success) {
        return failed(driver, "cuIpcGetMemHandle", pointer, result);
    }
    std::ranges::copy(handle.bytes, ipc->begin());
    return 0;
}

int export_dmabuf(const cuda::Driver& driver, cuda::DevicePointer pointer, std::size_t size_bytes, Dmabuf* dmabuf) {
    if (driver.range_handle == nullptr) {
        return -ENOTSUP;
    }
    // Small allocations are packed by 512 bytes and whole pages are exported, so the pages around the bytes go out.
    const std::uint64_t page_bytes = host_page_bytes();
    const cuda::DevicePointer base = pointer / page_bytes * page_bytes;
    const cuda::DevicePointer last = pointer + (size_bytes - 1);
    const std::uint64_t bytes = (last - base) / page_bytes * page_bytes + page_bytes;
    int number = -1;
    const cuda::Result result = driver.range_handle(&number, base, bytes, cuda::range_handle_dmabuf, 0);
    if (result == cuda::invalid_value || result == cuda::not_supported) {
        return -ENOTSUP;
    }
    if (result != cuda::success) {
        return failed(driver, "cuMemGetHandleForAddressRange", pointer, result);
    }
    *dmabuf = {Descriptor(number), bytes, pointer - base};
    return 0;
}

cuda::Result open_ipc(const cuda::Driver& driver, const IpcBytes& ipc, cuda::DevicePointer* base) {
    cuda::IpcHandle handle{};
    std::ranges::copy(ipc, handle.bytes);
    const cuda::Result result = driver.ipc_open(base, handle, cuda::ipc_lazy_enable_peer_access);
    if (result != cuda::success) {
        log_line(LogLevel::error,
                 "cuIpcOpenMemHandle answered %d (%s): the owner is this process, has ended or has freed the memory",
                 static_cast<int>(result), cuda::name_of(driver, result));
    }
    return result;
}

} // namespace gdrkit::usrbio
