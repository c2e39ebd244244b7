"""The copy engine: pinned memory and threads that move files to and from memory as fast as the machine can.

Level 4. One engine for host memory and one for each NUMA node that has a device, made at the first use and closed at
the end of the program, or by :func:`close_engines`. What it does for a range of a file is decided by what the kernel
has cached of it: cached bytes are copied from the page cache, others are read by O_DIRECT (``native/engine``).
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from array import array
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gdrkit import cuda
from gdrkit.errors import UsageError
from gdrkit.gds._native import call, native
from gdrkit.gds.target import HOST
from gdrkit.gds.transfer import Route
from gdrkit.handles import Handle
from gdrkit.units import GIB, KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["ACCESS", "HOST_OPTIONS", "Engine", "EngineOptions", "EngineWork", "close_engines", "engine_for"]

ACCESS = {"automatic": 0, "buffered": 1, "direct": 2}

_ANY_NODE = -1
_COUNT_MAX = 256
_BYTES_MIN, _BYTES_MAX = 4 * KIB, GIB


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine works: what was fastest where it was measured (``reports/baselines``).

    Attributes
    ----------
    workers_count : int
        Threads; at most as many as this process has processors, at least 2.
    slots_count : int
        Pieces of staging memory of each, so that one fills while others drain.
    piece_bytes : int
        Size of each.
    first_bytes : int
        Pieces of a transfer grow from this size and shrink to it at the end; `piece_bytes`: none does.
    haul_bytes : int
        Size of the copies to a device that the threads load together, once a transfer is long enough; at most
        `piece_bytes`: there are none.
    hauls_count : int
        How many of them there are for all threads.
    load_bytes : int
        Of a haul, what one thread loads at a time.
    sleeps_until_asked : bool
        A thread waits for the device by short sleeps between questions; False: until the device interrupts.
    direct_readers_count : int
        How many reads by O_DIRECT are under way at a time for one transfer.
    direct_read_bytes : int
        Size of each.
    direct_writers_count : int
        How many writes by O_DIRECT.
    direct_write_bytes : int
        Size of each.
    buffered_writers_count : int
        How many threads write into the page cache for one transfer at a time.

    Raises
    ------
    UsageError
        A count that is not 1 to 256, or a size that is not 4 KiB to 1 GiB.
    """

    workers_count: int = 12
    slots_count: int = 2
    piece_bytes: int = 4 * MIB
    first_bytes: int = 512 * KIB
    haul_bytes: int = 8 * MIB
    hauls_count: int = 6
    load_bytes: int = MIB
    sleeps_until_asked: bool = True
    direct_readers_count: int = 2
    direct_read_bytes: int = 4 * MIB
    direct_writers_count: int = 2
    direct_write_bytes: int = 16 * MIB
    buffered_writers_count: int = 2

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            most = _BYTES_MAX if name.endswith("_bytes") else _COUNT_MAX
            least = _BYTES_MIN if name.endswith("_bytes") else 1
            if not isinstance(value, bool) and not least <= value <= most:
                message = f"{name} of an engine is {value}, and not {least} to {most}"
                raise UsageError(message)

    def workers(self) -> int:
        """As many threads as there will be."""
        return min(self.workers_count, max(len(os.sched_getaffinity(0)), 2))


# Memory of the host: no device waits for pieces, and the processors do all of the work.
HOST_OPTIONS = EngineOptions(workers_count=16, slots_count=1, piece_bytes=8 * MIB, first_bytes=8 * MIB)


class EngineWork:
    """A job of the engine, as a transfer sees it."""

    route = Route.ENGINE
    why_not_direct = ""

    def __init__(self, job: Any) -> None:  # noqa: ANN401 - native.
        self._job = job

    def wait(self, timeout_us: int) -> bool:
        """Whether it was over within the time."""
        return bool(self._job.wait(timeout_us))

    def cancel(self) -> None:
        """Begin nothing new."""
        self._job.cancel()

    def progress(self) -> dict[str, Any]:
        """How far it is."""
        found: dict[str, Any] = self._job.progress()
        return found

    def arrived(self) -> Sequence[int]:
        """How many bytes of each range arrived."""
        found: list[int] = self._job.arrived()
        return found


