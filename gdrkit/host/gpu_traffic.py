"""Bytes that crossed the PCIe link and the NVLinks of each GPU, from the counters of NVML.

The GPU counts the bytes of all processes together, and PCIe bytes include the headers of the packets. The PCIe counters
have 32 bits: at the rate of a fast link they wrap every 70 ms. Therefore a thread of :class:`GpuTrafficCounter` reads
them every 20 ms, and counts the readings that came too late.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from gdrkit.errors import GdrkitError
from gdrkit.host import _nvml

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["GpuTraffic", "GpuTrafficCounter", "WrappingCounter"]

# Field identifiers of nvml.h. The PCIe fields count bytes, and the NVLink fields count KiB of each link.
_PCIE_SENT_FIELD_ID, _PCIE_RECEIVED_FIELD_ID = 197, 198  # NVML_FI_DEV_PCIE_COUNT_TX_BYTES, ..._RX_BYTES
_NVLINK_SENT_FIELD_ID, _NVLINK_RECEIVED_FIELD_ID = 138, 139  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ..._RX
_KIB = 1 << 10
_COUNTER_MODULUS = 1 << 32
_READ_PERIOD_S = 0.02
# A link of PCIe 5.0 with 16 lanes moves at most 63 GB/s, so it needs longer than this for 2**32 bytes.
_LATE_AFTER_S = 0.065
_UNSIGNED_LONG_TYPES = (2, 3)  # nvmlValueType_t: unsigned long, unsigned long long.


@dataclass(slots=True)
class WrappingCounter:
    """The growth of a counter that continues at 0 when it reaches 2**32.

    Attributes
    ----------
    growth : int
        Increase of the counter since the first value.
    late_count : int
        Number of times that the counter may have wrapped more than once, because two values were too far apart in time.
    """

    growth: int = 0
    late_count: int = 0
    _last_value: int | None = None
    _last_time_s: float = 0.0

    def add(self, value: int, now_s: float) -> None:
        """Add a value of the counter that was read at the time `now_s`."""
        if self._last_value is not None:
            increase = value - self._last_value
            self.growth += increase if increase >= 0 else increase + _COUNTER_MODULUS
            self.late_count += bool(increase) and now_s - self._last_time_s > _LATE_AFTER_S
        self._last_value, self._last_time_s = value, now_s


@dataclass(frozen=True, slots=True)
class GpuTraffic:
    """The growth of the counters of one GPU. A counter that the GPU does not have is None.

    Attributes
    ----------
    pci_bus_id : str
        PCI address as sysfs writes it.
    minor : int
        Number of the device node, ``/dev/nvidia<minor>``.
    pcie_received_bytes, pcie_sent_bytes : int or None
        Bytes of packets that the GPU received and sent over PCIe, with their headers.
    nvlink_received_bytes, nvlink_sent_bytes : int or None
        Payload bytes that the GPU received and sent over all NVLinks.
    late_count : int
        Number of times that the PCIe counters may have wrapped more than once between two readings. If it is not 0, the
        PCIe bytes are lower bounds.
    process_ids : tuple of int
        Processes that NVML listed as users of the GPU, in the PID namespace of the driver.
    """

    pci_bus_id: str
    minor: int
    pcie_received_bytes: int | None
    pcie_sent_bytes: int | None
    nvlink_received_bytes: int | None
    nvlink_sent_bytes: int | None
    late_count: int
    process_ids: tuple[int, ...]


@dataclass(slots=True)
class _Gpu:
    handle: Any  # The nvmlDevice_t of the GPU.
    pci_bus_id: str
    minor: int
    pcie_received_counter: WrappingCounter = field(default_factory=WrappingCounter)
    pcie_sent_counter: WrappingCounter = field(default_factory=WrappingCounter)
    has_pcie_counters: bool = False
    nvlink_kib_at_start: tuple[int, int] | None = None
    process_ids: set[int] = field(default_factory=set)


class GpuTrafficCounter:
    """Context manager that counts the traffic of all GPUs. In its context, call :meth:`start`, later :meth:`traffic`.

    If NVML cannot be used, :meth:`traffic` returns no GPUs, and :attr:`failure` has the error.

    Attributes
    ----------
    failure : GdrkitError or None
        The reason why there are no counters.
    """

    def __init__(self) -> None:
        self.failure: GdrkitError | None = None
        self._gpus: list[_Gpu] = []
        self._nvml_context = _nvml.initialized()
        self._is_open = False
        self._stop_event = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        try:
            self._nvml_context.__enter__()
            self._is_open = True
            for index in range(_nvml.call("nvmlDeviceGetCount")):
                handle = _nvml.call("nvmlDeviceGetHandleByIndex", index)
                minor = int(_nvml.call("nvmlDeviceGetMinorNumber", handle))
                gpu = _Gpu(handle, _nvml.pci_bus_id(handle), minor)
                gpu.nvlink_kib_at_start = _read_nvlink_kib(handle)
                self._gpus.append(gpu)
            self._read_pcie()
        except GdrkitError as error:
            self.failure = error
            self._gpus = []
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop_event.set()
        if self._thread is not None:
            self._thread.join()
        if self._is_open:
            self._nvml_context.__exit__(None, None, None)

    def start(self) -> None:
        """Start the thread if a GPU has PCIe counters. If this process forks, it must call this after the fork."""
        if self._thread is None and any(gpu.has_pcie_counters for gpu in self._gpus):
            self._thread = threading.Thread(target=self._run, name="gdrkit-gpu-traffic", daemon=True)
            self._thread.start()

    def read_processes(self) -> None:
        """Query the processes that use each GPU now, and add them to :attr:`GpuTraffic.process_ids`."""
        for gpu in self._gpus:
            processes = _nvml.call_if_supported("nvmlDeviceGetComputeRunningProcesses", gpu.handle) or ()
            gpu.process_ids.update(int(process.pid) for process in processes)

    def traffic(self) -> tuple[GpuTraffic, ...]:
        """Stop the thread, and return the growth of all counters since the context was entered."""
        if self._thread is not None:
            self._stop_event.set()
            self._thread.join()
            self._thread = None
        self._read_pcie()
        return tuple(map(_make_traffic, self._gpus))

    def _run(self) -> None:
        while not self._stop_event.wait(_READ_PERIOD_S):
            self._read_pcie()

    def _read_pcie(self) -> None:
        for gpu in self._gpus:
            sent_bytes, received_bytes = _read_fields(
                gpu.handle, [(_PCIE_SENT_FIELD_ID, 0), (_PCIE_RECEIVED_FIELD_ID, 0)]
            )
            if sent_bytes is None or received_bytes is None:
                continue
            now_s = time.monotonic()
            gpu.has_pcie_counters = True
            gpu.pcie_sent_counter.add(sent_bytes, now_s)
            gpu.pcie_received_counter.add(received_bytes, now_s)


def _make_traffic(gpu: _Gpu) -> GpuTraffic:
    nvlink_kib_at_end = _read_nvlink_kib(gpu.handle)
    nvlink_sent_bytes = nvlink_received_bytes = None
    if gpu.nvlink_kib_at_start is not None and nvlink_kib_at_end is not None:
        nvlink_sent_bytes, nvlink_received_bytes = (
            (last_kib - first_kib) * _KIB
            for first_kib, last_kib in zip(gpu.nvlink_kib_at_start, nvlink_kib_at_end, strict=True)
        )
    return GpuTraffic(
        pci_bus_id=gpu.pci_bus_id,
        minor=gpu.minor,
        pcie_received_bytes=gpu.pcie_received_counter.growth if gpu.has_pcie_counters else None,
        pcie_sent_bytes=gpu.pcie_sent_counter.growth if gpu.has_pcie_counters else None,
        nvlink_received_bytes=nvlink_received_bytes,
        nvlink_sent_bytes=nvlink_sent_bytes,
        late_count=max(gpu.pcie_received_counter.late_count, gpu.pcie_sent_counter.late_count),
        process_ids=tuple(sorted(gpu.process_ids)),
    )


def _read_nvlink_kib(handle: object) -> tuple[int, int] | None:
    """Return the KiB that all NVLinks of a GPU sent and received, or None if the GPU has no NVLink counters."""
    link_numbers = range(_nvml.NVLINKS_MAX)
    kib_values = _read_fields(
        handle,
        [(field_id, link) for field_id in (_NVLINK_SENT_FIELD_ID, _NVLINK_RECEIVED_FIELD_ID) for link in link_numbers],
    )
    sent_kib, received_kib = kib_values[: len(link_numbers)], kib_values[len(link_numbers) :]
    if all(value is None for value in kib_values):
        return None
    return sum(value or 0 for value in sent_kib), sum(value or 0 for value in received_kib)


def _read_fields(handle: object, fields: list[tuple[int, int]]) -> list[int | None]:
    """Return the values of `fields`, which are pairs of a field identifier and a scope. A missing value is None.

    The scope of an NVLink field is the number of the link. For other fields it is 0.
    """
    values = _nvml.call_if_supported("nvmlDeviceGetFieldValues", handle, fields)
    if values is None:
        return [None] * len(fields)
    return [_read_unsigned(value) if value.nvmlReturn == 0 else None for value in values]


def _read_unsigned(value: Any) -> int:  # noqa: ANN401 - a structure of pynvml, which has no types.
    # An unsigned long has 8 bytes on Linux, like an unsigned long long.
    return int(value.value.ullVal if value.valueType in _UNSIGNED_LONG_TYPES else value.value.uiVal)
