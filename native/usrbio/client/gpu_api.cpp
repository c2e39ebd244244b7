// The C functions of hf3fs_usrbio_gdr.h. They check that CUDA is available, and convert exceptions to errno values.
#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <new>

#include "usrbio/client/cuda_driver.hpp"
#include "usrbio/client/gpu_iov.hpp"
#include "usrbio/client/gpu_pool.hpp"
#include "usrbio/client/reach_file.hpp"

#define GDRKIT_GPU_ENTRY extern "C" [[gnu::visibility("default")]]

namespace {

using namespace gdrkit::usrbio;

// The layouts are parts of the C ABI.
static_assert(sizeof(gdrkit_gpu_pool_statistics_t) == 72);
static_assert(sizeof(hf3fs_gpu_ipc_handle_t) == gpu_ipc_handle_bytes &&
              sizeof(gdrkit_share_handle_t) == share_handle_bytes);
static_assert(sizeof(hf3fs_iov) == 312 && offsetof(hf3fs_iov, id) == 16 && offsetof(hf3fs_iov, mount_point) == 32 &&
              offsetof(hf3fs_iov, size) == 288 && offsetof(hf3fs_iov, numa) == 304);

// Calls `function` and returns its result. Returns -ENOTSUP without CUDA, and a negative errno if `function` throws.
template <typename Function> int call_with_cuda(Function&& function) noexcept {
    try {
        return cuda::driver() == nullptr ? -ENOTSUP : function();
    } catch (const std::bad_alloc&) {
        return -ENOMEM;
    } catch (...) {
        return -EIO;
    }
}

// Returns whether the device can share its memory with other processes, and a measurement showed that a NIC reaches
// this memory.
bool is_usable(const cuda::Driver& driver, cuda::Device device) {
    int has_unified_addressing = 0, compute_mode = 0;
    cuda::Uuid uuid{};
    return driver.device_attribute(&has_unified_addressing, cuda::device_unified_addressing, device) == cuda::success &&
           driver.device_attribute(&compute_mode, cuda::device_compute_mode, device) == cuda::success &&
           has_unified_addressing != 0 && compute_mode != cuda::compute_mode_prohibited &&
           driver.device_uuid(&uuid, device) == cuda::success && is_reached_by_nic(uuid);
}

int count_usable_devices() {
    int device_count = 0, usable_count = 0;
    const cuda::Driver& driver = *cuda::driver();
    if (driver.device_count(&device_count) != cuda::success) {
        return 0;
    }
    for (int index = 0; index < device_count; ++index) {
        cuda::Device device = 0;
        usable_count += driver.device_get(&device, index) == cuda::success && is_usable(driver, device) ? 1 : 0;
    }
    return usable_count;
}

} // namespace

GDRKIT_GPU_ENTRY bool hf3fs_gdr_available(void) {
    return hf3fs_gdr_device_count() > 0;
}

GDRKIT_GPU_ENTRY int hf3fs_gdr_device_count(void) {
    return std::max(0, call_with_cuda(count_usable_devices));
}

GDRKIT_GPU_ENTRY int hf3fs_iovcreate_gpu(hf3fs_iov* iov, const char* mount, std::size_t size, std::size_t block_size,
                                         int device) {
    return call_with_cuda([&] { return create_gpu_iov(iov, mount, size, block_size, device); });
}

GDRKIT_GPU_ENTRY int hf3fs_iovopen_gpu(hf3fs_iov* iov, const std::uint8_t id[16], const char* mount, std::size_t size,
                                       std::size_t block_size, int device) {
    return call_with_cuda([&] { return open_gpu_iov(iov, id, mount, size, block_size, device); });
}

GDRKIT_GPU_ENTRY int hf3fs_iovwrap_gpu(hf3fs_iov* iov, void* pointer, const std::uint8_t id[16], const char* mount,
                                       std::size_t size, std::size_t block_size, int device) {
    return call_with_cuda([&] { return wrap_gpu_iov(iov, pointer, id, mount, size, block_size, device); });
}

GDRKIT_GPU_ENTRY void hf3fs_iovunlink_gpu(hf3fs_iov* iov) {
    call_with_cuda([&] {
        unlink_gpu_iov(iov);
        return 0;
    });
}

GDRKIT_GPU_ENTRY void hf3fs_iovdestroy_gpu(hf3fs_iov* iov) {
    call_with_cuda([&] {
        destroy_gpu_iov(iov);
        return 0;
    });
}

