// The binary interface of libcufile, written from the header of cuFile 1.20 (PyPI nvidia-cufile 1.20.0.107).
// cuFile 1.19 added cuFileReadv and cuFileWritev, and their counters at the end of the level 1 statistics.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace gdrkit::twin::cufile {

// The first version with vectored calls and their statistics, in the form of cuFileGetVersion: 1190 is 1.19.
inline constexpr int first_version_with_vectors = 1190;

// CUfileOpError codes that the twin returns.
enum Status : int {
    success = 0,
    driver_not_initialized = 5001,
    driver_closing = 5006,
    platform_not_supported = 5007,
    io_not_supported = 5008,
    cuda_driver_error = 5011,
    cuda_pointer_invalid = 5012,
    cuda_memory_type_invalid = 5013,
    cuda_pointer_range_error = 5014,
    invalid_mapping_range = 5017,
    invalid_file_type = 5018,
    invalid_value = 5022,
    memory_already_registered = 5023,
    memory_not_registered = 5024,
    driver_already_open = 5026,
    handle_not_registered = 5027,
    handle_already_registered = 5028,
    internal_error = 5030,
    batch_submit_failed = 5035,
    batch_full = 5037,
    no_memory = 5043,
    io_error = 5044,
    max_status = 5050, // CU_FILE_IO_MAX_ERROR: the largest code that a fault plan may inject
};

// CUfileError_t. Most functions return this structure by value; cuFileRead and similar functions return a
// number of bytes.
struct Error {
    std::int32_t error;      // CUfileOpError
    std::int32_t cuda_error; // CUresult, if `error` is cuda_driver_error
};
static_assert(sizeof(Error) == 8 && offsetof(Error, cuda_error) == 4);

using FileHandle = void*;
using BatchHandle = void*;
using Stream = std::uint64_t;

enum FileHandleType : std::int32_t { opaque_fd = 1, opaque_win32 = 2, userspace_fs = 3 };

struct Description { // CUfileDescr_t
    std::int32_t type;
    union {
        std::int32_t fd;
        void* handle;
    } handle;
    const void* fs_ops;
};
static_assert(sizeof(Description) == 24 && offsetof(Description, handle) == 8 && offsetof(Description, fs_ops) == 16);

struct DriverProperties { // CUfileDrvProps_t
    struct {
        std::uint32_t major_version;
        std::uint32_t minor_version;
        std::size_t poll_threshold_kb;
        std::size_t max_direct_io_kb;
        std::uint32_t status_flags;
        std::uint32_t control_flags;
    } nvfs;
    std::uint32_t feature_flags;
    std::uint32_t max_device_cache_kb;
    std::uint32_t per_buffer_cache_kb;
    std::uint32_t max_pinned_kb;
    std::uint32_t max_batch_io;
    std::uint32_t max_batch_timeout_ms;
};
static_assert(sizeof(DriverProperties) == 56 && offsetof(DriverProperties, feature_flags) == 32 &&
              offsetof(DriverProperties, max_batch_timeout_ms) == 52);

// CUfileDriverControlFlags_t and CUfileFeatureFlags_t are bit numbers.
enum ControlBit { use_poll_mode_bit = 0, allow_compat_bit = 1 };
enum FeatureBit { batch_bit = 1, streams_bit = 2, parallel_bit = 3 };

struct IoVector { // CUfileIOVec_t
    void* base;
    std::size_t length_bytes;
};
static_assert(sizeof(IoVector) == 16 && offsetof(IoVector, length_bytes) == 8);

enum Opcode : std::int32_t { opcode_read = 0, opcode_write = 1 };
enum BatchMode : std::int32_t { mode_batch = 1 };

struct IoParameters { // CUfileIOParams_t
    std::int32_t mode;
    struct {
        void* buffer;
        off_t file_offset;
        off_t buffer_offset;
        std::size_t length_bytes;
    } batch;
    FileHandle file;
    std::int32_t opcode;
    void* cookie;
};
static_assert(sizeof(IoParameters) == 64 && offsetof(IoParameters, batch) == 8 && offsetof(IoParameters, file) == 40 &&
              offsetof(IoParameters, opcode) == 48 && offsetof(IoParameters, cookie) == 56);

enum IoStatus : std::int32_t { // CUfileStatus_t
    io_waiting = 0x01,
    io_pending = 0x02,
    io_invalid = 0x04,
    io_canceled = 0x08,
    io_complete = 0x10,
    io_timeout = 0x20,
    io_failed = 0x40,
};

struct IoEvent { // CUfileIOEvents_t
    void* cookie;
    std::int32_t status;
    std::size_t result; // number of bytes, or a negative error code converted to std::size_t
};
static_assert(sizeof(IoEvent) == 24 && offsetof(IoEvent, status) == 8 && offsetof(IoEvent, result) == 16);

