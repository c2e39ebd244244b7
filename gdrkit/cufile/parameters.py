"""The parameters of libcufile: functions that set and return them.

Parameters can be set only while the driver is closed. A new value is staged: it takes effect when the driver opens.
While the driver is closed, a query returns the staged value. Some versions of libcufile discard it when the driver
opens. The numbers of the parameters are taken from ``cufile.h`` 1.20. A libcufile that does not know a parameter
returns CU_FILE_INVALID_VALUE.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from gdrkit.cufile import _cufile, _layout
from gdrkit.errors import Api, Reason, Unsupported, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Flag",
    "Size",
    "Text",
    "flag",
    "keeps_staged_size",
    "limits",
    "posix_pool",
    "set_flag",
    "set_posix_pool",
    "set_size",
    "set_text",
    "size",
    "text",
]


class Size(enum.IntEnum):
    """Numeric parameters (``CUFileSizeTConfigParameter_t``). A name ends with the unit of the value, if it has one."""

    PROFILE_STATS = 0
    MAX_IO_QUEUE_DEPTH = 1
    MAX_IO_THREADS = 2
    MIN_IO_THRESHOLD_KB = 3
    MAX_REQUEST_PARALLELISM = 4
    MAX_DIRECT_IO_SIZE_KB = 5
    MAX_DEVICE_CACHE_SIZE_KB = 6
    PER_BUFFER_CACHE_SIZE_KB = 7
    MAX_DEVICE_PINNED_MEM_SIZE_KB = 8
    IO_BATCHSIZE = 9
    POLLTHRESHOLD_SIZE_KB = 10
    BATCH_IO_TIMEOUT_MS = 11


class Flag(enum.IntEnum):
    """Boolean parameters (``CUFileBoolConfigParameter_t``)."""

    USE_POLL_MODE = 0
    ALLOW_COMPAT_MODE = 1
    FORCE_COMPAT_MODE = 2
    FS_MISC_API_CHECK_AGGRESSIVE = 3
    PARALLEL_IO = 4
    ALLOW_SYSTEM_MEMORY = 6
    USE_PCIP2PDMA = 7
    PREFER_IO_URING = 8
    FORCE_ODIRECT_MODE = 9
    SKIP_TOPOLOGY_DETECTION = 10
    STREAM_MEMOPS_BYPASS = 11


class Text(enum.IntEnum):
    """Text parameters (``CUFileStringConfigParameter_t``)."""

    LOGGING_LEVEL = 0
    ENV_LOGFILE_PATH = 1
    LOG_DIR = 2


# The parameters that cuFileDriverGetProperties reports. libcufile 1.15 discards their staged values.
_PARAMETERS_IN_DRIVER_PROPERTIES = frozenset(
    {
        Size.MAX_DIRECT_IO_SIZE_KB,
        Size.MAX_DEVICE_CACHE_SIZE_KB,
        Size.PER_BUFFER_CACHE_SIZE_KB,
        Size.MAX_DEVICE_PINNED_MEM_SIZE_KB,
        Size.IO_BATCHSIZE,
        Size.POLLTHRESHOLD_SIZE_KB,
        Size.BATCH_IO_TIMEOUT_MS,
    }
)


def keeps_staged_size(parameter: Size, *, version: int) -> bool:
    """Return whether libcufile of this version (1150 is 1.15) keeps a staged value when the driver opens."""
    return parameter not in _PARAMETERS_IN_DRIVER_PROPERTIES or version >= _layout.STAGED_SIZES_VERSION_MIN


def size(parameter: Size) -> int:
    """Return the value of a numeric parameter."""
    return int(_cufile.call("cuFileGetParameterSizeT", "get_parameter_size_t", param=int(parameter)))


def limits(parameter: Size) -> tuple[int, int]:
    """Return the smallest and the largest valid value. If the largest value is 0, the limit depends on the GPU."""
    smallest, largest = _cufile.call(
        "cuFileGetParameterMinMaxValue", "get_parameter_min_max_value", param=int(parameter)
    )
    return int(smallest), int(largest)


def flag(parameter: Flag) -> bool:
    """Return the value of a boolean parameter."""
    return bool(_cufile.call("cuFileGetParameterBool", "get_parameter_bool", param=int(parameter)))


def text(parameter: Text) -> str:
    """Return the value of a text parameter."""
    return _cufile.get_string_parameter(int(parameter))


def set_size(parameter: Size, value: int) -> None:
    """Stage a numeric parameter.

    Raises
    ------
    ApiError
        CU_FILE_DRIVER_ALREADY_OPEN: the driver is open.
    Unsupported
        This libcufile would discard the value when the driver opens; see :func:`keeps_staged_size`.
    UsageError
        The value is negative.
    """
    if value < 0:
        message = f"{parameter.name} must be at least 0, not {value}"
        raise UsageError(message)
    if not keeps_staged_size(parameter, version=_cufile.library_version()):
        raise Unsupported(
            api=Api.CUFILE,
            operation="cuFileSetParameterSizeT",
            status=None,
            status_name="the driver discards the value when it opens",
            arguments={"param": parameter.name, "value": value, "version": _cufile.format_version()},
            reason=Reason.NOT_SUPPORTED,
            what_to_do="set the parameter in cufile.json, or install cuFile 1.18 or newer",
        )
    _cufile.call("cuFileSetParameterSizeT", "set_parameter_size_t", param=int(parameter), value=value)


def set_flag(parameter: Flag, value: bool) -> None:  # noqa: FBT001 - the value is a flag.
    """Stage a boolean parameter; see :func:`set_size`."""
    _cufile.call("cuFileSetParameterBool", "set_parameter_bool", param=int(parameter), value=value)


def set_text(parameter: Text, value: str) -> None:
    """Stage a text parameter; see :func:`set_size`."""
    _cufile.set_string_parameter(int(parameter), value)


def posix_pool(count: int = 3) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes in KiB and the counts of the pinned buffers of compat mode. `count` is the number of sizes."""
    return _cufile.get_slab_arrays(count)


def set_posix_pool(sizes_kib: Sequence[int], counts: Sequence[int]) -> None:
    """Stage the sizes and counts of the pinned buffers of compat mode; see :func:`set_size`."""
    if len(sizes_kib) != len(counts) or not sizes_kib:
        message = (
            f"sizes_kib and counts must have the same length of at least 1, not {len(sizes_kib)} and {len(counts)}"
        )
        raise UsageError(message)
    _cufile.set_slab_arrays(sizes_kib, counts)
