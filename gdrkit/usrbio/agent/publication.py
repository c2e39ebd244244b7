"""What a client published: host memory, a ring, device memory; each with its link.

Level 5. Publishing is in this order: open and check, register, tell the loop, make the link; so a link exists only for
what works. Taking back is the same order backwards: the loop first, which waits for what is in flight.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Protocol

from gdrkit.handles import ReleaseStack
from gdrkit.usrbio.agent.lending import Lending
from gdrkit.usrbio.agent.link_names import parse_device_target
from gdrkit.usrbio.agent.mount import open_shared, take_unnamed
from gdrkit.usrbio.agent.refusal import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gdrkit.host import ProcessIdentity
    from gdrkit.usrbio.agent._agent_loop import AgentLoop
    from gdrkit.usrbio.agent.link_names import LinkName
    from gdrkit.usrbio.agent.memory import Nics, Registered
    from gdrkit.usrbio.agent.mount import SharedFile

__all__ = ["Drain", "Links", "Publication"]


class Links(Protocol):
    """Where links are seen: a folder of a plain mount, or a virtual one of a FUSE mount."""

    def add(self, name: str, target: str, *, owner: ProcessIdentity | None, shared: SharedFile | None) -> None:
        """Make a link; Refused with EEXIST when the name says something else."""

    def remove(self, name: str, target: str) -> None:
        """Remove it if it is still this one."""


class Drain(Protocol):
    """Calls what removes something from the loop, until nothing of it is in flight."""

    def __call__(self, remove: Callable[[int], bool]) -> None:
        """`remove` gets a timeout in ms and is False while operations are in flight after it."""


class Publication:
    """One link and what it stands for; :meth:`close` takes all of it back.

    Attributes
    ----------
    name : LinkName
        What the link is called.
    target : str
        Where it leads.
    shared : SharedFile or None
        The shared memory of a host iov or a ring.
    registered : Registered or None
        The memory of an iov as the NICs know it; a ring is none.
    lending : Lending or None
        To whom else it is lent; a ring is lent to nobody.
    """

    def __init__(self, name: LinkName, target: str) -> None:
        """Not for direct use; see :meth:`make`."""
        self.name = name
        self.target = target
        self.shared: SharedFile | None = None
        self.registered: Registered | None = None
        self.lending: Lending | None = None
        self._parts = ReleaseStack()

    @classmethod
    def make(
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
        loop: AgentLoop,
        links: Links,
        drain: Drain,
    ) -> Publication:
        """Publish; the descriptors are owned from now on.

        Raises
        ------
        Refused, GdrkitError
            Why not; nothing is left.
        """
        made = cls(name, target)
        try:
            if name.device_index is not None:
                made._take_device(nics, handle, descriptors)
            else:
                made._take_shared(uid, descriptors)
            if name.ring is not None:
                made._serve_ring(client, loop, drain)
            else:
                made._serve_buffer(client, uid, nics, loop, drain)
            links.add(name.text, target, owner=owner, shared=made.shared)
            made._parts.push(lambda: links.remove(name.text, target))
            if made.lending is not None:
                made._parts.push(made.lending.close)
        except BaseException as error:
            made._parts.run_after(error)
            raise
        return made

    def close(self, *, remove_shared: bool) -> None:
        """Take it back; a failure leaves what is left for the next call.

        Parameters
        ----------
        remove_shared : bool
            The client is gone: its shared memory has no other owner.
        """
        if remove_shared and self.shared is not None:
            self.shared.remove()
        self._parts.run()

    def _take_device(self, nics: Nics, handle: bytes, descriptors: Sequence[int]) -> None:
        try:
            target = parse_device_target(self.target)
            if target.device_index != self.name.device_index:
                message = f"the name says device {self.name.device_index} and the target {target.device_index}"
                raise Refused(errno.EINVAL, message)  # noqa: TRY301 - the descriptors are closed below.
        except Refused:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        self.registered = nics.register_device(target, handle, descriptors)
        self._parts.push(self.registered.close)

    def _take_shared(self, uid: int, descriptors: Sequence[int]) -> None:
        if descriptors:
            self.shared = take_unnamed(self.target, descriptors[0], uid=uid)
        else:
            self.shared = open_shared(self.target, uid=uid)
        self._parts.push(self.shared.close)

    def _serve_ring(self, client: int, loop: AgentLoop, drain: Drain) -> None:
        assert self.shared is not None  # noqa: S101 - a ring is host memory.
        assert self.name.ring is not None  # noqa: S101
        rules, identity = self.name.ring, self.name.id
        loop.add_ring(
            client,
            identity,
            fd=self.shared.fd,
            for_read=rules.for_read,
            io_depth=rules.io_depth,
            priority=rules.priority,
            timeout_ms=rules.timeout_ms,
            flags=rules.flags,
        )
        self._parts.push(lambda: drain(lambda timeout_ms: loop.remove_ring(client, identity, timeout_ms=timeout_ms)))

    def _serve_buffer(self, client: int, uid: int, nics: Nics, loop: AgentLoop, drain: Drain) -> None:
        if self.registered is None:
            assert self.shared is not None  # noqa: S101 - what is no device memory is shared.
            self.registered = nics.register_host(self.shared)
            self._parts.push(self.registered.close)
        known = self.registered

        def add(to: int) -> None:
            loop.add_buffer(
                to,
                self.name.id,
                length=known.length_bytes,
                block_bytes=self.name.block_bytes,
                keys=known.keys,
                near=known.near,
            )

        def remove(to: int) -> None:
            drain(lambda timeout_ms: loop.remove_buffer(to, self.name.id, timeout_ms=timeout_ms))

        add(client)
        self._parts.push(lambda: remove(client))
        self.lending = Lending(owner=client, uid=uid, target=self.target, add=add, remove=remove)
