"""Descriptions of the memory that callers provide for transfers: host memory or memory of a CUDA device.

Each transfer describes its memory once, and the description keeps the memory alive. If the owner of the memory has
queued work for it on a CUDA stream, gdrkit waits for that work before the first byte moves.
"""

from __future__ import annotations

from collections.abc import Callable  # noqa: TC003 - a NamedTuple evaluates its annotations.
from typing import Any, NamedTuple, cast

from gdrkit import cuda
from gdrkit.cuda import CudaMemory, pointer
from gdrkit.errors import ApiError, ClosedResource, Reason, UsageError
from gdrkit.gds._native import native

__all__ = ["HOST", "TransferBuffer", "describe_buffer"]

# The device index of host memory.
HOST = -1


def _release_nothing() -> None:
    """Do nothing, because the owner of the memory needs no notice."""


class TransferBuffer(NamedTuple):
    """The memory of one transfer.

    Attributes
    ----------
    address : int
        Address of the first byte.
    length_bytes : int
        Size in bytes.
    device_index : int
        Index of the CUDA device that has the memory; :data:`HOST` for host memory.
    memory_owner : object
        Object that keeps the memory alive as long as it exists itself.
    release : callable
        Function that tells the owner that the memory is no longer used. A second call does nothing.
    """

    address: int
    length_bytes: int
    device_index: int
    memory_owner: object
    release: Callable[[], None] = _release_nothing

    @property
    def is_host(self) -> bool:
        """Whether the memory is host memory."""
        return self.device_index == HOST


def describe_buffer(buffer: object, *, writable: bool) -> TransferBuffer:
    """Describe memory that a caller of gdrkit provides. When the transfer is over, ``release`` must be called.

    Parameters
    ----------
    buffer : object
        Memory of :mod:`gdrkit.cuda`, or a contiguous object with ``__cuda_array_interface__``, the buffer protocol or
        ``__dlpack__``.
    writable : bool
        Whether the transfer will write to the memory.

    Raises
    ------
    UsageError
        The object is not memory, is not contiguous, or is read-only although `writable` is true. With the reason
        NOT_DEVICE_MEMORY: some bytes of the array are not allocated memory of a device.
    ClosedResource
        The buffer is memory of :mod:`gdrkit.cuda` that was closed.
    """
    # isinstance() of an abstract base class would take longer than the rest of this function.
    if CudaMemory in type(buffer).__mro__:
        memory = cast("CudaMemory", buffer)
        if memory.closed:
            memory_name = f"{memory.kind.value} memory at {memory.address:#x}"
            raise ClosedResource(memory_name)
        return TransferBuffer(memory.address, memory.length_bytes, memory.device.index, memory)
    if hasattr(buffer, "__cuda_array_interface__"):
        return _describe_array(buffer, writable=writable)
    try:
        host_memory: Any = native.HostMemory(buffer, writable=writable)
    except TypeError as error:
        if hasattr(buffer, "__dlpack__"):
            return _describe_array(buffer, writable=writable)
        message = f"a buffer must support the buffer protocol, DLPack or __cuda_array_interface__, not {type(buffer)}"
        raise UsageError(message) from error
    except (BufferError, ValueError) as error:
        message = f"the {type(buffer).__name__} cannot be used: {error}"
        advice = "pass contiguous memory" + (" that is not read-only" if writable else "")
        raise UsageError(message, what_to_do=advice) from error
    memory_owner = (host_memory, buffer)
    fields = (host_memory.address, host_memory.length_bytes, HOST, memory_owner, host_memory.release)
    return tuple.__new__(TransferBuffer, fields)  # A call of the class would take three times as long.


def _describe_array(array: object, *, writable: bool) -> TransferBuffer:
    """Return the description of an array of another library, after the work on the stream of the array has ended."""
    description = cuda.describe(array)
    address, length_bytes = description.address, description.length_bytes
    try:
        if writable and description.read_only:
            message = "the array is read-only"
            raise UsageError(message)  # noqa: TRY301 - the memory is released below.
        try:
            device_index = pointer.device_index(address)
            with cuda.Device(device_index) as device, device.current():
                pointer.allocation_key(address, length_bytes)  # This raises an error if the memory is too short.
                if description.stream is not None:
                    cuda.wait_for_stream(description.stream)
        except ApiError as error:
            message = f"{length_bytes} bytes at {address:#x} are not memory of a CUDA device"
            raise UsageError(message, reason=Reason.NOT_DEVICE_MEMORY) from error
    except BaseException:
        description.release()
        raise
    return TransferBuffer(address, length_bytes, device_index, array, description.release)
