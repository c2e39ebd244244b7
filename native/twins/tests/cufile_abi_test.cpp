// The declarations of cufile_abi.hpp against the real cufile.h, where there is one. All of it is checked when it
// compiles.
#include <cufile.h>

#include "cufile/cufile_abi.hpp"

namespace twin = gdrkit::twin::cufile;

#define SAME(ours, theirs) static_assert(static_cast<long long>(twin::ours) == static_cast<long long>(theirs))
#define SAME_SIZE(ours, theirs) static_assert(sizeof(twin::ours) == sizeof(theirs) && alignof(twin::ours) <= 8)
#define SAME_PLACE(ours, member, theirs, their_member)                                                                 \
    static_assert(offsetof(twin::ours, member) == offsetof(theirs, their_member))

SAME(success, CU_FILE_SUCCESS);
SAME(driver_not_initialized, CU_FILE_DRIVER_NOT_INITIALIZED);
SAME(driver_closing, CU_FILE_DRIVER_CLOSING);
SAME(platform_not_supported, CU_FILE_PLATFORM_NOT_SUPPORTED);
SAME(io_not_supported, CU_FILE_IO_NOT_SUPPORTED);
SAME(cuda_driver_error, CU_FILE_CUDA_DRIVER_ERROR);
SAME(cuda_pointer_invalid, CU_FILE_CUDA_POINTER_INVALID);
SAME(cuda_memory_type_invalid, CU_FILE_CUDA_MEMORY_TYPE_INVALID);
SAME(cuda_pointer_range_error, CU_FILE_CUDA_POINTER_RANGE_ERROR);
SAME(invalid_mapping_range, CU_FILE_INVALID_MAPPING_RANGE);
SAME(invalid_file_type, CU_FILE_INVALID_FILE_TYPE);
SAME(invalid_value, CU_FILE_INVALID_VALUE);
SAME(memory_already_registered, CU_FILE_MEMORY_ALREADY_REGISTERED);
SAME(memory_not_registered, CU_FILE_MEMORY_NOT_REGISTERED);
SAME(driver_already_open, CU_FILE_DRIVER_ALREADY_OPEN);
SAME(handle_not_registered, CU_FILE_HANDLE_NOT_REGISTERED);
SAME(handle_already_registered, CU_FILE_HANDLE_ALREADY_REGISTERED);
SAME(internal_error, CU_FILE_INTERNAL_ERROR);
SAME(batch_submit_failed, CU_FILE_BATCH_SUBMIT_FAILED);
SAME(batch_full, CU_FILE_BATCH_FULL);
SAME(no_memory, CU_FILE_NOMEM_ERROR);
SAME(io_error, CU_FILE_IO_ERROR);
SAME(status_most, CU_FILE_IO_MAX_ERROR);

SAME(opaque_fd, CU_FILE_HANDLE_TYPE_OPAQUE_FD);
SAME(userspace_fs, CU_FILE_HANDLE_TYPE_USERSPACE_FS);
SAME(opcode_read, CUFILE_READ);
SAME(opcode_write, CUFILE_WRITE);
SAME(mode_batch, CUFILE_BATCH);
SAME(io_waiting, CUFILE_WAITING);
SAME(io_pending, CUFILE_PENDING);
SAME(io_invalid, CUFILE_INVALID);
SAME(io_canceled, CUFILE_CANCELED);
SAME(io_complete, CUFILE_COMPLETE);
SAME(io_timeout, CUFILE_TIMEOUT);
SAME(io_failed, CUFILE_FAILED);
SAME(fixed_buffer_offset, CU_FILE_STREAM_FIXED_BUF_OFFSET);
SAME(fixed_file_offset, CU_FILE_STREAM_FIXED_FILE_OFFSET);
SAME(fixed_file_size, CU_FILE_STREAM_FIXED_FILE_SIZE);
SAME(page_aligned_inputs, CU_FILE_STREAM_PAGE_ALIGNED_INPUTS);

SAME_SIZE(Error, CUfileError_t);
SAME_SIZE(Description, CUfileDescr_t);
SAME_SIZE(DriverProperties, CUfileDrvProps_t);
SAME_SIZE(IoParameters, CUfileIOParams_t);
SAME_PLACE(IoParameters, batch.file_offset, CUfileIOParams_t, u.batch.file_offset);
SAME_PLACE(IoParameters, batch.length_bytes, CUfileIOParams_t, u.batch.size);
SAME_PLACE(IoParameters, cookie, CUfileIOParams_t, cookie);
SAME_SIZE(IoEvent, CUfileIOEvents_t);
SAME_PLACE(IoEvent, result, CUfileIOEvents_t, ret);

SAME_SIZE(IoVector, CUfileIOVec_t);
SAME_SIZE(StatsLevel1, CUfileStatsLevel1_t);
SAME_PLACE(StatsLevel1, read_bytes, CUfileStatsLevel1_t, read_bytes);
SAME_PLACE(StatsLevel1, batch_submit_ops, CUfileStatsLevel1_t, batch_submit_ops);
SAME_PLACE(StatsLevel1, batch_p2p_submit_ops, CUfileStatsLevel1_t, batch_p2p_submit_ops);
SAME_PLACE(StatsLevel1, batch_posix_enqueued_ops, CUfileStatsLevel1_t, batch_posix_enqueued_ops);
SAME_PLACE(StatsLevel1, readv_ops, CUfileStatsLevel1_t, readv_ops);
SAME_PLACE(StatsLevel1, writev_latency_sum_us, CUfileStatsLevel1_t, writev_lat_sum_us);
SAME_SIZE(StatsLevel2, CUfileStatsLevel2_t);
SAME_PLACE(StatsLevel2, write_size_kb, CUfileStatsLevel2_t, write_size_kb_hist);
SAME_SIZE(GpuStats, CUfilePerGpuStats_t);
SAME_PLACE(GpuStats, posix_reads, CUfilePerGpuStats_t, n_posix_reads);
SAME_PLACE(GpuStats, p2p_writes, CUfilePerGpuStats_t, n_p2p_writes);
SAME_PLACE(GpuStats, write_errors, CUfilePerGpuStats_t, n_writes_err);
SAME_SIZE(StatsLevel3, CUfileStatsLevel3_t);
SAME_PLACE(StatsLevel3, gpus, CUfileStatsLevel3_t, per_gpu_stats);

int main() {}
