"""The copy engine: threads and pinned memory that move bytes between files and memory.

There is one engine for host memory and one for each device, with memory and threads of the device's NUMA node. An
engine is created at the first use and closed at the end of the program, or by :func:`close_engines`. By default, the
engine reads cached ranges of a file from the page cache and other ranges with O_DIRECT. The native part is in
``native/engine``.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gdrkit import cuda, forks
from gdrkit.errors import UsageError
from gdrkit.gds._native import api_error, call_native, native
from gdrkit.gds.buffer import HOST
from gdrkit.handles import Handle
from gdrkit.units import GIB, KIB, MIB

if TYPE_CHECKING:
    from array import array

    from gdrkit.gds.transfer import Transfer, TransferJob

__all__ = ["ACCESS_NUMBERS", "HOST_OPTIONS", "Engine", "EngineOptions", "close_engines", "engine_for"]

# For each value of `access` (see Engine.submit), the number of the I/O path in an enum of the native engine.
ACCESS_NUMBERS = {"automatic": 0, "buffered": 1, "direct": 2}

_ANY_NUMA_NODE = -1
# Limits of the settings in EngineOptions.
_COUNT_MAX = 256
_BYTES_MIN, _BYTES_MAX = 4 * KIB, GIB


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Settings of an engine. The defaults are the fastest values of the measurements in ``reports/baselines``.

    Attributes
    ----------
    workers_count : int
        Largest number of threads. If this process may use fewer processors, the engine has one thread per processor,
        but at least two.
    buffers_count : int
        Number of staging buffers of each thread. One is filled while the device copies from the others.
    chunk_bytes : int
        Size of one staging buffer and largest size of a chunk, in bytes.
    first_chunk_bytes : int
        Size of the first and of the last chunks of a transfer, in bytes. Between them the chunks are larger, up to
        `chunk_bytes`. If it equals `chunk_bytes`, all chunks have this size.
    coalesced_bytes : int
        Size of a coalesced copy to a device, which all threads fill together, in bytes. Only long transfers use
        coalesced copies. A value of at most `chunk_bytes` turns them off.
    coalesced_count : int
        Number of buffers for coalesced copies, for all threads together.
    slice_bytes : int
        Part of a coalesced copy that one thread fills at a time, in bytes.
    polls_device : bool
        How a thread waits for a copy of the device. True: the thread queries the device between short sleeps. False: it
        blocks until the interrupt of the device.
    direct_readers_count : int
        Number of concurrent O_DIRECT reads of one transfer.
    direct_read_bytes : int
        Size of an O_DIRECT read, in bytes.
    direct_writers_count : int
        Number of concurrent O_DIRECT writes of one transfer.
    direct_write_bytes : int
        Size of an O_DIRECT write, in bytes.
    buffered_writers_count : int
        Number of threads that write into the page cache at the same time for one transfer.

    Raises
    ------
    UsageError
        A count is not in the range 1 to 256, or a size is not in the range 4 KiB to 1 GiB.
    """

    workers_count: int = 14
    buffers_count: int = 2
    chunk_bytes: int = 4 * MIB
    first_chunk_bytes: int = 512 * KIB
    coalesced_bytes: int = 8 * MIB
    coalesced_count: int = 4
    slice_bytes: int = 512 * KIB
    polls_device: bool = True
    direct_readers_count: int = 2
    direct_read_bytes: int = 4 * MIB
    direct_writers_count: int = 2
    direct_write_bytes: int = 16 * MIB
    buffered_writers_count: int = 2

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            smallest, largest = (_BYTES_MIN, _BYTES_MAX) if name.endswith("_bytes") else (1, _COUNT_MAX)
            if not isinstance(value, bool) and not smallest <= value <= largest:
                message = f"{name} must be {smallest} to {largest}, not {value}"
                raise UsageError(message)

    def threads_count(self) -> int:
        """Return the number of threads that the engine will have."""
        return min(self.workers_count, max(len(os.sched_getaffinity(0)), 2))


# The settings for host memory: many threads, because the processors move all bytes, and no small first chunks, because
# no device waits for data.
HOST_OPTIONS = EngineOptions(workers_count=16, buffers_count=1, chunk_bytes=8 * MIB, first_chunk_bytes=8 * MIB)


