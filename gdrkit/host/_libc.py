"""Functions of the C library that Python lacks, by ctypes: prctl, capset, setfsuid, fstatfs, renameat2, inotify."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import signal
import struct
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterator, Sequence

__all__ = [
    "acting_as",
    "address_of",
    "allow_set_group_id",
    "die_with_parent",
    "drop_write_capabilities",
    "file_system_type",
    "read_removed_names",
    "rename_without_replacing",
    "separate_umask",
    "watch_removed_names",
]

# The constants in this block are from the Linux headers that the comments name.
# linux/fs.h.
_RENAME_NOREPLACE = 1
# linux/prctl.h.
_PR_SET_PDEATHSIG = 1
# linux/capability.h. Version 3 has two words, and each has an effective, a permitted and an inheritable set.
_CAPABILITY_VERSION = 0x20080522
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH, _CAP_FSETID, _CAP_SYS_RESOURCE = 1, 2, 4, 24
# asm/unistd.h: the number of setgroups(2). The system call changes only the calling thread, but the function of the C
# library changes all threads.
_SYS_SETGROUPS_BY_MACHINE = {"x86_64": 116, "aarch64": 159}
# linux/sched.h.
_CLONE_FS = 0x200
# linux/inotify.h.
_IN_MOVED_FROM, _IN_DELETE, _IN_Q_OVERFLOW = 0x40, 0x200, 0x4000
# The first fields of struct inotify_event: wd, mask, cookie, len. The name has `len` bytes and is padded with zeros.
_INOTIFY_EVENT = struct.Struct("=iIII")
_INOTIFY_READ_BYTES = 1 << 16


def address_of(mapping: mmap.mmap) -> int:
    """Return the address of the first byte of `mapping`. It is valid until the mapping is closed or resized."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def die_with_parent(parent_process_id: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends (prctl(2), PR_SET_PDEATHSIG).

    Parameters
    ----------
    parent_process_id : int
        ID of the parent process. If the parent has already ended, this function kills the calling process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent_process_id:
        os.kill(os.getpid(), signal.SIGKILL)


def drop_write_capabilities() -> None:
    """Give up CAP_FSETID and CAP_SYS_RESOURCE in this thread and in the threads that it starts later: capset(2).

    Then the kernel treats writes of root as writes of any user: it clears the set-user-ID and set-group-ID bits of a
    file that is written, and it enforces the disk quotas of the file system. Blocks that ext4 reserves for root stay
    usable, because the user of the thread is still root.

    Raises
    ------
    OSError
        The errors of capset(2).
    """
    _change_effective_capabilities(remove=1 << _CAP_FSETID | 1 << _CAP_SYS_RESOURCE)


def allow_set_group_id() -> None:
    """Let this thread of root set the set-group-ID bit of any folder again, after :func:`drop_write_capabilities`.

    Raises
    ------
    OSError
        EPERM: the process does not have CAP_FSETID.
    """
    _change_effective_capabilities(add=1 << _CAP_FSETID)


def _change_effective_capabilities(*, add: int = 0, remove: int = 0) -> int:
    """Change the effective capabilities of this thread, and return the new set. Bit N of a set is capability N."""
    library = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    # The effective, permitted and inheritable set of the capabilities 0 to 31, then of the capabilities 32 to 63.
    capability_sets = (ctypes.c_uint32 * 6)()
    was_read = library.capget(header, capability_sets) == 0
    capability_sets[0] = (capability_sets[0] | add) & ~remove
    if not was_read or library.capset(header, capability_sets) != 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, os.strerror(error_number))
    return capability_sets[0]


@contextlib.contextmanager
def acting_as(uid: int, gid: int, groups: Sequence[int]) -> Iterator[None]:
    """Let this thread of root use files with the rights of another user until the block ends: setfsuid(2).

    Other threads keep their rights. For a user other than root, the kernel also takes away the capabilities of root for
    files. If SECBIT_NO_SETUID_FIXUP is set (prctl(2), SecureBits= of systemd), the thread keeps them, and
    this function raises an error.

    Raises
    ------
    OSError
        EPERM: this thread may not act as that user. Other errors are errors of setgroups(2).
    """
    previous_uid, previous_gid = _read_file_ids()
    previous_groups = os.getgroups()
    try:
        _set_thread_groups(groups)
        _set_file_ids(uid, gid)
        if uid != 0 and _change_effective_capabilities() & (1 << _CAP_DAC_OVERRIDE | 1 << _CAP_DAC_READ_SEARCH):
            raise OSError(errno.EPERM, f"acting as user {uid}, this thread keeps the capabilities of root")
        yield
    finally:
        _set_file_ids(previous_uid, previous_gid)
        _set_thread_groups(previous_groups)


