"""A publication of a client: an iov in host memory, a ring, or an iov in device memory, with its link.

A publication is created in this order: open and check the memory, register the memory, add it to the loop, create the
link. So a link exists only for memory that rings can use. A publication is removed in the reverse order. Before the
memory is removed from the loop, the loop waits for the operations in flight.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Protocol

from gdrkit.errors import GdrkitError
from gdrkit.handles import ReleaseStack
from gdrkit.usrbio.agent.agent_error import AgentError, as_agent_error
from gdrkit.usrbio.agent.borrowers import Borrowers
from gdrkit.usrbio.agent.kept import PublishedHostMemory, make_device_key, make_host_key
from gdrkit.usrbio.agent.link_names import parse_device_target
from gdrkit.usrbio.agent.shared_memory import adopt_unnamed, open_shared

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gdrkit.host import ProcessIdentity
    from gdrkit.usrbio.agent._agent_loop import AgentLoop
    from gdrkit.usrbio.agent.kept import KeptRegistrations, MemoryKey
    from gdrkit.usrbio.agent.link_names import DeviceTarget, LinkName
    from gdrkit.usrbio.agent.memory import Nics, RegisteredMemory
    from gdrkit.usrbio.agent.mount import LinkFolder
    from gdrkit.usrbio.agent.quota import MemoryQuota
    from gdrkit.usrbio.agent.shared_memory import SharedFile

__all__ = ["Drain", "Publication"]


class Drain(Protocol):
    """A function that removes an object from the loop and waits for its operations in flight."""

    def __call__(self, remove: Callable[[int], bool]) -> None:
        """Call `remove` with a timeout in milliseconds, until it returns True. Raise AgentError (EBUSY) if it does not.

        `remove` returns False if operations are still in flight after the timeout.
        """


class Publication:
    """A link and the iov or ring that it names. :meth:`close` removes both.

    Attributes
    ----------
    link_name : LinkName
        The parsed name of the link.
    target : str
        The target of the link.
    shared_file : SharedFile or None
        The shared memory of a ring or of an iov in host memory.
    registered_memory : RegisteredMemory or None
        The registration of the iov. A ring is not registered.
    borrowers : Borrowers or None
        The clients that have borrowed the iov. A ring has none.
    """

    def __init__(self, link_name: LinkName, target: str) -> None:
        """Create a publication without memory. Callers use :meth:`create` instead."""
        self.link_name = link_name
        self.target = target
        self.shared_file: SharedFile | None = None
        self.registered_memory: RegisteredMemory | None = None
        self.borrowers: Borrowers | None = None
        self._length_bytes = 0
        self._memory_key: MemoryKey | None = None
        self._kept_registrations: KeptRegistrations | None = None
        self._is_kept = False
        self._host_memory: PublishedHostMemory | None = None
        self._on_close = ReleaseStack()

    @classmethod
    def create(
        cls,
        link_name: LinkName,
        target: str,
        *,
        client_number: int,
        uid: int,
        owner: ProcessIdentity | None,
        share_handle: bytes,
        descriptors: Sequence[int],
        nics: Nics,
        memory_quota: MemoryQuota,
        kept_registrations: KeptRegistrations,
        loop: AgentLoop,
        links: LinkFolder,
        drain: Drain,
    ) -> Publication:
        """Register the memory, add it to the loop and create the link. Return the publication.

        `owner` is the client's process, which the link's record names. `share_handle` is empty if the client sent none.
        The publication owns the descriptors from now on, also if this method raises.

        Raises
        ------
        AgentError, GdrkitError
            A step failed. The steps before it were undone.
        """
        publication = cls(link_name, target)
        try:
            if link_name.device_index is not None:
                publication._register_device(nics, kept_registrations, share_handle, descriptors)
            else:
                publication._open_shared(uid, descriptors, memory_quota, kept_registrations, links)
            if link_name.ring_options is not None:
                publication._add_ring(client_number, loop, drain)
            else:
                if publication.registered_memory is None:
                    publication._register_host(nics, memory_quota)
                publication._add_buffer(client_number, uid, loop, drain)
            links.add(link_name.text, target, owner=owner, shared_file=publication.shared_file)
            publication._on_close.push(lambda: publication._remove_link(links))
            if publication._host_memory is not None:
                publication._host_memory.replace_record(link_name.text)
                publication._host_memory.shared_file.mark_published()
            if publication.borrowers is not None:
                publication._on_close.push(publication.borrowers.close)
        except BaseException as error:
            publication._on_close.run_after(error)
            raise
        return publication

    def close(self, *, remove_shared: bool, kept_registrations: KeptRegistrations | None = None) -> bool:
        """Remove the publication. If the method raises, the caller may call it again for the remaining steps.

        Parameters
        ----------
        remove_shared : bool
            Whether to remove also the name of the shared memory in /dev/shm, because the client has ended.
        kept_registrations : KeptRegistrations or None
            The object that takes over the registration, for the next publication of the same dma-buf or file. The
            registration is not kept if another client borrowed the memory, or published the same file: that client may
            still have the memory mapped, and must not see the contents of the next iov. If host memory is not kept, its
            name in /dev/shm is removed.

        Returns
        -------
        bool
            Whether the registration is now in `kept_registrations`.
        """
        if remove_shared and self.shared_file is not None:
            self.shared_file.remove()
        self._kept_registrations = kept_registrations
        self._on_close.run()
        return self._is_kept

    def _register_device(
        self, nics: Nics, kept_registrations: KeptRegistrations, share_handle: bytes, descriptors: Sequence[int]
    ) -> None:
        try:
            device_target = self._parse_and_check_target()
            self._memory_key = make_device_key(device_target, share_handle, descriptors)
            kept_registration = None if self._memory_key is None else kept_registrations.take(self._memory_key)
            self.registered_memory = None if isinstance(kept_registration, PublishedHostMemory) else kept_registration
        except BaseException:
            _close_all(descriptors)
            raise
        if self.registered_memory is None:
            self.registered_memory = nics.register_device(device_target, share_handle, descriptors)
        else:
            _close_all(descriptors)
        self._length_bytes = device_target.length_bytes
        self._on_close.push(self._release_device)

    def _parse_and_check_target(self) -> DeviceTarget:
        device_target = parse_device_target(self.target)
        if device_target.device_index != self.link_name.device_index:
            message = (
                f"the name of the link says device {self.link_name.device_index}, and its target says device "
                f"{device_target.device_index}"
            )
            raise AgentError(errno.EINVAL, message)
        return device_target

    def _release_device(self) -> None:
        """Keep the registration, or end it."""
        assert self.registered_memory is not None  # noqa: S101 - set by _register_device().
        if self._kept_registrations is not None and self._memory_key is not None and self.borrowers is not None:
            self._is_kept = not self.borrowers.was_borrowed and self._kept_registrations.keep(
                self._memory_key, self.registered_memory
            )
        if not self._is_kept:
            self.registered_memory.close()

    def _open_shared(
        self,
        uid: int,
        descriptors: Sequence[int],
        memory_quota: MemoryQuota,
        kept_registrations: KeptRegistrations,
        links: LinkFolder,
    ) -> None:
        if descriptors:
            shared_file = adopt_unnamed(self.target, descriptors[0], uid=uid)
        else:
            shared_file = open_shared(self.target, uid=uid)
        is_ring = self.link_name.ring_options is not None
        host_memory = None if is_ring else kept_registrations.take(make_host_key(shared_file))
        if isinstance(host_memory, PublishedHostMemory):
            shared_file.close()
        else:
            host_memory = PublishedHostMemory(shared_file, links)
        self._host_memory, self.shared_file = host_memory, host_memory.shared_file
        self.registered_memory = host_memory.registered_memory
        self._on_close.push(self._release_host_memory)
        if self.registered_memory is None:
            host_memory.on_close.push(memory_quota.charge(uid, shared_file.length_bytes))
        else:
            self._length_bytes = self.registered_memory.length_bytes

    def _remove_link(self, links: LinkFolder) -> None:
        """Remove the link, and its record unless the memory may be kept."""
        may_keep = (
            self._kept_registrations is not None
            and self._host_memory is not None
            and self.registered_memory is not None
        )
        links.remove(self.link_name.text, self.target, with_record=not may_keep)
        if may_keep and self._host_memory is not None:
            self._host_memory.record_name = self.link_name.text

    def _release_host_memory(self) -> None:
        """Keep host memory with its registration, or end both."""
        host_memory = self._host_memory
        assert host_memory is not None  # noqa: S101 - set by _open_shared().
        if self._kept_registrations is not None and self.registered_memory is not None and self.borrowers is not None:
            host_memory.registered_memory = self.registered_memory
            host_memory.shared_file.is_unnamed = False  # The next publication must not create the name again.
            may_be_mapped = self.borrowers.was_borrowed or host_memory.shared_file.is_published_elsewhere()
            self._is_kept = not may_be_mapped and self._kept_registrations.keep(
                make_host_key(host_memory.shared_file), host_memory
            )
        if not self._is_kept:
            host_memory.close()

    def _add_ring(self, client_number: int, loop: AgentLoop, drain: Drain) -> None:
        assert self.shared_file is not None  # noqa: S101 - a ring is in host memory.
        assert self.link_name.ring_options is not None  # noqa: S101
        options, ring_id = self.link_name.ring_options, self.link_name.id
        loop.add_ring(
            client_number,
            ring_id,
            fd=self.shared_file.fd,
            for_read=options.for_read,
            io_depth=options.io_depth,
            priority=options.priority,
            timeout_ms=options.timeout_ms,
            flags=options.flags,
        )
        self._on_close.push(
            lambda: drain(lambda timeout_ms: loop.remove_ring(client_number, ring_id, timeout_ms=timeout_ms))
        )

    def _register_host(self, nics: Nics, memory_quota: MemoryQuota) -> None:
        """Register host memory. If the agent cannot pin more, end kept registrations of all clients and try again."""
        assert self.shared_file is not None  # noqa: S101 - set by _open_shared().
        assert self._host_memory is not None  # noqa: S101 - as above.
        try:
            self.registered_memory = nics.register_host(self.shared_file)
        except GdrkitError as error:
            if as_agent_error(error).errno != errno.ENOMEM:
                raise
            memory_quota.free_idle_memory(None)
            self.registered_memory = nics.register_host(self.shared_file)
        self._length_bytes = self.registered_memory.length_bytes
        self._host_memory.on_close.push(self.registered_memory.close)

    def _add_buffer(self, owner_number: int, uid: int, loop: AgentLoop, drain: Drain) -> None:
        """Add the registered memory to the loop."""
        assert self.registered_memory is not None  # noqa: S101 - the caller has registered the memory.
        registered_memory = self.registered_memory

        def add_to_client(client_number: int) -> None:
            loop.add_buffer(
                client_number,
                self.link_name.id,
                length_bytes=self._length_bytes,
                block_bytes=self.link_name.block_bytes,
                addresses_and_rkeys=registered_memory.addresses_and_rkeys,
                preferred_nic_indices=registered_memory.preferred_nic_indices,
                host_address=registered_memory.host_address,
            )

        def remove_from_client(client_number: int) -> None:
            drain(lambda timeout_ms: loop.remove_buffer(client_number, self.link_name.id, timeout_ms=timeout_ms))

        add_to_client(owner_number)
        self._on_close.push(lambda: remove_from_client(owner_number))
        self.borrowers = Borrowers(
            owner_number=owner_number,
            owner_uid=uid,
            target=self.target,
            add_to_client=add_to_client,
            remove_from_client=remove_from_client,
        )


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
