"""Loading of model files into the memory of one device or of several.

All files of one device are one transfer of the copy engine. Several devices with peer access read each byte once: each
reads its share of every file, and copies it to the others.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from array import array
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from gdrkit import cuda
from gdrkit.buffers import MemoryKind
from gdrkit.errors import ClosedResource, UsageError
from gdrkit.gds import HOST, File, Route, TransferBuffer, transfer_ranges
from gdrkit.safetensors._torch import TorchMaker, has_torch
from gdrkit.safetensors.header import collector_paused, read_header
from gdrkit.safetensors.layout import Layout, file_share, layout_of, rows_of
from gdrkit.safetensors.tensors import DlpackMaker
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from gdrkit.gds import Access, Transfer
    from gdrkit.safetensors.header import Header
    from gdrkit.safetensors.layout import Placement, Select

__all__ = [
    "DeviceLoad",
    "LoadReport",
    "LoadedTensors",
    "ModelLoad",
    "load_file",
    "load_files",
    "maker_of",
    "start_load_files",
]

# Numbers of a read in a layout: offset in the file, offset in the memory, length.
_READ_NUMBERS = 3
_TORCH_NAMES = frozenset({"pt", "torch", "pytorch"})
# Interval in which result() looks for progress, in seconds.
_PROGRESS_S = 0.05
# The time of a smaller load is mostly latency, so it tells nothing about rates.
_RATE_MIN_BYTES = 16 * MIB
# The part of a file whose residency in the page cache is queried, and the share from which the file counts as cached.
_CACHE_QUERY_BYTES = 128 * MIB
_CACHED_SHARE_MIN = 0.5
# Rates of the last reads and of the last copies of several devices, by their indices, in bytes per second.
_read_rates: dict[frozenset[int], float] = {}
_copy_rates: dict[frozenset[int], float] = {}

StrPath = str | os.PathLike[str]


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
        What the load did.
    metadata : list of dict or None
        The texts of each file, in the order of the files.
    """

    report: LoadReport
    metadata: list[dict[str, str] | None]


def maker_of(framework: str | None) -> TorchMaker | DlpackMaker:
    """Return the object that allocates memory and makes tensors: by torch, or by DLPack.

    Parameters
    ----------
    framework : str or None
        ``pt`` (or ``torch``, ``pytorch``) or ``dlpack``. None: torch if it is installed, else DLPack.
    """
    if framework == DlpackMaker.name or (framework is None and not has_torch()):
        return DlpackMaker()
    if framework is None or framework in _TORCH_NAMES:
        return TorchMaker()
    message = f"framework must be 'pt' or 'dlpack', not {framework!r}"
    raise UsageError(message)


