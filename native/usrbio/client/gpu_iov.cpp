// Creation, opening, wrapping, export and import of GPU iovs. The C functions in gpu_api.cpp call the functions of this
// file.
#include "usrbio/client/gpu_iov.hpp"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <filesystem>
#include <utility>

#include "usrbio/client/agent_connection.hpp"
#include "usrbio/client/gpu_pool.hpp"
#include "usrbio/client/gpu_publish.hpp"
#include "usrbio/client/gpu_target.hpp"
#include "usrbio/client/host_iov.hpp"
#include "usrbio/client/log.hpp"
#include "usrbio/client/names.hpp"

namespace gdrkit::usrbio {
namespace {

constexpr std::size_t size_max = INT64_MAX;
// nvidia-peermem pins device memory in pages of this size. The library allocates whole pages, so that a NIC can access
// no other data.
constexpr std::size_t rdma_page_bytes = 65536;

// Creates a GpuIov without memory, with the primary context of the device.
int new_gpu_iov(int device, const char* mount, std::size_t size_bytes, std::shared_ptr<GpuIov>* gpu) {
    auto new_gpu = std::make_shared<GpuIov>(*cuda::driver(), device);
    if (const int error = new_gpu->primary.retain(new_gpu->driver, device); error != 0) {
        return error;
    }
    new_gpu->context = new_gpu->primary.get();
    new_gpu->mount = mount;
    new_gpu->size_bytes = size_bytes;
    *gpu = std::move(new_gpu);
    return 0;
}

void register_and_fill_iov(hf3fs_iov* iov, const std::shared_ptr<GpuIov>& gpu, const std::uint8_t* id,
                           std::size_t block_size) {
    log_line(LogLevel::info, "%s GPU iov: %zu bytes at 0x%llx on device %d, %s IPC handle",
             gpu->memory == GpuIov::Memory::wrapped  ? "wrapped"
             : gpu->memory == GpuIov::Memory::opened ? "opened"
                                                     : "created",
             gpu->size_bytes, static_cast<unsigned long long>(gpu->pointer), gpu->device,
             gpu->ipc ? "with" : "without");
    if (needs_flush(gpu->driver, gpu->device)) {
        gpu->context_to_flush.emplace(gpu->primary.get());
    }
    // Register before changing `iov`, because register_iov() may throw.
    const hf3fs_iov_handle handle = register_iov(gpu);
    *iov = {};
    iov->base = reinterpret_cast<std::uint8_t*>(gpu->pointer);
    std::memcpy(iov->id, id, sizeof iov->id);
    std::memcpy(iov->mount_point, gpu->mount.c_str(), gpu->mount.size() + 1);
    iov->size = gpu->size_bytes;
    iov->block_size = block_size;
    iov->numa = -1;
    iov->iovh = handle;
}

// Checks the memory, enables SYNC_MEMOPS on it, exports its IPC handle if it can have one, and publishes the iov. The
// caller must have made the context of the memory current.
int check_and_publish(GpuIov& gpu, const std::uint8_t id[16]) {
    if (const int error = check_device_memory(gpu.driver, gpu.device, gpu.pointer, gpu.size_bytes, &gpu.allocation);
        error != 0) {
        return error;
    }
    if (const int error = enable_sync_memops(gpu.driver, gpu.pointer); error != 0) {
        return error;
    }
    IpcBytes ipc{};
    const int ipc_status = export_ipc(gpu.driver, gpu.pointer, &ipc);
    if (ipc_status == 0) {
        gpu.ipc = ipc;
        // An IPC handle covers one allocation only.
        if (gpu.size_bytes > gpu.allocation.bytes - (gpu.pointer - gpu.allocation.base)) {
            log_line(LogLevel::error, "%zu bytes extend beyond the end of their allocation of %zu bytes",
                     gpu.size_bytes, gpu.allocation.bytes);
            return -EINVAL;
        }
    } else if (ipc_status != -ENOTSUP) {
        return ipc_status;
    }
    return publish_gpu_iov(gpu, id);
}

int allocate(GpuIov& gpu) {
    const std::size_t allocated_bytes = (gpu.size_bytes + rdma_page_bytes - 1) / rdma_page_bytes * rdma_page_bytes;
    cuda::Result result = gpu.driver.allocate(&gpu.base, allocated_bytes);
    if (result == cuda::out_of_memory && trim_pool(0) > 0) {
        result = gpu.driver.allocate(&gpu.base, allocated_bytes);
    }
    if (result != cuda::success) {
        log_line(LogLevel::error, "cuMemAlloc(%zu) failed: %s (%d)", allocated_bytes,
                 cuda::result_name(gpu.driver, result), result);
        return result == cuda::invalid_value ? -ENOMEM : cuda::convert_to_errno(result);
    }
    gpu.memory = GpuIov::Memory::allocated;
    gpu.pointer = gpu.base;
    return 0;
}

// Takes a block from the pool, or allocates one. Returns null if the pool cannot serve this iov: no agent keeps
// registrations, the pool is off, the size is above its limit, the device is short of memory, or the block cannot be
// created.
std::unique_ptr<GpuBlock> take_pooled_block(const GpuIov& gpu) {
    std::shared_ptr<AgentConnection> agent;
    if (!may_use_pool(gpu.size_bytes) || find_agent_connection(gpu.mount.c_str(), agent) != 0 ||
        !agent->keeps_registrations()) {
        return nullptr;
    }
    if (auto idle_block = take_block(*agent, gpu.device, gpu.size_bytes)) {
        log_line(LogLevel::info, "GPU pool: reuses %zu bytes at 0x%llx for %zu bytes", idle_block->block_bytes,
                 static_cast<unsigned long long>(idle_block->base), gpu.size_bytes);
        return idle_block;
    }
    const std::size_t block_bytes = choose_pool_block_bytes(gpu.size_bytes);
    if (would_exhaust_memory(gpu.driver, block_bytes) &&
        (trim_pool(0) == 0 || would_exhaust_memory(gpu.driver, block_bytes))) {
        return nullptr;
    }
    std::unique_ptr<GpuBlock> block;
    if (GpuBlock::create(gpu.driver, gpu.device, block_bytes, &block) != 0) {
        return nullptr;
    }
    log_line(LogLevel::info, "GPU pool: grows by %zu bytes at 0x%llx for %zu bytes", block_bytes,
             static_cast<unsigned long long>(block->base), gpu.size_bytes);
    return block;
}

int publish_block(GpuIov& gpu, std::unique_ptr<GpuBlock> block, const std::uint8_t id[16]) {
    gpu.memory = GpuIov::Memory::pooled;
    gpu.pointer = block->base;
    gpu.allocation = block->allocation;
    gpu.ipc = block->ipc;
    gpu.block = std::move(block);
    return publish_gpu_iov(gpu, id);
}

// Maps the memory of another process by its IPC handle, and compares the size of the mapping with the size in the
// handle or link. `allocation_bytes` is 0 if the size of the allocation is unknown. Returns `driver_error` if the
// driver refuses the handle.
int map_ipc(GpuIov& gpu, const IpcBytes& ipc, std::uint64_t allocation_bytes, std::uint64_t offset_bytes,
            int driver_error) {
    const CurrentContext current_context(gpu.driver, gpu.context);
    if (current_context.error() != 0) {
        return current_context.error();
    }
    if (const cuda::Result result = open_ipc(gpu.driver, ipc, &gpu.base); result != cuda::success) {
        return result == cuda::out_of_memory ? -ENOMEM : driver_error;
    }
    gpu.memory = GpuIov::Memory::opened;
    gpu.ipc = ipc;
    const cuda::Result range_result = gpu.driver.address_range(&gpu.allocation.base, &gpu.allocation.bytes, gpu.base);
    if (range_result != cuda::success) {
        log_line(LogLevel::error, "cuMemGetAddressRange failed: %s (%d)", cuda::result_name(gpu.driver, range_result),
                 range_result);
        return -EINVAL;
    }
    if (gpu.allocation.base != gpu.base || (allocation_bytes != 0 && allocation_bytes != gpu.allocation.bytes) ||
        offset_bytes > gpu.allocation.bytes || gpu.size_bytes > gpu.allocation.bytes - offset_bytes) {
        log_line(LogLevel::error,
                 "the handle describes %zu bytes at offset %zu, but the shared allocation has %zu bytes",
                 gpu.size_bytes, static_cast<std::size_t>(offset_bytes), gpu.allocation.bytes);
        return -EINVAL;
    }
    gpu.pointer = gpu.base + offset_bytes;
    Allocation unused_allocation;
    if (const int error = check_device_memory(gpu.driver, gpu.device, gpu.pointer, gpu.size_bytes, &unused_allocation);
        error != 0) {
        return error;
    }
    return enable_sync_memops(gpu.driver, gpu.pointer);
}

// Returns the number of the device with this UUID in this process, or -1.
int find_device_by_uuid(const cuda::Driver& driver, const std::array<std::uint8_t, 16>& uuid) {
    int count = 0;
    if (driver.device_count(&count) != cuda::success) {
        return -1;
    }
    for (int device = 0; device < count; ++device) {
        cuda::Uuid device_uuid{};
        if (driver.device_uuid(&device_uuid, device) == cuda::success && std::ranges::equal(device_uuid.bytes, uuid)) {
            return device;
        }
    }
    return -1;
}

} // namespace

bool is_gpu_iov(const hf3fs_iov* iov) noexcept {
    return find_gpu_iov(iov) != nullptr;
}

int find_gpu_device(const hf3fs_iov* iov) noexcept {
    const auto gpu = find_gpu_iov(iov);
    return gpu ? gpu->device : -1;
}

int create_gpu_iov(hf3fs_iov* iov, const char* mount, std::size_t size, std::size_t block_size, int device) {
    if (iov == nullptr || !is_valid_mount(mount) || size == 0) {
        return -EINVAL;
    }
    if (size > size_max - rdma_page_bytes) {
        return -ENOMEM;
    }
    std::shared_ptr<GpuIov> gpu;
    if (const int error = new_gpu_iov(device, mount, size, &gpu); error != 0) {
        return error;
    }
    const Uuid id = make_random_uuid();
    const CurrentContext current_context(gpu->driver, gpu->context);
    if (current_context.error() != 0) {
        return current_context.error();
    }
    int status = 0;
    if (auto block = take_pooled_block(*gpu)) {
        status = publish_block(*gpu, std::move(block), id.data());
    } else {
        status = allocate(*gpu);
        if (status == 0) {
            status = check_and_publish(*gpu, id.data());
        }
    }
    if (status != 0) {
        return status;
    }
    register_and_fill_iov(iov, gpu, id.data(), block_size);
    return 0;
}

int wrap_gpu_iov(hf3fs_iov* iov, void* pointer, const std::uint8_t id[16], const char* mount, std::size_t size,
                 std::size_t block_size, int device) {
    if (iov == nullptr || !is_valid_mount(mount) || pointer == nullptr || id == nullptr || size == 0 ||
        size > size_max) {
        return -EINVAL;
    }
    std::shared_ptr<GpuIov> gpu;
    if (const int error = new_gpu_iov(device, mount, size, &gpu); error != 0) {
        return error;
    }
    gpu->pointer = reinterpret_cast<cuda::DevicePointer>(pointer);
    gpu->context = find_context(gpu->driver, gpu->pointer, gpu->context);
    const CurrentContext current_context(gpu->driver, gpu->context);
    if (current_context.error() != 0) {
        return current_context.error();
    }
    if (const int error = check_and_publish(*gpu, id); error != 0) {
        return error;
    }
    register_and_fill_iov(iov, gpu, id, block_size);
    return 0;
}

int open_gpu_iov(hf3fs_iov* iov, const std::uint8_t id[16], const char* mount, std::size_t size, std::size_t block_size,
                 int device) {
    if (iov == nullptr || !is_valid_mount(mount) || id == nullptr || size == 0) {
        return -EINVAL;
    }
    std::shared_ptr<GpuIov> gpu;
    if (const int error = new_gpu_iov(device, mount, size, &gpu); error != 0) {
        return error;
    }
    std::string name;
    if (const int error = find_publication(mount, id, &name); error != 0) {
        return error;
    }
    std::error_code error;
    const std::filesystem::path link = std::string(mount) + "/3fs-virt/iovs/" + name;
    const std::string target_text = std::filesystem::read_symlink(link, error).native();
    if (error) {
        return -error.value();
    }
    // The link contains the owner's number of the device. map_ipc() checks the device of the memory.
    const auto target = parse_target(target_text);
    if (!target || !name.ends_with(".gdr.d" + std::to_string(target->device)) || target->size_bytes != size) {
        log_line(LogLevel::error, "%s is not an iov of %zu bytes: %s", name.c_str(), size, target_text.c_str());
        return -EINVAL;
    }
    if (!target->ipc) {
        log_line(LogLevel::error, "%s was published only by its dma-buf: its memory has no IPC handle", name.c_str());
        return -ENOTSUP;
    }
    int status = map_ipc(*gpu, *target->ipc, target->allocation_bytes, target->offset_bytes, -EIO);
    if (status == 0) {
        status = gpu->borrowed.borrow(mount, name, target_text);
    }
    if (status != 0) {
        return status;
    }
    register_and_fill_iov(iov, gpu, id, block_size);
    return 0;
}

int import_gpu_iov(hf3fs_iov* iov, const hf3fs_gpu_ipc_handle_t* handle, const char* mount) {
    if (iov == nullptr || !is_valid_mount(mount) || handle == nullptr) {
        return -EINVAL;
    }
    const auto parsed_handle = parse_gdr_handle(handle->data);
    if (!parsed_handle) {
        log_line(LogLevel::error, "hf3fs_iov_import_gpu: the 80 bytes are not a valid handle of GPU memory");
        return -EINVAL;
    }
    // The device number in the handle comes from the owner, so it is only a hint: find_ipc_device() finds the device in
    // this process.
    int device = -1;
    if (const int error =
            find_ipc_device(*cuda::driver(), parsed_handle->ipc, static_cast<int>(parsed_handle->device), &device);
        error != 0) {
        return error;
    }
    std::shared_ptr<GpuIov> gpu;
    if (const int error = new_gpu_iov(device, mount, parsed_handle->length_bytes, &gpu); error != 0) {
        return error;
    }
    if (const int error = map_ipc(*gpu, parsed_handle->ipc, 0, 0, -EINVAL); error != 0) {
        return error;
    }
    std::uint8_t id[16];
    if (const int status = borrow_publication(*gpu, 0, id); status != 0) {
        return status;
    }
    register_and_fill_iov(iov, gpu, id, gpu->size_bytes);
    return 0;
}

int import_shared_gpu_iov(hf3fs_iov* iov, const gdrkit_share_handle_t* handle, const char* mount) {
    if (iov == nullptr || !is_valid_mount(mount) || handle == nullptr) {
        return -EINVAL;
    }
    const auto parsed_handle = parse_share_handle(handle->data);
    if (!parsed_handle) {
        log_line(LogLevel::error, "the 192 bytes are not a valid share handle");
        return -EINVAL;
    }
    if (parsed_handle->kind != ShareKind::ipc) {
        log_line(LogLevel::error,
                 "gdrkit_iov_import_share takes only share handles of type IPC, which need no descriptors");
        return -ENOTSUP;
    }
    const int device = find_device_by_uuid(*cuda::driver(), parsed_handle->device_uuid);
    std::shared_ptr<GpuIov> gpu;
    if (const int error = new_gpu_iov(device, mount, parsed_handle->length_bytes, &gpu); error != 0) {
        return error;
    }
    if (is_running(parsed_handle->owner) == false) {
        log_line(LogLevel::error, "the owner of the memory (process %u) has ended", parsed_handle->owner.process_id);
        return -ESRCH;
    }
    if (const int error =
            map_ipc(*gpu, parsed_handle->ipc, parsed_handle->allocation_bytes, parsed_handle->offset_bytes, -EINVAL);
        error != 0) {
        return error;
    }
    std::uint8_t id[16];
    if (const int status = borrow_publication(*gpu, parsed_handle->offset_bytes, id); status != 0) {
        return status;
    }
    register_and_fill_iov(iov, gpu, id, gpu->size_bytes);
    return 0;
}

int export_gpu_iov(const hf3fs_iov* iov, hf3fs_gpu_ipc_handle_t* handle) {
    const auto gpu = find_gpu_iov(iov);
    if (!gpu || handle == nullptr) {
        return -EINVAL;
    }
    if (!gpu->ipc) {
        log_line(LogLevel::error, "this memory has no IPC handle; its dma-buf was published instead");
        return -EINVAL;
    }
    if (gpu->pointer != gpu->allocation.base) {
        log_line(LogLevel::error, "the iov begins inside its allocation, but the 80-byte handle has no offset. "
                                  "Use gdrkit_iov_export_share, whose handle has an offset");
        return -EINVAL;
    }
    const auto bytes = pack(GdrHandle{*gpu->ipc, gpu->size_bytes, static_cast<std::uint64_t>(gpu->device)});
    if (!bytes) {
        return -EINVAL;
    }
    gpu->is_exported = true;
    std::ranges::copy(*bytes, handle->data);
    return 0;
}

int export_shared_gpu_iov(const hf3fs_iov* iov, gdrkit_share_handle_t* handle) {
    const auto gpu = find_gpu_iov(iov);
    if (!gpu || handle == nullptr) {
        return -EINVAL;
    }
    if (!gpu->ipc || gpu->memory == GpuIov::Memory::opened) {
        log_line(LogLevel::error,
                 "gdrkit_iov_export_share: only the owner can share memory, and the memory must have an IPC handle");
        return -ENOTSUP;
    }
    ShareHandle share;
    share.allocation_bytes = gpu->allocation.bytes;
    share.offset_bytes = gpu->pointer - gpu->allocation.base;
    share.length_bytes = gpu->size_bytes;
    share.owner = identify_this_process();
    share.ipc = *gpu->ipc;
    if (const int error = query_device_uuid(*gpu, &share.device_uuid); error != 0) {
        return error;
    }
    const auto bytes = pack(share);
    if (!bytes) {
        return -EINVAL;
    }
    gpu->is_exported = true;
    std::ranges::copy(*bytes, handle->data);
    return 0;
}

int synchronize_gpu_iov(const hf3fs_iov* iov, int direction) {
    const auto gpu = find_gpu_iov(iov);
    if (!gpu || (direction != 0 && direction != 1)) {
        return -EINVAL;
    }
    const CurrentContext current_context(gpu->driver, gpu->context);
    if (current_context.error() != 0) {
        return current_context.error();
    }
    if (const cuda::Result result = gpu->driver.context_synchronize(); result != cuda::success) {
        log_line(LogLevel::error, "cuCtxSynchronize() failed: %s (%d)", cuda::result_name(gpu->driver, result), result);
        return -EIO;
    }
    // Direction 1: the GPU is about to read what a NIC wrote.
    return direction == 1 && needs_flush(gpu->driver, gpu->device) ? flush_remote_writes(gpu->driver, gpu->context) : 0;
}

void unlink_gpu_iov(hf3fs_iov* iov) {
    if (const auto gpu = find_gpu_iov(iov)) {
        gpu->unlink(*iov);
    }
}

void destroy_gpu_iov(hf3fs_iov* iov) {
    // `gpu` keeps the object alive, because destroy() removes the reference of the iov table.
    if (const auto gpu = find_gpu_iov(iov)) {
        gpu->destroy(*iov);
    }
}

} // namespace gdrkit::usrbio
