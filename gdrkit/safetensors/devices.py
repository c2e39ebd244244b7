"""The memory, the tensors and the transfer of each device of a load, and the shares that devices copy to each other."""

from __future__ import annotations

import contextlib
import math
from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

from gdrkit import cuda
from gdrkit.buffers import MemoryKind
from gdrkit.errors import UsageError
from gdrkit.gds import HOST, Route, TransferBuffer, transfer_ranges
from gdrkit.safetensors._torch import TorchTensorMaker, has_torch
from gdrkit.safetensors.layout import Layout, find_share, interleave_columns
from gdrkit.safetensors.tensors import DlpackTensorMaker
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gdrkit.gds import Access, File, Transfer
    from gdrkit.safetensors.layout import Placement

__all__ = [
    "DeviceLoad",
    "LoadReport",
    "LoadedTensors",
    "are_shares_faster",
    "copy_to_peers",
    "create_tensor_maker",
    "remember_rates",
]

# Numbers of a read in a layout: offset in the file, offset in the memory, length.
_NUMBERS_PER_READ = 3
_TORCH_NAMES = frozenset({"pt", "torch", "pytorch"})
# The time of a smaller load is mostly latency, so it tells nothing about rates.
_RATE_MIN_BYTES = 16 * MIB
# Only this number of bytes at the beginning of a file is queried for residency in the page cache.
_CACHE_QUERY_BYTES = 128 * MIB
# A file counts as cached if at least this share of the queried bytes is in the page cache.
_CACHED_SHARE_MIN = 0.5
# Rates of the last load of each set of device indices, in bytes per second: of the reads from files, and of the copies
# between the devices.
_read_rates: dict[frozenset[int], float] = {}
_copy_rates: dict[frozenset[int], float] = {}


class LoadReport(NamedTuple):
    """The result of a load: the route of its bytes, and their number.

    Attributes
    ----------
    route : Route
        The route of the bytes from the files. It is ``engine``, because tensors are not aligned as cuFile needs.
    bytes : int
        Bytes that were read from files, for all devices together.
    direct_io_bytes : int
        The part of these bytes that bypassed the page cache (O_DIRECT).
    peer_bytes : int
        Bytes that were copied from one device to another.
    duration_s : float
        Time from the start of the transfer to its last byte, in seconds.
    """

    route: Route
    bytes: int
    direct_io_bytes: int
    peer_bytes: int
    duration_s: float


class LoadedTensors(dict[str, Any]):
    """The tensors of one device by their names, as a dict.

    Attributes
    ----------
    report : LoadReport
        The report of the load.
    metadata : list of dict or None
        The metadata of each file, in the order of the files.
    """

    report: LoadReport
    metadata: list[dict[str, str] | None]


def create_tensor_maker(framework: str | None) -> TorchTensorMaker | DlpackTensorMaker:
    """Return the object that allocates memory and makes tensors: by torch, or by DLPack.

    Parameters
    ----------
    framework : str or None
        ``pt`` (or ``torch``, ``pytorch``) or ``dlpack``. None: torch if it is installed, else DLPack.
    """
    if framework == DlpackTensorMaker.framework_name or (framework is None and not has_torch()):
        return DlpackTensorMaker()
    if framework is None or framework in _TORCH_NAMES:
        return TorchTensorMaker()
    message = f"framework must be 'pt' or 'dlpack', not {framework!r}"
    raise UsageError(message)


