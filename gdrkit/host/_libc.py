"""Where the bytes of a Python buffer lie, and what of the C library Python has no name for.

Level 2. The one file of this room that has ctypes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mmap

__all__ = ["address_of", "die_with_parent", "rename_new"]

# linux/fs.h.
_RENAME_NOREPLACE = 1
# linux/prctl.h.
_PR_SET_PDEATHSIG = 1


def address_of(mapping: mmap.mmap) -> int:
    """The address of the first byte; it holds until the mapping is closed or resized."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that has started it ends: prctl(2), PR_SET_PDEATHSIG.

    Parameters
    ----------
    parent : int
        The process of that thread. Where it has ended before, this one ends now.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def rename_new(name: str, new_name: str, *, folder: int, new_folder: int) -> None:
    """renameat2(2) with RENAME_NOREPLACE: the new name must not be there.

    A file system that does not know the flag (EINVAL) gets a link and an unlink, which refuse the same.

    Raises
    ------
    OSError
        EEXIST: the new name is there; others as of renameat2(2).
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
