"""The selection of tensors and slices in a file, and the place of each in one memory.

The tensors have the same order in the memory as in the file, so that one read fills several neighbours. A gap is left
only where the next tensor would otherwise be unaligned.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, SupportsIndex

from gdrkit.errors import UsageError
from gdrkit.safetensors.header import ELEMENT_TYPES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gdrkit.safetensors.header import Header, TensorEntry

__all__ = [
    "EVERYTHING",
    "Layout",
    "Placement",
    "Select",
    "TensorIndex",
    "find_share",
    "interleave_columns",
    "make_layout",
]

# An index of a tensor, as in `tensor[0, 4:8]`. `...` selects the whole tensor, and None selects nothing.
TensorIndex = SupportsIndex | slice | tuple[object, ...] | object
# A function that returns the index of the part of a tensor to load. Its arguments are the name and the shape.
Select = Callable[[str, tuple[int, ...]], TensorIndex]

EVERYTHING = ...  # The index of a whole tensor.
# Tensors of at least this size begin at a multiple of _ALIGNMENT_BYTES, which kernels with vector loads need. Smaller
# tensors begin at a multiple of their element size, so that one read still fills many scalars.
_ALIGNED_MIN_BYTES = 256
_ALIGNMENT_BYTES = 16
# _create_named_tuple(Placement, values) is faster than a call of Placement.
_create_named_tuple = tuple.__new__
# A part of a tensor: its shape, the offset of each contiguous run from the end of the header, and the size of each run.
_Part = tuple[tuple[int, ...], Sequence[int], int]


class Placement(NamedTuple):
    """The place of a tensor, or of a part of a tensor, in the memory that holds the tensors of one file.

    Attributes
    ----------
    name : str
        Name of the tensor.
    dtype : str
        A key of :data:`~gdrkit.safetensors.ELEMENT_TYPES`.
    shape : tuple of int
        Shape of the part.
    offset_bytes, length_bytes : int
        Offset in the memory, and size.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    length_bytes: int


class Layout(NamedTuple):
    """The places of the selected tensors of one file, and the reads that fill them.

    Attributes
    ----------
    placements : list of Placement
        The tensors, in the order of the file.
    reads : array of int
        Three numbers for each read: offset in the file, offset in the memory, length in bytes.
    length_bytes : int
        Size of the memory.
    """

    placements: list[Placement]
    reads: array[int]
    length_bytes: int


