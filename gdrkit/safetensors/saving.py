"""The function :func:`save_file`, which writes tensors of devices or of the host to a model file."""

from __future__ import annotations

import contextlib
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdrkit.gds import TransferBuffer, transfer_ranges
from gdrkit.gds.new_file import new_file, open_destination
from gdrkit.safetensors.devices import create_tensor_maker
from gdrkit.safetensors.header import ELEMENT_TYPES, TensorEntry, pack_header

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gdrkit.safetensors.loading import StrPath

__all__ = ["save_file"]

_POSITION_BY_DTYPE = {name: position for position, name in enumerate(ELEMENT_TYPES)}
_NEW_FILE_MODE = 0o666


def save_file(
    tensors: Mapping[str, Any],
    filename: StrPath,
    metadata: Mapping[str, str] | None = None,
    *,
    framework: str | None = None,
    durable: bool = False,
) -> None:
    """Write tensors to a file, as ``safetensors.torch.save_file`` does, without a copy of the tensors on the host.

    The file gets its name when it is complete. If the write fails, an old file of this name stays.

    Parameters
    ----------
    tensors : mapping
        The tensors by their names: of torch, or :class:`ModelTensor`.
    filename : str or path-like
        Path of the file.
    metadata : mapping or None
        Texts to store beside the tensors.
    framework : str or None
        See :func:`start_load_files`.
    durable : bool
        Wait until the disk has the data and the name.

    Raises
    ------
    UsageError
        A tensor is not contiguous, or has a type that the format lacks.
    TransferFailed
        The disk is full, or a call failed.
    """
    tensor_maker = create_tensor_maker(framework)
    descriptions = [(name, *tensor_maker.describe_tensor(name, tensor)) for name, tensor in tensors.items()]
    # Items are (name, data type, shape, memory). As in safetensors, large element types come first.
    descriptions.sort(key=lambda item: (-_POSITION_BY_DTYPE[item[1]], item[0]))
    entries, data_end = [], 0
    for name, dtype, shape, memory in descriptions:
        entries.append((name, TensorEntry(dtype, shape, data_end, data_end + memory.length_bytes)))
        data_end += memory.length_bytes
    header = pack_header(entries, metadata)
    with contextlib.ExitStack() as stack:
        destination = stack.enter_context(open_destination(Path(filename)))
        file = stack.enter_context(
            new_file(destination, source_mode=_NEW_FILE_MODE, access="automatic", direct="never", durable=durable)
        )
        file.write_from(header)
        extents_by_device: dict[int, tuple[array[int], list[TransferBuffer]]] = {}
        for (_name, entry), (*_rest, memory) in zip(entries, descriptions, strict=True):
            extents, buffers = extents_by_device.setdefault(memory.device_index, (array("Q"), []))
            # An extent has four numbers: index of the file, offset in the file, address, length.
            extents.extend((0, len(header) + entry.begin, memory.address, memory.length_bytes))
            buffers.append(memory)
        transfers = [
            transfer_ranges([file], extents, TransferBuffer(0, data_end, device_index, buffers), write=True)
            for device_index, (extents, buffers) in extents_by_device.items()
        ]
        for transfer in transfers:
            transfer.result()