// The flags of a registered stream (CU_FILE_STREAM_*). A fixed argument has its final value when the transfer is
// queued.
enum StreamFlags : std::uint32_t {
    fixed_buffer_offset = 1,
    fixed_file_offset = 2,
    fixed_file_size = 4,
    page_aligned_inputs = 8,
    stream_flags_mask = 15,
};

struct OpCounter { // CUfileOpCounter_t
    std::uint64_t ok;
    std::uint64_t err;
};

// The fields *_bw are in bytes per second.
struct StatsLevel1 { // CUfileStatsLevel1_t
    OpCounter read_ops, write_ops, handle_register_ops, handle_deregister_ops, buffer_register_ops,
        buffer_deregister_ops;
    std::uint64_t read_bytes, write_bytes, read_bw, write_bw, read_latency_average_us, write_latency_average_us,
        read_ops_per_s, write_ops_per_s, read_latency_sum_us, write_latency_sum_us;
    OpCounter batch_submit_ops, batch_complete_ops, batch_setup_ops, batch_cancel_ops, batch_destroy_ops,
        batch_enqueued_ops, batch_posix_enqueued_ops, batch_processed_ops, batch_posix_processed_ops,
        batch_nvfs_submit_ops, batch_p2p_submit_ops, batch_aio_submit_ops, batch_iouring_submit_ops,
        batch_mixed_submit_ops, batch_total_submit_ops;
    std::uint64_t batch_read_bytes, batch_write_bytes, batch_read_bw, batch_write_bw, batch_submit_latency_average_us,
        batch_completion_latency_average_us, batch_submit_ops_per_s, batch_complete_ops_per_s,
        batch_submit_latency_sum_us, batch_completion_latency_sum_us, last_batch_read_bytes, last_batch_write_bytes;
    OpCounter readv_ops, writev_ops;
    std::uint64_t readv_bytes, writev_bytes, readv_bw, writev_bw, readv_latency_average_us, writev_latency_average_us,
        readv_ops_per_s, writev_ops_per_s, readv_latency_sum_us, writev_latency_sum_us;
};
static_assert(sizeof(StatsLevel1) == 624 && offsetof(StatsLevel1, read_bytes) == 96 &&
              offsetof(StatsLevel1, batch_submit_ops) == 176 && offsetof(StatsLevel1, batch_read_bytes) == 416 &&
              offsetof(StatsLevel1, readv_ops) == 512 && offsetof(StatsLevel1, readv_bytes) == 544);

inline constexpr int histogram_bins = 32;
inline constexpr int max_gpus = 16;

struct StatsLevel2 { // CUfileStatsLevel2_t
    StatsLevel1 basic;
    // Number of transfers in each bin of sizes: bin 0 is less than 1 KiB, bin n is from 2^(n-1) KiB to less
    // than 2^n KiB, and the last bin has no upper limit.
    std::uint64_t read_size_kb_hist[histogram_bins];
    std::uint64_t write_size_kb_hist[histogram_bins];
};
static_assert(sizeof(StatsLevel2) == 1136 && offsetof(StatsLevel2, read_size_kb_hist) == 624);

// The fields maps* and unmaps count the registrations and deregistrations of buffers (n_mmap and n_mmap_free in
// cuFile). The fields routed_* count transfers that used dynamic routing (n_dr_reads and n_dr_writes).
struct GpuStats { // CUfilePerGpuStats_t
    std::uint8_t uuid[16];
    std::uint64_t read_bytes, read_bw, read_utilization, read_duration_us, total_reads, p2p_reads, nvfs_reads,
        posix_reads, unaligned_reads, routed_reads, sparse_regions, inline_regions, read_errors;
    std::uint64_t write_bytes, write_bw, write_utilization, write_duration_us, total_writes, p2p_writes, nvfs_writes,
        posix_writes, unaligned_writes, routed_writes, write_errors;
    std::uint64_t maps, maps_ok, map_errors, unmaps, registered_bytes;
};
static_assert(sizeof(GpuStats) == 248 && offsetof(GpuStats, posix_reads) == 72 &&
              offsetof(GpuStats, write_bytes) == 120 && offsetof(GpuStats, posix_writes) == 176 &&
              offsetof(GpuStats, maps) == 208);

struct StatsLevel3 { // CUfileStatsLevel3_t
    StatsLevel2 detailed;
    std::uint32_t gpu_count;
    GpuStats gpus[max_gpus];
};
static_assert(sizeof(StatsLevel3) == 5112 && offsetof(StatsLevel3, gpus) == 1144);

} // namespace gdrkit::twin::cufile

// This macro marks an exported function: C linkage and default visibility. Exceptions must not leave such a function.
#define GDRKIT_CUFILE_ENTRY extern "C" [[gnu::visibility("default")]]
