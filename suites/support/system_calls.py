"""Error injection: observe the system calls of one thread, and make some calls fail (seccomp_unotify(2)).

At each observed system call, the kernel stops the thread and notifies this process. This process lets the kernel
execute the call, or chooses the result that the thread gets instead. The thread runs the unchanged product on a real
file system.
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

__all__ = ["SystemCall", "run_with_intercepted_calls"]

# System call numbers by machine and name.
_CALL_NUMBERS = {
    "x86_64": {
        "lseek": 8,
        "pread64": 17,
        "fcntl": 72,
        "flock": 73,
        "fsync": 74,
        "fdatasync": 75,
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
        "fdatasync": 83,
        "fadvise64": 223,
        "renameat2": 276,
        "seccomp": 277,
        "preadv2": 286,
    },
}
_LIBC = ctypes.CDLL(None, use_errno=True)
# PR_SET_NO_NEW_PRIVS (linux/prctl.h).
_SET_NO_NEW_PRIVS = 38
# SECCOMP_SET_MODE_FILTER and SECCOMP_FILTER_FLAG_NEW_LISTENER (linux/seccomp.h), operation and flag of seccomp(2).
_SET_MODE_FILTER, _FLAG_NEW_LISTENER = 1, 8
# Instructions of the BPF program: BPF_LD | BPF_W | BPF_ABS, BPF_JMP | BPF_JEQ | BPF_K and BPF_RET | BPF_K.
_LOAD_CALL_NUMBER, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
# Return values of the BPF program: SECCOMP_RET_ALLOW and SECCOMP_RET_USER_NOTIF.
_RETURN_ALLOW, _RETURN_NOTIFY = 0x7FFF0000, 0x7FC00000
# SECCOMP_IOCTL_NOTIF_RECV and SECCOMP_IOCTL_NOTIF_SEND, ioctls of the listener, and SECCOMP_USER_NOTIF_FLAG_CONTINUE, a
# flag of a reply.
_IOCTL_RECEIVE, _IOCTL_SEND, _REPLY_CONTINUE = 0xC0502100, 0xC0182101, 1
# struct seccomp_notif (id, pid, flags, call number, machine, instruction pointer, six arguments) and
# struct seccomp_notif_resp (id, return value, negative errno, flags).
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
_REPLY = struct.Struct("=QqiI")


@dataclass(frozen=True, slots=True)
class SystemCall:
    """A system call that the thread made and that the kernel has not yet executed.

    Attributes
    ----------
    name : str
        Name of the system call.
    path : str
        Path of the file whose descriptor is the first argument; empty if the first argument is not a descriptor.
    arguments : tuple of int
        All six arguments as signed numbers.
    """

    name: str
    path: str
    arguments: tuple[int, ...]


class _Instruction(ctypes.Structure):
    """struct sock_filter."""

    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("len", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction)))


def run_with_intercepted_calls(
    action: Callable[[], object], *call_names: str, reply: Callable[[SystemCall], int | None]
) -> None:
    """Run `action` in a thread, and call `reply` before each system call of these names that the thread makes.

    If `reply` returns None, the kernel executes the call. If `reply` returns a number, the call is not executed and
    returns this number: a negative errno, or the result of a successful call.

    The threads that `action` starts inherit the filter, and are observed too. After `action` returns, observed calls of
    these threads get no reply, and fail. So a thread that outlives `action` must be started before the call of this
    function. Calls of other threads are not observed. An exception of `action` is raised here.
    """
    call_numbers = _CALL_NUMBERS[platform.machine()]
    listener_queue: queue.SimpleQueue[int] = queue.SimpleQueue()

    def install_filter_and_act() -> None:
        listener_fd = -1
        try:
            listener_fd = _install_filter([call_numbers[name] for name in call_names], call_numbers["seccomp"])
        finally:
            listener_queue.put(listener_fd)
        action()

    end_event_fd = os.eventfd(0)
    try:
        with ThreadPoolExecutor(1) as executor:
            future = executor.submit(install_filter_and_act)
            future.add_done_callback(lambda _: os.eventfd_write(end_event_fd, 1))
            listener_fd = listener_queue.get()
            if listener_fd >= 0:
                try:
                    _serve(listener_fd, end_event_fd, {call_numbers[name]: name for name in call_names}, reply)
                finally:
                    os.close(listener_fd)  # A call that still waits for a reply then fails with ENOSYS.
            future.result()
    finally:
        os.close(end_event_fd)


def _install_filter(call_numbers: list[int], seccomp_number: int) -> int:
    """Install a filter for these calls in this thread, and return the descriptor for its notifications."""
    # If the call number matches, the filter jumps to the last instruction, which notifies this process. Otherwise it
    # reaches the instruction before the last, which allows the call.
    jump_instructions = [
        _Instruction(_JUMP_IF_EQUAL, len(call_numbers) - index, 0, call_number)
        for index, call_number in enumerate(call_numbers)
    ]
    return_instructions = [_Instruction(_RETURN, 0, 0, _RETURN_ALLOW), _Instruction(_RETURN, 0, 0, _RETURN_NOTIFY)]
    program = [_Instruction(_LOAD_CALL_NUMBER, 0, 0, 0), *jump_instructions, *return_instructions]
    instruction_array = (_Instruction * len(program))(*program)
    # Without privileges, seccomp(2) requires this attribute of the thread.
    _LIBC.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    listener_fd = _LIBC.syscall(
        seccomp_number, _SET_MODE_FILTER, _FLAG_NEW_LISTENER, ctypes.byref(_Program(len(program), instruction_array))
    )
    if listener_fd < 0:
        raise OSError(ctypes.get_errno(), "seccomp(SECCOMP_SET_MODE_FILTER) failed")
    return int(listener_fd)


def _serve(
    listener_fd: int, end_event_fd: int, name_by_number: dict[int, str], reply: Callable[[SystemCall], int | None]
) -> None:
    """Reply to the notifications until the event descriptor `end_event_fd` is readable."""
    poll = select.poll()
    poll.register(listener_fd, select.POLLIN)
    poll.register(end_event_fd, select.POLLIN)
    while end_event_fd not in dict(poll.poll()):
        notification_data = bytearray(_NOTIFICATION.size)
        try:
            fcntl.ioctl(listener_fd, _IOCTL_RECEIVE, notification_data)
        except OSError as error:
            # ENOENT: a signal interrupted the system call, and the thread makes it again.
            if error.errno != errno.ENOENT:
                raise
            continue
        notification_id, _, _, call_number, _, _, *arguments = _NOTIFICATION.unpack(notification_data)
        signed_arguments = tuple(argument - (1 << 64) if argument >> 63 else argument for argument in arguments)
        result = reply(
            SystemCall(name_by_number[call_number], _read_descriptor_path(signed_arguments[0]), signed_arguments)
        )
        flags = _REPLY_CONTINUE if result is None else 0
        return_value, negative_errno = (result or 0, 0) if (result or 0) >= 0 else (0, result)
        fcntl.ioctl(listener_fd, _IOCTL_SEND, _REPLY.pack(notification_id, return_value, negative_errno, flags))


def _read_descriptor_path(descriptor: int) -> str:
    try:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())
    except OSError:
        return ""
