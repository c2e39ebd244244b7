// The structs and functions of libhf3fs_api_shared.so, as hf3fs_usrbio.h declares them. The Python module loads a
// client library at run time, gdrkit's or another one, so it is not linked with a client library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <ctime>

namespace gdrkit::usrbio::abi {

struct Iov {
    std::uint8_t* base;
    void* iovh;
    char id[16];
    char mount_point[256];
    std::size_t size;
    std::size_t block_size;
    int numa;
};
static_assert(sizeof(Iov) == 312 && offsetof(Iov, id) == 16 && offsetof(Iov, mount_point) == 32 &&
              offsetof(Iov, size) == 288 && offsetof(Iov, numa) == 304);

struct Ior {
    Iov iov;
    void* iorh;
    char mount_point[256];
    bool for_read;
    int io_depth;
    int priority;
    int timeout;
    std::uint64_t flags;
};
static_assert(sizeof(Ior) == 600 && offsetof(Ior, iorh) == 312 && offsetof(Ior, for_read) == 576 &&
              offsetof(Ior, io_depth) == 580 && offsetof(Ior, flags) == 592);

struct Cqe {
    std::int32_t index;
    std::int32_t reserved;
    std::int64_t result;
    const void* userdata;
};
static_assert(sizeof(Cqe) == 24 && offsetof(Cqe, result) == 8 && offsetof(Cqe, userdata) == 16);

struct GpuHandle {
    std::uint8_t data[80];
};

struct GpuPoolStatistics {
    std::uint64_t idle_bytes_max, idle_blocks, idle_bytes, in_use_blocks, in_use_bytes;
    std::uint64_t hits, misses, trimmed_blocks, refused_blocks;
};
static_assert(sizeof(GpuPoolStatistics) == 72);

// GDRKIT_HF3FS_FUNCTIONS(MACRO) expands to MACRO(function, result type, parameter types...) for each function that a
// library may have. A call of a function that the loaded library does not have raises an error.
#define GDRKIT_HF3FS_FUNCTIONS(MACRO)                                                                                  \
    MACRO(hf3fs_extract_mount_point, int, char*, int, const char*)                                                     \
    MACRO(hf3fs_is_hf3fs, bool, int)                                                                                   \
    MACRO(hf3fs_iovcreate, int, Iov*, const char*, std::size_t, std::size_t, int)                                      \
    MACRO(hf3fs_iovopen, int, Iov*, const std::uint8_t*, const char*, std::size_t, std::size_t, int)                   \
    MACRO(hf3fs_iovwrap, int, Iov*, void*, const std::uint8_t*, const char*, std::size_t, std::size_t, int)            \
    MACRO(hf3fs_iovunlink, void, Iov*)                                                                                 \
    MACRO(hf3fs_iovdestroy, void, Iov*)                                                                                \
    MACRO(hf3fs_ior_size, std::size_t, int)                                                                            \
    MACRO(hf3fs_io_entries, int, const Ior*)                                                                           \
    MACRO(hf3fs_iorcreate3, int, Ior*, const char*, int, bool, int, int, int, int)                                     \
    MACRO(hf3fs_iorcreate4, int, Ior*, const char*, int, bool, int, int, int, std::uint64_t)                           \
    MACRO(hf3fs_iordestroy, void, Ior*)                                                                                \
    MACRO(hf3fs_reg_fd, int, int, std::uint64_t)                                                                       \
    MACRO(hf3fs_dereg_fd, void, int)                                                                                   \
    MACRO(hf3fs_prep_io, int, const Ior*, const Iov*, bool, void*, int, std::size_t, std::uint64_t, const void*)       \
    MACRO(hf3fs_submit_ios, int, const Ior*)                                                                           \
    MACRO(hf3fs_wait_for_ios, int, const Ior*, Cqe*, int, int, const std::timespec*)                                   \
    MACRO(hf3fs_hardlink, int, const char*, const char*)                                                               \
    MACRO(hf3fs_punchhole, int, int, int, const std::size_t*, const std::size_t*, std::size_t)                         \
    MACRO(hf3fs_gdr_available, bool)                                                                                   \
    MACRO(hf3fs_gdr_device_count, int)                                                                                 \
    MACRO(hf3fs_iovcreate_gpu, int, Iov*, const char*, std::size_t, std::size_t, int)                                  \
    MACRO(hf3fs_iovopen_gpu, int, Iov*, const std::uint8_t*, const char*, std::size_t, std::size_t, int)               \
    MACRO(hf3fs_iovwrap_gpu, int, Iov*, void*, const std::uint8_t*, const char*, std::size_t, std::size_t, int)        \
    MACRO(hf3fs_iovunlink_gpu, void, Iov*)                                                                             \
    MACRO(hf3fs_iovdestroy_gpu, void, Iov*)                                                                            \
    MACRO(hf3fs_iov_is_gpu, bool, const Iov*)                                                                          \
    MACRO(hf3fs_iov_gpu_device, int, const Iov*)                                                                       \
    MACRO(hf3fs_iovsync_gpu, int, const Iov*, int)                                                                     \
    MACRO(hf3fs_iov_export_gpu, int, const Iov*, GpuHandle*)                                                           \
    MACRO(hf3fs_iov_import_gpu, int, Iov*, const GpuHandle*, const char*)                                              \
    MACRO(hf3fs_iovcreate_device, int, Iov*, const char*, std::size_t, std::size_t, int)                               \
    MACRO(hf3fs_iovopen_device, int, Iov*, const std::uint8_t*, const char*, std::size_t, std::size_t, int)            \
    MACRO(hf3fs_iovwrap_device, int, Iov*, void*, const std::uint8_t*, const char*, std::size_t, std::size_t, int)     \
    MACRO(hf3fs_iov_mem_type, int, const Iov*)                                                                         \
    MACRO(hf3fs_iov_device_id, int, const Iov*)                                                                        \
    MACRO(hf3fs_iovsync, int, const Iov*, int)                                                                         \
    MACRO(gdrkit_gpu_pool_limit, int, std::size_t, unsigned)                                                           \
    MACRO(gdrkit_gpu_pool_trim, int, std::size_t)                                                                      \
    MACRO(gdrkit_gpu_pool_query, int, GpuPoolStatistics*, std::size_t)                                                 \
    MACRO(gdrkit_host_pool_trim, int, std::size_t)

} // namespace gdrkit::usrbio::abi
