"""The memory of publications, registered with every active NIC.

Level 5. All NICs or none, and what was registered is taken back before what it lies in. Device memory is known to the
NICs by the dma-buf that its owner exported. Where this process has CUDA, it also opens the memory by IPC: that gives an
address of its own, by which peer memory can be tried, and which a NIC that is no hardware needs.
"""

from __future__ import annotations

import errno
import mmap
from typing import TYPE_CHECKING, Self

from gdrkit import cuda, verbs
from gdrkit.buffers import DmabufRange
from gdrkit.errors import ApiError, GdrkitError, Reason, RegistrationFailed, SetupMissing, UsageError
from gdrkit.handles import ReleaseStack
from gdrkit.registration import (
    HandleMessage,
    Placement,
    RegistrationRoute,
    ShareKind,
    device_of,
    import_dmabuf,
    import_memory,
    register,
)
from gdrkit.registration.share import device_at
from gdrkit.usrbio.agent.agent_error import AgentError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from gdrkit.cuda import CudaMemory, Device
    from gdrkit.usrbio.agent.link_names import DeviceTarget
    from gdrkit.usrbio.agent.mount import SharedFile

__all__ = ["Nics", "RegisteredMemory"]


class RegisteredMemory:
    """Memory that every NIC reaches, until :meth:`close`.

    Attributes
    ----------
    length_bytes : int
        Its size.
    keys : tuple of (int, int)
        Address and key of its first byte, for each NIC in the order of :class:`Nics`.
    near : tuple of int
        The numbers of the NICs to prefer; empty: all are as good.
    route : RegistrationRoute or None
        How device memory became known; None for host memory.
    """

    def __init__(self, length_bytes: int) -> None:
        """Not for direct use; see :class:`Nics`."""
        self.length_bytes = length_bytes
        self.keys: tuple[tuple[int, int], ...] = ()
        self.near: tuple[int, ...] = ()
        self.route: RegistrationRoute | None = None
        self._parts = ReleaseStack()

    def hold(self, close: Callable[[], None]) -> None:
        """Have something closed after what was added later."""
        self._parts.push(close)

    def add(self, region: verbs.Region) -> None:
        """The region of the next NIC."""
        self._parts.push(region.close)
        self.keys = (*self.keys, (region.remote_address, region.rkey))

    def close(self) -> None:
        """Deregister, then close what was registered; a failure leaves what is left for the next call."""
        self._parts.run()

    def undo(self, error: BaseException) -> None:
        """Close because `error` is on its way."""
        self._parts.run_after(error)


