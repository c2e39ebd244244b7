"""Memory for transfers by cuFile: ranges of memory, registered buffers, and a cache of registrations.

cuFile finds a registration by the address of the first byte of its memory. A transfer therefore passes this address and
an offset; with any other address, cuFile copies through its own pinned buffers.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

from gdrkit import forks
from gdrkit.cufile import _cufile, parameters
from gdrkit.cufile.interfaces import OwnedMemory
from gdrkit.errors import ApiError, ClosedResource, GdrkitError, Reason, UsageError
from gdrkit.handles import Handle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from gdrkit.cufile.driver import Driver
    from gdrkit.cufile.interfaces import CudaStream, Memory

__all__ = [
    "BufferCache",
    "BufferRange",
    "RegisteredBuffer",
    "TransferRange",
    "compute_part_bytes",
    "find_registration",
]

# The open registrations of this process, by the address of their first byte. libcufile has the same table inside.
_registration_by_address: dict[int, RegisteredBuffer] = {}
# The largest value of off_t and ssize_t.
_OFFSET_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class BufferRange:
    """A part of a :class:`Memory`.

    Attributes
    ----------
    memory : Memory
        The memory.
    offset_bytes : int
        Offset of the part in the memory, in bytes.
    length_bytes : int or None
        Size of the part, in bytes. None: up to the end of the memory.
    """

    memory: Memory
    offset_bytes: int = 0
    length_bytes: int | None = None

    def at(self, file_offset_bytes: int) -> TransferRange:
        """Return the checked description of a transfer between this part and a range of a file.

        Raises
        ------
        UsageError
            The part is not inside the memory, or the range is too large for a file.
        ClosedResource
            The memory was freed.
        """
        length_bytes = compute_part_bytes(self.memory, offset_bytes=self.offset_bytes, length_bytes=self.length_bytes)
        if not 0 <= file_offset_bytes <= _OFFSET_MAX - length_bytes:
            message = (
                f"file_offset_bytes must be 0 to {_OFFSET_MAX - length_bytes} for a transfer of {length_bytes} bytes, "
                f"not {file_offset_bytes}"
            )
            raise UsageError(message)
        return TransferRange(self.memory, self.memory.address, self.offset_bytes, length_bytes, file_offset_bytes)


class TransferRange(NamedTuple):
    """The checked memory range and file range of one transfer. Every cuFile call takes its arguments from it.

    Attributes
    ----------
    memory : Memory
        The memory.
    address : int
        Address of the first byte of the memory.
    offset_bytes : int
        Offset of the first byte of the transfer in the memory, in bytes.
    length_bytes : int
        Size of the transfer in bytes.
    file_offset_bytes : int
        Offset of the first byte of the transfer in the file, in bytes.
    """

    memory: Memory
    address: int
    offset_bytes: int
    length_bytes: int
    file_offset_bytes: int


def compute_part_bytes(memory: Memory, *, offset_bytes: int, length_bytes: int | None) -> int:
    """Return the size of a part of the memory, in bytes. If `length_bytes` is None, the part ends with the memory.

    Raises
    ------
    UsageError
        The part is not inside the memory.
    ClosedResource
        The memory was freed.
    """
    if memory.closed:
        resource = "the memory"
        raise ClosedResource(resource)
    part_bytes = memory.length_bytes - offset_bytes if length_bytes is None else length_bytes
    if offset_bytes < 0 or part_bytes < 0 or offset_bytes + part_bytes > memory.length_bytes:
        message = f"{part_bytes} bytes at offset {offset_bytes} are not inside memory of {memory.length_bytes} bytes"
        raise UsageError(message)
    return part_bytes


class RegisteredBuffer:
    """Memory that is registered with cuFile and pinned, so that transfers need no bounce buffers; a context manager.

    Parameters
    ----------
    driver : Driver
        The open driver. If the memory is still registered when the driver closes, the driver deregisters it.
    memory : Memory
        The memory. It must be deregistered before it is freed.

    Raises
    ------
    ApiError
        The library failed, for example with CU_FILE_MEMORY_ALREADY_REGISTERED.
    """

    def __init__(self, driver: Driver, memory: Memory) -> None:
        driver.check_open()
        self._length_bytes = compute_part_bytes(memory, offset_bytes=0, length_bytes=None)
        self.memory = memory
        self._address = memory.address
        # The stream on which the newest transfer of this memory was queued.
        self._last_stream: CudaStream | None = None
        self._is_queueing_transfer = False
        # The lock is reentrant, because a signal handler may call use_stream() while its thread has the lock.
        self._lock = forks.ForkSafeLock(reentrant=True)
        with memory.current():
            _cufile.call(
                "cuFileBufRegister", "buf_register", bufPtr_base=self._address, length=self._length_bytes, flags=0
            )
        _registration_by_address[self._address] = self
        # The handle counts this buffer in :func:`gdrkit.handles.live` until the buffer is closed.
        self._live_handle = Handle("cufile.buffer")
        self._remove_close_callback = driver.on_close(self.close)
        self._is_closed = False

    @property
    def closed(self) -> bool:
        """Whether the memory was deregistered."""
        return self._is_closed

    @contextlib.contextmanager
    def use_stream(self, stream: CudaStream, operation: str) -> Iterator[None]:
        """Check that no other stream still uses this memory, before the block queues a transfer on `stream`.

        If several streams use one registration, libcufile 1.15 in compat mode mixes up their bytes. Whether a transfer
        uses compat mode is known only when it ends. So several streams are allowed only if compat mode is not allowed.

        Raises
        ------
        UsageError
            ``BUSY``: the work of another stream is not done, or the caller is a signal handler that has interrupted
            such a block.
        """
        # The lock is held during the block, because a query of the stream shows no work until the transfer is queued.
        # Without the lock, another thread could use the memory on its own stream before that.
        with self._lock:
            if self._is_queueing_transfer:
                message = f"{operation} cannot use memory for which the interrupted call is queueing a transfer"
                raise UsageError(message, reason=Reason.BUSY, what_to_do="queue the transfer after the signal handler")
            self._is_queueing_transfer = True
            try:
                self._check_other_stream_is_done(stream, operation)
                self._last_stream = stream
                yield
            finally:
                self._is_queueing_transfer = False

    def _check_other_stream_is_done(self, stream: CudaStream, operation: str) -> None:
        """Raise UsageError (BUSY) if a stream other than `stream` has not finished its work with this memory."""
        last_stream = self._last_stream
        # Bytes cannot be mixed up if the last stream was destroyed, is the same stream, or has done its work.
        is_other_busy = last_stream is not None and not (
            last_stream.closed or last_stream.handle == stream.handle or last_stream.query()
        )
        if last_stream is not None and is_other_busy and _allows_compat_mode():
            message = (
                f"{operation} on stream {stream.handle:#x} cannot use the memory registered at {self._address:#x} "
                f"({self._length_bytes} bytes), because stream {last_stream.handle:#x} has not finished its work "
                "with this memory, and libcufile mixes up the bytes of several streams in compat mode"
            )
            what_to_do = (
                f"queue all transfers of this memory on one stream, or synchronize stream {last_stream.handle:#x} "
                "first; if every transfer must be direct, set allow_compat_mode to false in cufile.json"
            )
            raise UsageError(message, reason=Reason.BUSY, what_to_do=what_to_do)

    def close(self) -> None:
        """Deregister the memory; a second close does nothing."""
        if self._is_closed:
            return
        self._is_closed = True  # Set before the call, so that a signal handler does not deregister the memory again.
        try:
            with self.memory.current():
                _cufile.call("cuFileBufDeregister", "buf_deregister", bufPtr_base=self._address)
        except GdrkitError:
            self._is_closed = False
            raise
        _registration_by_address.pop(self._address, None)
        self._remove_close_callback()
        self._live_handle.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def find_registration(address: int) -> RegisteredBuffer | None:
    """Return the registration of the memory whose first byte has this address, or None."""
    return _registration_by_address.get(address)


class BufferCache:
    """A cache of registrations with cuFile, for later transfers. The methods are thread-safe.

    An :class:`OwnedMemory` stays registered until its owner frees it: the cache deregisters it by an action that it
    gives to ``before_release``. Other memory is registered only while a transfer uses it, because memory that is freed
    while it is pinned would be lost until the process ends.

    Parameters
    ----------
    driver : Driver
        The open driver. When it closes, it deregisters all memory.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        # The lock is reentrant, because a signal handler may lease or free memory while its thread has the lock.
        self._lock = forks.ForkSafeLock(reentrant=True)
        # The registrations of this cache, by the address of their first byte.
        self._entry_by_address: dict[int, _CacheEntry] = {}
        # Memory that cuFile refused to register. The cache tries again after it has deregistered other memory.
        self._refused_memories: weakref.WeakSet[Memory] = weakref.WeakSet()
        forks.register(self)

    @property
    def registered_bytes(self) -> int:
        """Size of all registered memory, in bytes."""
        with self._lock:
            entries = tuple(self._entry_by_address.values())
            return sum(entry.memory.length_bytes for entry in entries if entry.buffer is not None)

    @contextlib.contextmanager
    def lease(self, memory: Memory) -> Iterator[bool]:
        """Keep memory registered during a block, if possible. The block gets whether the memory is registered.

        cuFile may refuse the memory, for example if too much memory is pinned. The cache then deregisters all memory
        that no transfer uses, and tries once more. If the memory is still not registered, transfers work as well,
        through pinned buffers of cuFile.

        While the block runs, freeing an :class:`OwnedMemory` fails with a UsageError (BUSY).
        """
        with self._lock:
            entry = self._lease_registered(memory) or self._register(memory)
        try:
            yield entry is not None
        finally:
            if entry is not None:
                with self._lock:
                    self._end_lease(entry)

    def after_fork_in_child(self) -> None:
        """Forget all registrations in a forked child, because they belong to the parent."""
        self._entry_by_address.clear()

    def _lease_registered(self, memory: Memory) -> _CacheEntry | None:
        """Add a lease to the entry of the memory, and return the entry. Return None if no entry covers all of it."""
        entry = self._entry_by_address.get(memory.address)
        if entry is None:
            return None
        entry.lease_count += 1  # From now on, no signal handler of this thread deregisters the memory.
        if entry.is_registered and entry.memory.length_bytes >= memory.length_bytes:
            return entry
        self._end_lease(entry)
        return None

    def _register(self, memory: Memory) -> _CacheEntry | None:
        """Register the memory and return its entry with one lease. Return None if it cannot be registered now."""
        if memory.closed or memory in self._refused_memories:
            return None
        # The entry exists before the registration, so that a signal handler neither registers nor frees the memory.
        entry = _CacheEntry(memory, lease_count=1)
        existing_entry = self._entry_by_address.setdefault(memory.address, entry)
        if existing_entry is not entry:
            if existing_entry.buffer is None or not existing_entry.buffer.closed:
                return None  # cuFile accepts no second registration of an address.
            # The existing registration was closed together with the driver.
            self._entry_by_address[memory.address] = entry
        try:
            if isinstance(memory, OwnedMemory) and memory.owned:
                entry.stays_registered = True
                entry.remove_release_callback = memory.before_release(lambda: self._deregister_before_release(entry))
            try:
                entry.buffer = RegisteredBuffer(self._driver, memory)
            except ApiError:
                if not self._deregister_all_unused():
                    raise
                entry.buffer = RegisteredBuffer(self._driver, memory)
        except BaseException as error:
            self._entry_by_address.pop(memory.address, None)
            entry.remove_release_callback()
            # An ApiError or ClosedResource is not raised, because transfers work without the registration.
            if not isinstance(error, ApiError | ClosedResource):
                raise
            if isinstance(error, ApiError):
                self._refused_memories.add(memory)
            return None
        return entry

    def _end_lease(self, entry: _CacheEntry) -> None:
        entry.lease_count -= 1
        if entry.lease_count == 0 and not entry.stays_registered:
            self._deregister(entry)

    def _deregister_before_release(self, entry: _CacheEntry) -> None:
        with self._lock:
            if self._entry_by_address.get(entry.memory.address) is not entry:
                return
            if entry.lease_count:
                message = "a transfer by cuFile uses the memory"
                raise UsageError(message, reason=Reason.BUSY, what_to_do="wait for the transfer, then free the memory")
            self._deregister(entry)

    def _deregister_all_unused(self) -> int:
        """Deregister all memory that no transfer uses, and return the number of these registrations."""
        unused_entries = [entry for entry in tuple(self._entry_by_address.values()) if entry.lease_count == 0]
        for entry in unused_entries:
            self._deregister(entry)
        return len(unused_entries)

    def _deregister(self, entry: _CacheEntry) -> None:
        if entry.buffer is not None:
            entry.buffer.close()
        if self._entry_by_address.get(entry.memory.address) is entry:
            self._entry_by_address.pop(entry.memory.address, None)
        entry.remove_release_callback()
        self._refused_memories.clear()


