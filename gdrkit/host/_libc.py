"""Calls of the C library that Python does not offer, by ctypes: prctl, renameat2, the address of a mapping."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mmap

__all__ = ["address_of", "die_with_parent", "file_system_type", "rename_new"]

# linux/fs.h.
_RENAME_NOREPLACE = 1
# linux/prctl.h.
_PR_SET_PDEATHSIG = 1


def address_of(mapping: mmap.mmap) -> int:
    """Return the address of the first byte. It is valid until the mapping is closed or resized."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends (prctl(2), PR_SET_PDEATHSIG).

    Parameters
    ----------
    parent : int
        Process ID of that thread. If that process has ended already, the calling process kills itself.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def file_system_type(descriptor: int) -> int:
    """Return the magic number of the file system that an open file lies on: fstatfs(2), ``f_type``.

    Raises
    ------
    OSError
        As of fstatfs(2).
    """
    # struct statfs begins with f_type, a long, and is never longer than this.
    status = (ctypes.c_ulong * 64)()
    library = ctypes.CDLL(None, use_errno=True)
    if library.fstatfs(descriptor, ctypes.byref(status)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return status[0]


def rename_new(name: str, new_name: str, *, folder: int, new_folder: int) -> None:
    """Rename a file, and refuse to replace an existing one: renameat2(2) with RENAME_NOREPLACE.

    On a file system that does not support the flag (EINVAL) the file is linked and unlinked, with the same refusal.

    Parameters
    ----------
    name, new_name : str
        Names in the folders.
    folder, new_folder : int
        Descriptors of the two folders.

    Raises
    ------
    OSError
        EEXIST if `new_name` exists; other numbers as renameat2(2) lists them.
    """
    done = _renameat2()(folder, os.fsencode(name), new_folder, os.fsencode(new_name), _RENAME_NOREPLACE)
    number = ctypes.get_errno()
    if done == 0:
        return
    if number not in {errno.EINVAL, errno.ENOSYS}:
        raise OSError(number, os.strerror(number), name, None, new_name)
    os.link(name, new_name, src_dir_fd=folder, dst_dir_fd=new_folder, follow_symlinks=False)
    os.unlink(name, dir_fd=folder)


@cache
def _renameat2() -> Any:
    function = ctypes.CDLL(None, use_errno=True).renameat2
    function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    function.restype = ctypes.c_int
    return function
