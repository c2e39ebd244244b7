"""The memory layout of the statistics of libcufile in each of its versions.

The statistics have three levels, one after another in one buffer. cuFile 1.19 made the first level longer, which moved
the other levels. The Python bindings know the layout of only one version, so new bindings read wrong numbers from
libcufile 1.15. This module decodes the buffer with the layout of the library that has filled it. Source: ``cufile.h``
of 1.15, 1.18, 1.19 and 1.20.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "BUFFER_BYTES",
    "STAGED_SIZES_VERSION_MIN",
    "STATISTICS_VERSION_MIN",
    "SUM_AND_COUNT_BY_AVERAGE",
    "VECTORS_VERSION_MIN",
    "unpack_basic_counters",
    "unpack_gpu_counters",
    "unpack_histograms",
]

# Each constant is the first version of libcufile with a feature, in the form of cuFileGetVersion: 1000 x major + 10 x
# minor.
STATISTICS_VERSION_MIN = 1150
VECTORS_VERSION_MIN = 1190
# cuFile 1.15 discards some sizes that were set before the driver opens (see parameters.py), and 1.18 keeps them. The
# versions between them were not tested.
STAGED_SIZES_VERSION_MIN = 1180
# Size in bytes of the buffer that libcufile fills. It is larger than the statistics of any version.
BUFFER_BYTES = 8192

# Names of the counters in the order of the header. The first level has three groups: reads and writes, batches, and
# vectored reads and writes. Each group has pairs of counters (successes and errors), and then single counters.
_READ_WRITE_PAIRS = (
    "read_ops",
    "write_ops",
    "hdl_register_ops",
    "hdl_deregister_ops",
    "buf_register_ops",
    "buf_deregister_ops",
)
_READ_WRITE_SINGLES = (
    "read_bytes",
    "write_bytes",
    "read_bw_bytes_per_sec",
    "write_bw_bytes_per_sec",
    "read_lat_avg_us",
    "write_lat_avg_us",
    "read_ops_per_sec",
    "write_ops_per_sec",
    "read_lat_sum_us",
    "write_lat_sum_us",
)
_BATCH_PAIRS = (
    "batch_submit_ops",
    "batch_complete_ops",
    "batch_setup_ops",
    "batch_cancel_ops",
    "batch_destroy_ops",
    "batch_enqueued_ops",
    "batch_posix_enqueued_ops",
    "batch_processed_ops",
    "batch_posix_processed_ops",
    "batch_nvfs_submit_ops",
    "batch_p2p_submit_ops",
    "batch_aio_submit_ops",
    "batch_iouring_submit_ops",
    "batch_mixed_io_submit_ops",
    "batch_total_submit_ops",
)
_BATCH_SINGLES = (
    "batch_read_bytes",
    "batch_write_bytes",
    "batch_read_bw_bytes",
    "batch_write_bw_bytes",
    "batch_submit_lat_avg_us",
    "batch_completion_lat_avg_us",
    "batch_submit_ops_per_sec",
    "batch_complete_ops_per_sec",
    "batch_submit_lat_sum_us",
    "batch_completion_lat_sum_us",
    "last_batch_read_bytes",
    "last_batch_write_bytes",
)
_VECTOR_PAIRS = ("readv_ops", "writev_ops")
_VECTOR_SINGLES = (
    "readv_bytes",
    "writev_bytes",
    "readv_bw_bytes_per_sec",
    "writev_bw_bytes_per_sec",
    "readv_lat_avg_us",
    "writev_lat_avg_us",
    "readv_ops_per_sec",
    "writev_ops_per_sec",
    "readv_lat_sum_us",
    "writev_lat_sum_us",
)
# Two counters for the name of each average of the first level: libcufile divides the first counter (a sum) by the
# second one (a count of operations).
SUM_AND_COUNT_BY_AVERAGE: Mapping[str, tuple[str, str]] = {
    "read_lat_avg_us": ("read_lat_sum_us", "read_ops"),
    "write_lat_avg_us": ("write_lat_sum_us", "write_ops"),
    "batch_submit_lat_avg_us": ("batch_submit_lat_sum_us", "batch_submit_ops"),
    "batch_completion_lat_avg_us": ("batch_completion_lat_sum_us", "batch_complete_ops"),
    "readv_lat_avg_us": ("readv_lat_sum_us", "readv_ops"),
    "writev_lat_avg_us": ("writev_lat_sum_us", "writev_ops"),
}
# The second level has two histograms of 32 counters each: first of read sizes, then of write sizes. The third level has
# the number of GPUs, and then for each GPU its UUID and these counters.
_GPU_COUNTER_NAMES = (
    "read_bytes",
    "read_bw_bytes_per_sec",
    "read_utilization",
    "read_duration_us",
    "n_total_reads",
    "n_p2p_reads",
    "n_nvfs_reads",
    "n_posix_reads",
    "n_unaligned_reads",
    "n_dr_reads",
    "n_sparse_regions",
    "n_inline_regions",
    "n_reads_err",
    "writes_bytes",
    "write_bw_bytes_per_sec",
    "write_utilization",
    "write_duration_us",
    "n_total_writes",
    "n_p2p_writes",
    "n_nvfs_writes",
    "n_posix_writes",
    "n_unaligned_writes",
    "n_dr_writes",
    "n_writes_err",
    "n_mmap",
    "n_mmap_ok",
    "n_mmap_err",
    "n_mmap_free",
    "reg_bytes",
)
_COUNTER_BYTES = 8
_UUID_BYTES = 16
_HISTOGRAM_COUNTERS = 32
_GPUS_MAX = 16


def _list_basic_counter_names(version: int) -> Iterator[str]:
    """Yield the names of the counters of the first level in their order."""
    groups = [(_READ_WRITE_PAIRS, _READ_WRITE_SINGLES), (_BATCH_PAIRS, _BATCH_SINGLES)]
    if version >= VECTORS_VERSION_MIN:
        groups.append((_VECTOR_PAIRS, _VECTOR_SINGLES))
    for pair_names, single_names in groups:
        for pair_name in pair_names:
            yield pair_name
            yield f"{pair_name}_err"
        yield from single_names


def unpack_basic_counters(buffer: bytes, *, version: int) -> Mapping[str, int]:
    """Return the counters of the first level by their names in the header.

    A counter X of successes and errors becomes two entries, ``X`` and ``X_err``.
    """
    names = tuple(_list_basic_counter_names(version))
    return dict(zip(names, struct.unpack_from(f"<{len(names)}Q", buffer), strict=True))


def unpack_histograms(buffer: bytes, *, version: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the histograms of read sizes and of write sizes, from the second level."""
    offset = _count_basic_bytes(version)
    counts = struct.unpack_from(f"<{2 * _HISTOGRAM_COUNTERS}Q", buffer, offset)
    return counts[:_HISTOGRAM_COUNTERS], counts[_HISTOGRAM_COUNTERS:]


def unpack_gpu_counters(buffer: bytes, *, version: int) -> Iterator[tuple[bytes, Mapping[str, int]]]:
    """Yield the UUID and the counters of each GPU, from the third level of the buffer."""
    offset = _count_basic_bytes(version) + 2 * _HISTOGRAM_COUNTERS * _COUNTER_BYTES
    (gpu_count,) = struct.unpack_from("<I", buffer, offset)
    offset += 8  # The number of GPUs has 4 bytes, and 4 bytes of padding follow.
    gpu_entry = struct.Struct(f"<{_UUID_BYTES}s{len(_GPU_COUNTER_NAMES)}Q")
    for gpu_index in range(min(gpu_count, _GPUS_MAX)):
        uuid, *counter_values = gpu_entry.unpack_from(buffer, offset + gpu_index * gpu_entry.size)
        yield uuid, dict(zip(_GPU_COUNTER_NAMES, counter_values, strict=True))


def _count_basic_bytes(version: int) -> int:
    """Return the size of the first level in bytes."""
    return len(tuple(_list_basic_counter_names(version))) * _COUNTER_BYTES
