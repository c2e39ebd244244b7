"""Registration of memory with several NICs, either with all of them or with none, and the choice of the method.

The policy for device memory is: use dma-buf if the driver exports the memory as dma-buf and every NIC registers it;
else peer memory (``ibv_reg_mr`` of the device address); else raise an error with both causes. Host memory has one
method, ``ibv_reg_mr`` of its pages. The next method is tried only if the previous one is not supported at all. Any
other failure is raised unchanged, because another method would hide it.
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

    from gdrkit.buffers import DmabufRange, RegistrableMemory
    from gdrkit.verbs import Region, RemoteRange

__all__ = ["TRANSFER_ACCESS", "Registration", "RegistrationRoute", "check_memory", "check_nics", "register"]

# The rights that transfers need. Atomic requests (Access.REMOTE_ATOMIC) are not transfers.
TRANSFER_ACCESS = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE


class RegistrationRoute(enum.Enum):
    """The method by which memory was registered with a NIC."""

    DMABUF = "dmabuf"
    PEER_MEMORY = "peer_memory"
    HOST = "host"  # ibv_reg_mr of pages of this process. This is not a direct path to a device.

    @classmethod
    def methods_for(cls, kind: MemoryKind) -> tuple[Self, ...]:
        """Return the methods that the policy tries for memory of this kind, in order."""
        # Memory of these two kinds has no address in this process, so ibv_reg_mr cannot pin it as peer memory.
        if kind in {MemoryKind.GAUDI, MemoryKind.DMABUF}:
            return (cls.DMABUF,)
        return (cls.HOST,) if kind is MemoryKind.HOST else (cls.DMABUF, cls.PEER_MEMORY)


class Registration:
    """Memory that some NICs can access. :func:`register` creates it.

    It must be closed before the memory is freed. If gdrkit owns the memory, :meth:`DeviceBuffer.close` closes the
    registration before it frees the memory.

    Attributes
    ----------
    memory : RegistrableMemory
        The registered memory.
    route : RegistrationRoute
        The method of registration.
    refusals : tuple of GdrkitError
        The errors of the methods that were tried before `route`. It is empty if the first method worked.
    """

    def __init__(self, memory: RegistrableMemory, route: RegistrationRoute, refusals: tuple[GdrkitError, ...]) -> None:
        """Create a registration without regions. Callers use :func:`register` instead."""
        self.memory = memory
        self.route = route
        self.refusals = refusals
        self._regions: dict[Nic, Region] = {}
        self._release_stack = ReleaseStack()
        self._is_closed = False
        self._handle = Handle("registration")
        # The memory calls close() before it is freed. This function removes that callback.
        self._remove_close_callback: Callable[[], None] = memory.before_release(self.close)

    @property
    def closed(self) -> bool:
        """Whether the memory was deregistered."""
        return self._is_closed

    @property
    def nics(self) -> tuple[Nic, ...]:
        """The NICs with which the memory was registered, as passed to :func:`register`."""
        return tuple(self._regions)

    def region(self, nic: Nic) -> Region:
        """Return the memory region of one NIC.

        Raises
        ------
        UsageError
            The memory is not registered with this NIC.
        """
        if self._is_closed:
            resource = "registration"
            raise ClosedResource(resource)
        if nic not in self._regions:
            message = f"the memory is not registered with {nic.name}"
            raise UsageError(message)
        return self._regions[nic]

    def remote(self, nic: Nic, *, offset_bytes: int = 0, length_bytes: int | None = None) -> RemoteRange:
        """Return the address and the key by which a peer can access a part of the memory through `nic`.

        A length of None means up to the end of the memory.
        """
        return self.region(nic).remote(offset_bytes=offset_bytes, length_bytes=length_bytes)

    def close(self) -> None:
        """Deregister from all NICs, then close the dma-buf. A second close does nothing.

        Raises
        ------
        ApiError
            A region could not be deregistered. The error of the first such region is raised, with the other errors as
            notes. Until another close succeeds, gdrkit does not free the memory.
        """
        if self._is_closed:
            return
        self._release_stack.run()
        # If an exception of a signal handler interrupts these statements, the next close of the memory repeats them.
        self._handle.release()
        self._is_closed = True
        self._remove_close_callback()

    def _add_dmabuf(self, dmabuf: DmabufRange) -> None:
        self._release_stack.push(dmabuf.close)

    def _add_region(self, nic: Nic, region: Region) -> None:
        self._regions[nic] = region
        self._release_stack.push(region.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        names = ", ".join(nic.name for nic in self._regions)
        return f"Registration({self.route.value}, {names}{', closed' if self._is_closed else ''})"


def register(
    memory: RegistrableMemory,
    nics: Sequence[Nic],
    *,
    access: Access = TRANSFER_ACCESS,
    route: RegistrationRoute | None = None,
) -> Registration:
    """Register memory with all of `nics`, or with none of them, and return the registration.

    Parameters
    ----------
    memory : RegistrableMemory
        The memory to register, in most cases a :class:`~gdrkit.buffers.DeviceBuffer`. All of it is registered.
    nics : sequence of Nic
        The NICs to register with, at least one. A NIC must not occur twice.
    access : Access
        Access rights of the keys.
    route : RegistrationRoute or None
        Use only this method. With None, choose the method by the policy at the top of this module.

    Raises
    ------
    RegistrationFailed
        NO_ROUTE: no method is possible. ``causes`` has the error of each method, in the order of the attempts.
    ApiError
        A method is possible and failed (bad argument, out of memory, ...). Nothing stays registered.
    UsageError
        `memory` is not a DeviceBuffer. `nics` is empty, has a NIC twice or has an item that is not a Nic. `route` is
        HOST for device memory, or PEER_MEMORY for host memory: ``ibv_reg_mr`` would succeed, and the registration would
        report the wrong method.
    """
    check_memory(memory)
    if memory.closed:
        resource = "the memory to register"
        raise ClosedResource(resource)
    nics = check_nics(nics)
    methods = RegistrationRoute.methods_for(memory.kind) if route is None else (route,)
    refusals: list[GdrkitError] = []
    for method in methods:
        registration = Registration(memory, method, tuple(refusals))
        try:
            _REGISTER_FUNCTION_BY_ROUTE[method](registration, nics, access)
        except Unsupported as error:
            registration.close()
            # The registration keeps the refusals. A clone has no traceback, which would keep the frames of all callers
            # alive.
            refusals.append(error.clone())
        except BaseException as error:
            _close_and_note_errors(registration, error)
            raise
        else:
            return registration
    message = f"no method of registration is possible for this {memory.kind.value} memory"
    raise RegistrationFailed(
        message,
        causes=tuple(refusals),
        reason=Reason.NO_ROUTE,
        what_to_do="remove one of the causes; each cause has its advice",
    ) from refusals[-1]


def check_memory(memory: object) -> None:
    """Raise :class:`UsageError` unless `memory` is memory that can be registered."""
    # The attribute is looked up in the class, because properties of closed memory raise.
    if not hasattr(type(memory), "before_release"):
        message = f"memory must be a DeviceBuffer (allocated by a device or gdrkit.host), not {_describe_type(memory)}"
        advice = "use gdrkit.cuda.wrap() for an array on a GPU, Nic.register_host() for a buffer of this process"
        raise UsageError(message, what_to_do=advice)


def check_nics(nics: object) -> tuple[Nic, ...]:
    """Return the NICs to register with.

    Raises
    ------
    UsageError
        `nics` is empty, contains a NIC twice, or contains something other than a Nic.
    """
    if isinstance(nics, Nic) or not isinstance(nics, Iterable):
        message = f"nics must be a sequence of Nic such as [nic], not {_describe_type(nics)}"
        raise UsageError(message)
    nic_tuple = tuple(nics)
    invalid_item = next((item for item in nic_tuple if not isinstance(item, Nic)), None)
    if invalid_item is not None:
        message = f"nics must be a sequence of Nic, and it contains {_describe_type(invalid_item)}"
        raise UsageError(message, what_to_do="open a NIC with Nic.open(name)")
    if not nic_tuple or len(set(nic_tuple)) != len(nic_tuple):
        message = f"nics must contain at least one NIC, and no NIC twice, not {[nic.name for nic in nic_tuple]}"
        raise UsageError(message)
    return nic_tuple


def _describe_type(value: object) -> str:
    value_type = type(value)
    if value_type.__module__ == "builtins":
        return value_type.__qualname__
    return f"{value_type.__module__}.{value_type.__qualname__}"


def _register_dmabuf(registration: Registration, nics: Sequence[Nic], access: Access) -> None:
    for nic in nics:
        refusal = nic.dmabuf_error()
        if refusal is not None:
            raise refusal
    dmabuf = registration.memory.export_dmabuf()
    registration._add_dmabuf(dmabuf)  # noqa: SLF001 - this module builds the registration.
    for nic in nics:
        registration._add_region(nic, nic.register_dmabuf(dmabuf, access=access))  # noqa: SLF001


def _register_peer_memory(registration: Registration, nics: Sequence[Nic], access: Access) -> None:
    memory = registration.memory
    if memory.kind is MemoryKind.HOST:
        message = "host memory cannot be registered as peer memory"
        raise UsageError(message, what_to_do="pass route=RegistrationRoute.HOST, or route=None to let gdrkit choose")
    _require_address(memory)
    for nic in nics:
        region = nic.register_address(memory.address, length_bytes=memory.length_bytes, access=access)
        registration._add_region(nic, region)  # noqa: SLF001


def _register_host(registration: Registration, nics: Sequence[Nic], access: Access) -> None:
    memory = registration.memory
    if memory.kind is not MemoryKind.HOST:
        message = f"{memory.kind.value} memory is not host memory"
        raise UsageError(message, what_to_do="pass route=None to let gdrkit choose dma-buf or peer memory")
    for nic in nics:
        region = nic.register_pages(memory.address, length_bytes=memory.length_bytes, access=access)
        registration._add_region(nic, region)  # noqa: SLF001


def _require_address(memory: RegistrableMemory) -> None:
    """Raise Unsupported for memory without an address, so that ibv_reg_mr does not get a null pointer."""
    if memory.address <= 0:
        raise Unsupported(
            api=Api.VERBS,
            operation="ibv_reg_mr",
            status=None,
            status_name="not called",
            arguments={"addr": memory.address, "length": memory.length_bytes},
            reason=Reason.PEER_MEMORY_UNSUPPORTED,
            what_to_do="use a NIC and a kernel that register dma-bufs",
            detail="the memory has no address in this process",
        )


_REGISTER_FUNCTION_BY_ROUTE = {
    RegistrationRoute.DMABUF: _register_dmabuf,
    RegistrationRoute.PEER_MEMORY: _register_peer_memory,
    RegistrationRoute.HOST: _register_host,
}


def _close_and_note_errors(registration: Registration, error: BaseException) -> None:
    try:
        registration.close()
    except GdrkitError as close_error:
        error.add_note(f"then the clean-up failed too: {close_error}")
