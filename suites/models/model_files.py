"""Model files with known bytes, for the cases about `gdrkit.safetensors`."""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from gdrkit import pattern
from gdrkit.safetensors import ELEMENT_TYPES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["TENSORS_OF_EVERY_TYPE", "ModelFile", "compute_size_bytes", "pack_file", "write_model"]

# Name, type and shape of tensors: one of each data type, an empty tensor, and a tensor without dimensions. The shape
# (3, 8) has 24 elements, so that also elements of 4 or 6 bits fill whole bytes.
TENSORS_OF_EVERY_TYPE: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    *((f"tensor.{name}", name, (3, 8)) for name in ELEMENT_TYPES),
    ("empty", "F32", (0, 5)),
    ("scalar", "F64", ()),
)


class ModelFile(NamedTuple):
    """A model file, and the bytes and shapes of its tensors by their names."""

    path: Path
    tensor_data: dict[str, bytes]
    shapes: dict[str, tuple[int, ...]]


def pack_file(header: Any, data: bytes = b"") -> bytes:  # noqa: ANN401 - any JSON value, or bytes.
    """Return the contents of a model file: the size of the header in 8 bytes, the header, and `data`.

    `header` is a JSON value, or the bytes of the header.
    """
    header_bytes = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(header_bytes)) + header_bytes + data


def compute_size_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the size of a tensor in a file, in bytes."""
    return math.prod(shape) * ELEMENT_TYPES[dtype].bits // 8


def write_model(
    path: Path,
    tensors: Sequence[tuple[str, str, tuple[int, ...]]],
    *,
    seed: int,
    metadata: Mapping[str, str] | None = None,
) -> ModelFile:
    """Write a file with tensors of these names, types and shapes, and with random bytes."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    tensor_data, data_offset = {}, 0
    for index, (name, dtype, shape) in enumerate(tensors):
        tensor_data[name] = pattern.payload(compute_size_bytes(dtype, shape), seed=seed + index)
        end = data_offset + len(tensor_data[name])
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [data_offset, end]}
        data_offset = end
    path.write_bytes(pack_file(header, b"".join(tensor_data.values())))
    return ModelFile(path, tensor_data, {name: shape for name, _dtype, shape in tensors})
