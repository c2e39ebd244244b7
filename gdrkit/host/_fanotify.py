"""Reports of the kernel about opened files, from fanotify(7), called by ctypes.

The kernel reports every open of a file on a file system that a program has added (fanotify_mark(2)), through any mount
and by any process. This needs CAP_SYS_ADMIN and Linux 5.9. A report names the folder of the file by a handle, which
:func:`open_by_handle` opens (CAP_DAC_READ_SEARCH). Opens of folders and opens with O_PATH are not reported.
"""

from __future__ import annotations

import ctypes
import os
import struct
from dataclasses import dataclass
from functools import cache
from typing import Any

from gdrkit.handles import Closeable, Handle

__all__ = ["OpenReports", "OpenedFile", "open_by_handle"]

# These constants are from linux/fanotify.h.
_FAN_CLOEXEC, _FAN_NONBLOCK, _FAN_REPORT_DIR_FID, _FAN_REPORT_NAME = 0x1, 0x2, 0x400, 0x800
_FAN_MARK_ADD, _FAN_MARK_FILESYSTEM = 0x1, 0x100
_FAN_OPEN, _FAN_Q_OVERFLOW = 0x20, 0x4000
_INFO_TYPE_DFID_NAME = 2  # FAN_EVENT_INFO_TYPE_DFID_NAME
# struct fanotify_event_metadata: event_len, vers, reserved, metadata_len, mask, fd, pid.
_EVENT_METADATA = struct.Struct("=IBBHQii")
# struct fanotify_event_info_fid: info_type, pad, len, fsid, and the beginning of its struct file_handle: handle_bytes,
# handle_type.
_EVENT_INFO_HEADER = struct.Struct("=BBHQIi")
# struct file_handle begins with these two fields: handle_bytes, handle_type. The bytes of the handle follow.
_FILE_HANDLE_HEADER = struct.Struct("=Ii")
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class OpenedFile:
    """A report about one open, or about several opens of a file by one process since the last read.

    Attributes
    ----------
    file_system_id : int
        Id of the file system, as ``f_fsid`` of :func:`os.fstatvfs`.
    folder_handle : bytes
        Handle of the folder that contains the file; see :func:`open_by_handle`.
    name : bytes
        Name of the file in that folder.
    process_id : int
        Process that opened the file. 0 if it is outside the PID namespace of this process.
    """

    file_system_id: int
    folder_handle: bytes
    name: bytes
    process_id: int


class OpenReports(Closeable):
    """A queue of reports about opened files; a context manager.

    The kernel merges equal reports that were not read yet. If 16,384 reports (``max_queued_events``) were not read, the
    kernel drops further ones.

    Attributes
    ----------
    overflow_count : int
        Number of times that the kernel has dropped reports.

    Raises
    ------
    OSError
        EPERM: this process has no CAP_SYS_ADMIN. ENOSYS, EINVAL: the kernel is older than Linux 5.9.
    """

    def __init__(self) -> None:
        flags = _FAN_CLOEXEC | _FAN_NONBLOCK | _FAN_REPORT_DIR_FID | _FAN_REPORT_NAME
        self._descriptor = _raise_on_error(_find_function("fanotify_init")(flags, os.O_RDONLY), "fanotify_init")
        self.overflow_count = 0
        self._handle = Handle("host.fanotify")

    def fileno(self) -> int:
        """Return the descriptor, for poll(2)."""
        return self._descriptor

    def add_file_system(self, descriptor: int) -> None:
        """Report opens on the file system that contains the open file or folder `descriptor`.

        Raises
        ------
        OSError
            EPERM: this process lacks a capability. ENODEV, EOPNOTSUPP, EXDEV: the file system has no id or no file
            handles.
        """
        result = _find_function("fanotify_mark")(
            self._descriptor, _FAN_MARK_ADD | _FAN_MARK_FILESYSTEM, ctypes.c_uint64(_FAN_OPEN), descriptor, None
        )
        _raise_on_error(result, "fanotify_mark")

    def read(self) -> list[OpenedFile]:
        """Return the first reports of the queue (at most 64 KiB of event data), or an empty list, without waiting."""
        try:
            event_data = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return []
        opened_files = []
        offset = 0
        while offset < len(event_data):
            event_bytes, _, _, metadata_bytes, mask, _, process_id = _EVENT_METADATA.unpack_from(event_data, offset)
            if mask & _FAN_Q_OVERFLOW:
                self.overflow_count += 1
            elif event_bytes > metadata_bytes:
                opened_file = _parse_event_info(event_data, offset + metadata_bytes, process_id)
                if opened_file is not None:
                    opened_files.append(opened_file)
            offset += event_bytes
        return opened_files

    def close(self) -> None:
        """End the reports. A second close does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
            self._handle.release()


def open_by_handle(handle: bytes, *, mount_descriptor: int) -> int:
    """Open a folder by its handle, with O_PATH, and return the descriptor: open_by_handle_at(2).

    Parameters
    ----------
    handle : bytes
        The :attr:`OpenedFile.folder_handle` of a report.
    mount_descriptor : int
        Descriptor of a file or folder on the same file system. In /proc/self/fd, the path of the opened folder begins
        with the mount point through which this descriptor was opened.

    Raises
    ------
    OSError
        ESTALE: the folder was removed. EPERM: this process has no CAP_DAC_READ_SEARCH.
    """
    result = _find_function("open_by_handle_at")(mount_descriptor, handle, os.O_PATH | os.O_CLOEXEC)
    return _raise_on_error(result, "open_by_handle_at")


def _parse_event_info(event_data: bytes, offset: int, process_id: int) -> OpenedFile | None:
    """Return the report at this offset, or None if it does not name the folder of the file."""
    info_type, _, info_bytes, file_system_id, handle_bytes, _ = _EVENT_INFO_HEADER.unpack_from(event_data, offset)
    if info_type != _INFO_TYPE_DFID_NAME:
        return None
    # The handle of the folder begins with the last two fields of _EVENT_INFO_HEADER. The name of the file follows it.
    handle_offset = offset + _EVENT_INFO_HEADER.size - _FILE_HANDLE_HEADER.size
    name_offset = offset + _EVENT_INFO_HEADER.size + handle_bytes
    name = event_data[name_offset : offset + info_bytes].partition(b"\0")[0]
    return OpenedFile(file_system_id, event_data[handle_offset:name_offset], name, process_id)


def _raise_on_error(result: int, function_name: str) -> int:
    """Return `result`, or raise the error in errno if it is negative. The error has the function name as `filename`."""
    if result < 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, os.strerror(error_number), function_name)
    return result


@cache
def _find_function(name: str) -> Any:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.restype = ctypes.c_int
    return function
