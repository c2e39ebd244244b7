"""Registrations that the agent keeps for a client between two publications of the same memory.

The client library keeps the memory of a destroyed iov, and publishes the same memory again for a later iov. The memory
is a dma-buf or a file of ``/dev/shm``. Each has its own inode, and the kernel does not use the inode number for another
file while a descriptor is open. A kept registration holds a descriptor, so device and inode identify the memory. Only a
client that has the dma-buf, or owns the file, can use the registration again.
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

__all__ = [
    "KEPT_REGISTRATIONS_MAX",
    "KeptRegistrations",
    "MemoryKey",
    "PublishedHostMemory",
    "make_device_key",
    "make_host_key",
]

# Largest number of registrations that the agent keeps for one client.
KEPT_REGISTRATIONS_MAX: Final = 1024


class MemoryKey(NamedTuple):
    """The identity of published memory.

    `st_dev` and `st_ino` are the numbers that fstat(2) reports for the dma-buf or the file of ``/dev/shm``.
    `offset_bytes` and `length_bytes` are the published range. The fields from `device_index` on are the GPU and the
    allocation that the link of device memory names.
    """

    st_dev: int
    st_ino: int
    offset_bytes: int
    length_bytes: int
    device_index: int
    allocation_bytes: int
    allocation_offset_bytes: int
    ipc_handle: bytes | None


def make_device_key(target: DeviceTarget, packed_handle: bytes, descriptors: Sequence[int]) -> MemoryKey | None:
    """Return the identity of published device memory, or None if the publication has no dma-buf.

    Raises
    ------
    UsageError
        MALFORMED: `packed_handle` is not a valid share handle.
    OSError
        The descriptor is not open.
    """
    if not packed_handle or len(descriptors) != 1:
        return None
    share_handle = ShareHandle.parse(packed_handle)
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


def make_host_key(shared_file: SharedFile) -> MemoryKey:
    """Return the identity of published host memory, which has no GPU and no allocation."""
    st_dev, st_ino = shared_file.identity
    return MemoryKey(
        st_dev,
        st_ino,
        offset_bytes=0,
        length_bytes=shared_file.length_bytes,
        device_index=-1,
        allocation_bytes=0,
        allocation_offset_bytes=0,
        ipc_handle=None,
    )


class PublishedHostMemory:
    """Published host memory, which may be kept when its publication ends: the file, the registration and the quota.

    Attributes
    ----------
    shared_file : SharedFile
        The file in /dev/shm.
    registered_memory : RegisteredMemory or None
        The registration. A ring has none.
    on_close : ReleaseStack
        The actions of :meth:`close`.
    record_name : str or None
        Name of the record that stays while the memory is kept: the name of its last publication. If this agent is
        killed, the next agent reads the record and removes the memory from /dev/shm. None: the memory is published.
    """

    def __init__(self, shared_file: SharedFile, links: LinkFolder) -> None:
        self.shared_file = shared_file
        self.registered_memory: RegisteredMemory | None = None
        self.record_name: str | None = None
        self._links = links
        self.on_close = ReleaseStack()
        self.on_close.push(shared_file.close)

    def replace_record(self, name: str) -> None:
        """Remove the record of the last publication, because the new publication `name` has its own record now."""
        if self.record_name not in {None, name}:
            self._links.remove_record(self.record_name)
        self.record_name = None

    def close(self) -> None:
        """Deregister the memory and close the file. If the memory is kept, also remove its name from /dev/shm.

        If the method raises, the caller may call it again.
        """
        if self.record_name is not None:
            self.shared_file.remove()
            self._links.remove_record(self.record_name)
        self.on_close.run()


class KeptRegistrations:
    """The kept registrations of one client. It can be used by any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._registration_by_key: dict[MemoryKey, RegisteredMemory | PublishedHostMemory] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._registration_by_key)

    def take(self, key: MemoryKey) -> RegisteredMemory | PublishedHostMemory | None:
        """Return the registration of this memory for a new publication, or None. The caller owns it."""
        with self._lock:
            return self._registration_by_key.pop(key, None)

    def keep(self, key: MemoryKey, registration: RegisteredMemory | PublishedHostMemory) -> bool:
        """Keep the registration of a publication that has ended.

        Return False if the client has too many kept registrations or keeps this memory already, or has ended. The
        caller then still owns the registration.
        """
        with self._lock:
            if (
                self._is_closed
                or len(self._registration_by_key) >= KEPT_REGISTRATIONS_MAX
                or key in self._registration_by_key
            ):
                return False
            self._registration_by_key[key] = registration
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
            keys = [
                key for key in self._registration_by_key if (key.st_dev, key.st_ino) == (status.st_dev, status.st_ino)
            ]
            if not keys:
                raise AgentError(errno.ENOENT, "the agent keeps no registration of this memory")
            self._end_registrations(keys)

    def drop_host_memory(self) -> None:
        """End the kept registrations of host memory. If the method raises, the caller may call it again."""
        with self._lock:
            self._end_registrations(
                [
                    key
                    for key, registration in self._registration_by_key.items()
                    if isinstance(registration, PublishedHostMemory)
                ]
            )

    def close(self) -> None:
        """End all kept registrations, and keep no more. If the method raises, the caller may call it again."""
        with self._lock:
            self._is_closed = True
            self._end_registrations(list(self._registration_by_key))

    def _end_registrations(self, keys: list[MemoryKey]) -> None:
        """End the registrations of these keys. If one cannot be ended, it stays, and the caller may try again."""
        removals = ReleaseStack()
        for key in keys:
            removals.push(lambda key=key: self._end_registration(key))  # type: ignore[misc]
        removals.run()

    def _end_registration(self, key: MemoryKey) -> None:
        self._registration_by_key[key].close()
        del self._registration_by_key[key]
