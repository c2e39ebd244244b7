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

constexpr std::size_t iov_bytes_max = INT64_MAX;

// Creates a GpuIov that has the primary context of the device, but no memory yet.
int make_gpu_iov(int device, const char* mount, std::size_t size_bytes, std::shared_ptr<GpuIov>* gpu_iov) {
    auto created_iov = std::make_shared<GpuIov>(*cuda::driver(), device);
    if (const int error = created_iov->primary_context.retain(created_iov->driver, device); error != 0) {
        return error;
    }
    created_iov->context = created_iov->primary_context.get();
    created_iov->mount = mount;
    created_iov->size_bytes = size_bytes;
    *gpu_iov = std::move(created_iov);
    return 0;
}

// Adds the object to the table of iovs, and fills the struct of the application.
void register_and_fill_iov(hf3fs_iov* iov, const std::shared_ptr<GpuIov>& gpu_iov, const std::uint8_t* id,
                           std::size_t block_size) {
    log_line(LogLevel::info, "%s GPU iov: %zu bytes at 0x%llx on device %d, %s IPC handle",
             gpu_iov->origin == GpuIov::Origin::wrapped  ? "wrapped"
             : gpu_iov->origin == GpuIov::Origin::opened ? "opened"
                                                         : "created",
             gpu_iov->size_bytes, static_cast<unsigned long long>(gpu_iov->pointer), gpu_iov->device,
             gpu_iov->ipc ? "with" : "without");
    if (needs_remote_write_flush(gpu_iov->driver, gpu_iov->device)) {
        gpu_iov->context_to_flush.emplace(gpu_iov->primary_context.get());
    }
    // Register before changing `iov`, because register_iov() may throw.
    const hf3fs_iov_handle handle = register_iov(gpu_iov);
    *iov = {};
    iov->base = reinterpret_cast<std::uint8_t*>(gpu_iov->pointer);
    std::memcpy(iov->id, id, sizeof iov->id);
    std::memcpy(iov->mount_point, gpu_iov->mount.c_str(), gpu_iov->mount.size() + 1);
    iov->size = gpu_iov->size_bytes;
    iov->block_size = block_size;
    iov->numa = -1;
    iov->iovh = handle;
}

// Checks the memory, enables SYNC_MEMOPS on it, exports the IPC handle if this type of memory has one, and publishes
// the iov. The context of the memory must be current.
int check_and_publish(GpuIov& gpu_iov, const std::uint8_t id[16]) {
    if (const int error = check_device_memory(gpu_iov.driver, gpu_iov.device, gpu_iov.pointer, gpu_iov.size_bytes,
                                              &gpu_iov.allocation);
        error != 0) {
        return error;
    }
    if (const int error = enable_sync_memops(gpu_iov.driver, gpu_iov.pointer); error != 0) {
        return error;
    }
    IpcBytes ipc{};
    const int ipc_status = export_ipc(gpu_iov.driver, gpu_iov.pointer, &ipc);
    if (ipc_status == 0) {
        gpu_iov.ipc = ipc;
        // An IPC handle covers one allocation only.
        if (gpu_iov.size_bytes > gpu_iov.allocation.bytes - (gpu_iov.pointer - gpu_iov.allocation.base)) {
            log_line(LogLevel::error, "%zu bytes extend beyond the end of their allocation of %zu bytes",
                     gpu_iov.size_bytes, gpu_iov.allocation.bytes);
            return -EINVAL;
        }
    } else if (ipc_status != -ENOTSUP) {
        return ipc_status;
    }
    return publish_gpu_iov(gpu_iov, id);
}

int allocate(GpuIov& gpu_iov) {
    const std::size_t allocated_bytes = (gpu_iov.size_bytes + rdma_page_bytes - 1) / rdma_page_bytes * rdma_page_bytes;
    cuda::Result result = gpu_iov.driver.allocate(&gpu_iov.owned_address, allocated_bytes);
    if (result == cuda::out_of_memory && trim_gpu_pool(0) > 0) {
        result = gpu_iov.driver.allocate(&gpu_iov.owned_address, allocated_bytes);
    }
    if (result != cuda::success) {
        log_line(LogLevel::error, "cuMemAlloc(%zu) failed: %s (%d)", allocated_bytes,
                 cuda::result_name(gpu_iov.driver, result), result);
        return result == cuda::invalid_value ? -ENOMEM : cuda::convert_to_errno(result);
    }
    gpu_iov.origin = GpuIov::Origin::allocated;
    gpu_iov.pointer = gpu_iov.owned_address;
    return 0;
}

