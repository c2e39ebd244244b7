"""Registrations that the agent keeps for a client between two publications of the same memory.

The client library keeps the memory of a destroyed iov, and publishes the same memory again for a later iov: a dma-buf,
or a file of ``/dev/shm``. The kernel gives each of them an inode of its own, and does not use the number again while a
descriptor is open. A kept registration holds a descriptor, so that device and inode identify the memory: only a client
that has the dma-buf, or owns the file, can name it.
"""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING, Final, NamedTuple

from gdrkit.handles import ReleaseStack
from gdrkit.registration import ShareHandle, ShareKind
from gdrkit.usrbio.agent.agent_error import AgentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.usrbio.agent.link_names import DeviceTarget
    from gdrkit.usrbio.agent.memory import RegisteredMemory
    from gdrkit.usrbio.agent.mount import LinkFolder
    from gdrkit.usrbio.agent.shared_memory import SharedFile

__all__ = ["KEPT_MAX", "HostPages", "KeptRegistrations", "MemoryKey", "make_host_key", "make_memory_key"]

# Largest number of registrations that the agent keeps for one client.
KEPT_MAX: Final = 1024


class MemoryKey(NamedTuple):
    """The identity of a range of a dma-buf, and the allocation that the link of its publication names."""

    device: int
    inode: int
    offset_bytes: int
    length_bytes: int
    device_index: int
    allocation_bytes: int
    allocation_offset_bytes: int
    ipc_handle: bytes | None


def make_memory_key(target: DeviceTarget, handle: bytes, descriptors: Sequence[int]) -> MemoryKey | None:
    """Return the identity of published memory, or None if the publication has no dma-buf.

    Raises
    ------
    UsageError
        MALFORMED: the handle is not a valid share handle.
    OSError
        The descriptor is not open.
    """
    if not handle or len(descriptors) != 1:
        return None
    share_handle = ShareHandle.parse(handle)
    if share_handle.kind is not ShareKind.DMABUF:
        return None
    status = os.fstat(descriptors[0])
    return MemoryKey(
        status.st_dev,
        status.st_ino,
        share_handle.offset_bytes,
        share_handle.length_bytes,
        target.device_index,
        target.allocation_bytes,
        target.offset_bytes,
        target.ipc_handle,
    )


def make_host_key(shared: SharedFile) -> MemoryKey:
    """Return the identity of shared memory."""
    return MemoryKey(*shared.identity, 0, shared.length_bytes, -1, 0, 0, None)


class HostPages:
    """Published host memory that stays when its publication ends: the file, the registration and the quota.

    Attributes
    ----------
    shared : SharedFile
        The file in /dev/shm.
    registered : RegisteredMemory or None
        The registration. A ring has none.
    record : str or None
        While the memory is kept: the name of its last publication, whose record stays. If this agent is killed, the
        next agent removes the name of the memory by this record.
    """

    def __init__(self, shared: SharedFile, links: LinkFolder) -> None:
        self.shared = shared
        self.registered: RegisteredMemory | None = None
        self.record: str | None = None
        self._links = links
        self.on_close = ReleaseStack()
        self.on_close.push(shared.close)

    def replace_record(self, name: str) -> None:
        """Remove the record of the last publication, because the new publication `name` has its own record now."""
        if self.record not in {None, name}:
            self._links.remove_record(self.record)
        self.record = None

    def close(self) -> None:
        """Deregister the memory and close the file. Remove the name of kept memory. After an error, close again."""
        if self.record is not None:
            self.shared.remove()
            self._links.remove_record(self.record)
        self.on_close.run()


class KeptRegistrations:
    """The kept registrations of one client. It can be used by any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_key: dict[MemoryKey, RegisteredMemory | HostPages] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._by_key)

    def take(self, key: MemoryKey) -> RegisteredMemory | HostPages | None:
        """Return the registration of this memory for a new publication, or None. The caller owns it."""
        with self._lock:
            return self._by_key.pop(key, None)

    def keep(self, key: MemoryKey, registered: RegisteredMemory | HostPages) -> bool:
        """Keep the registration of a publication that has ended.

        Return False if the client keeps too many, keeps the same memory already, or has ended. The caller then still
        owns the registration.
        """
        with self._lock:
            if self._is_closed or len(self._by_key) >= KEPT_MAX or key in self._by_key:
                return False
            self._by_key[key] = registered
            return True

    def drop(self, descriptor: int) -> None:
        """End every kept registration of a dma-buf or a file. The caller still owns the descriptor.

        Raises
        ------
        AgentError
            ENOENT: the agent keeps no registration of this memory.
        """
        status = os.fstat(descriptor)
        with self._lock:
            keys = [key for key in self._by_key if (key.device, key.inode) == (status.st_dev, status.st_ino)]
            if not keys:
                raise AgentError(errno.ENOENT, "the agent keeps no registration of this memory")
            self._end(keys)

    def drop_host_memory(self) -> None:
        """End the kept registrations of host memory. After an error, call this method again."""
        with self._lock:
            self._end([key for key, registered in self._by_key.items() if isinstance(registered, HostPages)])

    def close(self) -> None:
        """End all kept registrations, and keep no more. After an error, close again."""
        with self._lock:
            self._is_closed = True
            self._end(list(self._by_key))

    def _end(self, keys: list[MemoryKey]) -> None:
        """Deregister memory. A registration that fails to end stays, for another attempt."""
        removals = ReleaseStack()
        for key in keys:
            removals.push(lambda key=key: self._end_one(key))  # type: ignore[misc]
        removals.run()

    def _end_one(self, key: MemoryKey) -> None:
        self._by_key[key].close()
        del self._by_key[key]
