"""Memory for the tensors of a file, and a DLPack tensor class for programs without torch."""

from __future__ import annotations

import mmap
import re
from typing import TYPE_CHECKING, Any

from gdrkit import cuda
from gdrkit.errors import UsageError
from gdrkit.gds import HOST, TransferBuffer
from gdrkit.gds.buffer import describe_buffer
from gdrkit.safetensors.header import ELEMENT_TYPES

if TYPE_CHECKING:
    from gdrkit.safetensors.layout import Placement

__all__ = ["DlpackTensorMaker", "ModelTensor", "TensorBuffer"]


class TensorBuffer:
    """Memory of one device, or of the host, that several tensors share.

    It is freed when the last of these tensors and the last consumer of their DLPack capsules are gone.

    Parameters
    ----------
    device_index : int
        Index of the device; :data:`gdrkit.gds.HOST` for memory of the host.
    length_bytes : int
        Size in bytes.

    Raises
    ------
    ApiError
        OUT_OF_MEMORY: the device does not have that much memory left.
    """

    def __init__(self, device_index: int, length_bytes: int) -> None:
        self._device: cuda.Device | None = None
        self._memory: cuda.DeviceMemory | mmap.mmap | None = None
        # Neither a device nor mmap allocates 0 bytes.
        size_bytes = max(length_bytes, 1)
        if device_index == HOST:
            self._memory = mmap.mmap(-1, size_bytes)
            buffer_description = describe_buffer(self._memory, writable=True)
            buffer_description.release()  # This ends the access to the mmap object. The address stays valid.
            self.address = buffer_description.address
        else:
            self._device = cuda.Device(device_index)
            try:
                self._memory = self._device.allocate(size_bytes)
            except BaseException:
                self._device.close()
                raise
            self.address = self._memory.address
        self.device_index = device_index
        self.length_bytes = length_bytes

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Return a part of the memory."""
        if length_bytes == 0:
            return b""
        if isinstance(self._memory, cuda.DeviceMemory):
            return self._memory.read(offset_bytes=offset_bytes, length_bytes=length_bytes)
        assert self._memory is not None  # noqa: S101 - it exists as long as this object.
        return self._memory[offset_bytes : offset_bytes + length_bytes]

    def __del__(self) -> None:
        # Host memory is freed together with its mmap object.
        if isinstance(self._memory, cuda.DeviceMemory):
            self._memory.close()
        if self._device is not None:
            self._device.close()


class ModelTensor:
    """A tensor in device memory or host memory, for every library that takes DLPack.

    ``torch.from_dlpack(tensor)``, ``cupy.from_dlpack(tensor)`` and similar functions make an array of the same memory.

    Attributes
    ----------
    dtype : str
        A key of :data:`~gdrkit.safetensors.ELEMENT_TYPES`.
    shape : tuple of int
        Number of elements in each dimension.
    address : int
        Address of the first byte.
    length_bytes : int
        Size in bytes.
    device_index : int
        Index of the device; :data:`gdrkit.gds.HOST` for memory of the host.
    """

    __slots__ = ("__weakref__", "_buffer", "address", "device_index", "dtype", "length_bytes", "shape")

    def __init__(self, buffer: TensorBuffer, placement: Placement) -> None:
        self._buffer = buffer
        self.dtype, self.shape, self.length_bytes = placement.dtype, placement.shape, placement.length_bytes
        self.address = buffer.address + placement.offset_bytes
        self.device_index = buffer.device_index

    def read(self) -> bytes:
        """Copy the bytes of the tensor to the host and return them."""
        return self._buffer.read(self.address - self._buffer.address, self.length_bytes)

    def transfer_buffer(self) -> TransferBuffer:
        """Return the memory of the tensor for a transfer of :mod:`gdrkit.gds`."""
        return TransferBuffer(self.address, self.length_bytes, self.device_index, self._buffer)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's type and index of the device."""
        return cuda.dlpack_device(self._find_cuda_index())

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Return the tensor as a DLPack capsule, which keeps the memory alive.

        A pair of F4 elements is exported as one element with two lanes, as in torch. Elements of 6 bits are exported
        without padding bits.

        Raises
        ------
        BufferError
            A copy or another device was requested, or an F4 tensor is a scalar or has an odd last dimension.
        """
        if copy or dl_device not in {None, self.__dlpack_device__()}:
            message = "the tensor is exported in place: it cannot be copied or exported to another device"
            raise BufferError(message)
        element_type = ELEMENT_TYPES[self.dtype]
        shape, lanes = self.shape, 1
        if self.dtype == "F4":
            if not shape or shape[-1] % 2:
                message = f"elements of 4 bits can be exported in pairs only, not in shape {list(shape)}"
                raise BufferError(message)
            shape, lanes = (*shape[:-1], shape[-1] // 2), 2
        return cuda.export_tensor(
            self._buffer,
            self.address,
            shape=shape,
            element_type=(element_type.dlpack_code, element_type.bits, lanes),
            device_index=self._find_cuda_index(),
            is_versioned=max_version is not None and max_version[0] >= 1,
        )

    def _find_cuda_index(self) -> int | None:
        return None if self.device_index == HOST else self.device_index

    def __repr__(self) -> str:
        device_name = "cpu" if self.device_index == HOST else f"cuda:{self.device_index}"
        return f"ModelTensor({self.dtype}, {list(self.shape)}, {device_name})"


class DlpackTensorMaker:
    """An object that allocates memory and makes tensors in this memory, for programs without torch.

    It has the same methods as :class:`gdrkit.safetensors._torch.TorchTensorMaker`.
    """

    framework_name = "dlpack"

    def find_device_index(self, device: Any) -> int:  # noqa: ANN401 - every form in which torch names a device.
        """Return the index of a device that is named as in torch: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or 1."""
        if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
            return device
        match = re.fullmatch(r"cpu|cuda(?::(\d{1,4}))?", str(device))
        if match is None:
            message = f"device must be 'cpu', 'cuda', 'cuda:1' or a number, not {device!r}"
            raise UsageError(message)
        return HOST if match[0] == "cpu" else int(match[1] or 0)

    def allocate(self, device_index: int, length_bytes: int) -> TensorBuffer:
        """Return new memory."""
        return TensorBuffer(device_index, length_bytes)

    def wait_for_allocations(self, device_index: int) -> None:
        """Do nothing, because no queued kernel uses memory that the driver has just allocated.

        The allocator of torch differs: it returns memory that queued kernels may still use.
        """

    def address(self, buffer: TensorBuffer) -> int:
        """Return the address of the memory."""
        return buffer.address

    def make_tensors(self, buffer: TensorBuffer, placements: list[Placement]) -> list[ModelTensor]:
        """Return the tensors of a file whose bytes are in `buffer`."""
        return [ModelTensor(buffer, placement) for placement in placements]

    def allocate_separate_tensors(
        self, device_index: int, placements: list[Placement]
    ) -> tuple[list[ModelTensor], list[int]]:
        """Return tensors with memory of their own, and the address of each."""
        buffers = [TensorBuffer(device_index, placement.length_bytes) for placement in placements]
        tensors = [
            ModelTensor(buffer, placement._replace(offset_bytes=0))
            for buffer, placement in zip(buffers, placements, strict=True)
        ]
        return tensors, [buffer.address for buffer in buffers]

    def describe_tensor(self, name: str, tensor: object) -> tuple[str, tuple[int, ...], TransferBuffer]:
        """Return the data type, the shape and the memory of a tensor to save."""
        if not isinstance(tensor, ModelTensor):
            message = f"tensor {name!r} must be a ModelTensor, not {type(tensor).__name__}"
            raise UsageError(message, what_to_do="install torch to save tensors of torch")
        return tensor.dtype, tensor.shape, tensor.transfer_buffer()
