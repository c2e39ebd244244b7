"""The parameters of libcufile: staged while the driver is closed, in force while it is open.

Level 2. Reading one before the driver is open gives what is staged, which is not what an opened driver will use.
Numbers of ``cufile.h`` 1.20; a library that does not know one answers CU_FILE_INVALID_VALUE.
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
    "is_kept",
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
    """Parameters that are numbers (``CUFileSizeTConfigParameter_t``); their units are at the end."""

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
    """Parameters that are yes or no (``CUFileBoolConfigParameter_t``)."""

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
    """Parameters that are text (``CUFileStringConfigParameter_t``)."""

    LOGGING_LEVEL = 0
    ENV_LOGFILE_PATH = 1
    LOG_DIR = 2


# What Properties show.
_PROPERTIES = frozenset(
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


def is_kept(which: Size, *, version: int) -> bool:
    """Whether a driver of this version of libcufile (1150 is 1.15), once open, still has what was staged."""
    return which not in _PROPERTIES or version >= _layout.STAGED_SIZES_SINCE


def size(which: Size) -> int:
    """A number."""
    return int(_cufile.call("cuFileGetParameterSizeT", "get_parameter_size_t", param=int(which)))


def limits(which: Size) -> tuple[int, int]:
    """Least and most that a number may be set to; a most of 0 is one that depends on the GPU."""
    least, most = _cufile.call("cuFileGetParameterMinMaxValue", "get_parameter_min_max_value", param=int(which))
    return int(least), int(most)


def flag(which: Flag) -> bool:
    """Yes or no."""
    return bool(_cufile.call("cuFileGetParameterBool", "get_parameter_bool", param=int(which)))


def text(which: Text) -> str:
    """A text."""
    return _cufile.string_parameter(int(which))


def set_size(which: Size, value: int) -> None:
    """Stage a number.

    Raises
    ------
    ApiError
        CU_FILE_DRIVER_ALREADY_OPEN: only while the driver is closed.
    Unsupported
        This libcufile would forget it as soon as the driver is open; see :func:`is_kept`.
    UsageError
        It is negative.
    """
    if value < 0:
        message = f"{which.name} cannot be {value}"
        raise UsageError(message)
    if not is_kept(which, version=_cufile.library_version()):
        raise Unsupported(
            api=Api.CUFILE,
            operation="cuFileSetParameterSizeT",
            status=None,
            status_name="forgotten when the driver opens",
            arguments={"param": which.name, "value": value, "version": _cufile.version_text()},
            reason=Reason.NOT_SUPPORTED,
            what_to_do="set it in cufile.json, or install cuFile 1.18 or newer",
        )
    _cufile.call("cuFileSetParameterSizeT", "set_parameter_size_t", param=int(which), value=value)


def set_flag(which: Flag, value: bool) -> None:  # noqa: FBT001 - the value is a flag.
    """Stage a flag; as :func:`set_size`."""
    _cufile.call("cuFileSetParameterBool", "set_parameter_bool", param=int(which), value=value)


def set_text(which: Text, value: str) -> None:
    """Stage a text; as :func:`set_size`."""
    _cufile.set_string_parameter(int(which), value)


def posix_pool(count: int = 3) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes in KiB and counts of the pinned buffers of compat mode; `count` is how many sizes there are."""
    return _cufile.slab_arrays(count)


def set_posix_pool(sizes_kib: Sequence[int], counts: Sequence[int]) -> None:
    """Stage them; as :func:`set_size`."""
    if len(sizes_kib) != len(counts) or not sizes_kib:
        message = f"{len(sizes_kib)} sizes and {len(counts)} counts belong to no pool"
        raise UsageError(message)
    _cufile.set_slab_arrays(sizes_kib, counts)
