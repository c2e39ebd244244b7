"""Search for the ibv_pd pointer inside the protection domain objects of pyverbs before 59.

In those versions ``PD.pd`` treats an ``ibv_pd *`` as a Python object, and reading it crashes the interpreter. The
``PD`` object contains the pointer, at an offset that depends on the build. This module searches the object for the
pointer. A candidate is accepted only if the memory that it points to agrees with everything that pyverbs reports about
the domain. If no candidate or more than one is accepted, the result is None. Memory is read through /proc/self/mem,
because the kernel then reports an unmapped address as an error instead of a fault.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any

__all__ = ["find_domain_pointer"]

_POINTER_WORD = struct.Struct("@P")
# The beginning of struct ibv_pd: a pointer to its context, then its handle.
_DOMAIN_START = struct.Struct("@PI")
# The beginning of struct ibv_context: the device, a table of 32 operations, then cmd_fd (verbs.h; part of the ABI).
_COMMAND_FD_OFFSET = 8 + 32 * 8
_COMMAND_FD = struct.Struct("@i")


def find_domain_pointer(domain: Any, context: Any) -> int | None:
    """Return the ``ibv_pd *`` in a ``PD`` that was made from `context`, or None if no single candidate is accepted."""
    # One of the words of the `Context` object is the pointer to its ibv_context. It is not known which one.
    context_words, handle, command_fd = set(_read_words(context)), int(domain.handle), int(context.cmd_fd)
    try:
        memory_fd = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None  # Without /proc no candidate can be checked.
    try:
        accepted_words = {
            word
            for word in _read_words(domain)
            if (domain_start := _read_memory(memory_fd, word, _DOMAIN_START)) is not None
            and domain_start[0] in context_words
            and domain_start[1] == handle
            and _read_memory(memory_fd, domain_start[0] + _COMMAND_FD_OFFSET, _COMMAND_FD) == (command_fd,)
        }
    finally:
        os.close(memory_fd)
    return accepted_words.pop() if len(accepted_words) == 1 else None


def _read_words(instance: Any) -> list[int]:
    """Return the pointer-sized words of a Python object."""
    size_bytes = type(instance).__basicsize__ // _POINTER_WORD.size * _POINTER_WORD.size
    return [word for (word,) in _POINTER_WORD.iter_unpack(ctypes.string_at(id(instance), size_bytes))]


def _read_memory(memory_fd: int, address: int, layout: struct.Struct) -> tuple[Any, ...] | None:
    try:
        data = os.pread(memory_fd, layout.size, address)
    except (OSError, OverflowError):
        return None  # The address is not mapped, so the word is not a pointer.
    return layout.unpack(data) if len(data) == layout.size else None
