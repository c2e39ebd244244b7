"""Memory to NIC: which way of registration, and all NICs or none.

Level 3. The one room that knows both exporters and importers. dma-buf where the memory exports one and every NIC
takes it; else peer memory (``ibv_reg_mr`` of the device address); else an error with both causes. Host memory has one
way, ``ibv_reg_mr`` of its pages. The next way is
tried only when the one before answered that it cannot do this at all; any other failure is raised as it is, since
another way would hide it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import TYPE_CHECKING, Self

from gdrkit.buffers import MemoryKind
from gdrkit.errors import Api, ClosedResource, GdrkitError, Reason, RegistrationFailed, Unsupported, UsageError
from gdrkit.handles import Handle, ReleaseStack
from gdrkit.verbs import Access, Nic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from gdrkit.buffers import DeviceBuffer, DmabufRange
    from gdrkit.verbs import Region, RemoteRange

__all__ = ["ALL_ACCESS", "Registration", "RegistrationRoute", "check_memory", "checked_nics", "register"]

ALL_ACCESS = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE


class RegistrationRoute(enum.Enum):
    """How a NIC came to know the memory."""

    DMABUF = "dmabuf"
    PEER_MEMORY = "peer_memory"
    HOST = "host"  # ibv_reg_mr of pages of this process; nothing about it is direct.

    @classmethod
    def ways_of(cls, kind: MemoryKind) -> tuple[Self, ...]:
        """The ways that the policy tries for memory of this kind, in order."""
        if kind is MemoryKind.GAUDI:  # Its addresses are none of this process, so that nothing pins them.
            return (cls.DMABUF,)
        return (cls.HOST,) if kind is MemoryKind.HOST else (cls.DMABUF, cls.PEER_MEMORY)


class Registration:
    """Memory that some NICs can reach; made by :func:`register`.

    It closes before the memory does: :meth:`DeviceBuffer.close` of gdrkit's memory deregisters first.

    Attributes
    ----------
    memory : DeviceBuffer
        What was registered.
    route : RegistrationRoute
        How.
    refusals : tuple of GdrkitError
        Why the ways before this one were not possible; empty for the first.
    """

    def __init__(self, memory: DeviceBuffer, route: RegistrationRoute, refusals: tuple[GdrkitError, ...]) -> None:
        """Not for direct use; see :func:`register`."""
        self.memory = memory
        self.route = route
        self.refusals = refusals
        self._regions: dict[Nic, Region] = {}
        self._parts = ReleaseStack()
        self._closed = False
        self._handle = Handle("registration")
        self._leave: Callable[[], None] = memory.before_release(self.close)

    @property
    def closed(self) -> bool:
        """Whether it was taken back."""
        return self._closed

    @property
    def nics(self) -> tuple[Nic, ...]:
        """Which NICs can reach the memory, as given to :func:`register`."""
        return tuple(self._regions)

    def region(self, nic: Nic) -> Region:
        """The region of one NIC.

        Raises
        ------
        UsageError
            The memory was not registered with it.
        """
        if self._closed:
            what = "registration"
            raise ClosedResource(what)
        if nic not in self._regions:
            message = f"the memory is not registered with {nic.name}"
            raise UsageError(message)
        return self._regions[nic]

    def remote(self, nic: Nic, *, offset_bytes: int = 0, length_bytes: int | None = None) -> RemoteRange:
        """What a peer needs to reach a part of the memory through this NIC; None: up to the end."""
        return self.region(nic).remote(offset_bytes=offset_bytes, length_bytes=length_bytes)

    def close(self) -> None:
        """Deregister from all NICs, then close the dma-buf; a second close does nothing.

        Raises
        ------
        ApiError
            Of the first region that could not be deregistered, the others as notes. The memory cannot be freed by
            gdrkit then; closing again tries again.
        """
        if self._closed:
            return
        self._parts.run()
        self._closed = True
        self._leave()
        self._handle.release()

    def _hold(self, dmabuf: DmabufRange) -> None:
        self._parts.push(dmabuf.close)

    def _add(self, nic: Nic, region: Region) -> None:
        self._regions[nic] = region
        self._parts.push(region.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        names = ", ".join(nic.name for nic in self._regions)
        return f"Registration({self.route.value}, {names}{', closed' if self._closed else ''})"


def register(
    memory: DeviceBuffer,
    nics: Sequence[Nic],
    *,
    access: Access = ALL_ACCESS,
    route: RegistrationRoute | None = None,
) -> Registration:
    """Let NICs reach memory: all of them, or none.

    Parameters
    ----------
    memory : DeviceBuffer
        What to register, whole.
    nics : sequence of Nic
        With which; at least one, each once.
    access : Access
        What the keys allow.
    route : RegistrationRoute or None
        Force one way; None: the policy of this module.

    Raises
    ------
    RegistrationFailed
        NO_ROUTE: no way is possible; ``causes`` has the answer of each that was tried, in order.
    ApiError
        A way is possible and failed (bad argument, out of memory ...); nothing stays registered.
    UsageError
        `memory` is not a DeviceBuffer, or `nics` is not a sequence of at least one Nic, each once. A way by address
        that is not for this kind of memory: that of peer memory would register host memory, too, and be called what it
        is not.
    """
    check_memory(memory)
    if memory.closed:
        what = "the memory to register"
        raise ClosedResource(what)
    nics = checked_nics(nics)
    ways = RegistrationRoute.ways_of(memory.kind) if route is None else (route,)
    refusals: list[GdrkitError] = []
    for way in ways:
        registration = Registration(memory, way, tuple(refusals))
        try:
            _WAYS[way](registration, nics, access)
        except Unsupported as error:
            registration.close()
            # They stay as long as the registration does, so without the frames of this call and of its callers.
            refusals.append(error.fresh())
        except BaseException as error:
            _close_after(registration, error)
            raise
        else:
            return registration
    message = f"no way of registration is possible for this {memory.kind.value} memory"
    raise RegistrationFailed(
        message,
        causes=tuple(refusals),
        reason=Reason.NO_ROUTE,
        what_to_do="one of the causes must go; each says how",
    ) from refusals[-1]


def check_memory(memory: object) -> None:
    """Raise :class:`UsageError` unless it is memory that can be registered."""
    # By its class: a property of closed memory raises.
    if not hasattr(type(memory), "before_release"):
        message = f"memory must be a DeviceBuffer (what a device or gdrkit.host allocates), not {_named(memory)}"
        advice = "use gdrkit.cuda.wrap() for an array on a GPU, Nic.register_host() for a buffer of this process"
        raise UsageError(message, what_to_do=advice)


def checked_nics(nics: object) -> tuple[Nic, ...]:
    """Return the NICs to register with.

    Raises
    ------
    UsageError
        It is not a sequence of at least one Nic, each once.
    """
    if isinstance(nics, Nic) or not isinstance(nics, Iterable):
        message = f"nics must be a sequence of Nic such as [nic], not {_named(nics)}"
        raise UsageError(message)
    found = tuple(nics)
    wrong = next((each for each in found if not isinstance(each, Nic)), None)
    if wrong is not None:
        message = f"nics must be a sequence of Nic, and it contains {_named(wrong)}"
        raise UsageError(message, what_to_do="open a NIC by Nic.open(name)")
    if not found or len(set(found)) != len(found):
        message = f"nics must contain at least one NIC, each once, not {[nic.name for nic in found]}"
        raise UsageError(message)
    return found


def _named(thing: object) -> str:
    kind = type(thing)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _by_dmabuf(registration: Registration, nics: Sequence[Nic], access: Access) -> None:
    for nic in nics:
        refusal = nic.dmabuf_refusal()
        if refusal is not None:
            raise refusal
    dmabuf = registration.memory.export_dmabuf()
    registration._hold(dmabuf)  # noqa: SLF001 - these functions build it.
    for nic in nics:
        registration._add(nic, nic.register_dmabuf(dmabuf, access=access))  # noqa: SLF001


def _by_address(registration: Registration, nics: Sequence[Nic], access: Access) -> None:
    memory = registration.memory
    if memory.kind is MemoryKind.HOST:
        message = "host memory is no peer memory"
        raise UsageError(message, what_to_do="register it by RegistrationRoute.HOST, or let the policy choose")
    _require_address(memory)
    for nic in nics:
        region = nic.register_address(memory.address, length_bytes=memory.length_bytes, access=access)
        registration._add(nic, region)  # noqa: SLF001


def _by_host_pages(registration: Registration, nics: Sequence[Nic], access: Access) -> None:
    memory = registration.memory
    if memory.kind is not MemoryKind.HOST:
        message = f"{memory.kind.value} memory is no host memory"
        raise UsageError(message, what_to_do="register it by dma-buf or as peer memory, or let the policy choose")
    for nic in nics:
        region = nic.register_pages(memory.address, length_bytes=memory.length_bytes, access=access)
        registration._add(nic, region)  # noqa: SLF001


def _require_address(memory: DeviceBuffer) -> None:
    """Refuse what only has a dma-buf: a null pointer is never given to a driver."""
    if memory.address <= 0:
        raise Unsupported(
            api=Api.VERBS,
            operation="ibv_reg_mr",
            status=None,
            status_name="no call",
            arguments={"addr": memory.address, "length": memory.length_bytes},
            reason=Reason.PEER_MEMORY_UNSUPPORTED,
            what_to_do="use a NIC and a kernel that register dma-bufs",
            detail="the memory has no address in this process",
        )


_WAYS = {
    RegistrationRoute.DMABUF: _by_dmabuf,
    RegistrationRoute.PEER_MEMORY: _by_address,
    RegistrationRoute.HOST: _by_host_pages,
}


def _close_after(registration: Registration, error: BaseException) -> None:
    try:
        registration.close()
    except GdrkitError as second:
        error.add_note(f"then, while undoing: {second}")
