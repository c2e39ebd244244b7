"""Descriptions of memory that files are read into and written from: host memory or memory of a CUDA device.

The memory of a caller is described once: address, size, device. The description keeps the memory alive. Before the
first byte moves, gdrkit waits for the work that the producer of the memory has queued on its stream.
"""

from __future__ import annotations

from collections.abc import Callable  # noqa: TC003 - a NamedTuple evaluates its annotations.
from typing import Any, NamedTuple

from gdrkit import cuda
from gdrkit.cuda import CudaMemory, pointer
from gdrkit.errors import ApiError, ClosedResource, Reason, UsageError
from gdrkit.gds._native import native

__all__ = ["HOST", "Target", "target_of"]

HOST = -1


def _nothing() -> None:
    return


class Target(NamedTuple):
    """A range of memory that is used by a transfer.

    Attributes
    ----------
    address : int
        Address of the first byte.
    length_bytes : int
        Size in bytes.
    device_index : int
        Index of the CUDA device; :data:`HOST` for host memory.
    keep : object
        Object that keeps the memory alive.
    release : callable
        Tells the owner that the memory is no longer used; called once.
    """

    address: int
    length_bytes: int
    device_index: int
    keep: object
    release: Callable[[], None] = _nothing


def target_of(buffer: object, *, writable: bool) -> Target:
    """Return a description of memory that a caller provides.

    Parameters
    ----------
    buffer : object
        Memory of :mod:`gdrkit.cuda`, or a contiguous object with ``__cuda_array_interface__``, the buffer protocol or
        ``__dlpack__``.
    writable : bool
        Whether the memory will be written to.

    Raises
    ------
    UsageError
        The object is not memory, not contiguous, or read-only. NOT_DEVICE_MEMORY: it claims more memory than it has.
    ClosedResource
        The memory of gdrkit was closed.
    """
    if isinstance(buffer, CudaMemory):
        if buffer.closed:
            what = f"{buffer.kind.value} memory at {buffer.address:#x}"
            raise ClosedResource(what)
        return Target(buffer.address, buffer.length_bytes, buffer.device.index, buffer)
    if hasattr(buffer, "__cuda_array_interface__"):
        return _foreign(buffer, writable=writable)
    try:
        held: Any = native().HostMemory(buffer, writable=writable)
    except TypeError as error:
        if hasattr(buffer, "__dlpack__"):
            return _foreign(buffer, writable=writable)
        message = f"{type(buffer).__name__} is no memory: it has no buffer, DLPack or CUDA array interface"
        raise UsageError(message) from error
    except (BufferError, ValueError) as error:
        message = f"the {type(buffer).__name__} cannot be used: {error}"
        raise UsageError(message, what_to_do="hand over contiguous memory that may be written to") from error
    return Target(held.address, held.length_bytes, HOST, (held, buffer), held.release)


def _foreign(array: object, *, writable: bool) -> Target:
    found = cuda.describe(array)
    try:
        if writable and found.read_only:
            message = "the array is read-only"
            raise UsageError(message)  # noqa: TRY301 - the memory is released below.
        try:
            index = pointer.device_index(found.address)
            with cuda.Device(index) as device, device.current():
                pointer.allocation_key(found.address, found.length_bytes)
                if found.stream is not None:
                    cuda.wait_for(found.stream)
        except ApiError as error:
            message = f"{found.length_bytes} bytes at {found.address:#x} are not memory of a CUDA device"
            raise UsageError(message, reason=Reason.NOT_DEVICE_MEMORY) from error
    except BaseException:
        found.release()
        raise
    return Target(found.address, found.length_bytes, index, array, found.release)
