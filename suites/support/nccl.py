"""ctypes binding of the NCCL functions that an all-reduce over gdrkit's memory needs.

Each rank is a separate process (:mod:`support.nccl_rank`) with one communicator. The alternative would be one thread
with the communicators of several devices. Such a thread must put all collective calls, and the destruction of the
communicators, into NCCL groups, because a call outside of a group never returns.
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

# Values of ncclDataType_t and ncclRedOp_t.
_NCCL_INT32, _NCCL_SUM = 2, 0
_INT32_BYTES = 4
# NCCL_UNIQUE_ID_BYTES of nccl.h.
UNIQUE_ID_BYTES = 128


class UniqueId(ctypes.Structure):
    """ncclUniqueId: identity of a communicator, by which its ranks find each other. It is passed by value."""

    _fields_ = (("internal", ctypes.c_uint8 * UNIQUE_ID_BYTES),)


# Argument types of the functions, as in nccl.h. Without the types, ctypes would truncate addresses to 32 bits.
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
    """An NCCL call failed."""


class Nccl:
    """The NCCL library of the Python package nvidia-nccl, or else the library that the dynamic loader finds."""

    def __init__(self) -> None:
        folder = folder_of_nccl()
        self._library = ctypes.CDLL("libnccl.so.2" if folder is None else str(folder / "lib" / "libnccl.so.2"))
        for name, argument_types in FUNCTIONS.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = argument_types, c_int
        for name, argument_type in (("ncclGetErrorString", c_int), ("ncclGetLastError", c_void_p)):
            function = getattr(self._library, name)
            function.argtypes, function.restype = (argument_type,), ctypes.c_char_p

    @property
    def version(self) -> int:
        """Version of the library, e.g. 22809 for 2.28.9."""
        version = c_int()
        self.call("ncclGetVersion", ctypes.byref(version))
        return version.value

    def unique_id(self) -> bytes:
        """Return a new ncclUniqueId. NCCL starts a thread in this process, by which the ranks connect to each other."""
        unique_id = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(unique_id))
        return bytes(unique_id)

    def call(self, name: str, *arguments: object) -> None:
        """Call the NCCL function `name`.

        Raises
        ------
        NcclError
            The call failed. The text has the name of the function, its status and the messages of NCCL.
        """
        status = getattr(self._library, name)(*arguments)
        if status:
            texts = [self._library.ncclGetErrorString(status), self._library.ncclGetLastError(None)]
            details = " / ".join((text or b"").decode(errors="replace").strip() for text in texts)
            message = f"{name} failed: {status}: {details}"
            raise NcclError(message)


class Communicator:
    """The communicator of this process, on the current CUDA device of this thread.

    The constructor returns when all ranks have called it.
    """

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
        """Enqueue on `stream`: `target` becomes the sum of the `source` buffers of all ranks, as 32-bit integers."""
        count = length_bytes // _INT32_BYTES
        self._nccl.call("ncclAllReduce", source, target, count, _NCCL_INT32, _NCCL_SUM, self._handle, stream)

    def close(self) -> None:
        """Destroy the communicator. Its work must have completed. The call returns when all ranks have made it."""
        self._nccl.call("ncclCommDestroy", self._handle)


def folder_of_nccl() -> Path | None:
    """Return the folder of the Python package nvidia-nccl, or None. It contains the library and its header."""
    try:
        package = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    folders = [] if package is None else [Path(location) for location in package.submodule_search_locations or []]
    return next((folder for folder in folders if (folder / "lib" / "libnccl.so.2").exists()), None)


def loaded_library() -> dict[str, str | None]:
    """Return the SONAME of the loaded NCCL library, with its build id."""
    libraries = [library for library in evidence.libraries() if (library.soname or "").startswith("libnccl.so")]
    return {library.soname or "": library.build_id for library in libraries}
