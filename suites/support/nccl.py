"""Just enough of NCCL for an all-reduce over memory of ours: one communicator, that of one rank.

A rank is a process of its own (:mod:`support.nccl_rank`): a thread that has the communicators of several devices must
group whatever is collective, also their destruction, and one call outside a group waits for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
from ctypes import POINTER, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit import evidence

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["FUNCTIONS", "Communicator", "Nccl", "NcclError", "UniqueId", "folder_of_nccl", "loaded_library"]

_INT32, _SUM = 2, 0
_ELEMENT_BYTES = 4
UNIQUE_ID_BYTES = 128


class UniqueId(ctypes.Structure):
    """By what the ranks of a communicator find each other; NCCL takes it by value."""

    _fields_ = (("internal", ctypes.c_uint8 * UNIQUE_ID_BYTES),)


# As nccl.h declares them. Unless it is told, ctypes passes an integer as 32 bits, and so cuts addresses and handles.
FUNCTIONS: dict[str, tuple[type, ...]] = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(UniqueId),),
    "ncclCommInitRank": (POINTER(c_void_p), c_int, UniqueId, c_int),
    "ncclCommRegister": (c_void_p, c_void_p, c_size_t, POINTER(c_void_p)),
    "ncclCommDeregister": (c_void_p, c_void_p),
    "ncclAllReduce": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclCommDestroy": (c_void_p,),
}


class NcclError(RuntimeError):
    """A call of NCCL failed."""


class Nccl:
    """The library: that of the package nvidia-nccl, else what the loader finds."""

    def __init__(self) -> None:
        folder = folder_of_nccl()
        self._library = ctypes.CDLL("libnccl.so.2" if folder is None else str(folder / "lib" / "libnccl.so.2"))
        for name, arguments in FUNCTIONS.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, c_int
        for name, argument in (("ncclGetErrorString", c_int), ("ncclGetLastError", c_void_p)):
            function = getattr(self._library, name)
            function.argtypes, function.restype = (argument,), ctypes.c_char_p

    @property
    def version(self) -> int:
        """E.g. 22809 for 2.28.9."""
        found = c_int()
        self.call("ncclGetVersion", ctypes.byref(found))
        return found.value

    def unique_id(self) -> bytes:
        """A new one; a thread of this process brings the ranks together."""
        found = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(found))
        return bytes(found)

    def call(self, name: str, *arguments: object) -> None:
        """Call a function.

        Raises
        ------
        NcclError
            With its name, its status and what NCCL says of that.
        """
        status = getattr(self._library, name)(*arguments)
        if status:
            said = [self._library.ncclGetErrorString(status), self._library.ncclGetLastError(None)]
            words = " / ".join((each or b"").decode(errors="replace").strip() for each in said)
            message = f"{name} failed: {status}: {words}"
            raise NcclError(message)


class Communicator:
    """That of this process, on the device that is current on this thread; returns when all ranks are there."""

    def __init__(self, nccl: Nccl, *, rank: int, ranks_count: int, unique_id: bytes) -> None:
        self._nccl = nccl
        self._handle = c_void_p()
        named = UniqueId.from_buffer_copy(unique_id)
        nccl.call("ncclCommInitRank", ctypes.byref(self._handle), ranks_count, named, rank)

    @contextlib.contextmanager
    def registered(self, address: int, length_bytes: int) -> Iterator[None]:
        """Memory of the device is known to the communicator."""
        handle = c_void_p()
        self._nccl.call("ncclCommRegister", self._handle, address, length_bytes, ctypes.byref(handle))
        try:
            yield
        finally:
            self._nccl.call("ncclCommDeregister", self._handle, handle)

    def all_reduce(self, source: int, target: int, *, length_bytes: int, stream: int) -> None:
        """Queue the sum of the sources of all ranks, as 32-bit integers, into `target`."""
        count = length_bytes // _ELEMENT_BYTES
        self._nccl.call("ncclAllReduce", source, target, count, _INT32, _SUM, self._handle, stream)

    def close(self) -> None:
        """Destroy it, after its last work was waited for; returns when all ranks have come to this."""
        self._nccl.call("ncclCommDestroy", self._handle)


def folder_of_nccl() -> Path | None:
    """Of the package nvidia-nccl, with its library and its header."""
    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    folders = [] if found is None else [Path(each) for each in found.submodule_search_locations or []]
    return next((each for each in folders if (each / "lib" / "libnccl.so.2").exists()), None)


def loaded_library() -> dict[str, str | None]:
    """What of NCCL this process has loaded."""
    found = [each for each in evidence.libraries() if (each.soname or "").startswith("libnccl.so")]
    return {each.soname or "": each.build_id for each in found}