def make_layout(header: Header, select: Select | None = None, *, names: Iterable[str] | None = None) -> Layout:
    """Return the layout for the selected parts of a file.

    Parameters
    ----------
    header : Header
        The header of the file.
    select : callable or None
        See :data:`Select`. None selects all tensors completely.
    names : iterable of str or None
        Names of the tensors to consider; None for all.
    """
    if select is None and names is None and all(entry[2] % _ALIGNMENT_BYTES == 0 for entry in header.tensors.values()):
        # The memory has the layout of the file, so one read fills it.
        placements = [
            _create_named_tuple(Placement, (name, dtype, shape, begin, end - begin))
            for name, (dtype, shape, begin, end) in header.tensors.items()
        ]
        whole_data = (header.data_offset_bytes, 0, header.data_bytes)
        return Layout(placements, array("Q", whole_data if header.data_bytes else ()), header.data_bytes)
    # The current read copies `read_length` bytes from `read_file_offset` in the file to `read_memory_offset` in the
    # memory. It grows while tensors follow each other. `read_data_end` is its end, counted from the end of the header,
    # as `begin`.
    placements, reads = [], array("Q")
    memory_end = read_data_end = read_length = run_bytes = 0
    run_offsets: Sequence[int]
    read_file_offset, read_memory_offset = header.data_offset_bytes, 0
    entries = header.tensors.items() if names is None else [(name, header.tensors[name]) for name in names]
    for name, entry in entries:
        dtype, shape, begin, end = entry
        run_offsets, length = (begin,), end - begin
        if select is not None:
            part = _make_part(name, entry, select(name, shape))
            if part is None:
                continue
            shape, run_offsets, run_bytes = part
            length = run_bytes * len(run_offsets)
            begin = run_offsets[0] if run_offsets else begin
        alignment = _ALIGNMENT_BYTES if length >= _ALIGNED_MIN_BYTES else -(-ELEMENT_TYPES[dtype].bits // 8)
        offset = memory_end + -memory_end % alignment
        placements.append(_create_named_tuple(Placement, (name, dtype, shape, offset, length)))
        memory_end = offset + length
        # A tensor that follows the last read in the file and in the memory extends this read.
        if len(run_offsets) <= 1 and begin == read_data_end and offset == read_memory_offset + read_length:
            read_length += length
            read_data_end += length
            continue
        if read_length:
            reads.extend((read_file_offset, read_memory_offset, read_length))
        # With a read end of -1, the next tensor does not extend a read.
        read_length, read_memory_offset, read_data_end = 0, memory_end, -1
        if len(run_offsets) <= 1:
            read_file_offset, read_memory_offset, read_length = header.data_offset_bytes + begin, offset, length
            read_data_end = begin + length
        else:
            file_offsets = [header.data_offset_bytes + run_offset for run_offset in run_offsets]
            reads.extend(
                interleave_columns(file_offsets, range(offset, memory_end, run_bytes), [run_bytes] * len(run_offsets))
            )
    if read_length:
        reads.extend((read_file_offset, read_memory_offset, read_length))
    return Layout(placements, reads, memory_end)


def interleave_columns(*columns: Sequence[int]) -> array[int]:
    """Return the numbers of columns of equal length, row by row."""
    rows = array("Q", bytes(8 * len(columns) * len(columns[0])))
    for index, column in enumerate(columns):
        rows[index :: len(columns)] = array("Q", column)
    return rows


def _make_part(name: str, entry: TensorEntry, index: TensorIndex) -> _Part | None:
    """Return the part of a tensor that an index selects, or None if the index is None.

    Raises
    ------
    UsageError
        The index does not fit to the shape, has a step, or divides a byte that has several elements.
    """
    if index is None:
        return None
    if index is EVERYTHING:
        return entry.shape, (entry.begin,), entry.end - entry.begin
    sizes = entry.shape
    items = _expand_index(name, sizes, index) if isinstance(index, tuple) or not sizes else (index,)
    # The loop narrows the selection dimension by dimension, from the outermost. The selection so far consists of runs,
    # whose `start_bits` count from the begin of the tensor. Each run has `unit_count` units that follow each other. A
    # unit has one position in the dimensions so far, and all positions in the inner dimensions. Dimensions that the
    # index omits stay complete.
    start_bits, unit_count, unit_bits = [0], 1, (entry.end - entry.begin) * 8
    selected_sizes = []
    for size, item in zip(sizes, items, strict=False):
        if isinstance(item, slice):
            begin, end = _find_slice_range(name, size, item)
            selected_sizes.append(end - begin)
        else:
            begin = _find_position(name, size, item)
            end = begin + 1
        outer_unit_bits, unit_bits = unit_bits, unit_bits // size if size else 0
        if end - begin == size:
            unit_count *= size
            continue
        first_bit = begin * unit_bits
        start_bits = [
            start_bit + first_bit + unit * outer_unit_bits for start_bit in start_bits for unit in range(unit_count)
        ]
        unit_count = end - begin
    shape_of_part = (*selected_sizes, *sizes[len(items) :])
    run_bits = unit_count * unit_bits
    if not run_bits or not start_bits:
        return shape_of_part, (), 0
    if run_bits % 8 or (unit_bits % 8 and any(start_bit % 8 for start_bit in start_bits)):
        message = (
            f"the part {index!r} of tensor {name!r} begins or ends inside a byte, because {entry.dtype} has "
            f"{ELEMENT_TYPES[entry.dtype].bits} bits"
        )
        raise UsageError(message, what_to_do="select an even number of elements of the last dimension")
    return shape_of_part, [entry.begin + start_bit // 8 for start_bit in start_bits], run_bits // 8


def _expand_index(name: str, shape: tuple[int, ...], index: TensorIndex) -> tuple[object, ...]:
    """Return the items of an index, with complete slices in place of ``...``."""
    items = index if isinstance(index, tuple) else (index,)
    ellipses = [position for position, item in enumerate(items) if item is EVERYTHING]
    omitted_count = len(shape) - (len(items) - len(ellipses))
    if len(ellipses) > 1 or omitted_count < 0:
        message = f"{index!r} has too many items for tensor {name!r} of shape {list(shape)}"
        raise UsageError(message)
    for position in ellipses:
        items = (*items[:position], *[slice(None)] * omitted_count, *items[position + 1 :])
    return items


def _find_slice_range(name: str, size: int, item: slice) -> tuple[int, int]:
    begin, end, step = item.indices(size)
    if step != 1:
        message = f"the step of a slice must be 1, not {step} (tensor {name!r})"
        raise UsageError(message, what_to_do="load the tensor, and select the elements on the device")
    return begin, max(begin, end)


def _find_position(name: str, size: int, item: object) -> int:
    if isinstance(item, bool) or not isinstance(item, SupportsIndex):
        message = f"an index may contain only integers, slices and ..., not {item!r:.40} (tensor {name!r})"
        raise UsageError(message)
    position = item.__index__()
    if not -size <= position < size:
        message = f"index {position} is not inside a dimension of size {size} (tensor {name!r})"
        raise UsageError(message)
    return position % size


def find_share(reads: array[int], share_index: int, shares_count: int) -> array[int]:
    """Divide `reads` into `shares_count` shares of equal size, and return the reads of one share."""
    total_bytes = sum(reads[2::3])
    begin = total_bytes * share_index // shares_count
    end = total_bytes * (share_index + 1) // shares_count
    # `bytes_before` is the number of bytes of all reads before the current one.
    share, bytes_before = array("Q"), 0
    for file_offset, memory_offset, length in zip(reads[0::3], reads[1::3], reads[2::3], strict=True):
        part_begin, part_end = max(begin, bytes_before), min(end, bytes_before + length)
        if part_begin < part_end:
            share.extend(
                (
                    file_offset + part_begin - bytes_before,
                    memory_offset + part_begin - bytes_before,
                    part_end - part_begin,
                )
            )
        bytes_before += length
    return share