@dataclass(eq=False, slots=True)
class _CacheEntry:
    """One registration of the cache.

    Attributes
    ----------
    memory : Memory
        The memory.
    lease_count : int
        Number of :meth:`BufferCache.lease` blocks that use the registration now.
    buffer : RegisteredBuffer or None
        The registration. None: it is in progress, or cuFile has refused it.
    stays_registered : bool
        Whether the memory stays registered after its last lease, until its owner frees it.
    remove_release_callback : callable
        Removes the action that deregisters the memory before its owner frees it.
    """

    memory: Memory
    lease_count: int
    buffer: RegisteredBuffer | None = None
    stays_registered: bool = False
    remove_release_callback: Callable[[], None] = lambda: None

    @property
    def is_registered(self) -> bool:
        """Whether the memory is registered now. The driver deregisters all memory when it closes."""
        return self.buffer is not None and not self.buffer.closed


def _allows_compat_mode() -> bool:
    """Return whether libcufile may copy through host memory. Return True if libcufile lacks ALLOW_COMPAT_MODE.

    The properties of the driver have the same flag, but their query makes transfers on streams fail
    (:meth:`gdrkit.cufile.Driver.properties`).
    """
    try:
        return parameters.flag(parameters.Flag.ALLOW_COMPAT_MODE)
    except ApiError:
        return True