GDRKIT_GPU_ENTRY bool hf3fs_iov_is_gpu(const hf3fs_iov* iov) {
    return is_gpu_iov(iov);
}

GDRKIT_GPU_ENTRY int hf3fs_iov_gpu_device(const hf3fs_iov* iov) {
    return find_gpu_device(iov);
}

GDRKIT_GPU_ENTRY int hf3fs_iovsync_gpu(const hf3fs_iov* iov, int direction) {
    return call_with_cuda([&] { return synchronize_gpu_iov(iov, direction); });
}

GDRKIT_GPU_ENTRY int hf3fs_iov_export_gpu(const hf3fs_iov* iov, hf3fs_gpu_ipc_handle_t* handle) {
    return call_with_cuda([&] { return export_gpu_iov(iov, handle); });
}

GDRKIT_GPU_ENTRY int hf3fs_iov_import_gpu(hf3fs_iov* iov, const hf3fs_gpu_ipc_handle_t* handle, const char* mount) {
    return call_with_cuda([&] { return import_gpu_iov(iov, handle, mount); });
}

GDRKIT_GPU_ENTRY int hf3fs_iovcreate_device(hf3fs_iov* iov, const char* mount, std::size_t size, std::size_t block_size,
                                            int device) {
    return call_with_cuda([&] { return block_size != 0 ? -EINVAL : create_gpu_iov(iov, mount, size, 0, device); });
}

GDRKIT_GPU_ENTRY int hf3fs_iovopen_device(hf3fs_iov* iov, const std::uint8_t id[16], const char* mount,
                                          std::size_t size, std::size_t block_size, int device) {
    return call_with_cuda([&] { return block_size != 0 ? -EINVAL : open_gpu_iov(iov, id, mount, size, 0, device); });
}

GDRKIT_GPU_ENTRY int hf3fs_iovwrap_device(hf3fs_iov* iov, void* pointer, const std::uint8_t id[16], const char* mount,
                                          std::size_t size, std::size_t block_size, int device) {
    return call_with_cuda(
        [&] { return block_size != 0 ? -EINVAL : wrap_gpu_iov(iov, pointer, id, mount, size, 0, device); });
}

GDRKIT_GPU_ENTRY hf3fs_mem_type hf3fs_iov_mem_type(const hf3fs_iov* iov) {
    return is_gpu_iov(iov) ? HF3FS_MEM_DEVICE : HF3FS_MEM_HOST;
}

GDRKIT_GPU_ENTRY int hf3fs_iov_device_id(const hf3fs_iov* iov) {
    return find_gpu_device(iov);
}

GDRKIT_GPU_ENTRY int hf3fs_iovsync(const hf3fs_iov* iov, int direction) {
    if (iov == nullptr || (direction != 0 && direction != 1)) {
        return -EINVAL;
    }
    return is_gpu_iov(iov) ? hf3fs_iovsync_gpu(iov, direction) : 0;
}

GDRKIT_GPU_ENTRY int gdrkit_iov_export_share(const hf3fs_iov* iov, gdrkit_share_handle_t* handle) {
    return call_with_cuda([&] { return export_shared_gpu_iov(iov, handle); });
}

GDRKIT_GPU_ENTRY int gdrkit_iov_import_share(hf3fs_iov* iov, const gdrkit_share_handle_t* handle, const char* mount) {
    return call_with_cuda([&] { return import_shared_gpu_iov(iov, handle, mount); });
}

GDRKIT_GPU_ENTRY int gdrkit_gpu_pool_limit(std::size_t idle_bytes_max, unsigned idle_ms_max) {
    return call_with_cuda([&] {
        set_gpu_pool_limits(idle_bytes_max, idle_ms_max);
        return 0;
    });
}

GDRKIT_GPU_ENTRY int gdrkit_gpu_pool_trim(std::size_t idle_bytes_max) {
    return call_with_cuda([&] {
        trim_gpu_pool(idle_bytes_max);
        return 0;
    });
}

GDRKIT_GPU_ENTRY int gdrkit_gpu_pool_query(gdrkit_gpu_pool_statistics_t* statistics, std::size_t size) {
    return call_with_cuda([&] {
        if (statistics == nullptr || size != sizeof *statistics) {
            return -EINVAL;
        }
        *statistics = get_gpu_pool_statistics();
        return 0;
    });
}
