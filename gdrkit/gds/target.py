"""Memory that files are read into and written from: of the host, or of a CUDA device, whoever made it.

Level 4. What a caller hands over is described once: address, size, device. It is held, and the work that its maker has
queued on it is waited for, before the first byte moves.
"""

from __future__ import annotations

from collections.abc import Callable  # noqa: TC003 - a NamedTuple looks at its annotations.
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
    """A piece of memory.

    Attributes
    ----------
    address : int
        Of its first byte.
    length_bytes : int
        Its size.
    device_index : int
        Of the CUDA device; :data:`HOST` for host memory.
    keep : object
        What keeps the memory alive.
    release : callable
        Tells its owner that it is no longer used; called once.
    """

    address: int
    length_bytes: int
    device_index: int
    keep: object
    release: Callable[[], None] = _nothing


def target_of(buffer: object, *, writable: bool) -> Target:
    """Describe memory that a caller hands over.

    Parameters
    ----------
    buffer : object
        Memory of :mod:`gdrkit.cuda`, or anything with ``__cuda_array_interface__``, the buffer protocol or
        ``__dlpack__`` whose bytes lie one behind the other.
    writable : bool
        Whether it will be written to.

    Raises
    ------
    UsageError
        It is none of these, not contiguous or read-only; NOT_DEVICE_MEMORY: it is less memory than it says.
    ClosedResource
        Memory of gdrkit that was closed.
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
            raise UsageError(message)  # noqa: TRY301 - its owner is told below.
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
