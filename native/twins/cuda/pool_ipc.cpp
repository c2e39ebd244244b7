// Memory pools that processes share: cuMemPoolExportToShareableHandle and related functions.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "cuda/device.hpp"
#include "cuda/entry.hpp"
#include "cuda/ipc_handle.hpp"
#include "cuda/pool.hpp"
#include "cuda/visible_devices.hpp"

namespace gdrkit::twin::cuda {
namespace {

// With these seals on the memfd of an exported pool, no process can change its content or size.
constexpr int pool_seals = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;

// Export a pool as a shareable handle: a sealed memfd with the message that identifies the pool.
Result export_pool(const Pool& pool, int* pool_fd) {
    HandleMessage message{};
    message.pool = pool.handle;
    // In the message of a pool, the next two fields hold the type and the id of the location.
    message.object_id = static_cast<std::uint64_t>(pool.location.type);
    message.length_bytes = static_cast<std::uint64_t>(pool.location.id);
    message.physical_number = pool.is_host() ? 0 : get_physical_number(pool.device);
    IpcHandle ipc_handle{};
    write_handle(pool_magic, message, &ipc_handle);
    Fd fd(memfd_create("gdrkit-pool", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!fd || write(fd.get(), &ipc_handle, sizeof ipc_handle) != static_cast<ssize_t>(sizeof ipc_handle) ||
        fcntl(fd.get(), F_ADD_SEALS, pool_seals) != 0) {
        return operating_system_error;
    }
    *pool_fd = fd.release();
    return success;
}

Result import_pool(int pool_fd, Handle* pool_handle) {
    IpcHandle ipc_handle{};
    HandleMessage message{};
    struct stat file_status {};
    if (fstat(pool_fd, &file_status) != 0) {
        return errno == EBADF ? unknown_error : invalid_value;
    }
    if (fcntl(pool_fd, F_GET_SEALS) != pool_seals || file_status.st_size != sizeof ipc_handle ||
        pread(pool_fd, &ipc_handle, sizeof ipc_handle, 0) != static_cast<ssize_t>(sizeof ipc_handle) ||
        !read_handle(pool_magic, ipc_handle, &message)) {
        return invalid_value;
    }
    Location location{static_cast<std::int32_t>(message.object_id), static_cast<std::int32_t>(message.length_bytes)};
    if (location.type == location_device) {
        const auto device = find_ordinal(message.physical_number);
        if (!device) {
            return invalid_device;
        }
        location.id = *device;
    }
    PoolRef pool;
    if (const Result result = make_pool(location, &pool); result != success) {
        return result;
    }
    pool->owner_service_id = message.owner_service_id;
    pool->handle_in_owner = message.pool;
    add_pool(pool);
    *pool_handle = pool->handle;
    return success;
}

Result import_pool_memory(const PoolRef& pool, const IpcHandle& pointer_handle, DevicePointer* pointer) {
    HandleMessage message{};
    if (!read_handle(pool_memory_magic, pointer_handle, &message) ||
        message.owner_service_id != pool->owner_service_id || message.pool != pool->handle_in_owner ||
        message.length_bytes == 0) {
        return invalid_value;
    }
    RangeRef range;
    if (const Result result = map_imported_memory(message, MemoryKind::pool, &range, pool->is_host());
        result != success) {
        return result;
    }
    pool->add_used_bytes(range->length_bytes);
    range->pool = pool->handle;
    range->owning_object = pool;
    add_range(range);
    *pointer = range->base;
    return success;
}

} // namespace

GDRKIT_CUDA_ENTRY Result cuMemPoolExportToShareableHandle(void* shareable, Handle pool_handle, int handle_type,
                                                          unsigned long long flags) {
    return run_entry("cuMemPoolExportToShareableHandle", [&] {
        const PoolRef pool = find_pool(pool_handle);
        if (shareable == nullptr || !pool || flags != 0 || handle_type != handle_posix_fd ||
            (pool->handle_types & handle_posix_fd) == 0) {
            return invalid_value;
        }
        return export_pool(*pool, static_cast<int*>(shareable));
    });
}

GDRKIT_CUDA_ENTRY Result cuMemPoolImportFromShareableHandle(Handle* pool_handle, void* shareable, int handle_type,
                                                            unsigned long long flags) {
    return run_entry("cuMemPoolImportFromShareableHandle", [&] {
        if (pool_handle == nullptr || handle_type != handle_posix_fd || flags != 0) {
            return invalid_value;
        }
        return import_pool(static_cast<int>(reinterpret_cast<std::intptr_t>(shareable)), pool_handle);
    });
}

GDRKIT_CUDA_ENTRY Result cuMemPoolExportPointer(IpcHandle* pointer_handle, DevicePointer pointer) {
    return run_entry("cuMemPoolExportPointer", [&] {
        const RangeRef range = find_range(pointer);
        if (pointer_handle == nullptr || !range || range->kind != MemoryKind::pool ||
            (range->handle_types & handle_posix_fd) == 0) {
            return invalid_value;
        }
        write_handle(pool_memory_magic, export_memory(range), pointer_handle);
        return success;
    });
}

GDRKIT_CUDA_ENTRY Result cuMemPoolImportPointer(DevicePointer* pointer, Handle pool_handle,
                                                const IpcHandle* pointer_handle) {
    return run_entry_in_context("cuMemPoolImportPointer", [&](const ContextRef&) {
        const PoolRef pool = find_pool(pool_handle);
        if (pointer == nullptr || pointer_handle == nullptr || !pool || !pool->is_imported()) {
            return invalid_value;
        }
        return import_pool_memory(pool, *pointer_handle, pointer);
    });
}

} // namespace gdrkit::twin::cuda