class Nics:
    """Every NIC with an active port, open; use it as a context manager.

    Raises
    ------
    SetupMissing
        There are no verbs here, or no NIC has an active port.
    """

    def __init__(self) -> None:
        self._parts = ReleaseStack()
        self._placement = Placement()
        self.all = verbs.open_active_nics()
        for nic in self.all:
            self._parts.push(nic.close)
        if not self.all:
            message = "no NIC has an active port"
            raise UsageError(message, reason=Reason.NO_DEVICE)

    def register_host(self, shared: SharedFile) -> RegisteredMemory:
        """Map shared memory, and register it whole: its keys reach what is its client's anyway."""
        registered = RegisteredMemory(shared.length_bytes)
        try:
            mapping = mmap.mmap(shared.fd, shared.length_bytes)
            registered.hold(mapping.close)
            for nic in self.all:
                registered.add(nic.register_host(mapping))
        except BaseException as error:
            registered.undo(error)
            raise
        return registered

    def register_device(self, target: DeviceTarget, handle: bytes, descriptors: Sequence[int]) -> RegisteredMemory:
        """Register device memory that another process owns.

        Parameters
        ----------
        target : DeviceTarget
            What its link says.
        handle : bytes
            Its share handle; empty: there is only the link.
        descriptors : sequence of int
            What the handle wants; owned from now on.

        Raises
        ------
        AgentError
            EINVAL: link and handle contradict each other. EOPNOTSUPP: there is neither a dma-buf nor an IPC handle.
        RegistrationFailed
            NO_ROUTE: no way is possible here; `causes` says why.
        GdrkitError
            As of :func:`~gdrkit.registration.import_dmabuf` and :func:`~gdrkit.registration.register`.
        """
        handle_message = HandleMessage(handle, descriptors) if handle else None
        try:
            return self._register_device(target, handle_message)
        finally:
            if handle_message is not None:
                handle_message.close()

    def close(self) -> None:
        """Close them."""
        self._parts.run()

    def _register_device(self, target: DeviceTarget, handle_message: HandleMessage | None) -> RegisteredMemory:
        if handle_message is not None and handle_message.handle.length_bytes != target.length_bytes:
            message = f"the link says {target.length_bytes} bytes and the handle {handle_message.handle.length_bytes}"
            raise AgentError(errno.EINVAL, message)
        refusals: list[GdrkitError] = []
        registered = RegisteredMemory(target.length_bytes)
        try:
            own = self._opened(registered, target, handle_message, refusals)
            if handle_message is not None and handle_message.handle.kind is ShareKind.DMABUF:
                self._by_dmabuf(registered, handle_message, own, refusals)
            if not registered.keys and own is not None:
                self._by_address(registered, own, refusals)
            if not registered.keys:
                raise _no_way(refusals)  # noqa: TRY301 - what was made is taken back below.
            registered.near = self._near(own, handle_message)
        except BaseException as error:
            registered.undo(error)
            raise
        return registered

    def _opened(
        self,
        registered: RegisteredMemory,
        target: DeviceTarget,
        handle_message: HandleMessage | None,
        refusals: list[GdrkitError],
    ) -> CudaMemory | None:
        """The memory with an address of this process, where that can be had; else why not is a refusal."""
        try:
            device = device_of(handle_message.handle) if handle_message is not None else device_at(target.device_index)
            registered.hold(device.close)
            if handle_message is not None and handle_message.handle.kind is not ShareKind.DMABUF:
                memory: CudaMemory = import_memory(device, handle_message)
                registered.hold(memory.close)
                return memory
            if target.ipc is None:
                return None
            return _part_of(registered, device, target)
        except (ApiError, UsageError) as error:
            refusals.append(error)
            return None

    def _by_dmabuf(
        self,
        registered: RegisteredMemory,
        handle_message: HandleMessage,
        own: CudaMemory | None,
        refusals: list[GdrkitError],
    ) -> None:
        for nic in self.all:
            refusal = nic.dmabuf_error()
            if refusal is not None:
                refusals.append(refusal)
                return
        with import_dmabuf(handle_message) as theirs:
            address = theirs.address if own is None else own.address
            source = DmabufRange(
                theirs.dup().take(),
                offset_bytes=theirs.offset_bytes,
                length_bytes=theirs.length_bytes,
                address=address,
            )
        registered.hold(source.close)
        for nic in self.all:
            registered.add(nic.register_dmabuf(source))
        registered.route = RegistrationRoute.DMABUF

    def _by_address(self, registered: RegisteredMemory, own: CudaMemory, refusals: list[GdrkitError]) -> None:
        try:
            made = register(own, self.all, route=RegistrationRoute.PEER_MEMORY)
        except RegistrationFailed as error:
            refusals.append(error)
            return
        registered.hold(made.close)
        registered.keys = tuple((made.region(nic).remote_address, made.region(nic).rkey) for nic in self.all)
        registered.route = RegistrationRoute.PEER_MEMORY

    def _near(self, own: CudaMemory | None, handle_message: HandleMessage | None) -> tuple[int, ...]:
        if own is not None:
            nearest = self._placement.nearest(own.device.pci_bus_id, self.all)
        elif handle_message is not None:
            try:
                with device_of(handle_message.handle) as device:
                    nearest = self._placement.nearest(device.pci_bus_id, self.all)
            except (ApiError, UsageError):
                return ()  # Which is near is not known here; it works by any of them.
        else:
            return ()
        return tuple(number for number, nic in enumerate(self.all) if nic in nearest)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _part_of(registered: RegisteredMemory, device: Device, target: DeviceTarget) -> CudaMemory:
    """The memory of a link, opened by IPC; the link's word for its size is held to the driver's."""
    assert target.ipc is not None  # noqa: S101 - the caller looked.
    whole = cuda.open_handle(device, target.ipc)
    registered.hold(whole.close)
    if whole.length_bytes != target.allocation_bytes:
        message = f"the link says {target.allocation_bytes} bytes, and there are {whole.length_bytes}"
        raise UsageError(message, reason=Reason.MALFORMED)
    part = cuda.borrow(device, whole.address + target.offset_bytes, length_bytes=target.length_bytes)
    registered.hold(part.close)
    return part


def _no_way(refusals: list[GdrkitError]) -> GdrkitError:
    if not refusals:
        message = "the memory has neither a dma-buf nor an IPC handle"
        return AgentError(errno.EOPNOTSUPP, message)
    if len(refusals) == 1 and isinstance(refusals[0], SetupMissing):
        return refusals[0]
    return RegistrationFailed(
        "no way of registration is possible for this device memory",
        causes=tuple(refusals),
        reason=Reason.NO_ROUTE,
        what_to_do="publish it with its dma-buf; else one of the causes must go",
    )
