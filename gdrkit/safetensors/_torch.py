"""Access to torch: its devices, its data types, memory of its allocator, and tensors in that memory.

This file is the only one of the package that imports torch or safetensors.
"""

from __future__ import annotations

import errno
import functools
import importlib
import importlib.util
import itertools
import mmap
import sys
from typing import TYPE_CHECKING, Any

from gdrkit.errors import UsageError
from gdrkit.gds import HOST, TransferBuffer
from gdrkit.gds._native import api_error
from gdrkit.loader import setup_missing
from gdrkit.safetensors.header import ELEMENT_TYPES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gdrkit.safetensors.layout import Placement

__all__ = ["TorchTensorMaker", "find_functions_to_replace", "has_torch"]

_BYTE_BITS = 8
_CUDA_ERROR_OUT_OF_MEMORY = 2
# The types that have several elements per byte.
_PACKED_TYPES = tuple(name for name, element_type in ELEMENT_TYPES.items() if element_type.bits < _BYTE_BITS)


def _import(name: str, *, what_to_do: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise setup_missing(
            operation=f"import {name}", text=str(error), what_to_do=what_to_do, default_errno=errno.ENOENT
        ) from error


def has_torch() -> bool:
    """Return whether torch is installed."""
    return "torch" in sys.modules or importlib.util.find_spec("torch") is not None


class TorchTensorMaker:
    """An object that allocates memory and makes tensors in this memory, by torch.

    Memory comes from torch's allocator, so that torch counts it, uses it again, and frees its cache if memory is short.

    Raises
    ------
    SetupMissing
        torch is not installed.
    """

    framework_name = "pt"

    def __init__(self) -> None:
        self._torch = _import("torch", what_to_do="pip install torch, or pass framework='dlpack'")
        self._torch_type_by_dtype = {
            dtype: getattr(self._torch, element_type.torch_name, None) for dtype, element_type in ELEMENT_TYPES.items()
        }
        # torch represents the 6-bit types by bytes. This table omits these types, because tensors of bytes are saved as
        # U8.
        self._dtype_by_torch_type = {
            torch_type: dtype for dtype, torch_type in self._torch_type_by_dtype.items() if not dtype.startswith("F6_")
        }

    def find_device_index(self, device: Any) -> int:
        """Return the index of a device that torch knows: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, 1 or a torch.device."""
        try:
            torch_device = self._torch.device("cuda", device) if isinstance(device, int) else self._torch.device(device)
        except RuntimeError as error:
            message = f"device must name the CPU or a CUDA device, not {device!r}"
            raise UsageError(message) from error
        if torch_device.type == "cpu":
            return HOST
        if torch_device.type != "cuda":
            message = f"device must name the CPU or a CUDA device, not {device!r}"
            raise UsageError(message)
        return int(self._torch.cuda.current_device() if torch_device.index is None else torch_device.index)

    def allocate(self, device_index: int, length_bytes: int) -> Any:
        """Return new memory as a tensor of bytes. Call :meth:`wait_for_allocations` before other code writes to it."""
        torch = self._torch
        # The size is a multiple of 8 bytes, the size of the largest elements, so that the memory can be viewed as a
        # tensor of any type.
        size_bytes = max(-(-length_bytes // 8) * 8, 8)
        if device_index == HOST:
            return torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)
        return self._make_empty_tensors(device_index, [(size_bytes, torch.uint8)])[0]

    def _make_empty_tensors(self, device_index: int, shapes_and_types: Iterable[tuple[Any, Any]]) -> list[Any]:
        """Return a new tensor for each pair of shape and type."""
        # The device is passed as an object, because torch would parse its name for each tensor.
        device = self._torch.device("cpu") if device_index == HOST else self._torch.device("cuda", device_index)
        empty, empty_like = self._torch.empty, self._torch.empty_like
        # empty_like() is faster than empty() with a shape, a type and a device, so only the first tensor of each shape
        # and type is made by empty().
        first_tensors: dict[tuple[Any, Any], Any] = {}
        tensors: list[Any] = []
        try:
            for shape_and_type, equal_pairs in itertools.groupby(shapes_and_types):
                tensor_count = len(list(equal_pairs))
                if shape_and_type not in first_tensors:
                    first_tensors[shape_and_type] = empty(shape_and_type[0], dtype=shape_and_type[1], device=device)
                    tensors.append(first_tensors[shape_and_type])
                    tensor_count -= 1
                tensors += map(empty_like, [first_tensors[shape_and_type]] * tensor_count)
        except self._torch.cuda.OutOfMemoryError as error:
            # The traceback of the error keeps this frame, and the frame would keep the memory.
            del tensors, first_tensors
            failure = ("cuda", "torch.empty", _CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY")
            detail = str(error).partition("\n")[0]
            raise api_error(failure, arguments={"device_index": device_index}, detail=detail) from error
        return tensors

    def wait_for_allocations(self, device_index: int) -> None:
        """Wait until no queued kernel uses the memory that was allocated.

        The allocator of torch may return memory that queued kernels still use, because kernels of the same stream that
        use the new memory run later.
        """
        if device_index != HOST:
            self._torch.cuda.current_stream(device_index).synchronize()

    def address(self, buffer: Any) -> int:
        """Return the address of the memory."""
        return int(buffer.data_ptr())

    def make_tensors(self, buffer: Any, placements: list[Placement]) -> list[Any]:
        """Return the tensors of a file whose bytes are in `buffer`.

        Consecutive tensors of one type whose shapes differ only in the first dimension form a run. One call of torch
        makes all tensors of a run.
        """
        view_by_dtype = {
            dtype: buffer.view(torch_type) for dtype, torch_type in self._find_torch_types(placements).items()
        }
        tensors: list[Any] = []
        first_dimensions: list[int] = []
        run_type_and_shape, run_begin, run_end = None, 0, -1
        for _name, dtype, shape, offset_bytes, length_bytes in placements:
            torch_shape = _compute_packed_shape(dtype, shape, length_bytes) if dtype in _PACKED_TYPES else shape
            if not (
                torch_shape
                and length_bytes
                and offset_bytes == run_end
                and (dtype, torch_shape[1:]) == run_type_and_shape
            ):
                self._add_run(tensors, view_by_dtype, run_type_and_shape, run_begin, first_dimensions)
                run_type_and_shape, run_begin, first_dimensions = (dtype, torch_shape[1:]), offset_bytes, []
            if not (torch_shape and length_bytes):
                view = view_by_dtype[dtype]
                tensors.append(
                    view.as_strided(torch_shape, _compute_strides(torch_shape), offset_bytes // view.element_size())
                )
                run_end = -1  # With this end, the next tensor does not continue the run.
                continue
            first_dimensions.append(torch_shape[0])
            run_end = offset_bytes + length_bytes
        self._add_run(tensors, view_by_dtype, run_type_and_shape, run_begin, first_dimensions)
        return tensors

    def _add_run(
        self,
        tensors: list[Any],
        view_by_dtype: dict[str, Any],
        run_type_and_shape: Any,
        run_offset_bytes: int,
        first_dimensions: list[int],
    ) -> None:
        """Append the tensors of a run to `tensors`. The run begins at the offset `run_offset_bytes` of the memory.

        `run_type_and_shape` has the data type of the tensors, and their shape without the first dimension.
        """
        if not first_dimensions:
            return
        view, shape = view_by_dtype[run_type_and_shape[0]], (sum(first_dimensions), *run_type_and_shape[1])
        joined_tensor = view.as_strided(shape, _compute_strides(shape), run_offset_bytes // view.element_size())
        # Unlike split, unsafe_split_with_sizes returns parts that may be changed in place also under autograd.
        tensors.extend(
            [joined_tensor]
            if len(first_dimensions) == 1
            else self._torch.unsafe_split_with_sizes(joined_tensor, first_dimensions)
        )

    def allocate_separate_tensors(self, device_index: int, placements: list[Placement]) -> tuple[list[Any], list[int]]:
        """Return tensors with memory of their own, and the address of each."""
        torch_type_by_dtype = self._find_torch_types(placements)
        tensors = self._make_empty_tensors(
            device_index,
            (
                (
                    _compute_packed_shape(dtype, shape, length_bytes) if dtype in _PACKED_TYPES else shape,
                    torch_type_by_dtype[dtype],
                )
                for _name, dtype, shape, _offset_bytes, length_bytes in placements
            ),
        )
        return tensors, list(map(self._torch.Tensor.data_ptr, tensors))

    def _find_torch_types(self, placements: list[Placement]) -> dict[str, Any]:
        """Return the type in torch for each data type of the placements."""
        dtypes = {placement.dtype for placement in placements}
        dtypes_without_torch_type = sorted(dtype for dtype in dtypes if self._torch_type_by_dtype[dtype] is None)
        if dtypes_without_torch_type:
            message = f"torch {self._torch.__version__} has no type for {', '.join(dtypes_without_torch_type)}"
            raise UsageError(message, what_to_do="update torch, or leave these tensors out by `select`")
        return {dtype: self._torch_type_by_dtype[dtype] for dtype in dtypes}

    def describe_tensor(self, name: str, tensor: Any) -> tuple[str, tuple[int, ...], TransferBuffer]:
        """Wait for the queued work on a tensor to save, and return its data type, its shape and its memory.

        Raises
        ------
        UsageError
            The format has no such type, or the tensor is not contiguous.
        """
        dtype = self._dtype_by_torch_type.get(tensor.dtype)
        if dtype is None or not tensor.is_contiguous():
            cause = "is not contiguous" if dtype else f"has the type {tensor.dtype}, which the format lacks"
            message = f"tensor {name!r} {cause}"
            raise UsageError(message, what_to_do="call contiguous(), or convert it to another type")
        if tensor.is_cuda:
            self._torch.cuda.current_stream(tensor.device).synchronize()
        shape = tuple(tensor.shape)
        device_index = tensor.device.index if tensor.is_cuda else HOST
        length_bytes = tensor.numel() * tensor.element_size()
        memory = TransferBuffer(tensor.data_ptr(), length_bytes, device_index, tensor)
        # An element of torch's float4_e2m1fn_x2 is a pair of F4 elements.
        return dtype, (*shape[:-1], shape[-1] * 2) if dtype == "F4" else shape, memory


def _compute_packed_shape(dtype: str, shape: tuple[int, ...], length_bytes: int) -> tuple[int, ...]:
    """Return the shape in bytes of a tensor with several elements in a byte.

    If the last dimension does not fill whole bytes, or if `shape` is empty, the result has one dimension.
    """
    last_bytes, extra_bits = divmod(shape[-1] * ELEMENT_TYPES[dtype].bits, 8) if shape else (0, 1)
    return (length_bytes,) if extra_bits else (*shape[:-1], last_bytes)


@functools.lru_cache(maxsize=4096)
def _compute_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) == 1:
        return (1,)
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def find_functions_to_replace() -> dict[str, Any]:
    """Return the functions of the library safetensors that load a file, by their names.

    Raises
    ------
    SetupMissing
        safetensors is not installed.
    """
    safetensors, safetensors_torch = (
        _import(name, what_to_do="pip install safetensors") for name in ("safetensors", "safetensors.torch")
    )
    return {"safe_open": safetensors.safe_open, "load_file": safetensors_torch.load_file}