class Engine:
    """A copy engine: threads and pinned memory on one NUMA node.

    Parameters
    ----------
    options : EngineOptions
        Settings of the engine.
    node : int
        NUMA node of the memory and the threads, or -1 for any.
    """

    def __init__(self, options: EngineOptions | None = None, *, node: int = _ANY_NUMA_NODE) -> None:
        self.options = options or EngineOptions()
        self._native_settings = {**asdict(self.options), "workers_count": self.options.threads_count(), "node": node}
        self._engine = call_native(native.Engine, **self._native_settings)
        # The handle counts this engine as an open object until close().
        self._handle = Handle("gds.engine")
        self._is_closed = False
        forks.register(self)

    def submit(
        self,
        *,
        write: bool,
        device_index: int,
        files: list[Any],
        extents: list[int] | array[int],
        access: str = "automatic",
        flags: int = 0,
        durable: bool = False,
        transfer: Transfer | None = None,
    ) -> TransferJob:
        """Queue a job, which transfers ranges, and return it. The call blocks while too many jobs are queued.

        Parameters
        ----------
        write : bool
            True: write from memory into files. False: read from files into memory.
        device_index : int
            Index of the device whose memory all ranges use; :data:`~gdrkit.gds.HOST` for host memory.
        files : list
            Native open files, or paths as bytes. The engine opens paths with `flags` and closes them.
        extents : list or array of int
            Four numbers for each range: index in `files`, offset, address, length. An array has the type code Q.
        access : str
            ``automatic``, ``buffered`` or ``direct``; see :class:`~gdrkit.gds.File`.
        flags : int
            Flags with which open(2) opens the paths.
        durable : bool
            Whether a write is complete only when the disk has the data (fdatasync).
        transfer : Transfer or None
            The transfer that gets the job. No interrupt can come between the two steps: queueing the job, and storing
            it in the transfer.
        """
        try:
            job: TransferJob = self._engine.submit(
                write, ACCESS_NUMBERS[access], device_index, files, extents, flags, durable, transfer
            )
        except KeyError:
            message = f"access must be one of {', '.join(map(repr, ACCESS_NUMBERS))}, not {access!r}"
            raise UsageError(message) from None
        except native.EngineError as error:
            raise api_error(error.args) from error
        return job

    def transfer_small(self, *arguments: Any) -> Any:  # noqa: ANN401 - native object.
        """Move one short range on the calling thread. Return (bytes, failure or None).

        The arguments are passed to ``Engine::transfer_small`` in ``native/engine``.
        """
        try:
            return self._engine.transfer_small(*arguments)
        except native.EngineError as error:
            raise api_error(error.args) from error

    @property
    def closed(self) -> bool:
        """Whether the engine was closed."""
        return self._is_closed

    def close(self) -> None:
        """Complete the queued jobs, then end the threads and free the memory. A second close does nothing.

        Meanwhile, the engine refuses further jobs. If Ctrl-C ends the wait, the engine stays open.
        """
        # If a signal handler forks during the native close(), that call returns False in the child, where self._engine
        # is now a new engine. This loop closes the new engine, too.
        while not self._engine.close():
            pass
        self._is_closed = True
        self._handle.release()

    def after_fork_in_child(self) -> None:
        """Abandon the threads and the memory of the engine in a forked child, and use new ones.

        Threads do not survive a fork. The memory and the streams belong to the parent, so the child must not release
        them.
        """
        native.keep_forever(self._engine)
        if not self._is_closed:
            self._engine = native.Engine(**self._native_settings)


# Engines by device index. Even devices on one NUMA node have separate engines: the threads of one engine fill only one
# PCIe link, and with more threads the staging memory would not fit into the caches of the processors.
_engines: dict[int, Engine] = {}
# Engines that close_engines() has taken out of use. They stay here until they are closed, even if an interrupt ends
# close_engines().
_retired_engines: dict[Engine, None] = {}
# The lock is reentrant, because a signal handler may start a transfer, or close the engines, while its thread holds
# the lock.
_engines_lock = forks.ForkSafeLock(reentrant=True)


def engine_for(device_index: int) -> Engine:
    """Return the engine of the device, or for :data:`HOST` the engine of host memory.

    The engine is created at its first use.
    """
    engine = _engines.get(device_index)
    if engine is not None:
        return engine
    with _engines_lock:
        while True:
            engine = _engines.get(device_index) or _add_if_first(device_index, _create_engine(device_index))
            if not engine.closed:
                return engine
            _engines.pop(device_index, None)  # A signal handler has closed the engines meanwhile.


def _create_engine(device_index: int) -> Engine:
    if device_index == HOST:
        return Engine(HOST_OPTIONS)
    with cuda.Device(device_index) as device:
        return Engine(node=int(native.node_of_device(device.pci_bus_id)))


def _add_if_first(device_index: int, engine: Engine) -> Engine:
    """Add a new engine, unless a signal handler has added one meanwhile, and return the engine that is used."""
    used_engine = _engines.setdefault(device_index, engine)
    if used_engine is not engine:
        engine.close()
    return used_engine


def close_engines() -> None:
    """Complete the queued jobs and close every engine. The next transfer creates a new engine.

    If Ctrl-C ends the wait, the next call waits again.
    """
    with _engines_lock:
        _retired_engines.update(dict.fromkeys(_engines.values()))
        _engines.clear()
    for engine in tuple(_retired_engines):
        engine.close()
        _retired_engines.pop(engine, None)


def _close_at_exit() -> None:
    """Close every engine, and release the memory of the transfers whose futures the program has dropped."""
    try:
        close_engines()
    except BaseException:
        # Ctrl-C has ended the wait. If the interpreter freed the engines at its end, it would wait for the jobs again.
        native.keep_forever(_retired_engines)
        raise
    if "gdrkit.gds._engine" not in sys.modules:
        return
    for transfer in tuple(native.in_progress.values()):
        transfer.discard()
    if threading.active_count() > 1:
        # When the interpreter ends, it stops daemon threads and never frees the objects that they use. The native
        # module must not report these objects as leaks.
        native.ignore_leaks()


atexit.register(_close_at_exit)