// Takes a block from the pool, or allocates one. Returns null if the pool cannot serve this iov: no agent is connected,
// the agent does not keep the registrations of idle blocks, the pool is off, the size is above its limit, the device is
// short of memory, or the block cannot be created.
std::unique_ptr<GpuBlock> take_pooled_block(const GpuIov& gpu_iov) {
    std::shared_ptr<AgentConnection> agent;
    if (!may_use_gpu_pool(gpu_iov.size_bytes) || find_agent_connection(gpu_iov.mount.c_str(), agent) != 0 ||
        !agent->keeps_registrations()) {
        return nullptr;
    }
    if (auto idle_block = take_block(*agent, gpu_iov.device, gpu_iov.size_bytes)) {
        log_line(LogLevel::info, "GPU pool: reuses a block of %zu bytes at 0x%llx for an iov of %zu bytes",
                 idle_block->block_bytes, static_cast<unsigned long long>(idle_block->base), gpu_iov.size_bytes);
        return idle_block;
    }
    const std::size_t block_bytes = choose_pool_block_bytes(gpu_iov.size_bytes);
    if (would_exhaust_memory(gpu_iov.driver, block_bytes) &&
        (trim_gpu_pool(0) == 0 || would_exhaust_memory(gpu_iov.driver, block_bytes))) {
        return nullptr;
    }
    std::unique_ptr<GpuBlock> block;
    if (GpuBlock::create(gpu_iov.driver, gpu_iov.device, block_bytes, &block) != 0) {
        return nullptr;
    }
    log_line(LogLevel::info, "GPU pool: allocates a block of %zu bytes at 0x%llx for an iov of %zu bytes", block_bytes,
             static_cast<unsigned long long>(block->base), gpu_iov.size_bytes);
    return block;
}

int publish_block(GpuIov& gpu_iov, std::unique_ptr<GpuBlock> block, const std::uint8_t id[16]) {
    gpu_iov.origin = GpuIov::Origin::pooled;
    gpu_iov.pointer = block->base;
    gpu_iov.allocation = block->allocation;
    gpu_iov.ipc = block->ipc;
    gpu_iov.block = std::move(block);
    return publish_gpu_iov(gpu_iov, id);
}

// Maps the memory of another process by its IPC handle, and checks that the mapped allocation has the described size
// and contains the described range. The description comes from the handle, or from the symbolic link of the published
// iov. `allocation_bytes` is 0 if the size of the allocation is unknown. Returns -ENOMEM if memory is exhausted, and
// `refusal_status` (-errno) if the driver refuses the handle for another reason.
int map_ipc(GpuIov& gpu_iov, const IpcBytes& ipc, std::uint64_t allocation_bytes, std::uint64_t offset_bytes,
            int refusal_status) {
    const CurrentContext current_context(gpu_iov.driver, gpu_iov.context);
    if (current_context.error() != 0) {
        return current_context.error();
    }
    if (const cuda::Result result = open_ipc(gpu_iov.driver, ipc, &gpu_iov.owned_address); result != cuda::success) {
        return result == cuda::out_of_memory ? -ENOMEM : refusal_status;
    }
    gpu_iov.origin = GpuIov::Origin::opened;
    gpu_iov.ipc = ipc;
    const cuda::Result range_result =
        gpu_iov.driver.address_range(&gpu_iov.allocation.base, &gpu_iov.allocation.bytes, gpu_iov.owned_address);
    if (range_result != cuda::success) {
        log_line(LogLevel::error, "cuMemGetAddressRange failed: %s (%d)",
                 cuda::result_name(gpu_iov.driver, range_result), range_result);
        return -EINVAL;
    }
    if (gpu_iov.allocation.base != gpu_iov.owned_address ||
        (allocation_bytes != 0 && allocation_bytes != gpu_iov.allocation.bytes) ||
        offset_bytes > gpu_iov.allocation.bytes || gpu_iov.size_bytes > gpu_iov.allocation.bytes - offset_bytes) {
        log_line(LogLevel::error,
                 "expected %zu bytes at offset %zu of an allocation of %zu bytes (0: unknown), but the driver has "
                 "mapped an allocation of %zu bytes",
                 gpu_iov.size_bytes, static_cast<std::size_t>(offset_bytes), static_cast<std::size_t>(allocation_bytes),
                 gpu_iov.allocation.bytes);
        return -EINVAL;
    }
    gpu_iov.pointer = gpu_iov.owned_address + offset_bytes;
    Allocation unused_allocation;
    if (const int error = check_device_memory(gpu_iov.driver, gpu_iov.device, gpu_iov.pointer, gpu_iov.size_bytes,
                                              &unused_allocation);
        error != 0) {
        return error;
    }
    return enable_sync_memops(gpu_iov.driver, gpu_iov.pointer);
}

