// Test of the software twin of libcufile (GPUDirect Storage): compares the declarations of cufile_abi.hpp with the real
// cufile.h at compile time, if that header is installed.
#include <cufile.h>

#include "cufile/cufile_abi.hpp"

namespace twin = gdrkit::twin::cufile;

#define CHECK_VALUE(twin_name, real_name)                                                                              \
    static_assert(static_cast<long long>(twin::twin_name) == static_cast<long long>(real_name))
#define CHECK_SIZE(twin_name, real_name)                                                                               \
    static_assert(sizeof(twin::twin_name) == sizeof(real_name) && alignof(twin::twin_name) <= 8)
#define CHECK_OFFSET(twin_name, member, real_name, real_member)                                                        \
    static_assert(offsetof(twin::twin_name, member) == offsetof(real_name, real_member))

CHECK_VALUE(success, CU_FILE_SUCCESS);
CHECK_VALUE(driver_not_initialized, CU_FILE_DRIVER_NOT_INITIALIZED);
CHECK_VALUE(driver_closing, CU_FILE_DRIVER_CLOSING);
CHECK_VALUE(platform_not_supported, CU_FILE_PLATFORM_NOT_SUPPORTED);
CHECK_VALUE(io_not_supported, CU_FILE_IO_NOT_SUPPORTED);
CHECK_VALUE(cuda_driver_error, CU_FILE_CUDA_DRIVER_ERROR);
CHECK_VALUE(cuda_pointer_invalid, CU_FILE_CUDA_POINTER_INVALID);
CHECK_VALUE(cuda_memory_type_invalid, CU_FILE_CUDA_MEMORY_TYPE_INVALID);
CHECK_VALUE(cuda_pointer_range_error, CU_FILE_CUDA_POINTER_RANGE_ERROR);
CHECK_VALUE(invalid_mapping_range, CU_FILE_INVALID_MAPPING_RANGE);
CHECK_VALUE(invalid_file_type, CU_FILE_INVALID_FILE_TYPE);
CHECK_VALUE(invalid_value, CU_FILE_INVALID_VALUE);
CHECK_VALUE(memory_already_registered, CU_FILE_MEMORY_ALREADY_REGISTERED);
CHECK_VALUE(memory_not_registered, CU_FILE_MEMORY_NOT_REGISTERED);
CHECK_VALUE(driver_already_open, CU_FILE_DRIVER_ALREADY_OPEN);
CHECK_VALUE(handle_not_registered, CU_FILE_HANDLE_NOT_REGISTERED);
CHECK_VALUE(handle_already_registered, CU_FILE_HANDLE_ALREADY_REGISTERED);
CHECK_VALUE(internal_error, CU_FILE_INTERNAL_ERROR);
CHECK_VALUE(batch_submit_failed, CU_FILE_BATCH_SUBMIT_FAILED);
CHECK_VALUE(batch_full, CU_FILE_BATCH_FULL);
CHECK_VALUE(no_memory, CU_FILE_NOMEM_ERROR);
CHECK_VALUE(io_error, CU_FILE_IO_ERROR);
CHECK_VALUE(max_status, CU_FILE_IO_MAX_ERROR);

CHECK_VALUE(opaque_fd, CU_FILE_HANDLE_TYPE_OPAQUE_FD);
CHECK_VALUE(userspace_fs, CU_FILE_HANDLE_TYPE_USERSPACE_FS);
CHECK_VALUE(opcode_read, CUFILE_READ);
CHECK_VALUE(opcode_write, CUFILE_WRITE);
CHECK_VALUE(mode_batch, CUFILE_BATCH);
CHECK_VALUE(io_waiting, CUFILE_WAITING);
CHECK_VALUE(io_pending, CUFILE_PENDING);
CHECK_VALUE(io_invalid, CUFILE_INVALID);
CHECK_VALUE(io_canceled, CUFILE_CANCELED);
CHECK_VALUE(io_complete, CUFILE_COMPLETE);
CHECK_VALUE(io_timeout, CUFILE_TIMEOUT);
CHECK_VALUE(io_failed, CUFILE_FAILED);
CHECK_VALUE(fixed_buffer_offset, CU_FILE_STREAM_FIXED_BUF_OFFSET);
CHECK_VALUE(fixed_file_offset, CU_FILE_STREAM_FIXED_FILE_OFFSET);
CHECK_VALUE(fixed_file_size, CU_FILE_STREAM_FIXED_FILE_SIZE);
CHECK_VALUE(page_aligned_inputs, CU_FILE_STREAM_PAGE_ALIGNED_INPUTS);

CHECK_SIZE(Error, CUfileError_t);
CHECK_SIZE(Description, CUfileDescr_t);
CHECK_SIZE(DriverProperties, CUfileDrvProps_t);
CHECK_SIZE(IoParameters, CUfileIOParams_t);
CHECK_OFFSET(IoParameters, batch.file_offset, CUfileIOParams_t, u.batch.file_offset);
CHECK_OFFSET(IoParameters, batch.length_bytes, CUfileIOParams_t, u.batch.size);
CHECK_OFFSET(IoParameters, cookie, CUfileIOParams_t, cookie);
CHECK_SIZE(IoEvent, CUfileIOEvents_t);
CHECK_OFFSET(IoEvent, result, CUfileIOEvents_t, ret);

CHECK_SIZE(IoVector, CUfileIOVec_t);
CHECK_SIZE(StatsLevel1, CUfileStatsLevel1_t);
CHECK_OFFSET(StatsLevel1, read_bytes, CUfileStatsLevel1_t, read_bytes);
CHECK_OFFSET(StatsLevel1, batch_submit_ops, CUfileStatsLevel1_t, batch_submit_ops);
CHECK_OFFSET(StatsLevel1, batch_p2p_submit_ops, CUfileStatsLevel1_t, batch_p2p_submit_ops);
CHECK_OFFSET(StatsLevel1, batch_posix_enqueued_ops, CUfileStatsLevel1_t, batch_posix_enqueued_ops);
CHECK_OFFSET(StatsLevel1, readv_ops, CUfileStatsLevel1_t, readv_ops);
CHECK_OFFSET(StatsLevel1, writev_latency_sum_us, CUfileStatsLevel1_t, writev_lat_sum_us);
CHECK_SIZE(StatsLevel2, CUfileStatsLevel2_t);
CHECK_OFFSET(StatsLevel2, write_size_kb_hist, CUfileStatsLevel2_t, write_size_kb_hist);
CHECK_SIZE(GpuStats, CUfilePerGpuStats_t);
CHECK_OFFSET(GpuStats, posix_reads, CUfilePerGpuStats_t, n_posix_reads);
CHECK_OFFSET(GpuStats, p2p_writes, CUfilePerGpuStats_t, n_p2p_writes);
CHECK_OFFSET(GpuStats, write_errors, CUfilePerGpuStats_t, n_writes_err);
CHECK_SIZE(StatsLevel3, CUfileStatsLevel3_t);
CHECK_OFFSET(StatsLevel3, gpus, CUfileStatsLevel3_t, per_gpu_stats);

int main() {}
