// Tests the GPU functions without CUDA: libcuda.so.1 cannot be loaded, or the library was built without ENABLE_GDR.
// Every function that can fail returns -ENOTSUP, whatever its arguments, and changes nothing. Only hf3fs_iovsync
// succeeds for an iov of host memory.
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "tests/check.hpp"
#include "usrbio/include/hf3fs_usrbio_gdr.h"

int main() {
    CHECK(!hf3fs_gdr_available());
    CHECK_EQUAL(hf3fs_gdr_device_count(), 0);
    hf3fs_iov unchanged_iov{};
    unchanged_iov.numa = 77;
    const hf3fs_iov iov_before = unchanged_iov;
    const std::uint8_t id[16] = {1};
    hf3fs_gpu_ipc_handle_t handle{};
    gdrkit_share_handle_t share_handle{};
    handle.data[0] = share_handle.data[0] = 1;
    for (hf3fs_iov* const iov : {&unchanged_iov, static_cast<hf3fs_iov*>(nullptr)}) {
        CHECK_EQUAL(hf3fs_iovcreate_gpu(iov, "/tmp", 4096, 0, 0), -ENOTSUP);
        CHECK_EQUAL(hf3fs_iovopen_gpu(iov, id, "/tmp", 4096, 0, 0), -ENOTSUP);
        CHECK_EQUAL(hf3fs_iovwrap_gpu(iov, &unchanged_iov, id, "/tmp", 4096, 0, 0), -ENOTSUP);
        CHECK_EQUAL(hf3fs_iovcreate_device(iov, "/tmp", 4096, 0, 0), -ENOTSUP);
        CHECK_EQUAL(hf3fs_iovopen_device(iov, id, "/tmp", 4096, 0, 0), -ENOTSUP);
        CHECK_EQUAL(hf3fs_iovwrap_device(iov, &unchanged_iov, id, "/tmp", 4096, 1, 0), -ENOTSUP);
        CHECK_EQUAL(hf3fs_iov_export_gpu(iov, &handle), -ENOTSUP);
        CHECK_EQUAL(hf3fs_iov_import_gpu(iov, &handle, "/tmp"), -ENOTSUP);
        CHECK_EQUAL(gdrkit_iov_export_share(iov, &share_handle), -ENOTSUP);
        CHECK_EQUAL(gdrkit_iov_import_share(iov, &share_handle, "/tmp"), -ENOTSUP);
        CHECK_EQUAL(hf3fs_iovsync_gpu(iov, 0), -ENOTSUP);
        CHECK(!hf3fs_iov_is_gpu(iov) && hf3fs_iov_gpu_device(iov) == -1 && hf3fs_iov_device_id(iov) == -1);
        CHECK_EQUAL(hf3fs_iov_mem_type(iov), HF3FS_MEM_HOST);
        hf3fs_iovunlink_gpu(iov);
        hf3fs_iovdestroy_gpu(iov);
    }
    CHECK_EQUAL(hf3fs_iovsync(&unchanged_iov, 1), 0);
    CHECK(std::memcmp(&unchanged_iov, &iov_before, sizeof unchanged_iov) == 0);
}
