"""Balance of NICs: all GPUs and NICs transfer at the same time, and port counters show how much each NIC carries.

Each pair of a GPU and a NIC has an initiator on this NIC, which writes to and reads from memory of the GPU in turn. So
both directions of every path between GPU and NIC are in use. On a balanced machine, the number of bytes that a NIC
carries is proportional to the rate of its link.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from gdrkit import pattern
from gdrkit.cuda import DeviceMemory
from gdrkit.errors import GdrkitError
from gdrkit.host import HostTree, port_growth, read_port_counters
from gdrkit.registration.placement import Placement
from gdrkit.registration.policy import register
from gdrkit.units import KIB, MIB
from gdrkit.verbs import Direction, Initiator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.cuda import PrimaryContext
    from gdrkit.verbs import Nic

__all__ = ["Balance", "NicLoad", "measure_balance"]

# A burst is 16 transfers of 64 KiB, which together cover all of the memory, so the check at the end checks every byte.
_MEMORY_BYTES, _TRANSFER_BYTES, _OPERATION_COUNT, _QUEUE_DEPTH = MIB, 64 * KIB, 16, 8
_PATTERN_SEED = 0x62616C  # "bal"
# A NIC is slow if its share of the bytes is less than this part of its expected share.
_SLOW_RATIO = 0.7


@dataclass(frozen=True, slots=True)
class NicLoad:
    """The load of one NIC: how many bytes it carried, and which share of the bytes of all NICs that is.

    Attributes
    ----------
    nic : str
        Name of the NIC.
    link_gbit_per_s : float
        Rate of its link in Gbit/s; 0 if unknown.
    moved_bytes : int
        Number of bytes that its initiators moved, in both directions.
    counted_bytes : int or None
        Sum of the bytes that its port counted as sent and as received; None if the port has no byte counters.
    share_percent, expected_percent : float
        Its share of the bytes of all NICs, and the share of its link rate in the sum of all link rates.
    """

    nic: str
    link_gbit_per_s: float
    moved_bytes: int
    counted_bytes: int | None
    share_percent: float
    expected_percent: float

    @property
    def is_slow(self) -> bool:
        """Whether the NIC carries less than 70 % of its expected share."""
        return self.share_percent < _SLOW_RATIO * self.expected_percent


@dataclass(frozen=True, slots=True)
class Balance:
    """The result of :func:`measure_balance`.

    Attributes
    ----------
    duration_s : float
        Duration of the transfers in seconds.
    is_counted : bool
        Whether the shares come from the port counters. If a port has no byte counters, or counted nothing, they come
        from the bytes that the initiators moved.
    loads : tuple of NicLoad
        The load of each NIC.
    gpus : tuple of str
        PCI addresses of the GPUs.
    matrix : tuple of tuple of int
        Number of moved bytes by GPU (row) and NIC (column).
    """

    duration_s: float
    is_counted: bool
    loads: tuple[NicLoad, ...]
    gpus: tuple[str, ...]
    matrix: tuple[tuple[int, ...], ...]

    @property
    def slow_nics(self) -> tuple[str, ...]:
        """Names of the slow NICs."""
        return tuple(load.nic for load in self.loads if load.is_slow)


def measure_balance(
    devices: Sequence[PrimaryContext], nics: Sequence[Nic], *, duration_s: float, tree: HostTree | None = None
) -> Balance:
    """Transfer between all GPUs and all NICs for `duration_s`, check the bytes, and return the load of each NIC.

    Raises
    ------
    GdrkitError
        A transfer failed, or its bytes were wrong.
    """
    tree = HostTree() if tree is None else tree
    workers = [_TransferWorker(device, nic) for device in devices for nic in nics]
    with ExitStack() as stack:
        for worker in workers:
            stack.enter_context(worker)
        counters_before = [read_port_counters(tree, nic.name, nic.port.number) for nic in nics]
        start_s = time.monotonic()
        for worker in workers:
            worker.start(start_s + duration_s)
        for worker in workers:
            worker.join()
        elapsed_s = time.monotonic() - start_s
        counters_after = [read_port_counters(tree, nic.name, nic.port.number) for nic in nics]
        for worker in workers:
            worker.check()
    moved_bytes_by_worker = [worker.moved_bytes for worker in workers]
    matrix = tuple(tuple(moved_bytes_by_worker[row * len(nics) : (row + 1) * len(nics)]) for row in range(len(devices)))
    counter_growths = [
        port_growth(before, after) for before, after in zip(counters_before, counters_after, strict=True)
    ]
    counted_bytes = [
        None
        if growth.sent_bytes is None or growth.received_bytes is None
        else growth.sent_bytes + growth.received_bytes
        for growth in counter_growths
    ]
    link_rates_gbit_per_s = [Placement(tree).link_gbit_per_s(nic) for nic in nics]
    moved_bytes_by_nic = [sum(column) for column in zip(*matrix, strict=True)]
    loads = _make_loads(nics, link_rates_gbit_per_s, moved_bytes=moved_bytes_by_nic, counted_bytes=counted_bytes)
    return Balance(
        duration_s=elapsed_s,
        is_counted=_has_every_port_counted(counted_bytes),
        loads=loads,
        gpus=tuple(device.pci_bus_id for device in devices),
        matrix=matrix,
    )


def _has_every_port_counted(counted_bytes: Sequence[int | None]) -> bool:
    """Return whether the port of every NIC has counted bytes."""
    return all(counted_bytes)


def _make_loads(
    nics: Sequence[Nic],
    link_rates_gbit_per_s: Sequence[float],
    *,
    moved_bytes: Sequence[int],
    counted_bytes: Sequence[int | None],
) -> tuple[NicLoad, ...]:
    """Return the load of each NIC. If a link rate is unknown (0), all links count as equally fast."""
    weights = link_rates_gbit_per_s if all(link_rates_gbit_per_s) else [1.0] * len(link_rates_gbit_per_s)
    carried_bytes = [count or 0 for count in counted_bytes] if _has_every_port_counted(counted_bytes) else moved_bytes
    return tuple(
        NicLoad(
            nic=nic.name,
            link_gbit_per_s=link_rates_gbit_per_s[index],
            moved_bytes=moved_bytes[index],
            counted_bytes=counted_bytes[index],
            share_percent=100 * carried_bytes[index] / (sum(carried_bytes) or 1),
            expected_percent=100 * weights[index] / sum(weights),
        )
        for index, nic in enumerate(nics)
    )


class _TransferWorker:
    """A thread that transfers between one GPU and one NIC. It is a context manager that owns its connection."""

    def __init__(self, device: PrimaryContext, nic: Nic) -> None:
        self.moved_bytes = 0
        self._device, self._nic = device, nic
        self._stack = ExitStack()
        self._error: GdrkitError | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._memory = stack.enter_context(DeviceMemory(self._device, _MEMORY_BYTES))
            # The driver may return memory that has the pattern of an earlier balance.
            self._memory.fill(0)
            registration = stack.enter_context(register(self._memory, [self._nic]))
            self._remote_range = registration.remote(self._nic)
            completion_queue = stack.enter_context(self._nic.completion_queue(depth=16))
            responder = stack.enter_context(self._nic.queue_pair(completion_queue))
            self._initiator = stack.enter_context(Initiator(self._nic.name, memory_bytes=_MEMORY_BYTES))
            responder.connect(self._initiator.endpoints()[0], reads_max=self._initiator.reads_max)
            self._initiator.connect([responder.endpoint()], reads_max=self._initiator.reads_max)
            self._initiator.write(pattern.payload(_MEMORY_BYTES, seed=_PATTERN_SEED))
            self._stack = stack.pop_all()
        return self

    def start(self, deadline_s: float) -> None:
        """Start the thread, which transfers until ``time.monotonic()`` is `deadline_s`."""
        self._thread = threading.Thread(target=self._run, args=(deadline_s,), name=f"balance of {self._nic.name}")
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of the transfers."""
        self._thread.join()

    def check(self) -> None:
        """Raise the error of the transfers, or DataMismatch if the GPU or the host has wrong bytes."""
        if self._error is not None:
            raise self._error
        if self.moved_bytes:
            pattern.check(self._memory.read(), seed=_PATTERN_SEED)
            pattern.check(self._initiator.read(), seed=_PATTERN_SEED)

    def _run(self, deadline_s: float) -> None:
        has_zeroed_host_memory = False
        try:
            while time.monotonic() < deadline_s:
                for direction in (Direction.WRITE, Direction.READ):
                    if not has_zeroed_host_memory and direction is Direction.READ:
                        # From here on, the memory of the host has the pattern only if this READ moves the bytes.
                        self._initiator.write(bytes(_MEMORY_BYTES))
                        has_zeroed_host_memory = True
                    burst = self._initiator.run(
                        direction,
                        self._remote_range,
                        length_bytes=_TRANSFER_BYTES,
                        operations=_OPERATION_COUNT,
                        depth=_QUEUE_DEPTH,
                    )
                    self.moved_bytes += burst.moved_bytes
        except GdrkitError as error:
            self._error = error.clone()

    def __exit__(self, *_: object) -> None:
        self._stack.close()
