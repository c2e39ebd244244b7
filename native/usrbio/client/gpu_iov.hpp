// GPU iovs: the implementation of the C functions of hf3fs_usrbio_gdr.h, which documents arguments and results. Unless
// a comment says otherwise, functions of type int return 0 or -errno. Any thread may call the functions. They preserve
// the CUDA context of the calling thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "usrbio/client/share_handle.hpp"
#include "usrbio/include/hf3fs_usrbio_gdr.h"

namespace gdrkit::usrbio {

bool is_gpu_iov(const hf3fs_iov* iov) noexcept;
int find_gpu_device(const hf3fs_iov* iov) noexcept; // Returns -1 if `iov` is not a GPU iov.

int create_gpu_iov(hf3fs_iov* iov, const char* mount, std::size_t size, std::size_t block_size, int device);
int wrap_gpu_iov(hf3fs_iov* iov, void* pointer, const std::uint8_t id[16], const char* mount, std::size_t size,
                 std::size_t block_size, int device);
int open_gpu_iov(hf3fs_iov* iov, const std::uint8_t id[16], const char* mount, std::size_t size, std::size_t block_size,
                 int device);
int import_gpu_iov(hf3fs_iov* iov, const hf3fs_gpu_ipc_handle_t* handle, const char* mount);
int import_shared_gpu_iov(hf3fs_iov* iov, const gdrkit_share_handle_t* handle, const char* mount);

int export_gpu_iov(const hf3fs_iov* iov, hf3fs_gpu_ipc_handle_t* handle);
int export_shared_gpu_iov(const hf3fs_iov* iov, gdrkit_share_handle_t* handle);
int synchronize_gpu_iov(const hf3fs_iov* iov, int direction);

// These functions implement hf3fs_iovunlink_gpu and hf3fs_iovdestroy_gpu. They do nothing if `iov` is not a GPU iov.
void unlink_gpu_iov(hf3fs_iov* iov);
void destroy_gpu_iov(hf3fs_iov* iov);

} // namespace gdrkit::usrbio
