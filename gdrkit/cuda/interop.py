"""Exchange of device memory with other libraries (torch, cupy, numba, ...) by the CUDA Array Interface or DLPack.

`wrap` makes a buffer of gdrkit from an array of another library. Closing the buffer never frees the memory: the array
owns it, and the buffer keeps the array alive. Only contiguous arrays can be wrapped, because a NIC does not support
strides. `export_tensor` makes a DLPack capsule for another library. Sources: "CUDA Array Interface (Version 3)" of
numba, and DLPack.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from gdrkit.cuda import _dlpack, _driver
from gdrkit.cuda.memory import BorrowedMemory, borrow
from gdrkit.errors import Api, Reason, Unsupported, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gdrkit.cuda.context import PrimaryContext

__all__ = ["ForeignArray", "describe", "dlpack_device", "export_tensor", "wrap"]

_INTERFACE_VERSIONS = (2, 3)
_TYPESTR_PATTERN = re.compile(r"[<>|=][a-zA-Z](\d+)")  # Byte order, type, and size in bytes, such as <f4.
_LEGACY_DEFAULT_STREAM = 1  # CU_STREAM_LEGACY. DLPack uses the same number for this stream.


@runtime_checkable
class _HasCudaArrayInterface(Protocol):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


@runtime_checkable
class _HasDlpack(Protocol):
    def __dlpack__(self, *, stream: int | None = None) -> object: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


@dataclass(frozen=True)
class ForeignArray:
    """The properties that an array of another library reports.

    Attributes
    ----------
    address : int
        Device address of the first byte.
    length_bytes : int
        Size in bytes.
    read_only : bool
        Whether the array must not be written to.
    stream : int or None
        Handle of the CUDA stream on which work on the array may be pending. None: there is no stream to wait for.
    release : callable
        Function that tells the producer that the array is no longer used. It must be called exactly once.
    """

    address: int
    length_bytes: int
    read_only: bool
    stream: int | None
    release: Callable[[], None]


def wrap(array: object, *, device: PrimaryContext, read_only: bool = False) -> BorrowedMemory:
    """Wrap an array of another library as device memory, without a copy.

    If the array names a stream, this function waits until the work that is queued there is complete. The wrapper keeps
    the array alive until the wrapper is closed.

    Parameters
    ----------
    array : object
        An object with ``__cuda_array_interface__`` (version 2 or 3) or ``__dlpack__``.
    device : PrimaryContext
        The device whose memory contains the array.
    read_only : bool
        True accepts a read-only array too: the caller promises that nothing writes to it.

    Raises
    ------
    Unsupported
        The array is managed memory.
    UsageError
        BAD_ARGUMENT: the array has neither protocol, or is empty, read-only or not contiguous. MALFORMED: the array's
        description of itself is invalid. NOT_DEVICE_MEMORY: the array is in host memory or on another device.
    """
    foreign_array = describe(array)
    try:
        if foreign_array.read_only and not read_only:
            message = "the array is read-only"
            raise UsageError(message, what_to_do="pass read_only=True, and register the memory without write access")  # noqa: TRY301
        if foreign_array.stream is not None:
            with device.current():
                _driver.call("cuStreamSynchronize", hStream=foreign_array.stream)
        memory = borrow(device, foreign_array.address, length_bytes=foreign_array.length_bytes)
    except BaseException:
        foreign_array.release()
        raise
    memory.before_release(lambda: _release_array(foreign_array, array))
    return memory


def dlpack_device(device_index: int | None) -> tuple[int, int]:
    """Return a device as DLPack's pair (type, index). A `device_index` of None means the host."""
    return (_dlpack.CPU, 0) if device_index is None else (_dlpack.CUDA, device_index)


def export_tensor(
    owner: object,
    address: int,
    *,
    shape: Sequence[int],
    element_type: tuple[int, int, int],
    device_index: int | None,
    is_versioned: bool,
) -> object:
    """Return a DLPack capsule for a contiguous tensor in memory of the host or of a device.

    Parameters
    ----------
    owner : object
        The object that has the memory. The capsule, and then its consumer, keep the owner alive.
    address : int
        Address of the first element.
    shape : sequence of int
        Number of elements in each dimension.
    element_type : tuple of int
        DLPack's type code, bits and lanes of an element.
    device_index : int or None
        Index of the device; None for memory of the host.
    is_versioned : bool
        Whether the consumer accepts version 1 of DLPack.
    """
    return _dlpack.export(
        address,
        shape=shape,
        device=dlpack_device(device_index),
        is_versioned=is_versioned,
        on_release=functools.partial(_release_owner, owner),
        element_type=element_type,
    )


def describe(array: object) -> ForeignArray:
    """Return the properties that an array reports.

    ``__cuda_array_interface__`` is preferred, because it names a stream. Otherwise ``__dlpack__`` is used.
    """
    if isinstance(array, _HasCudaArrayInterface):
        return _parse_interface(array.__cuda_array_interface__)
    if isinstance(array, _HasDlpack):
        return _parse_dlpack(array)
    message = f"{type(array).__name__} has neither __cuda_array_interface__ nor __dlpack__"
    raise UsageError(message)


