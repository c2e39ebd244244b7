"""The client of the storage service: it opens files by name and moves their bytes to and from registered memory.

The client registers memory with its NICs and sends the address and key of the memory to the server. The server moves
the bytes by RDMA.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import threading
from typing import TYPE_CHECKING, Self, TypeVar

import gdrkit
from gdrkit import forks, verbs
from gdrkit.buffers import DeviceBuffer
from gdrkit.cuda import CudaMemory
from gdrkit.errors import BrokenResource, ClosedResource, GdrkitError, Reason, UsageError
from gdrkit.handles import Handle, ReleaseStack
from gdrkit.registration import MemoryPool, Ordering, Placement, RegionCache
from gdrkit.storage import messages
from gdrkit.storage.address import ServerAddress
from gdrkit.storage.batch import Batch
from gdrkit.storage.control import Request, storage_error
from gdrkit.storage.file import IORequest, StorageFile, StorageResult
from gdrkit.storage.iobuffer import IOBuffer
from gdrkit.storage.session import StorageSession
from gdrkit.storage.transfers import Transfers
from gdrkit.storage.wire import IoOpcode

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from gdrkit.buffers import Allocator
    from gdrkit.cuda import PrimaryContext
    from gdrkit.registration import MemoryPoolStatistics

__all__ = ["IORequest", "StorageClient", "StorageFile", "StorageResult"]

_Reply = TypeVar("_Reply")


class StorageClient:
    """A session with a storage server. It is thread-safe: concurrent calls run one after another.

    In a forked child the client is closed and releases nothing: the session, NICs and memory belong to the parent.

    Parameters
    ----------
    address : str or ServerAddress
        Address of the server: ``HOST:PORT`` or ``unix:PATH``.
    token : str or None
        Token of the store, which is needed over TCP; see :func:`gdrkit.storage.token.read_token`.
    nics : sequence of Nic or None
        NICs that the server can reach, which the caller owns. The session has one queue pair for each of the first 16
        NICs (``messages.LANES_MAX``). None: the client opens all NICs that have an active port.
    timeout_ms : float
        Longest time without a reply of the server, in milliseconds.
    placement : Placement or None
        The object that chooses the NICs for device memory. None: create one for this machine.

    Raises
    ------
    ApiError
        The service failed: EACCES (wrong token), EPROTONOSUPPORT (other version) or EREMOTEIO (no server).
    UsageError
        MALFORMED: `address` has another form. NO_DEVICE: `nics` is None, and no NIC has an active port.
    SetupMissing
        libibverbs is not installed.
    """

    def __init__(
        self,
        address: str | ServerAddress,
        *,
        token: str | None = None,
        nics: Sequence[verbs.Nic] | None = None,
        timeout_ms: float = 30_000,
        placement: Placement | None = None,
    ) -> None:
        self.placement = Placement() if placement is None else placement
        self._address = address if isinstance(address, ServerAddress) else ServerAddress.parse(address)
        self._timeout_s = timeout_ms / 1000
        # Calls run one after the other, because the data connection serves one thread at a time.
        self._lock = threading.RLock()
        self._close_actions = ReleaseStack()
        self._is_closed = False
        self._pools: dict[Allocator, MemoryPool] = {}
        try:
            self.nics = self._open_nics() if nics is None else tuple(nics)
            # The caches of registrations of device memory. The key is the NICs with which a cache registers memory.
            self._caches: dict[tuple[verbs.Nic, ...], RegionCache] = {}
            self._close_actions.push(self._close_caches)
            self._orderings: dict[int, Ordering] = {}  # The ordering of each GPU, by its index.
            self._session = self._begin_session(token)
            self._close_actions.push(self._session.close)
            self._transfers = Transfers(self._session.data_socket, outstanding_max=self._session.limits.outstanding_max)
            self._close_actions.push(self._transfers.close)
        except BaseException as error:
            self._close_actions.run_after(error)
            raise
        # The index of the queue pair of each NIC.
        self._queue_pair_index_by_nic = {
            nic: index for index, nic in enumerate(self.nics[: len(self._session.queue_pairs)])
        }
        # Operations on host memory use the NICs, each with its queue pair, in turn.
        self._host_nics_in_turn = itertools.cycle(self._queue_pair_index_by_nic)
        self._live_handle = Handle("storage.client")
        forks.register(self)

    @property
    def limits(self) -> messages.SessionLimits:
        """Limits of the server."""
        return self._session.limits

    @property
    def chunk_bytes(self) -> int:
        """Size of a chunk: the number of bytes of a file that one checksum covers."""
        return self._session.chunk_bytes

    @property
    def server_program(self) -> str:
        """Name and version of the server program."""
        return self._session.server_program

    @property
    def closed(self) -> bool:
        """Whether the client was closed."""
        return self._is_closed

    def open(
        self,
        path: str,
        *,
        read: bool = True,
        write: bool = False,
        create: bool = False,
        truncate: bool = False,
        exclusive: bool = False,
        mode: int = 0o644,
    ) -> StorageFile:
        """Open a file of the store, as open(2) does."""
        request = messages.Open(path, read, write, create, truncate, exclusive, mode)
        return StorageFile(self, self.request(request, messages.OpenReply))

    def stat(self, path: str) -> messages.FileStat:
        """Return the attributes of a path. A symbolic link is not followed."""
        return self.request(messages.Stat(path), messages.FileStat)

    def list_folder(self, path: str = "") -> tuple[messages.FolderEntry, ...]:
        """Return all names of a folder, sorted by their bytes."""
        entries: list[messages.FolderEntry] = []
        while True:
            page = self.request(messages.List(path, entries[-1].name if entries else None), messages.ListReply)
            entries += page.entries
            if not page.more or not page.entries:
                return tuple(entries)

    def register(self, memory: bytearray | mmap.mmap | memoryview | DeviceBuffer) -> IOBuffer:
        """Register memory and return its buffer. Close the buffer before you free the memory.

        Host memory is registered with all NICs. Memory of a GPU is registered with the NICs that reach the GPU, and the
        nearest of these NICs transfer its bytes.

        Raises
        ------
        RegistrationFailed
            No NIC reaches the GPU, or no method of registration is possible.
        """
        if isinstance(memory, DeviceBuffer):
            return IOBuffer.of_device(memory, self._find_cache(memory))
        return IOBuffer.of_host(memory, self.nics)

    def allocate(self, allocator: Allocator, length_bytes: int) -> IOBuffer:
        """Return a registered buffer of this length. Its memory comes from a pool of the client.

        Closing the buffer returns its memory to the pool. The pool keeps the memory and its registration for later
        buffers of a similar size, at most 256 MiB for each allocator, and for at most 10 s without use. A new buffer
        contains the bytes that the previous buffer left in this memory.

        Parameters
        ----------
        allocator : Allocator
            The device, or a :class:`~gdrkit.host.HostAllocator`. It must outlive the client.
        length_bytes : int
            Size of the buffer in bytes, above 0.

        Raises
        ------
        ApiError
            The memory could not be allocated or registered.
        """
        with self._lock:
            self._check_open()
            pool = self._pools.get(allocator)
            if pool is None:
                pool = self._pools[allocator] = MemoryPool(allocator)
                self._close_actions.push(pool.close)
        pooled_memory = pool.allocate(length_bytes)
        try:
            cache = self._find_cache(pooled_memory.memory)
        except BaseException:
            pooled_memory.close()
            raise
        return IOBuffer.of_pool(pooled_memory, cache)

    def pool_statistics(self) -> dict[Allocator, MemoryPoolStatistics]:
        """Return the statistics of the pool of each allocator."""
        return {allocator: pool.statistics() for allocator, pool in self._pools.items()}

    def batch_read(self, requests: Sequence[IORequest], *, forbid_holes: bool = False) -> list[StorageResult]:
        """Fill buffers from files and return the results.

        Raises
        ------
        ApiError
            The first transfer that failed, with the errno of the server. EIO: the bytes of the file differ from the
            bytes that were written. ENODATA: the file has a hole, and `forbid_holes` is set. EREMOTEIO: the server is
            gone, or could not access the memory.
        DataMismatch
            Bytes that arrived in host memory differ from the bytes that the server sent.
        """
        batch = Batch(IoOpcode.READ, self.limits, forbid_holes=forbid_holes, checksum=True)
        return self._transfer(batch, requests)

    def batch_write(self, requests: Sequence[IORequest], *, checksum: bool = True) -> list[StorageResult]:
        """Write buffers to files and return the results.

        With `checksum`, the CPU computes the checksum of host memory, and the server refuses bytes with another
        checksum (EBADMSG). For device memory, the server computes the checksum of the bytes that it received.
        """
        batch = Batch(IoOpcode.WRITE, self.limits, forbid_holes=False, checksum=checksum)
        return self._transfer(batch, requests)

    def statistics(self) -> dict[str, int]:
        """Return the counters of the server."""
        return self.request(messages.ReadStatistics(), messages.StatisticsReply).counters

    def request(self, request: Request, reply_type: type[_Reply], *, descriptor: int | None = None) -> _Reply:
        """Send a request of :mod:`gdrkit.storage.messages` and return its reply, which is a `reply_type`.

        Raises
        ------
        ApiError
            The error has the errno of the server's reply. EREMOTEIO: the server is gone.
        """
        with self._lock:
            self._check_open()
            return self._session.request(request, reply_type, descriptors=() if descriptor is None else (descriptor,))

    def close(self) -> None:
        """End the session. The server then closes the files of the session. Close all buffers first."""
        with self._lock:
            if self._is_closed:
                return
            self._close_actions.run()
            self._is_closed = True
            self._live_handle.release()

    def after_fork_in_child(self) -> None:
        """Mark the client as closed in a forked child: its connection and memory belong to the parent.

        Two processes that use one connection would mix up their requests, and a registration is not valid in the child.
        """
        # Another thread of the parent may have held the lock during the fork.
        self._lock = threading.RLock()
        # The child must not release the objects of the parent, so it keeps references to them.
        self._objects_of_parent = self._close_actions
        self._close_actions = ReleaseStack()
        self._is_closed = True

    def _open_nics(self) -> tuple[verbs.Nic, ...]:
        nics = verbs.open_active_nics()
        for nic in nics:
            self._close_actions.push(nic.close)
        if not nics:
            message = "no NIC has an active port"
            raise UsageError(message, reason=Reason.NO_DEVICE)
        return nics

    def _begin_session(self, token: str | None) -> StorageSession:
        client_name = f"gdrkit {gdrkit.__version__}"
        try:
            return StorageSession(
                lambda: self._address.connect(self._timeout_s),
                self.nics,
                client=client_name,
                token=token,
                timeout_ms=self._timeout_s * 1000,
            )
        except (OSError, UsageError, BrokenResource) as error:
            address = str(self._address)
            raise storage_error("connect", errno.EREMOTEIO, detail=str(error), address=address) from error

    def _transfer(self, batch: Batch, requests: Sequence[IORequest]) -> list[StorageResult]:
        """Execute the requests of a batch, and return their results."""
        with self._lock:
            self._check_open()
            for request in requests:
                batch.add(request, self._choose_queue_pairs(request.buffer))
            try:
                results = self._transfers.run(batch.operations, timeout_s=self._timeout_s)
            except BaseException:
                self._forget_reach(requests)
                # The server may have transfers in progress. Once the queue pairs are in the error state, none of these
                # transfers can arrive.
                self._session.fail_queue_pairs()
                raise
            if any(result.result == -errno.EREMOTEIO for result in results):
                self._forget_reach(requests)
            if batch.opcode is IoOpcode.READ:
                self._make_visible(requests)
            return batch.join(results)

    def _find_cache(self, memory: DeviceBuffer) -> RegionCache:
        """Return the cache that registers memory with the NICs that reach this memory now."""
        with self._lock:
            self._check_open()
            nics = self.nics
            if isinstance(memory, CudaMemory):
                nics = self.placement.usable_nics(memory.device, tuple(self._queue_pair_index_by_nic))
            cache = self._caches.get(nics)
            if cache is None:
                cache = self._caches[nics] = RegionCache(nics)
            return cache

    def _close_caches(self) -> None:
        for cache in self._caches.values():
            cache.close()

    def _choose_queue_pairs(self, buffer: IOBuffer) -> Iterator[tuple[int, verbs.Nic]]:
        """Yield, without end, the index and the NIC of the queue pair for the next operation on a buffer."""
        device, nics = buffer.device, buffer.nics
        gpu_pci_bus_id = "" if device is None else device.pci_bus_id
        while True:
            nic = next(self._host_nics_in_turn) if device is None else self.placement.choose(gpu_pci_bus_id, nics)
            yield self._queue_pair_index_by_nic[nic], nic

    def _forget_reach(self, requests: Sequence[IORequest]) -> None:
        """Forget which NICs reach the GPUs of failed requests, so that the next registration measures it again."""
        for device in _list_devices(requests):
            # An error here must not replace the error of the transfer.
            with contextlib.suppress(GdrkitError):
                self.placement.reach.forget(device.uuid, self.nics)

    def _make_visible(self, requests: Sequence[IORequest]) -> None:
        """Make the bytes that NICs wrote visible to kernels and copies of the GPUs. Most GPUs need no action."""
        for device in _list_devices(requests):
            ordering = self._orderings.get(device.index)
            if ordering is None:
                ordering = self._orderings[device.index] = Ordering.of(device)
            ordering.make_visible(device)

    def _check_open(self) -> None:
        if self._is_closed:
            resource = "storage client"
            raise ClosedResource(resource)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _list_devices(requests: Sequence[IORequest]) -> set[PrimaryContext]:
    """Return the GPUs whose memory the requests use."""
    return {device for request in requests if (device := request.buffer.device) is not None}