class Engine:
    """Threads and pinned memory near one place.

    Parameters
    ----------
    options : EngineOptions
        How it works.
    node : int
        NUMA node; -1 for any.
    """

    def __init__(self, options: EngineOptions | None = None, *, node: int = _ANY_NODE) -> None:
        chosen = options or EngineOptions()
        self.options = chosen
        self._engine = call(native().Engine, node=node, **{**asdict(chosen), "workers_count": chosen.workers()})
        self._handle = Handle("gds.engine")
        _alive.add(self)

    def submit(
        self,
        *,
        write: bool,
        device_index: int,
        files: list[Any],
        extents: Iterable[int],
        access: str = "automatic",
        flags: int = 0,
        durable: bool = False,
    ) -> EngineWork:
        """Queue a job; waits while too many are queued.

        Parameters
        ----------
        write : bool
            From memory into files, or the other way.
        device_index : int
            Of all the memory; :data:`~gdrkit.gds.target.HOST` for host memory.
        files : list
            Native open files, or paths as bytes, which the engine opens with `flags` and closes.
        extents : iterable of int
            Four numbers for each range: index in `files`, offset, address, length.
        access : str
            ``automatic``, ``buffered`` or ``direct``.
        flags : int
            Of open(2), for paths.
        durable : bool
            A write is over when the disk has it (fdatasync).
        """
        if access not in ACCESS:
            message = f"access {access!r} is none of {', '.join(ACCESS)}"
            raise UsageError(message)
        packed = extents if isinstance(extents, array) else array("Q", extents)
        job = call(
            self._engine.submit,
            write=write,
            access=ACCESS[access],
            device=device_index,
            files=files,
            extents=packed,
            flags=flags,
            durable=durable,
        )
        return EngineWork(job)

    def transfer_small(self, *arguments: Any) -> Any:  # noqa: ANN401 - native.
        """One short range on this thread: (bytes, failure or None). See ``Engine.transfer_small`` of native/engine."""
        return call(self._engine.transfer_small, *arguments)

    def close(self) -> None:
        """End its threads after what is queued, and give its memory back; a second close does nothing."""
        self._engine.close()
        self._handle.release()


_alive: weakref.WeakSet[Engine] = weakref.WeakSet()
# By device; devices of one node share an engine.
_engines: dict[int, Engine] = {}
_of_nodes: dict[int, Engine] = {}
_lock = threading.Lock()


def engine_for(device_index: int) -> Engine:
    """The engine near this device, or that of host memory."""
    found = _engines.get(device_index)
    if found is not None:
        return found
    with _lock:
        if device_index not in _engines:
            _engines[device_index] = _engine_of_host() if device_index == HOST else _engine_near(device_index)
        return _engines[device_index]


def _engine_of_host() -> Engine:
    return Engine(HOST_OPTIONS)


def _engine_near(device_index: int) -> Engine:
    with cuda.Device(device_index) as device:
        node = int(native().node_of(device.pci_bus_id))
    if node not in _of_nodes:
        _of_nodes[node] = Engine(node=node)
    return _of_nodes[node]


def close_engines() -> None:
    """Close every engine after what is queued; the next transfer makes a new one."""
    with _lock:
        while _engines:
            _index, engine = _engines.popitem()
            engine.close()
        _of_nodes.clear()


def _forget_after_fork() -> None:
    global _lock  # noqa: PLW0603 - a thread that is not here may have it.
    _lock = threading.Lock()
    # Threads do not survive a fork, and their memory and streams belong to the parent: nothing may end them here.
    for each in _alive:
        native().keep_forever(each._engine)  # noqa: SLF001 - of this file.
    _engines.clear()
    _of_nodes.clear()


atexit.register(close_engines)
os.register_at_fork(after_in_child=_forget_after_fork)
