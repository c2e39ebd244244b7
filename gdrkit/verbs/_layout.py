"""Where the objects of pyverbs before 59 keep the address of what they wrap.

Level 2. ``PD.pd`` of those versions takes an ``ibv_pd *`` for a Python object and crashes the interpreter. The pointer
itself lies in the object, at a place that the build decides. It is looked for there, and believed only when everything
that can be asked in a regular way agrees with what it points to; where nothing or more than one thing does, there is
no answer. Memory is read through the kernel, which refuses an address that is not mapped instead of faulting.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any

__all__ = ["find_domain"]

_WORD = struct.Struct("@P")
# struct ibv_pd: its context, then a number.
_DOMAIN = struct.Struct("@PI")
# struct ibv_context: device, the table of 32 operations, then cmd_fd (verbs.h, part of the ABI).
_COMMAND_FD_OFFSET = 8 + 32 * 8
_COMMAND_FD = struct.Struct("@i")


def find_domain(domain: Any, context: Any) -> int | None:
    """The ``ibv_pd *`` in a ``PD``, which was made from `context`; None when it cannot be told for certain."""
    contexts, handle, command_fd = set(_words(context)), int(domain.handle), int(context.cmd_fd)
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None  # Without /proc nothing can be proven.
    try:
        found = {
            word
            for word in _words(domain)
            if (inside := _read(memory, word, _DOMAIN)) is not None
            and inside[0] in contexts
            and inside[1] == handle
            and _read(memory, inside[0] + _COMMAND_FD_OFFSET, _COMMAND_FD) == (command_fd,)
        }
    finally:
        os.close(memory)
    return found.pop() if len(found) == 1 else None


def _words(thing: Any) -> list[int]:
    size_bytes = type(thing).__basicsize__ // _WORD.size * _WORD.size
    return [word for (word,) in _WORD.iter_unpack(ctypes.string_at(id(thing), size_bytes))]


def _read(memory: int, address: int, what: struct.Struct) -> tuple[Any, ...] | None:
    try:
        data = os.pread(memory, what.size, address)
    except (OSError, OverflowError):
        return None  # Nothing is mapped there, so the word was no pointer.
    return what.unpack(data) if len(data) == what.size else None
