"""Loading of model files into the memory of one device or of several.

One transfer of the copy engine loads all files of one device. Several devices with peer access can read each byte only
once: each device reads its share of every file, and copies it to the others.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any, Self, cast

from gdrkit.errors import ClosedResource, UsageError
from gdrkit.forks import ForkSafeLock
from gdrkit.gds import File
from gdrkit.safetensors.devices import (
    DeviceLoad,
    LoadedTensors,
    LoadReport,
    are_shares_faster,
    copy_to_peers,
    create_tensor_maker,
    remember_rates,
)
from gdrkit.safetensors.header import pause_collector, read_header
from gdrkit.safetensors.layout import make_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from gdrkit.gds import Access, Transfer
    from gdrkit.safetensors.header import Header
    from gdrkit.safetensors.layout import Layout, Select

__all__ = ["ModelLoad", "StrPath", "load_file", "load_files", "start_load_files"]

# Interval at which result() reports progress, in seconds.
_PROGRESS_INTERVAL_S = 0.05
StrPath = str | os.PathLike[str]


class ModelLoad:
    """A load in progress, as a future. It is also a context manager, which cancels a load that is not over.

    :func:`start_load_files` creates it.
    """

    def __init__(
        self,
        files: list[File],
        headers: list[Header],
        device_loads: list[DeviceLoad],
        *,
        shares_count: int,
        returns_list: bool,
    ) -> None:
        self._files, self._headers, self._device_loads = files, headers, device_loads
        self._shares_count, self._returns_list = shares_count, returns_list
        # The lock is reentrant, because a signal handler may call result() or close() while the interrupted thread has
        # it.
        self._lock = ForkSafeLock(reentrant=True)
        self._loaded_tensors: list[LoadedTensors] | None = None
        self._is_abandoned = False

    @property
    def length_bytes(self) -> int:
        """Number of bytes to read from files."""
        return sum(transfer.length_bytes for transfer in self._list_transfers())

    @property
    def bytes_moved(self) -> int:
        """Number of bytes that have arrived so far."""
        return sum(transfer.bytes_moved for transfer in self._list_transfers())

    def done(self) -> bool:
        """Return whether the transfers are over."""
        return all(transfer.done() for transfer in self._list_transfers())

    def cancel(self) -> None:
        """Start no further chunks. Unless all chunks had started, :meth:`result` then raises an error (CANCELLED)."""
        for transfer in self._list_transfers():
            transfer.cancel()

    def result(self, *, on_progress: Callable[[int, int], None] | None = None) -> Any:  # noqa: ANN401 - one or a list.
        """Wait until all bytes have arrived, and return the tensors.

        Parameters
        ----------
        on_progress : callable or None
            Called about twenty times per second, and at the end, with the number of bytes that arrived and the number
            requested. An exception that it raises cancels the load.

        Returns
        -------
        :class:`LoadedTensors`, or a list of them if the device was given as a list.

        Raises
        ------
        TransferFailed
            See :meth:`gdrkit.gds.Transfer.result`. The error names the file. The memory is freed.
        """
        with self._lock:
            device_loads = self._device_loads  # A call of result() in a signal handler clears self._device_loads.
            if self._loaded_tensors is None:
                self._require_open()
                try:
                    self._loaded_tensors = self._finish(device_loads, on_progress)
                    self._require_open()  # A signal handler may have called close() meanwhile.
                except BaseException:
                    self._abandon()
                    raise
                self._device_loads = []
        return self._loaded_tensors if self._returns_list else self._loaded_tensors[0]

    def close(self) -> None:
        """Cancel the load if it is not over, and wait for its end. The tensors of :meth:`result` stay."""
        with self._lock:
            if self._loaded_tensors is None and not self._is_abandoned:
                self._abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _list_transfers(self) -> list[Transfer]:
        return [device_load.transfer for device_load in self._device_loads if device_load.transfer is not None]

    def _finish(
        self, device_loads: list[DeviceLoad], on_progress: Callable[[int, int], None] | None
    ) -> list[LoadedTensors]:
        """Wait for the transfers of the devices, and return the tensors.

        A call of :meth:`result` in a signal handler meanwhile returns the same tensors, because both calls take them
        from the same `device_loads`.
        """
        _make_tensors(device_loads)
        transfers = [device_load.transfer for device_load in device_loads if device_load.transfer is not None]
        if on_progress is not None:
            total_bytes = self.length_bytes
            while not all(transfer.job.wait(int(_PROGRESS_INTERVAL_S * 1e6)) for transfer in transfers):
                on_progress(self.bytes_moved, total_bytes)
            on_progress(self.bytes_moved, total_bytes)
        results = [transfer.result() for transfer in transfers]
        copy_start_s = time.monotonic()
        report = LoadReport(
            route=results[0].route,
            bytes=sum(result.bytes for result in results),
            direct_io_bytes=sum(result.direct_io_bytes for result in results),
            peer_bytes=copy_to_peers(device_loads) if self._shares_count > 1 else 0,
            duration_s=max(result.duration_s for result in results),
        )
        remember_rates(device_loads, report, copy_duration_s=time.monotonic() - copy_start_s)
        for file in self._files:
            file.close()
        tensors_of_devices = [device_load.tensors for device_load in device_loads]
        for tensors in tensors_of_devices:
            tensors.report, tensors.metadata = report, [header.metadata for header in self._headers]
        return tensors_of_devices

    def _require_open(self) -> None:
        if self._is_abandoned:
            # If a signal handler called close() meanwhile, result() has stored the tensors. They are dropped here.
            self._loaded_tensors = None
            name = "the load"
            raise ClosedResource(name)

    def _abandon(self) -> None:
        """Cancel the transfers, wait for their end, and drop the files and the memory."""
        self._is_abandoned = True
        with contextlib.suppress(UsageError):  # A forked child cannot wait for the transfers of its parent.
            self.cancel()
            for transfer in self._list_transfers():
                transfer.exception()
        for file in self._files:
            file.close()
        for device_load in self._device_loads:
            device_load.drop()
        self._device_loads = []


def start_load_files(
    paths: Iterable[StrPath],
    device: Any = "cpu",  # noqa: ANN401 - every form in which torch names a device, or a list.
    *,
    framework: str | None = None,
    select: Select | Sequence[Select | None] | None = None,
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
    select : callable, list of callables or None
        Function that returns the index of the part of a tensor to load, from its name and shape: ``...`` for the whole
        tensor, slices and numbers as in ``tensor[0, 4:8]``, or None to leave it out. Only the selected bytes are read.
        A list has one function for each device, for example for tensor parallelism.
    own_memory : bool
        False: the tensors of a file share one memory. It is freed when the last tensor is gone. True: each tensor has
        memory of its own.
    access : str
        See :class:`gdrkit.gds.File`.
    share : bool or None
        The method by which several devices get the bytes. True: each device reads a share and copies it to the others.
        False: each device reads all bytes. None: the faster of both, by the rates of the earlier loads of this process.
        The first load is shared if all devices have peer access to each other. A load with a list of selections is not
        shared.

    Raises
    ------
    UsageError
        MALFORMED: a file is not a valid safetensors file. BAD_ARGUMENT: a tensor is in two files, or an argument is
        invalid.
    ApiError
        The kernel does not open a file, or a device has too little memory.
    """
    tensor_maker = create_tensor_maker(framework)
    device_indices = [
        tensor_maker.find_device_index(name) for name in (device if isinstance(device, list | tuple) else [device])
    ]
    if not device_indices or len(set(device_indices)) != len(device_indices):
        message = f"device must name at least one device, and none twice, not {device!r}"
        raise UsageError(message)
    selections = _expand_selections(select, len(device_indices), share=share)
    device_loads = [DeviceLoad(tensor_maker, device_index, own_memory=own_memory) for device_index in device_indices]
    with contextlib.ExitStack() as open_resources:
        files = [open_resources.enter_context(File(path, access=access, direct="never")) for path in paths]
        if not files:
            message = "paths must name at least one file"
            raise UsageError(message)
        with pause_collector():
            headers = [read_header(file) for file in files]
            _check_names(files, headers)
        may_share = len(device_indices) > 1 and not isinstance(select, list | tuple)
        is_shared = may_share and (are_shares_faster(files, device_indices, access) if share is None else share)
        open_resources.pop_all()  # From here on, the ModelLoad closes the files.
    shares_count = len(device_indices) if is_shared else 1
    load = ModelLoad(
        files, headers, device_loads, shares_count=shares_count, returns_list=isinstance(device, list | tuple)
    )
    try:
        layouts: list[Layout] = []
        for device_position, (device_load, selection) in enumerate(zip(device_loads, selections, strict=True)):
            # The transfer of one device runs while the layouts of the next one are computed.
            with pause_collector():
                if device_position == 0 or selection is not selections[device_position - 1]:
                    layouts = [make_layout(header, selection) for header in headers]
                for layout in layouts:
                    device_load.add_file(layout)
            device_load.start(files, device_position if is_shared else 0, shares_count)
    except BaseException:
        load.close()
        raise
    return load


def _expand_selections(
    select: Select | Sequence[Select | None] | None, devices_count: int, *, share: bool | None
) -> list[Select | None]:
    """Return the selection of each device."""
    if not isinstance(select, list | tuple):
        return [cast("Select | None", select)] * devices_count
    if len(select) != devices_count:
        message = f"select must have one function for each of the {devices_count} devices, not {len(select)}"
        raise UsageError(message)
    if share:
        message = "share must be False or None for a list of selections, because the devices load different bytes"
        raise UsageError(message)
    return list(select)


def _make_tensors(device_loads: list[DeviceLoad]) -> None:
    with pause_collector():
        for device_load in device_loads:
            device_load.make_tensors()


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
    first_file_index_by_name: dict[str, int] = {}
    for file_index, (file, header) in enumerate(zip(files, headers, strict=True)):
        for name in header.tensors:
            if first_file_index_by_name.setdefault(name, file_index) != file_index:
                message = f"tensor {name!r} is in {files[first_file_index_by_name[name]].path} and in {file.path}"
                raise UsageError(message, what_to_do="load these files one at a time")