// Returns the number that the device with this UUID has in this process. Returns -1 if this process has no such device;
// make_gpu_iov() returns -ENODEV for -1.
int find_device_by_uuid(const cuda::Driver& driver, const std::array<std::uint8_t, 16>& uuid) {
    int device_count = 0;
    if (driver.device_count(&device_count) != cuda::success) {
        return -1;
    }
    for (int device = 0; device < device_count; ++device) {
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
    const auto gpu_iov = find_gpu_iov(iov);
    return gpu_iov ? gpu_iov->device : -1;
}

int create_gpu_iov(hf3fs_iov* iov, const char* mount, std::size_t size, std::size_t block_size, int device) {
    if (iov == nullptr || !is_valid_mount(mount) || size == 0) {
        return -EINVAL;
    }
    if (size > iov_bytes_max - rdma_page_bytes) {
        return -ENOMEM;
    }
    std::shared_ptr<GpuIov> gpu_iov;
    if (const int error = make_gpu_iov(device, mount, size, &gpu_iov); error != 0) {
        return error;
    }
    const Uuid id = make_random_uuid();
    const CurrentContext current_context(gpu_iov->driver, gpu_iov->context);
    if (current_context.error() != 0) {
        return current_context.error();
    }
    int status = 0;
    if (auto block = take_pooled_block(*gpu_iov)) {
        status = publish_block(*gpu_iov, std::move(block), id.data());
    } else {
        status = allocate(*gpu_iov);
        if (status == 0) {
            status = check_and_publish(*gpu_iov, id.data());
        }
    }
    if (status != 0) {
        return status;
    }
    register_and_fill_iov(iov, gpu_iov, id.data(), block_size);
    return 0;
}

int wrap_gpu_iov(hf3fs_iov* iov, void* pointer, const std::uint8_t id[16], const char* mount, std::size_t size,
                 std::size_t block_size, int device) {
    if (iov == nullptr || !is_valid_mount(mount) || pointer == nullptr || id == nullptr || size == 0 ||
        size > iov_bytes_max) {
        return -EINVAL;
    }
    std::shared_ptr<GpuIov> gpu_iov;
    if (const int error = make_gpu_iov(device, mount, size, &gpu_iov); error != 0) {
        return error;
    }
    gpu_iov->pointer = reinterpret_cast<cuda::DevicePointer>(pointer);
    gpu_iov->context = find_context(gpu_iov->driver, gpu_iov->pointer, gpu_iov->context);
    const CurrentContext current_context(gpu_iov->driver, gpu_iov->context);
    if (current_context.error() != 0) {
        return current_context.error();
    }
    if (const int error = check_and_publish(*gpu_iov, id); error != 0) {
        return error;
    }
    register_and_fill_iov(iov, gpu_iov, id, block_size);
    return 0;
}

int open_gpu_iov(hf3fs_iov* iov, const std::uint8_t id[16], const char* mount, std::size_t size, std::size_t block_size,
                 int device) {
    if (iov == nullptr || !is_valid_mount(mount) || id == nullptr || size == 0) {
        return -EINVAL;
    }
    std::shared_ptr<GpuIov> gpu_iov;
    if (const int error = make_gpu_iov(device, mount, size, &gpu_iov); error != 0) {
        return error;
    }
    std::string publication_name;
    if (const int error = find_publication(mount, id, &publication_name); error != 0) {
        return error;
    }
    std::error_code error;
    const std::filesystem::path link_path = std::string(mount) + "/3fs-virt/iovs/" + publication_name;
    const std::string target_text = std::filesystem::read_symlink(link_path, error).native();
    if (error) {
        return -error.value();
    }
    // The link contains the number of the device in the owner's process, so do not compare it with `device`. map_ipc()
    // checks that the memory is on `device`.
    const auto target = parse_target(target_text);
    if (!target || !publication_name.ends_with(".gdr.d" + std::to_string(target->device)) ||
        target->size_bytes != size) {
        log_line(LogLevel::error, "%s is not an iov of %zu bytes: %s", publication_name.c_str(), size,
                 target_text.c_str());
        return -EINVAL;
    }
    if (!target->ipc) {
        log_line(LogLevel::error, "%s was published only by its dma-buf: its memory has no IPC handle",
                 publication_name.c_str());
        return -ENOTSUP;
    }
    int status = map_ipc(*gpu_iov, *target->ipc, target->allocation_bytes, target->offset_bytes, -EIO);
    if (status == 0) {
        // Ask the agent to allow operations in this memory, which ends when the owner withdraws the publication.
        status = gpu_iov->borrowed_publication.borrow(mount, publication_name, target_text);
    }
    if (status != 0) {
        return status;
    }
    register_and_fill_iov(iov, gpu_iov, id, block_size);
    return 0;
}

int import_gpu_iov(hf3fs_iov* iov, const hf3fs_gpu_ipc_handle_t* handle, const char* mount) {
    if (iov == nullptr || !is_valid_mount(mount) || handle == nullptr) {
        return -EINVAL;
    }
    const auto parsed_handle = parse_gpu_ipc_handle(handle->data);
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
    std::shared_ptr<GpuIov> gpu_iov;
    if (const int error = make_gpu_iov(device, mount, parsed_handle->length_bytes, &gpu_iov); error != 0) {
        return error;
    }
    if (const int error = map_ipc(*gpu_iov, parsed_handle->ipc, 0, 0, -EINVAL); error != 0) {
        return error;
    }
    std::uint8_t id[16];
    if (const int status = borrow_owner_publication(*gpu_iov, 0, id); status != 0) {
        return status;
    }
    register_and_fill_iov(iov, gpu_iov, id, gpu_iov->size_bytes);
    return 0;
}

int import_shared_gpu_iov(hf3fs_iov* iov, const gdrkit_share_handle_t* handle, const char* mount) {
    if (iov == nullptr || !is_valid_mount(mount) || handle == nullptr) {
        return -EINVAL;
    }
    const auto parsed_handle = parse_share_handle(handle->data);
    if (!parsed_handle) {
        log_line(LogLevel::error, "gdrkit_iov_import_share: the 192 bytes are not a valid share handle");
        return -EINVAL;
    }
    if (parsed_handle->kind != ShareKind::ipc) {
        log_line(LogLevel::error,
                 "gdrkit_iov_import_share accepts only share handles of type IPC; this handle also needs file "
                 "descriptors of its owner");
        return -ENOTSUP;
    }
    const int device = find_device_by_uuid(*cuda::driver(), parsed_handle->device_uuid);
    std::shared_ptr<GpuIov> gpu_iov;
    if (const int error = make_gpu_iov(device, mount, parsed_handle->length_bytes, &gpu_iov); error != 0) {
        return error;
    }
    // If it is unknown whether the owner runs, continue: the driver refuses the handle of an owner that has ended.
    if (is_running(parsed_handle->owner) == false) {
        log_line(LogLevel::error, "the owner of the memory (process %u) has ended", parsed_handle->owner.process_id);
        return -ESRCH;
    }
    if (const int error = map_ipc(*gpu_iov, parsed_handle->ipc, parsed_handle->allocation_bytes,
                                  parsed_handle->offset_bytes, -EINVAL);
        error != 0) {
        return error;
    }
    std::uint8_t id[16];
    if (const int status = borrow_owner_publication(*gpu_iov, parsed_handle->offset_bytes, id); status != 0) {
        return status;
    }
    register_and_fill_iov(iov, gpu_iov, id, gpu_iov->size_bytes);
    return 0;
}

int export_gpu_iov(const hf3fs_iov* iov, hf3fs_gpu_ipc_handle_t* handle) {
    const auto gpu_iov = find_gpu_iov(iov);
    if (!gpu_iov || handle == nullptr) {
        return -EINVAL;
    }
    if (!gpu_iov->ipc) {
        log_line(LogLevel::error, "this memory has no IPC handle; its dma-buf was published instead");
        return -EINVAL;
    }
    if (gpu_iov->pointer != gpu_iov->allocation.base) {
        log_line(LogLevel::error, "the iov begins inside its allocation, but the 80-byte handle has no offset. "
                                  "Use gdrkit_iov_export_share, whose handle has an offset");
        return -EINVAL;
    }
    const auto packed_handle =
        pack(GpuIpcHandle{*gpu_iov->ipc, gpu_iov->size_bytes, static_cast<std::uint64_t>(gpu_iov->device)});
    if (!packed_handle) {
        return -EINVAL;
    }
    gpu_iov->is_exported = true;
    std::ranges::copy(*packed_handle, handle->data);
    return 0;
}

int export_shared_gpu_iov(const hf3fs_iov* iov, gdrkit_share_handle_t* handle) {
    const auto gpu_iov = find_gpu_iov(iov);
    if (!gpu_iov || handle == nullptr) {
        return -EINVAL;
    }
    if (!gpu_iov->ipc || gpu_iov->origin == GpuIov::Origin::opened) {
        log_line(LogLevel::error,
                 "gdrkit_iov_export_share: only the owner can share memory, and the memory must have an IPC handle");
        return -ENOTSUP;
    }
    ShareHandle share_handle;
    share_handle.allocation_bytes = gpu_iov->allocation.bytes;
    share_handle.offset_bytes = gpu_iov->pointer - gpu_iov->allocation.base;
    share_handle.length_bytes = gpu_iov->size_bytes;
    share_handle.owner = identify_this_process();
    share_handle.ipc = *gpu_iov->ipc;
    if (const int error = query_device_uuid(*gpu_iov, &share_handle.device_uuid); error != 0) {
        return error;
    }
    const auto packed_handle = pack(share_handle);
    if (!packed_handle) {
        return -EINVAL;
    }
    gpu_iov->is_exported = true;
    std::ranges::copy(*packed_handle, handle->data);
    return 0;
}

int synchronize_gpu_iov(const hf3fs_iov* iov, int direction) {
    const auto gpu_iov = find_gpu_iov(iov);
    if (!gpu_iov || (direction != 0 && direction != 1)) {
        return -EINVAL;
    }
    const CurrentContext current_context(gpu_iov->driver, gpu_iov->context);
    if (current_context.error() != 0) {
        return current_context.error();
    }
    if (const cuda::Result result = gpu_iov->driver.context_synchronize(); result != cuda::success) {
        log_line(LogLevel::error, "cuCtxSynchronize() failed: %s (%d)", cuda::result_name(gpu_iov->driver, result),
                 result);
        return -EIO;
    }
    // Direction 1: the GPU will read bytes that a NIC has written, so flush these writes if the device needs it.
    return direction == 1 && needs_remote_write_flush(gpu_iov->driver, gpu_iov->device)
               ? flush_remote_writes(gpu_iov->driver, gpu_iov->context)
               : 0;
}

void unlink_gpu_iov(hf3fs_iov* iov) {
    if (const auto gpu_iov = find_gpu_iov(iov)) {
        gpu_iov->unlink(*iov);
    }
}

void destroy_gpu_iov(hf3fs_iov* iov) {
    // `gpu_iov` keeps the object alive, because destroy() removes the reference of the iov table.
    if (const auto gpu_iov = find_gpu_iov(iov)) {
        gpu_iov->destroy(*iov);
    }
}

} // namespace gdrkit::usrbio