def _read_file_ids() -> tuple[int, int]:
    """Return the user and the group with whose rights this thread uses files."""
    library = ctypes.CDLL(None)
    # A call with an invalid ID (all ones) changes nothing and returns the current ID.
    current_ids = [set_id(ctypes.c_uint32(0xFFFFFFFF)) & 0xFFFFFFFF for set_id in (library.setfsuid, library.setfsgid)]
    return current_ids[0], current_ids[1]


def _set_file_ids(uid: int, gid: int) -> None:
    library = ctypes.CDLL(None)
    library.setfsgid(ctypes.c_uint32(gid))
    library.setfsuid(ctypes.c_uint32(uid))
    # setfsuid and setfsgid report no errors, so the result is read back.
    if _read_file_ids() != (uid, gid):
        raise OSError(errno.EPERM, f"this thread may not act as user {uid} and group {gid}")


def _set_thread_groups(groups: Sequence[int]) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    group_ids = (ctypes.c_uint32 * len(groups))(*groups)
    if library.syscall(_SYS_SETGROUPS_BY_MACHINE[platform.machine()], ctypes.c_size_t(len(groups)), group_ids) != 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, os.strerror(error_number))


def separate_umask() -> None:
    """Give this thread a umask of its own instead of the umask of the process, and set it to 0: unshare(2), CLONE_FS.

    Raises
    ------
    OSError
        The errors of unshare(2).
    """
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(_CLONE_FS) != 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, os.strerror(error_number))
    os.umask(0)


def file_system_type(descriptor: int) -> int:
    """Return the magic number of the file system that an open file lies on: fstatfs(2), ``f_type``.

    Raises
    ------
    OSError
        The errors of fstatfs(2).
    """
    # The first field of struct statfs is f_type, a long. The buffer is larger than the struct on every architecture.
    statfs_words = (ctypes.c_ulong * 64)()
    library = ctypes.CDLL(None, use_errno=True)
    if library.fstatfs(descriptor, ctypes.byref(statfs_words)) != 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, os.strerror(error_number))
    return statfs_words[0]


def rename_without_replacing(name: str, new_name: str, *, folder_fd: int, new_folder_fd: int) -> None:
    """Rename a file, and refuse to replace an existing one: renameat2(2) with RENAME_NOREPLACE.

    If the kernel (ENOSYS) or the file system (EINVAL) does not support this, the function links the new name and
    unlinks the old one. link(2) also refuses to replace an existing file.

    Parameters
    ----------
    name, new_name : str
        Old and new name of the file, each in its folder.
    folder_fd, new_folder_fd : int
        Descriptors of the folders of the old and of the new name.

    Raises
    ------
    OSError
        EEXIST: `new_name` exists. Other errors are errors of renameat2(2).
    """
    result = _load_renameat2()(folder_fd, os.fsencode(name), new_folder_fd, os.fsencode(new_name), _RENAME_NOREPLACE)
    error_number = ctypes.get_errno()
    if result == 0:
        return
    if error_number not in {errno.EINVAL, errno.ENOSYS}:
        raise OSError(error_number, os.strerror(error_number), name, None, new_name)
    os.link(name, new_name, src_dir_fd=folder_fd, dst_dir_fd=new_folder_fd, follow_symlinks=False)
    os.unlink(name, dir_fd=folder_fd)


@cache
def _load_renameat2() -> Any:
    function = ctypes.CDLL(None, use_errno=True).renameat2
    function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    function.restype = ctypes.c_int
    return function


def watch_removed_names(folder_fd: int) -> int:
    """Return a descriptor that reports the names that are removed from a folder from now on: inotify(7).

    The descriptor is readable when :func:`read_removed_names` has names to return. The caller closes it.

    Raises
    ------
    OSError
        EMFILE: this user has too many instances of inotify. ENOSPC: this user watches too many folders.
    """
    library = ctypes.CDLL(None, use_errno=True)
    descriptor = library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    path = os.fsencode(f"/proc/self/fd/{folder_fd}")
    if descriptor < 0 or library.inotify_add_watch(descriptor, path, _IN_DELETE | _IN_MOVED_FROM) < 0:
        error_number = ctypes.get_errno()
        if descriptor >= 0:
            os.close(descriptor)
        raise OSError(error_number, os.strerror(error_number))
    return int(descriptor)


def read_removed_names(descriptor: int) -> list[str] | None:
    """Return the next removed names (at most 64 KiB of event data), or None if the kernel has dropped some names.

    `descriptor` is the result of :func:`watch_removed_names`. The list is empty if no name was removed since the last
    call.
    """
    try:
        data = os.read(descriptor, _INOTIFY_READ_BYTES)
    except BlockingIOError:
        return []
    removed_names = []
    offset = 0
    while offset < len(data):
        _watch, mask, _cookie, name_bytes = _INOTIFY_EVENT.unpack_from(data, offset)
        offset += _INOTIFY_EVENT.size
        if mask & _IN_Q_OVERFLOW:
            return None
        removed_names.append(os.fsdecode(data[offset : offset + name_bytes].rstrip(b"\0")))
        offset += name_bytes
    return removed_names
