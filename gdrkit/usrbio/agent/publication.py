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
from gdrkit.usrbio.agent.kept import HostPages, make_host_key, make_memory_key
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
        """Call `remove` with a timeout in milliseconds, until it returns True.

        `remove` returns False if operations are still in flight after the timeout.
        """


class Publication:
    """A link and the iov or ring that it names. :meth:`close` removes both.

    Attributes
    ----------
    name : LinkName
        The name of the link.
    target : str
        The target of the link.
    shared : SharedFile or None
        The shared memory of a ring or of an iov in host memory.
    registered : RegisteredMemory or None
        The registration of an iov. A ring is not registered.
    borrowers : Borrowers or None
        The other clients that use an iov. A ring has none.
    """

    def __init__(self, name: LinkName, target: str) -> None:
        """Create a publication without memory. Callers use :meth:`create` instead."""
        self.name = name
        self.target = target
        self.shared: SharedFile | None = None
        self.registered: RegisteredMemory | None = None
        self.borrowers: Borrowers | None = None
        self._length_bytes = 0
        self._key: MemoryKey | None = None
        self._kept_registrations: KeptRegistrations | None = None
        self._is_kept = False
        self._pages: HostPages | None = None
        self._on_close = ReleaseStack()

    @classmethod
    def create(
        cls,
        name: LinkName,
        target: str,
        *,
        client: int,
        uid: int,
        owner: ProcessIdentity | None,
        handle: bytes,
        descriptors: Sequence[int],
        nics: Nics,
        quota: MemoryQuota,
        kept_registrations: KeptRegistrations,
        loop: AgentLoop,
        links: LinkFolder,
        drain: Drain,
    ) -> Publication:
        """Register the memory, add it to the loop and create the link. Return the publication.

        The publication owns the descriptors from now on, also if this method raises.

        Raises
        ------
        AgentError, GdrkitError
            A step failed. The steps before it were undone.
        """
        publication = cls(name, target)
        try:
            if name.device_index is not None:
                publication._register_device(nics, kept_registrations, handle, descriptors)
            else:
                publication._open_shared(uid, descriptors, quota, kept_registrations, links)
            if name.ring is not None:
                publication._add_ring(client, loop, drain)
            else:
                if publication.registered is None:
                    publication._register_host(nics, quota)
                publication._add_buffer(client, uid, loop, drain)
            links.add(name.text, target, owner=owner, shared=publication.shared)
            publication._on_close.push(lambda: publication._remove_link(links))
            if publication._pages is not None:
                publication._pages.replace_record(name.text)
                publication._pages.shared.mark_published()
            if publication.borrowers is not None:
                publication._on_close.push(publication.borrowers.close)
        except BaseException as error:
            publication._on_close.run_after(error)
            raise
        return publication

    def close(self, *, remove_shared: bool, kept_registrations: KeptRegistrations | None = None) -> bool:
        """Remove the publication. After an error, close again: the steps that succeeded are not repeated.

        Parameters
        ----------
        remove_shared : bool
            Whether to remove also the name of the shared memory in /dev/shm, because the client has ended.
        kept_registrations : KeptRegistrations or None
            Keep the registration in this object, for the next publication of the same dma-buf or file. The registration
            is not kept if another client borrowed the memory, or published the same file: that client may still have
            the memory mapped, and must not see the contents of the next iov. The name of host memory that is not kept
            is removed.

        Returns
        -------
        is_kept
            Whether `kept_registrations` has the registration.
        """
        if remove_shared and self.shared is not None:
            self.shared.remove()
        self._kept_registrations = kept_registrations
        self._on_close.run()
        return self._is_kept

    def _register_device(
        self, nics: Nics, kept_registrations: KeptRegistrations, handle: bytes, descriptors: Sequence[int]
    ) -> None:
        try:
            target = self._parse_and_check_target()
            self._key = make_memory_key(target, handle, descriptors)
            kept_registration = None if self._key is None else kept_registrations.take(self._key)
            self.registered = None if isinstance(kept_registration, HostPages) else kept_registration
        except BaseException:
            _close_all(descriptors)
            raise
        if self.registered is None:
            self.registered = nics.register_device(target, handle, descriptors)
        else:
            _close_all(descriptors)
        self._length_bytes = target.length_bytes
        self._on_close.push(self._release_device)

    def _parse_and_check_target(self) -> DeviceTarget:
        target = parse_device_target(self.target)
        if target.device_index != self.name.device_index:
            message = f"the name says device {self.name.device_index}, and the target device {target.device_index}"
            raise AgentError(errno.EINVAL, message)
        return target

    def _release_device(self) -> None:
        """Keep the registration, or end it."""
        assert self.registered is not None  # noqa: S101 - set by _register_device().
        if self._kept_registrations is not None and self._key is not None and self.borrowers is not None:
            self._is_kept = not self.borrowers.was_borrowed and self._kept_registrations.keep(
                self._key, self.registered
            )
        if not self._is_kept:
            self.registered.close()

    def _open_shared(
        self,
        uid: int,
        descriptors: Sequence[int],
        quota: MemoryQuota,
        kept_registrations: KeptRegistrations,
        links: LinkFolder,
    ) -> None:
        if descriptors:
            shared = adopt_unnamed(self.target, descriptors[0], uid=uid)
        else:
            shared = open_shared(self.target, uid=uid)
        pages = kept_registrations.take(make_host_key(shared)) if self.name.ring is None else None
        if isinstance(pages, HostPages):
            shared.close()
        else:
            pages = HostPages(shared, links)
        self._pages, self.shared, self.registered = pages, pages.shared, pages.registered
        self._on_close.push(self._release_pages)
        if self.registered is None:
            pages.on_close.push(quota.charge(uid, shared.length_bytes))
        else:
            self._length_bytes = self.registered.length_bytes

    def _remove_link(self, links: LinkFolder) -> None:
        """Remove the link, and its record unless the memory may be kept."""
        may_keep = self._kept_registrations is not None and self._pages is not None and self.registered is not None
        links.remove(self.name.text, self.target, has_record=not may_keep)
        if may_keep and self._pages is not None:
            self._pages.record = self.name.text

    def _release_pages(self) -> None:
        """Keep host memory with its registration, or end both."""
        pages = self._pages
        assert pages is not None  # noqa: S101 - set by _open_shared().
        if self._kept_registrations is not None and self.registered is not None and self.borrowers is not None:
            pages.registered = self.registered
            pages.shared.is_unnamed = False  # The next publication finds the name.
            may_be_mapped = self.borrowers.was_borrowed or pages.shared.is_published_elsewhere()
            self._is_kept = not may_be_mapped and self._kept_registrations.keep(make_host_key(pages.shared), pages)
        if not self._is_kept:
            pages.close()

    def _add_ring(self, client: int, loop: AgentLoop, drain: Drain) -> None:
        assert self.shared is not None  # noqa: S101 - a ring is in host memory.
        assert self.name.ring is not None  # noqa: S101
        options, ring_id = self.name.ring, self.name.id
        loop.add_ring(
            client,
            ring_id,
            fd=self.shared.fd,
            for_read=options.for_read,
            io_depth=options.io_depth,
            priority=options.priority,
            timeout_ms=options.timeout_ms,
            flags=options.flags,
        )
        self._on_close.push(lambda: drain(lambda timeout_ms: loop.remove_ring(client, ring_id, timeout_ms=timeout_ms)))

    def _register_host(self, nics: Nics, quota: MemoryQuota) -> None:
        """Register host memory. If the agent cannot pin more, first end the registrations that clients only keep."""
        assert self.shared is not None  # noqa: S101 - set by _open_shared().
        assert self._pages is not None  # noqa: S101 - as above.
        try:
            self.registered = nics.register_host(self.shared)
        except GdrkitError as error:
            if as_agent_error(error).errno != errno.ENOMEM:
                raise
            quota.free_idle_memory(None)
            self.registered = nics.register_host(self.shared)
        self._length_bytes = self.registered.length_bytes
        self._pages.on_close.push(self.registered.close)

    def _add_buffer(self, client: int, uid: int, loop: AgentLoop, drain: Drain) -> None:
        """Add the registered memory to the loop."""
        assert self.registered is not None  # noqa: S101 - the caller has registered the memory.
        registered = self.registered

        def add_to_client(client: int) -> None:
            loop.add_buffer(
                client,
                self.name.id,
                length=self._length_bytes,
                block_bytes=self.name.block_bytes,
                keys=registered.keys,
                preferred_nics=registered.preferred_nics,
                mapping=registered.host_address,
            )

        def remove_from_client(client: int) -> None:
            drain(lambda timeout_ms: loop.remove_buffer(client, self.name.id, timeout_ms=timeout_ms))

        add_to_client(client)
        self._on_close.push(lambda: remove_from_client(client))
        self.borrowers = Borrowers(
            owner=client,
            uid=uid,
            target=self.target,
            add_to_client=add_to_client,
            remove_from_client=remove_from_client,
        )


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
