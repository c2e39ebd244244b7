"""The part of NCCL that an all-reduce over gdrkit's memory needs, by ctypes.

Each rank is a separate process (:mod:`support.nccl_rank`) with one communicator. A thread with the communicators of
several devices would have to group all collective calls, also their destruction; one call outside a group never ends.
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
    """Identity of a communicator, by which its ranks find each other. NCCL takes it by value."""

    _fields_ = (("internal", ctypes.c_uint8 * UNIQUE_ID_BYTES),)


# The argument types in nccl.h. Without them, ctypes would pass integers as 32 bits, and truncate addresses and handles.
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
    """The library of the package nvidia-nccl, or the one that the loader finds."""

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
        """Version of the library, e.g. 22809 for 2.28.9."""
        version = c_int()
        self.call("ncclGetVersion", ctypes.byref(version))
        return version.value

    def unique_id(self) -> bytes:
        """Return a new identity, and start the thread of this process that connects the ranks."""
        unique_id = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(unique_id))
        return bytes(unique_id)

    def call(self, name: str, *arguments: object) -> None:
        """Call a function.

        Raises
        ------
        NcclError
            The call failed. The text has its name, its status and the messages of NCCL.
        """
        status = getattr(self._library, name)(*arguments)
        if status:
            texts = [self._library.ncclGetErrorString(status), self._library.ncclGetLastError(None)]
            details = " / ".join((each or b"").decode(errors="replace").strip() for each in texts)
            message = f"{name} failed: {status}: {details}"
            raise NcclError(message)


class Communicator:
    """The communicator of this process on the current device of this thread. Its creation waits for all ranks."""

    def __init__(self, nccl: Nccl, *, rank: int, ranks_count: int, unique_id: bytes) -> None:
        self._nccl = nccl
        self._handle = c_void_p()
        identity = UniqueId.from_buffer_copy(unique_id)
        nccl.call("ncclCommInitRank", ctypes.byref(self._handle), ranks_count, identity, rank)

    @contextlib.contextmanager
    def registered(self, address: int, length_bytes: int) -> Iterator[None]:
        """Register device memory with the communicator for the duration of the block."""
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
        """Destroy the communicator, whose work must have completed. The call waits for all ranks."""
        self._nccl.call("ncclCommDestroy", self._handle)


def folder_of_nccl() -> Path | None:
    """Return the folder of the package nvidia-nccl, which has its library and its header, or None."""
    try:
        package = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    folders = [] if package is None else [Path(each) for each in package.submodule_search_locations or []]
    return next((each for each in folders if (each / "lib" / "libnccl.so.2").exists()), None)


def loaded_library() -> dict[str, str | None]:
    """Return the build id of the loaded NCCL library by its SONAME."""
    libraries = [each for each in evidence.libraries() if (each.soname or "").startswith("libnccl.so")]
    return {each.soname or "": each.build_id for each in libraries}