class DeviceLoad:
    """The memory, the tensors and the transfer of one device."""

    def __init__(self, maker: TorchMaker | DlpackMaker, device_index: int, *, own_memory: bool) -> None:
        self.maker, self.device_index, self.own_memory = maker, device_index, own_memory
        self.buffers: list[Any] = []
        self.tensors: LoadedTensors = LoadedTensors()
        self.transfer: Transfer | None = None
        # The placements of each file whose tensors share a memory.
        self.placements: list[list[Placement]] = []
        # For each file, three numbers for each read: offset in the file, address, length.
        self.reads: list[array[int]] = []

    def place(self, layout: Layout) -> None:
        """Allocate the memory of one file."""
        if self.own_memory:
            self.reads.append(self._place_each(layout))
            return
        buffer = self.maker.allocate(self.device_index, layout.length_bytes)
        self.buffers.append(buffer)
        self.placements.append(layout.placements)
        address = self.maker.address(buffer)
        reads = array("Q", layout.reads)
        reads[1::3] = array("Q", [address + offset for offset in layout.reads[1::3]])
        self.reads.append(reads)

    def _place_each(self, layout: Layout) -> array[int]:
        """Allocate memory for each tensor."""
        tensors, addresses = self.maker.own_tensors(self.device_index, layout.placements)
        self.buffers.append(tensors)
        self._add(tensors, layout.placements)
        placements = layout.placements
        if len(layout.reads) == _READ_NUMBERS:
            full = [(address, part) for address, part in zip(addresses, placements, strict=True) if part.length_bytes]
            return rows_of(
                [layout.reads[0] + part.offset_bytes for _address, part in full],
                [address for address, _part in full],
                [part.length_bytes for _address, part in full],
            )
        reads, index = array("Q"), 0
        for file_offset, offset, length in zip(layout.reads[0::3], layout.reads[1::3], layout.reads[2::3], strict=True):
            end = offset + length
            while index < len(placements) and placements[index].offset_bytes < end:
                placement = placements[index]
                first = max(placement.offset_bytes, offset)
                last = min(placement.offset_bytes + placement.length_bytes, end)
                if first < last:
                    address = addresses[index] + first - placement.offset_bytes
                    reads.extend((file_offset + first - offset, address, last - first))
                if placement.offset_bytes + placement.length_bytes > end:
                    break
                index += 1
        return reads

    def make_tensors(self) -> None:
        """Make the tensors that share a memory. This takes longer than small copies, so it follows their start."""
        for buffer, placements in zip(self.buffers, self.placements, strict=False):
            self._add(self.maker.tensors(buffer, placements), placements)

    def _add(self, tensors: Sequence[Any], placements: Sequence[Placement]) -> None:
        self.tensors.update(zip([placement.name for placement in placements], tensors, strict=True))

    def start(self, files: Sequence[File], share_index: int, shares_count: int) -> None:
        """Start the transfer of one of several shares of every file."""
        extents, lengths = array("Q"), 0
        for file_index, reads in enumerate(self.reads):
            share = reads if shares_count == 1 else file_share(reads, share_index, shares_count)
            extents.extend(rows_of([file_index] * (len(share) // _READ_NUMBERS), share[0::3], share[1::3], share[2::3]))
            lengths += sum(share[2::3])
        self.maker.wait_for_allocations(self.device_index)
        self.transfer = transfer_ranges(files, extents, TransferBuffer(0, lengths, self.device_index, self.buffers))


class ModelLoad:
    """A load in progress, as a future and as a context manager, whose end cancels a load that is not over.

    :func:`start_load_files` creates it.
    """

    def __init__(
        self, files: list[File], headers: list[Header], devices: list[DeviceLoad], *, shares_count: int, is_list: bool
    ) -> None:
        self._files, self._headers, self._devices = files, headers, devices
        self._shares_count, self._is_list = shares_count, is_list
        self._lock = threading.Lock()
        self._loaded: list[LoadedTensors] | None = None
        self._is_abandoned = False

    @property
    def length_bytes(self) -> int:
        """Number of bytes to read from files."""
        return sum(transfer.length_bytes for transfer in self._transfers())

    @property
    def bytes_moved(self) -> int:
        """Number of bytes that have arrived so far."""
        return sum(transfer.bytes_moved for transfer in self._transfers())

    def done(self) -> bool:
        """Return whether the transfers are over."""
        return all(transfer.done() for transfer in self._transfers())

    def cancel(self) -> None:
        """Start no further chunks. :meth:`result` then raises an error (CANCELLED), unless all had been started."""
        for transfer in self._transfers():
            transfer.cancel()

    def result(self, *, on_progress: Callable[[int, int], None] | None = None) -> Any:  # noqa: ANN401 - one or a list.
        """Wait until all bytes have arrived, and return the tensors.

        Parameters
        ----------
        on_progress : callable or None
            Called about twenty times per second, and at the end, with the bytes that arrived and the bytes requested.
            An exception that it raises cancels the load.

        Returns
        -------
        :class:`LoadedTensors`, or a list of them if the device was given as a list.

        Raises
        ------
        TransferFailed
            See :meth:`gdrkit.gds.Transfer.result`. The error names the file. The memory is freed.
        """
        with self._lock:
            if self._loaded is None:
                if self._is_abandoned:
                    name = "the load"
                    raise ClosedResource(name)
                try:
                    self._loaded = self._finish(on_progress)
                except BaseException:
                    self._abandon()
                    raise
        return self._loaded if self._is_list else self._loaded[0]

    def close(self) -> None:
        """Cancel the load if it is not over, and wait for its end. The tensors of :meth:`result` stay."""
        with self._lock:
            if self._loaded is None and not self._is_abandoned:
                self._abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _transfers(self) -> list[Transfer]:
        return [one.transfer for one in self._devices if one.transfer is not None]

    def _finish(self, on_progress: Callable[[int, int], None] | None) -> list[LoadedTensors]:
        transfers = self._transfers()
        if on_progress is not None:
            total_bytes = self.length_bytes
            while not all(transfer.job.wait(int(_PROGRESS_S * 1e6)) for transfer in transfers):
                on_progress(self.bytes_moved, total_bytes)
            on_progress(self.bytes_moved, total_bytes)
        results = [transfer.result() for transfer in transfers]
        began_s = time.monotonic()
        report = LoadReport(
            route=results[0].route,
            bytes=sum(result.bytes for result in results),
            direct_io_bytes=sum(result.direct_io_bytes for result in results),
            peer_bytes=_copy_to_peers(self._devices) if self._shares_count > 1 else 0,
            duration_s=max(result.duration_s for result in results),
        )
        if len(results) > 1 and report.bytes >= _RATE_MIN_BYTES:
            indices = frozenset(one.device_index for one in self._devices)
            _read_rates[indices] = report.bytes / report.duration_s
            if report.peer_bytes:
                _copy_rates[indices] = report.peer_bytes / (time.monotonic() - began_s)
        for file in self._files:
            file.close()
        loaded = [one.tensors for one in self._devices]
        for tensors in loaded:
            tensors.report, tensors.metadata = report, [header.metadata for header in self._headers]
        self._devices = []
        return loaded

    def _abandon(self) -> None:
        """Cancel the transfers, wait for their end, and drop the files and the memory."""
        self._is_abandoned = True
        self.cancel()
        for transfer in self._transfers():
            transfer.exception()
        for file in self._files:
            file.close()
        self._devices = []


def start_load_files(
    paths: Iterable[StrPath],
    device: Any = "cpu",  # noqa: ANN401 - every form in which torch names a device, or a list.
    *,
    framework: str | None = None,
    select: Select | None = None,
    own_memory: bool = False,
    access: Access = "automatic",
    share: bool | None = None,
) -> ModelLoad:
    """Start to load model files, and return the future of the load.

    Parameters
    ----------
    paths : iterable
        Paths of the files. No tensor may be in two of them.
    device : str, int, torch.device or a list of them
        ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or 1. Each device of a list gets all selected tensors.
    framework : str or None
        ``"pt"``: tensors of torch. ``"dlpack"``: :class:`ModelTensor`. None: torch if it is installed.
    select : callable or None
        Function that returns the index of the part of a tensor to load, from its name and shape: ``...`` for the whole
        tensor, slices and numbers as in ``tensor[0, 4:8]``, or None to leave it out. Only the selected bytes are read.
    own_memory : bool
        False: the tensors of a file share one memory. It is freed when the last of them is gone. True: each tensor has
        memory of its own.
    access : str
        See :class:`gdrkit.gds.File`.
    share : bool or None
        How several devices get the bytes. True: each device reads a share and copies it to the others. False: each
        device reads all bytes. None: the faster of both, by the rates of the earlier loads of this process. The first
        load is shared if all devices have peer access to each other.

    Raises
    ------
    UsageError
        MALFORMED: a file is not a valid safetensors file. BAD_ARGUMENT: a tensor is in two files, or an argument is
        invalid.
    ApiError
        The kernel does not open a file, or a device has too little memory.
    """
    maker = maker_of(framework)
    indices = [maker.device_index(one) for one in (device if isinstance(device, list | tuple) else [device])]
    if not indices or len(set(indices)) != len(indices):
        message = f"device must name at least one device, and none twice, not {device!r}"
        raise UsageError(message)
    devices = [DeviceLoad(maker, index, own_memory=own_memory) for index in indices]
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(File(path, access=access, direct="never")) for path in paths]
        if not files:
            message = "paths must name at least one file"
            raise UsageError(message)
        with collector_paused():
            headers = [read_header(file) for file in files]
            _check_names(files, headers)
            for header in headers:
                layout = layout_of(header, select)
                for one in devices:
                    one.place(layout)
        is_shared = len(indices) > 1 and (_shares_are_faster(files, indices, access) if share is None else share)
        opened.pop_all()
    shares_count = len(indices) if is_shared else 1
    load = ModelLoad(files, headers, devices, shares_count=shares_count, is_list=isinstance(device, list | tuple))
    try:
        for share_index, one in enumerate(devices):
            one.start(files, share_index if is_shared else 0, shares_count)
        with collector_paused():
            for one in devices:
                one.make_tensors()
    except BaseException:
        load.close()
        raise
    return load


def load_files(
    paths: Iterable[StrPath],
    device: Any = "cpu",  # noqa: ANN401 - see start_load_files.
    *,
    on_progress: Callable[[int, int], None] | None = None,
    **options: Any,  # noqa: ANN401 - see start_load_files.
) -> Any:  # noqa: ANN401 - one or a list.
    """Load model files, and return their tensors: ``start_load_files(paths, device, ...).result(on_progress=...)``."""
    with start_load_files(paths, device, **options) as load:
        return load.result(on_progress=on_progress)


def load_file(
    filename: StrPath,
    device: Any = "cpu",  # noqa: ANN401 - see start_load_files.
    **options: Any,  # noqa: ANN401 - see start_load_files.
) -> Any:  # noqa: ANN401 - one or a list.
    """Load one model file, as ``safetensors.torch.load_file`` does; see :func:`load_files`."""
    return load_files([filename], device, **options)


def _check_names(files: Sequence[File], headers: Sequence[Header]) -> None:
    if len(files) == 1:
        return
    first: dict[str, int] = {}
    for index, (file, header) in enumerate(zip(files, headers, strict=True)):
        for name in header.tensors:
            if first.setdefault(name, index) != index:
                message = f"tensor {name!r} is in {files[first[name]].path} and in {file.path}"
                raise UsageError(message, what_to_do="load these files one at a time")


def _shares_are_faster(files: Sequence[File], indices: Sequence[int], access: Access) -> bool:
    """Return whether reads of shares and copies between the devices take less time than reads of everything by each.

    If n devices read everything, they read n times as many bytes as by shares. By shares, the other bytes are copied.
    So the rates of the last loads decide. A disk is slower than every link, so what is not cached is read once.
    """
    if HOST in indices:
        return False
    with contextlib.ExitStack() as stack:
        devices = [stack.enter_context(cuda.Device(index)) for index in indices]
        if not all(cuda.can_access_peer(a, b) for a in devices for b in devices if a is not b):
            return False
    key = frozenset(indices)
    if _copy_rates.get(key, math.inf) >= _read_rates.get(key, 0.0):
        return True
    return access == "direct" or any(
        file.cached_share(length_bytes=min(file.size_bytes, _CACHE_QUERY_BYTES)) < _CACHED_SHARE_MIN for file in files
    )


def _copy_to_peers(loads: Sequence[DeviceLoad]) -> int:
    """Copy the share of each device to all other devices. Return the number of copied bytes."""
    copied_bytes = 0
    with contextlib.ExitStack() as stack:
        devices = [stack.enter_context(cuda.Device(one.device_index)) for one in loads]
        for device in devices:
            for peer in devices:
                if device is not peer and cuda.can_access_peer(device, peer):
                    stack.enter_context(cuda.peer_access(device, peer))
        streams = [stack.enter_context(device.stream()) for device in devices]
        for index, (one, device) in enumerate(zip(loads, devices, strict=True)):
            for other, peer in zip(loads, devices, strict=True):
                if other is not one:
                    for from_address, to_address, length in _copies(one, other, index, len(loads)):
                        begin, end = _borrowed(device, from_address, length), _borrowed(peer, to_address, length)
                        with begin, end:
                            streams[index].copy(begin, end)
                        copied_bytes += length
        for stream in streams:
            stream.synchronize()
    return copied_bytes


def _copies(one: DeviceLoad, other: DeviceLoad, share_index: int, shares_count: int) -> Iterator[tuple[int, int, int]]:
    """Yield the addresses and the length of each copy of a share to another device.

    Reads of a file that follow each other in both memories are one copy.
    """
    for reads in zip(one.reads, other.reads, strict=True):
        source, target = (file_share(part, share_index, shares_count) for part in reads)
        begin = end = joined_bytes = 0
        for from_address, to_address, length in zip(source[1::3], target[1::3], source[2::3], strict=True):
            if joined_bytes and (from_address, to_address) == (begin + joined_bytes, end + joined_bytes):
                joined_bytes += length
                continue
            if joined_bytes:
                yield begin, end, joined_bytes
            begin, end, joined_bytes = from_address, to_address, length
        if joined_bytes:
            yield begin, end, joined_bytes


def _borrowed(device: cuda.Device, address: int, length_bytes: int) -> cuda.BorrowedMemory:
    """Return the memory as an object of gdrkit. Its attributes for NICs are not changed, as borrow() would."""
    return cuda.BorrowedMemory(device, kind=MemoryKind.CUDA, address=address, length_bytes=length_bytes)
