"""Observation of the system calls of one thread, with the errors that a case asks for (seccomp_unotify(2)).

The kernel stops the thread at each of the named calls and asks this process what to do. The thread runs the real
product on a real file system; nothing of the product is replaced.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import queue
import select
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SystemCall", "run_observed"]

_NUMBERS = {
    "x86_64": {
        "lseek": 8,
        "pread64": 17,
        "fcntl": 72,
        "flock": 73,
        "fsync": 74,
        "ftruncate": 77,
        "fchmod": 91,
        "fchown": 93,
        "fsetxattr": 190,
        "flistxattr": 196,
        "fadvise64": 221,
        "openat": 257,
        "unlinkat": 263,
        "renameat": 264,
        "linkat": 265,
        "preadv": 295,
        "renameat2": 316,
        "seccomp": 317,
        "preadv2": 327,
    },
    "aarch64": {
        "fsetxattr": 7,
        "flistxattr": 13,
        "fcntl": 25,
        "flock": 32,
        "unlinkat": 35,
        "linkat": 37,
        "renameat": 38,
        "ftruncate": 46,
        "fchmod": 52,
        "fchown": 55,
        "openat": 56,
        "lseek": 62,
        "pread64": 67,
        "preadv": 69,
        "fsync": 82,
        "fadvise64": 223,
        "renameat2": 276,
        "seccomp": 277,
        "preadv2": 286,
    },
}
_LIBC = ctypes.CDLL(None, use_errno=True)
_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8
_LOAD_NUMBER, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_RECEIVE, _SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
_REPLY = struct.Struct("=QqiI")


@dataclass(frozen=True, slots=True)
class SystemCall:
    """One call, before the kernel executes it.

    Attributes
    ----------
    name : str
        Name of the system call.
    path : str
        Path of the file whose descriptor is the first argument.
    arguments : tuple of int
        All six arguments as signed numbers.
    """

    name: str
    path: str
    arguments: tuple[int, ...]


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("len", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction)))


def run_observed(action: Callable[[], object], *names: str, reply: Callable[[SystemCall], int | None]) -> None:
    """Run `action` in a thread, and call `reply` before each system call of these names that the thread makes.

    If `reply` returns None, the kernel executes the call. If it returns a number, the call is not executed and has this
    result: minus an errno, or the value of a call that succeeds. Calls of other threads are not observed. But a thread
    that `action` starts has the filter, too, so threads that live longer must exist before. An exception of `action` is
    raised here.
    """
    numbers = _NUMBERS[platform.machine()]
    listeners: queue.SimpleQueue[int] = queue.SimpleQueue()

    def run() -> None:
        listener = -1
        try:
            listener = _install([numbers[name] for name in names], numbers["seccomp"])
        finally:
            listeners.put(listener)
        action()

    ended = os.eventfd(0)
    try:
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(run)
            future.add_done_callback(lambda _: os.eventfd_write(ended, 1))
            listener = listeners.get()
            if listener >= 0:
                try:
                    _serve(listener, ended, {numbers[name]: name for name in names}, reply)
                finally:
                    os.close(listener)  # A call that still waits then fails with ENOSYS.
            future.result()
    finally:
        os.close(ended)


def _install(numbers: list[int], seccomp: int) -> int:
    """Have the kernel report these calls of this thread, and return the descriptor that reports them."""
    jumps = [_Instruction(_JUMP_IF_EQUAL, len(numbers) - index, 0, each) for index, each in enumerate(numbers)]
    ends = [_Instruction(_RETURN, 0, 0, _ALLOW), _Instruction(_RETURN, 0, 0, _NOTIFY)]
    program = [_Instruction(_LOAD_NUMBER, 0, 0, 0), *jumps, *ends]
    filters = (_Instruction * len(program))(*program)
    _LIBC.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    listener = _LIBC.syscall(seccomp, _SET_MODE_FILTER, _NEW_LISTENER, ctypes.byref(_Program(len(program), filters)))
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return int(listener)


def _serve(listener: int, ended: int, names: dict[int, str], reply: Callable[[SystemCall], int | None]) -> None:
    """Answer until the action has ended."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(ended, select.POLLIN)
    while ended not in dict(poll.poll()):
        data = bytearray(_NOTIFICATION.size)
        try:
            fcntl.ioctl(listener, _RECEIVE, data)
        except OSError as error:
            if error.errno != errno.ENOENT:  # A signal interrupted the call; the thread makes it again.
                raise
            continue
        number, _, _, call, _, _, *arguments = _NOTIFICATION.unpack(data)
        signed = tuple(each - (1 << 64) if each >> 63 else each for each in arguments)
        result = reply(SystemCall(names[call], _path_of(signed[0]), signed))
        flags = _CONTINUE if result is None else 0
        value, error_number = (result or 0, 0) if (result or 0) >= 0 else (0, result)
        fcntl.ioctl(listener, _SEND, _REPLY.pack(number, value, error_number, flags))


def _path_of(descriptor: int) -> str:
    try:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())
    except OSError:
        return ""
