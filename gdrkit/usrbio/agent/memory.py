"""Registration of published memory: host memory with all NICs of the agent, device memory with the NICs that reach it.

:func:`gdrkit.registration.register` chooses the method: device memory is registered by dma-buf or as peer memory. This
module opens the memory of a client as an object that register() accepts.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from typing import TYPE_CHECKING, Self

from gdrkit import cuda, verbs
from gdrkit.buffers import DmabufRange, MemoryKind
from gdrkit.errors import (
    Api,
    ApiError,
    ClosedResource,
    GdrkitError,
    Reason,
    RegistrationFailed,
    Unsupported,
    UsageError,
)
from gdrkit.handles import ReleaseStack
from gdrkit.host import MappedFile
from gdrkit.registration import (
    HandleMessage,
    Placement,
    ShareKind,
    device_of,
    import_dmabuf,
    import_memory,
    register,
)
from gdrkit.storage import messages
from gdrkit.usrbio.agent.agent_error import AgentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from gdrkit.cuda import CudaMemory, Device
    from gdrkit.registration import Registration
    from gdrkit.usrbio.agent.link_names import DeviceTarget
    from gdrkit.usrbio.agent.shared_memory import SharedFile

__all__ = ["Nics", "PublishedDeviceMemory", "RegisteredMemory"]


class PublishedDeviceMemory:
    """Device memory of a client: a dma-buf, if the client sent one, and a mapping in this process, if there is one.

    The agent maps memory of which the client has sent a CUDA handle (a share handle that is not a dma-buf, or an IPC
    handle in the link).

    A NIC can register the dma-buf without a mapping. A registration as peer memory needs the address of the mapping.
    The libibverbs twin needs the address for a dma-buf too.

    Parameters
    ----------
    target : DeviceTarget
        The parsed target of the symbolic link by which the client published the memory.
    handle_message : HandleMessage or None
        The share handle of the memory and its descriptors. The caller still owns the message. None if the client has
        published the memory only by a link.

    Attributes
    ----------
    kind : MemoryKind
        ``CUDA_IMPORTED``.
    address : int
        Address of the mapping, or 0 if the memory is not mapped.
    length_bytes : int
        Size of the memory in bytes: the size in the share handle, which may exceed the size in the link. Without a
        handle, it is the size in the link.
    device : Device or None
        The GPU. None if this process cannot open it, or if the client sent no handle at all, neither in the link nor in
        a message.
    mapping_error : GdrkitError or None
        The error if the attempt to map the memory failed.

    Raises
    ------
    AgentError
        EINVAL: the size in the share handle is smaller than the size in the link, or the size is larger and the handle
        is not a dma-buf.
    GdrkitError
        See :func:`~gdrkit.registration.import_dmabuf`.
    """

    kind = MemoryKind.CUDA_IMPORTED

    def __init__(self, target: DeviceTarget, handle_message: HandleMessage | None) -> None:
        self.address = 0
        self.length_bytes = target.length_bytes
        self.device: Device | None = None
        self.mapping_error: GdrkitError | None = None
        self._dmabuf: DmabufRange | None = None
        self._is_closed = False
        self._before_release = ReleaseStack()
        self._on_close = ReleaseStack()
        try:
            self._open(target, handle_message)
        except BaseException as error:
            self._on_close.run_after(error)
            raise

    @property
    def closed(self) -> bool:
        """Whether the memory was closed."""
        return self._is_closed

    def export_dmabuf(self) -> DmabufRange:
        """Return the client's dma-buf with a duplicate of its descriptor, which the caller has to close.

        Raises
        ------
        Unsupported
            DMABUF_EXPORT_UNSUPPORTED: the publication has no dma-buf.
        ClosedResource
            The memory was closed.
        """
        if self._is_closed:
            resource = "published device memory"
            raise ClosedResource(resource)
        if self._dmabuf is None:
            raise Unsupported(
                api=Api.NONE,
                operation="export_dmabuf",
                status=None,
                status_name="not called",
                reason=Reason.DMABUF_EXPORT_UNSUPPORTED,
                what_to_do="publish the memory with its dma-buf",
                detail="the publication has no dma-buf",
            )
        dmabuf_copy = self._dmabuf.dup()
        if self.address:
            dmabuf_copy.address = self.address
        return dmabuf_copy

    def before_release(self, action: Callable[[], None]) -> Callable[[], None]:
        """Add an action that :meth:`close` runs before it unmaps the memory. Return a function that removes the action.

        The actions run in the reverse order.
        """
        return self._before_release.push(action)

    def close(self) -> None:
        """Run the actions of :meth:`before_release`, then unmap the memory.

        If close() raises, the caller may call it again to release the rest.
        """
        self._before_release.run()
        self._on_close.run()
        self._is_closed = True

    def _open(self, target: DeviceTarget, handle_message: HandleMessage | None) -> None:
        """Import the dma-buf if there is one, and try to map the memory."""
        if handle_message is not None:
            length_bytes = handle_message.handle.length_bytes
            is_dmabuf = handle_message.handle.kind is ShareKind.DMABUF
            # The link may state fewer bytes than the dma-buf has: an iov from the client's pool is the first part of a
            # block, and the dma-buf is the whole block.
            if length_bytes < target.length_bytes or (length_bytes > target.length_bytes and not is_dmabuf):
                message = (
                    f"the symbolic link of the memory states {target.length_bytes} bytes, and its share handle states "
                    f"{length_bytes} bytes"
                )
                raise AgentError(errno.EINVAL, message)
            self.length_bytes = length_bytes
            if handle_message.handle.kind is ShareKind.DMABUF:
                self._dmabuf = import_dmabuf(handle_message)
                self._on_close.push(self._dmabuf.close)
        try:
            self._map(target, handle_message)
        except (ApiError, UsageError) as error:
            self.mapping_error = error

    def _map(self, target: DeviceTarget, handle_message: HandleMessage | None) -> None:
        """Map the memory by its share handle, or by the IPC handle in the target of the link."""
        if handle_message is not None:
            device = device_of(handle_message.handle)
        elif target.ipc_handle is not None:
            # The link has the device number of the client's process. This process may number the devices differently,
            # so the device is found by the IPC handle.
            device = cuda.Device(cuda.device_of_handle(target.ipc_handle))
        else:
            return
        self._on_close.push(device.close)
        self.device = device
        if handle_message is not None and handle_message.handle.kind is not ShareKind.DMABUF:
            memory: CudaMemory = import_memory(device, handle_message)
            self._on_close.push(memory.close)
        elif target.ipc_handle is not None:
            memory = self._open_ipc(device, target, target.ipc_handle)
        else:
            return
        self.address = memory.address

    def _open_ipc(self, device: Device, target: DeviceTarget, ipc_handle: bytes) -> CudaMemory:
        """Map the allocation that a link names, and return the published range of it.

        The link states the size of the allocation. The driver must report the same size.
        """
        allocation = cuda.open_handle(device, ipc_handle)
        self._on_close.push(allocation.close)
        if allocation.length_bytes != target.allocation_bytes:
            message = (
                f"the symbolic link states an allocation of {target.allocation_bytes} bytes, and the CUDA driver "
                f"reports {allocation.length_bytes} bytes"
            )
            raise UsageError(message, reason=Reason.MALFORMED)
        address = allocation.address + target.offset_bytes
        published_range = cuda.borrow(device, address, length_bytes=self.length_bytes)
        self._on_close.push(published_range.close)
        return published_range


class RegisteredMemory:
    """Memory that NICs of the agent can access until :meth:`close`.

    Attributes
    ----------
    length_bytes : int
        Size of the memory in bytes.
    addresses_and_rkeys : tuple of (int, int)
        The remote address of the first byte and the rkey, for each NIC in the order of ``Nics.all``. Both are 0 for a
        NIC that cannot access the memory.
    host_address : int
        Address of host memory in this process, or 0 for device memory.
    preferred_nic_indices : tuple of int
        Indices in ``Nics.all`` of the NICs that are nearest to the memory. Empty: none is preferred.
    """

    def __init__(
        self,
        memory: MappedFile | PublishedDeviceMemory,
        registration: Registration,
        nics: Sequence[verbs.Nic],
        *,
        preferred_nic_indices: tuple[int, ...],
    ) -> None:
        """Take ownership of `memory`. `nics` are all NICs of the agent. Callers use :class:`Nics` instead."""
        self.length_bytes = memory.length_bytes
        self.host_address = memory.address if isinstance(memory, MappedFile) else 0
        regions = [registration.region(nic) if nic in registration.nics else None for nic in nics]
        self.addresses_and_rkeys = tuple(
            (0, 0) if region is None else (region.remote_address, region.rkey) for region in regions
        )
        self.preferred_nic_indices = preferred_nic_indices
        self._memory = memory

    def close(self) -> None:
        """Deregister the memory, then unmap it. If close() raises, the caller may call it again to release the rest."""
        self._memory.close()


class Nics:
    """All NICs with an active port, with which the agent registers memory. Use it as a context manager.

    Parameters
    ----------
    placement : Placement or None
        The object that chooses the NICs for device memory. None: create one for this machine.

    Attributes
    ----------
    all : tuple of Nic
        The open NICs.
    registration_count : int
        How often this object has registered memory. A registration with all NICs counts once.

    Raises
    ------
    SetupMissing
        libibverbs is not installed.
    UsageError
        NO_DEVICE: no NIC has an active port.
    """

    def __init__(self, placement: Placement | None = None) -> None:
        self._on_close = ReleaseStack()
        self._placement = placement or Placement()
        self._count_lock = threading.Lock()
        self.registration_count = 0
        self.all = verbs.open_active_nics()
        for nic in self.all:
            self._on_close.push(nic.close)
        # A session with the server has queue pairs for these NICs only.
        self._connected_nics = self.all[: messages.LANES_MAX]
        if not self.all:
            message = "no NIC has an active port"
            raise UsageError(message, reason=Reason.NO_DEVICE)

    def register_host(self, shared_file: SharedFile) -> RegisteredMemory:
        """Map shared memory and register all of it.

        Raises
        ------
        GdrkitError
            See :class:`~gdrkit.host.MappedFile` and :func:`~gdrkit.registration.register`.
        """
        memory = MappedFile(shared_file.fd, length_bytes=shared_file.length_bytes)
        with _close_after_error(memory):
            registered_memory = RegisteredMemory(memory, register(memory, self.all), self.all, preferred_nic_indices=())
            self._count_registration()
            return registered_memory

    def register_device(
        self, target: DeviceTarget, share_handle: bytes, descriptors: Sequence[int]
    ) -> RegisteredMemory:
        """Register device memory of a client with the NICs that reach its GPU, or with all if the GPU cannot be opened.

        Parameters
        ----------
        target : DeviceTarget
            The parsed target of the symbolic link by which the client published the memory.
        share_handle : bytes
            The share handle, or no bytes if the publication is only a link.
        descriptors : sequence of int
            The descriptors of the share handle, which this method closes. Without a share handle, there are none.

        Raises
        ------
        RegistrationFailed
            NO_ROUTE: no NIC reaches the GPU, or no registration method works. `causes` has the error of each NIC or
            method.
        AgentError, GdrkitError
            See :class:`PublishedDeviceMemory` and :func:`~gdrkit.registration.register`.
        """
        handle_message = HandleMessage(share_handle, descriptors) if share_handle else None
        try:
            memory = PublishedDeviceMemory(target, handle_message)
        finally:
            if handle_message is not None:
                handle_message.close()
        with _close_after_error(memory):
            try:
                nics = (
                    self.all
                    if memory.device is None
                    else self._placement.usable_nics(memory.device, self._connected_nics)
                )
                registration = register(memory, nics)
            except RegistrationFailed as error:
                if memory.mapping_error is None:
                    raise
                message = "no registration method works for this device memory"
                causes = (memory.mapping_error, *error.causes)
                raise RegistrationFailed(
                    message, causes=causes, reason=error.reason, what_to_do=error.what_to_do
                ) from error
            registered_memory = RegisteredMemory(
                memory, registration, self.all, preferred_nic_indices=self._find_nearest_nic_indices(memory, nics)
            )
            self._count_registration()
            return registered_memory

    def close(self) -> None:
        """Close the NICs."""
        self._on_close.run()

    def _count_registration(self) -> None:
        with self._count_lock:
            self.registration_count += 1

    def measure_reach(self) -> None:
        """Measure which NICs reach the GPUs that this process can open. The placement stores the results in a file.

        Clients read this file. If a GPU cannot be opened or measured now, the agent measures it when a client publishes
        memory of the GPU.
        """
        with contextlib.suppress(ApiError):
            for device_index in range(cuda.device_count()):
                with contextlib.suppress(GdrkitError), cuda.Device(device_index) as device:
                    self._placement.reach.get_results(device, self._connected_nics)

    def _find_nearest_nic_indices(self, memory: PublishedDeviceMemory, nics: Sequence[verbs.Nic]) -> tuple[int, ...]:
        """Return which of `nics` are nearest to the GPU of the memory, as indices into `self.all`."""
        if memory.device is None:
            return ()
        nearest_nics = self._placement.nearest_nics(memory.device.pci_bus_id, nics)
        return tuple(index for index, nic in enumerate(self.all) if nic in nearest_nics)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def _close_after_error(memory: MappedFile | PublishedDeviceMemory) -> Iterator[None]:
    """Close the memory if the block raises."""
    try:
        yield
    except BaseException as error:
        try:
            memory.close()
        except GdrkitError as close_error:
            error.add_note(f"the memory could not be closed: {close_error}")
        raise