class DeviceLoad:
    """The memory, the tensors and the transfer of one device.

    With `own_memory`, each tensor has memory of its own. Else the tensors of a file share one buffer.
    """

    def __init__(
        self, tensor_maker: TorchTensorMaker | DlpackTensorMaker, device_index: int, *, own_memory: bool
    ) -> None:
        self.tensor_maker, self.device_index, self.own_memory = tensor_maker, device_index, own_memory
        self.buffers: list[Any] = []
        self.tensors: LoadedTensors = LoadedTensors()
        self.transfer: Transfer | None = None
        # For each file whose tensors share one memory: their placements.
        self.placements: list[list[Placement]] = []
        # For each file, three numbers for each read: offset in the file, address, length.
        self.reads: list[array[int]] = []

    def add_file(self, layout: Layout) -> None:
        """Allocate the memory of one file, and add the reads that fill this memory."""
        if self.own_memory:
            self.reads.append(self._allocate_separate_tensors(layout))
            return
        buffer = self.tensor_maker.allocate(self.device_index, layout.length_bytes)
        self.buffers.append(buffer)
        self.placements.append(layout.placements)
        address = self.tensor_maker.address(buffer)
        reads = array("Q", layout.reads)
        reads[1::3] = array("Q", [address + offset for offset in layout.reads[1::3]])
        self.reads.append(reads)

    def _allocate_separate_tensors(self, layout: Layout) -> array[int]:
        """Allocate memory for each tensor, and return the reads that fill this memory."""
        tensors, addresses = self.tensor_maker.allocate_separate_tensors(self.device_index, layout.placements)
        self.buffers.append(tensors)
        self._add_tensors(tensors, layout.placements)
        placements = layout.placements
        if len(layout.reads) == _NUMBERS_PER_READ:
            # A single read means that the tensors follow each other in the file. So each tensor needs one read.
            addressed_placements = [
                (address, placement)
                for address, placement in zip(addresses, placements, strict=True)
                if placement.length_bytes
            ]
            return interleave_columns(
                [layout.reads[0] + placement.offset_bytes for _address, placement in addressed_placements],
                [address for address, _placement in addressed_placements],
                [placement.length_bytes for _address, placement in addressed_placements],
            )
        # Each read of the layout is divided at the ends of the tensors.
        reads, placement_index = array("Q"), 0
        for file_offset, read_begin, length in zip(
            layout.reads[0::3], layout.reads[1::3], layout.reads[2::3], strict=True
        ):
            read_end = read_begin + length
            while placement_index < len(placements) and placements[placement_index].offset_bytes < read_end:
                placement = placements[placement_index]
                part_begin = max(placement.offset_bytes, read_begin)
                part_end = min(placement.offset_bytes + placement.length_bytes, read_end)
                if part_begin < part_end:
                    address = addresses[placement_index] + part_begin - placement.offset_bytes
                    reads.extend((file_offset + part_begin - read_begin, address, part_end - part_begin))
                if placement.offset_bytes + placement.length_bytes > read_end:
                    break
                placement_index += 1
        return reads

    def make_tensors(self) -> None:
        """Make the tensors of each buffer, while their bytes arrive."""
        for buffer, placements in zip(self.buffers, self.placements, strict=False):
            self._add_tensors(self.tensor_maker.make_tensors(buffer, placements), placements)

    def _add_tensors(self, tensors: Sequence[Any], placements: Sequence[Placement]) -> None:
        self.tensors.update(zip([placement.name for placement in placements], tensors, strict=True))

    def drop(self) -> None:
        """Drop the memory and the tensors, because the traceback of an error may keep this object alive."""
        self.buffers.clear()
        self.tensors.clear()

    def start(self, files: Sequence[File], share_index: int, shares_count: int) -> None:
        """Start the transfer of one of several shares of every file."""
        # Four numbers for each read: index of the file, offset in the file, address, length.
        extents, total_bytes = array("Q"), 0
        for file_index, reads in enumerate(self.reads):
            share = reads if shares_count == 1 else find_share(reads, share_index, shares_count)
            extents.extend(
                interleave_columns(
                    [file_index] * (len(share) // _NUMBERS_PER_READ), share[0::3], share[1::3], share[2::3]
                )
            )
            total_bytes += sum(share[2::3])
        self.tensor_maker.wait_for_allocations(self.device_index)
        # transfer_ranges() takes the addresses from the extents and does not use the address of the buffer.
        self.transfer = transfer_ranges(files, extents, TransferBuffer(0, total_bytes, self.device_index, self.buffers))


def remember_rates(loads: Sequence[DeviceLoad], report: LoadReport, *, copy_duration_s: float) -> None:
    """Remember the rates of a load of several devices for :func:`are_shares_faster`."""
    if len(loads) > 1 and report.bytes >= _RATE_MIN_BYTES:
        device_indices = frozenset(load.device_index for load in loads)
        _read_rates[device_indices] = report.bytes / report.duration_s
        if report.peer_bytes:
            _copy_rates[device_indices] = report.peer_bytes / copy_duration_s


def are_shares_faster(files: Sequence[File], device_indices: Sequence[int], access: Access) -> bool:
    """Return whether a load by shares takes less time than a load in which each device reads all bytes.

    In a load by shares, each of n devices reads 1/n of the bytes, and copies them to the other devices. Shares are
    faster if the last copies between these devices were at least as fast as the last reads. They are also faster if
    the bytes come from a disk and not from the page cache, because a disk is slower than every link.
    """
    if HOST in device_indices:
        return False
    with contextlib.ExitStack() as stack:
        devices = [stack.enter_context(cuda.Device(index)) for index in device_indices]
        if not all(cuda.can_access_peer(device, peer) for device in devices for peer in devices if device is not peer):
            return False
    device_index_set = frozenset(device_indices)
    # Without a rate of an earlier load, shares count as faster.
    if _copy_rates.get(device_index_set, math.inf) >= _read_rates.get(device_index_set, 0.0):
        return True
    return access == "direct" or any(
        file.cached_share(length_bytes=min(file.size_bytes, _CACHE_QUERY_BYTES)) < _CACHED_SHARE_MIN for file in files
    )


def copy_to_peers(loads: Sequence[DeviceLoad]) -> int:
    """Copy the share of each device to all other devices. Return the number of copied bytes."""
    copied_bytes = 0
    with contextlib.ExitStack() as stack:
        devices = [stack.enter_context(cuda.Device(load.device_index)) for load in loads]
        for device in devices:
            for peer in devices:
                if device is not peer and cuda.can_access_peer(device, peer):
                    stack.enter_context(cuda.peer_access(device, peer))
        streams = [stack.enter_context(device.stream()) for device in devices]
        for share_index, (load, device) in enumerate(zip(loads, devices, strict=True)):
            for peer_load, peer in zip(loads, devices, strict=True):
                if peer_load is not load:
                    for from_address, to_address, length in _list_copies(load, peer_load, share_index, len(loads)):
                        source, target = _borrow(device, from_address, length), _borrow(peer, to_address, length)
                        with source, target:
                            streams[share_index].copy(source, target)
                        copied_bytes += length
        for stream in streams:
            stream.synchronize()
    return copied_bytes


def _list_copies(
    load: DeviceLoad, peer_load: DeviceLoad, share_index: int, shares_count: int
) -> Iterator[tuple[int, int, int]]:
    """Yield the addresses and the length of each copy of a share to another device.

    Reads of a file that follow each other in the memories of both devices are joined to one copy.
    """
    for reads_of_both in zip(load.reads, peer_load.reads, strict=True):
        from_share, to_share = (find_share(device_reads, share_index, shares_count) for device_reads in reads_of_both)
        from_begin = to_begin = joined_bytes = 0
        for from_address, to_address, length in zip(from_share[1::3], to_share[1::3], from_share[2::3], strict=True):
            if joined_bytes and (from_address, to_address) == (from_begin + joined_bytes, to_begin + joined_bytes):
                joined_bytes += length
                continue
            if joined_bytes:
                yield from_begin, to_begin, joined_bytes
            from_begin, to_begin, joined_bytes = from_address, to_address, length
        if joined_bytes:
            yield from_begin, to_begin, joined_bytes


def _borrow(device: cuda.Device, address: int, length_bytes: int) -> cuda.BorrowedMemory:
    """Return the memory as an object of gdrkit. Unlike cuda.borrow(), this function does not set SYNC_MEMOPS on it."""
    return cuda.BorrowedMemory(device, kind=MemoryKind.CUDA, address=address, length_bytes=length_bytes)