def _release_array(foreign_array: ForeignArray, _array: object) -> None:
    # `wrap` registers this call as a release action of the memory. Until the memory is closed, the reference to the
    # array in that action keeps the array alive.
    foreign_array.release()


def _release_owner(_owner: object) -> None:
    # The capsule keeps `_owner` alive only by the functools.partial that `export_tensor` makes of this function.
    # `_dlpack` deletes the partial after this call, so there is nothing else to do.
    return


def _parse_interface(interface: dict[str, Any]) -> ForeignArray:
    # `data` is the pair (address, is_read_only).
    version, data, shape, typestr = (interface.get(name) for name in ("version", "data", "shape", "typestr"))
    if version not in _INTERFACE_VERSIONS:
        raise _make_malformed_error("version", version)
    if not (isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], int) and isinstance(data[1], bool)):  # noqa: PLR2004
        raise _make_malformed_error("data", data)
    typestr_match = _TYPESTR_PATTERN.fullmatch(typestr) if isinstance(typestr, str) else None
    if typestr_match is None:
        raise _make_malformed_error("typestr", typestr)
    if interface.get("mask") is not None:
        message = "an array with a mask is not contiguous memory"
        raise UsageError(message)
    stream = interface.get("stream")
    if stream is not None and (not isinstance(stream, int) or stream <= 0):
        # The interface forbids 0, because it could mean the legacy or the per-thread default stream.
        raise _make_malformed_error("stream", stream)
    length_bytes = _count_contiguous_bytes(
        shape, interface.get("strides"), item_bytes=int(typestr_match[1]), has_byte_strides=True
    )
    return ForeignArray(data[0], length_bytes, data[1], stream, lambda: None)


def _parse_dlpack(array: _HasDlpack) -> ForeignArray:
    device_type, _index = array.__dlpack_device__()
    if device_type == _dlpack.CUDA_MANAGED:
        raise Unsupported(
            api=Api.CUDA,
            operation="__dlpack_device__",
            status=None,
            status_name="kDLCUDAManaged",
            reason=Reason.NOT_SUPPORTED,
            what_to_do="copy it to memory of cuMemAlloc",
            detail="managed memory moves between host and device",
        )
    if device_type != _dlpack.CUDA:
        message = f"the array is on a device of DLPack's type {device_type}, not on a CUDA device"
        raise UsageError(message, reason=Reason.NOT_DEVICE_MEMORY)
    # The producer makes the legacy default stream wait for the pending work on the array. Then `wrap` waits for that
    # stream.
    tensor = _dlpack.consume(array.__dlpack__(stream=_LEGACY_DEFAULT_STREAM))
    try:
        item_bytes, extra_bits = divmod(tensor.item_bits, 8)
        if extra_bits:
            message = f"elements of {tensor.item_bits} bits are not whole bytes"
            raise UsageError(message)  # noqa: TRY301 - the except clause releases the tensor.
        length_bytes = _count_contiguous_bytes(
            tensor.shape, tensor.strides, item_bytes=item_bytes, has_byte_strides=False
        )
    except BaseException:
        tensor.release()
        raise
    return ForeignArray(tensor.address, length_bytes, tensor.read_only, _LEGACY_DEFAULT_STREAM, tensor.release)


def _count_contiguous_bytes(shape: object, strides: object, *, item_bytes: int, has_byte_strides: bool) -> int:
    """Return the size of an array in bytes, or raise UsageError if the array is not contiguous or is empty.

    The strides count bytes if `has_byte_strides` is true, otherwise elements.
    """
    if not _is_int_tuple(shape) or not (strides is None or _is_int_tuple(strides)):
        raise _make_malformed_error("shape_and_strides", (shape, strides))
    dimensions = cast("tuple[int, ...]", shape)
    if item_bytes <= 0 or any(dimension < 0 for dimension in dimensions):
        raise _make_malformed_error("shape_and_item_size", (shape, item_bytes))
    if strides is not None:
        stride_tuple = cast("tuple[int, ...]", strides)
        if len(stride_tuple) != len(dimensions):
            raise _make_malformed_error("shape_and_strides", (shape, strides))
        contiguous_stride = item_bytes if has_byte_strides else 1
        for dimension, stride in zip(reversed(dimensions), reversed(stride_tuple), strict=True):
            # In a dimension of one element, the stride is never used.
            if dimension != 1 and stride != contiguous_stride:
                message = f"the array is not contiguous: shape {shape!r}, strides {strides!r}"
                raise UsageError(message, what_to_do="make a contiguous copy of it")
            contiguous_stride *= dimension
    length_bytes = math.prod(dimensions) * item_bytes
    if length_bytes == 0:
        message = "an empty array has no memory"
        raise UsageError(message)
    return length_bytes


def _is_int_tuple(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, int) for item in value)


def _make_malformed_error(field: str, value: object) -> UsageError:
    message = f"the array reports an invalid {field.replace('_', ' ')}: {value!r}"
    return UsageError(message, reason=Reason.MALFORMED)
