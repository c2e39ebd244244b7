"""Open RDMA devices, which register memory and create completion queues and queue pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from gdrkit.errors import ApiError, Reason, Unsupported, UsageError
from gdrkit.handles import ReleaseStack
from gdrkit.units import HOST_PAGE_BYTES
from gdrkit.verbs import _pyverbs
from gdrkit.verbs.completion import CompletionQueue
from gdrkit.verbs.context import NicContext
from gdrkit.verbs.ports import list_nics
from gdrkit.verbs.queue_pair import QueuePair
from gdrkit.verbs.region import Region
from gdrkit.verbs.status import Access

if TYPE_CHECKING:
    import mmap
    from collections.abc import Sequence

    from gdrkit.buffers import DmabufRange

__all__ = ["Nic", "open_active_nics"]

_READ_WRITE_ACCESS = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE


class Nic(NicContext):
    """An open RDMA device, with one port and one protection domain, that registers memory and creates queue pairs.

    Attributes
    ----------
    name : str
        Name of the device.
    port : PortInfo
        The state of the port when the device was opened.
    gid_index : int
        Index of the used GID in the port's GID table.
    gid : str
        The used GID.
    """

    def __init__(self, name: str, *, port: int, gid_index: int | None) -> None:
        """Open the device. Callers use :meth:`open` instead."""
        super().__init__(name, port=port, gid_index=gid_index)
        self._dmabuf_error: Unsupported | None = None
        self._is_dmabuf_probed = False

    @classmethod
    def open(cls, name: str, *, port: int = 1, gid_index: int | None = None) -> Self:
        """Open a device.

        Parameters
        ----------
        name : str
            The name of the device, as in :func:`list_nics`.
        port : int
            Number of the port, from 1.
        gid_index : int or None
            Index in the port's GID table. With None, the best GID of the port is used. On InfiniBand this is the first
            GID. On Ethernet, RoCE v2 is preferred to RoCE v1. Within one version, the order is IPv4, IPv6, link-local.

        Raises
        ------
        UsageError
            NO_DEVICE: there is no such device. BAD_ARGUMENT: there is no such port or GID.
        SetupMissing
            EACCES, EPERM: this user may not open /dev/infiniband.
        """
        names = [entry.name for entry in _pyverbs.list_devices()]
        if name not in names:
            message = f"there is no RDMA device {name!r}; libibverbs lists {names}"
            raise UsageError(message, reason=Reason.NO_DEVICE)
        return cls(name, port=port, gid_index=gid_index)

    def supports_dmabuf(self) -> bool:
        """Return whether the device, its driver and the kernel can register dma-bufs; see :meth:`dmabuf_error`."""
        return self.dmabuf_error() is None

    def dmabuf_error(self) -> ApiError | None:
        """Return None if the device can register dma-bufs, else the error, as a new object at each call.

        The probe tries to register a descriptor that is not open. EBADF means that dma-bufs are supported, because only
        the descriptor was wrong. The results "supported" and "not supported" are cached. Any other failure (ENOMEM,
        ...) may be temporary, so the next call repeats the probe.
        """
        if not self._is_dmabuf_probed:
            probe_error = _pyverbs.probe_dmabuf(
                self.domain, length_bytes=HOST_PAGE_BYTES, access=int(_READ_WRITE_ACCESS)
            )
            if probe_error is not None and not isinstance(probe_error, Unsupported):
                return probe_error
            self._dmabuf_error = None if probe_error is None else probe_error.clone()
            self._is_dmabuf_probed = True
        return None if self._dmabuf_error is None else self._dmabuf_error.clone()

    def register_host(
        self, buffer: bytearray | mmap.mmap | memoryview, *, access: Access = _READ_WRITE_ACCESS
    ) -> Region:
        """Register a writable host buffer. The buffer cannot be resized or closed before the region is closed.

        Raises
        ------
        SetupMissing
            ENOMEM, MEMLOCK_TOO_LOW: the limit of locked memory is below the size of the buffer.
        ApiError
            ibv_reg_mr failed for another reason.
        UsageError
            The buffer is empty, read-only or not contiguous.
        """
        view = memoryview(buffer)
        if view.readonly or not view.c_contiguous or not view.nbytes:
            message = "only a writable, contiguous, non-empty buffer can be registered"
            raise UsageError(message)
        view = view.cast("B")
        buffer_export, address = _pyverbs.export_host_buffer(view)
        native_region = _pyverbs.register_address(
            self.domain, address=address, length_bytes=view.nbytes, access=int(access), is_device=False
        )
        return Region(self, native_region, length_bytes=view.nbytes, memory=view, buffer_export=buffer_export)

    def register_pages(self, address: int, *, length_bytes: int, access: Access = _READ_WRITE_ACCESS) -> Region:
        """Register host memory by its address. The owner must keep the memory mapped until the region is closed.

        Raises
        ------
        SetupMissing, ApiError
            See :meth:`register_host`. EFAULT: a part of the memory is not mapped, or not writable.
        UsageError
            `address` or `length_bytes` is not above 0.
        """
        if address <= 0 or length_bytes <= 0:
            message = f"address and length_bytes must be above 0, not {address:#x} and {length_bytes}"
            raise UsageError(message)
        native_region = _pyverbs.register_address(
            self.domain, address=address, length_bytes=length_bytes, access=int(access), is_device=False
        )
        return Region(self, native_region, length_bytes=length_bytes, memory=None, buffer_export=None)

    def register_address(self, address: int, *, length_bytes: int, access: Access = _READ_WRITE_ACCESS) -> Region:
        """Register device memory by its address (peer memory).

        The owner must keep the memory allocated until the region is closed.

        Raises
        ------
        Unsupported
            EFAULT, PEER_MEMORY_UNSUPPORTED: no kernel driver knows the address as device memory.
        UsageError
            `address` or `length_bytes` is not above 0.
        """
        if address <= 0 or length_bytes <= 0:
            message = f"address and length_bytes must be above 0, not {address:#x} and {length_bytes}"
            raise UsageError(message)
        native_region = _pyverbs.register_address(
            self.domain, address=address, length_bytes=length_bytes, access=int(access), is_device=True
        )
        return Region(self, native_region, length_bytes=length_bytes, memory=None, buffer_export=None)

    def register_dmabuf(self, source: DmabufRange, *, access: Access = _READ_WRITE_ACCESS) -> Region:
        """Register a range of a dma-buf.

        Parameters
        ----------
        source : DmabufRange
            The range. The caller may close it once the region exists: the region keeps the dma-buf alive.
        access : Access
            Access rights of the keys. REMOTE_WRITE also needs LOCAL_WRITE.

        Raises
        ------
        Unsupported
            EOPNOTSUPP, EPROTONOSUPPORT or ENOTSUPP (524), with the reason DMABUF_REGION_UNSUPPORTED: the driver, the
            kernel or the topology does not support the registration.
        ApiError
            EBADF: the descriptor is not open. EINVAL: the descriptor is not a dma-buf, or the range is not inside the
            dma-buf.
        """
        native_region = _pyverbs.register_dmabuf(
            self.domain,
            fd=source.fd,
            offset_bytes=source.offset_bytes,
            length_bytes=source.length_bytes,
            iova=source.address,
            access=int(access),
        )
        return Region(self, native_region, length_bytes=source.length_bytes, memory=None, buffer_export=None)

    def completion_queue(self, *, depth: int = 256, events: bool = False) -> CompletionQueue:
        """Create a completion queue for at least `depth` completions, with a completion channel if `events` is true."""
        return CompletionQueue(self, depth=depth, events=events)

    def queue_pair(
        self,
        send_queue: CompletionQueue,
        receive_queue: CompletionQueue | None = None,
        *,
        sends_max: int = 64,
        receives_max: int = 64,
        elements_max: int = 4,
        inline_bytes_max: int = 0,
    ) -> QueuePair:
        """Create a reliable connected queue pair.

        Without a `receive_queue`, `send_queue` gets the completions of both sends and receives. `sends_max` and
        `receives_max` are the largest numbers of outstanding requests, and `elements_max` is the largest number of
        scatter/gather elements of one request.
        """
        return QueuePair(
            self,
            send_queue,
            send_queue if receive_queue is None else receive_queue,
            sends_max=sends_max,
            receives_max=receives_max,
            elements_max=elements_max,
            inline_bytes_max=inline_bytes_max,
        )


def open_active_nics(names: Sequence[str] | None = None, *, count_max: int | None = None) -> tuple[Nic, ...]:
    """Open RDMA devices, each at its first active port. The caller closes them.

    Parameters
    ----------
    names : sequence of str or None
        Names of the devices to open. A device without an active port is opened at port 1. None: all devices that have
        an active port are opened, in the order of :func:`list_nics`.
    count_max : int or None
        Open only the first devices, at most this number. With None, there is no limit.

    Raises
    ------
    UsageError
        NO_DEVICE: there is no device with one of the names. No device stays open.
    SetupMissing
        See :func:`list_nics` and :meth:`Nic.open`. No device stays open.
    """
    info_by_name = {nic_info.name: nic_info for nic_info in list_nics()}
    chosen_names = [name for name, nic_info in info_by_name.items() if nic_info.active] if names is None else names
    nics: list[Nic] = []
    cleanup_stack = ReleaseStack()
    try:
        for name in chosen_names[:count_max]:
            port = info_by_name[name].active_port if name in info_by_name else None
            nics.append(Nic.open(name, port=port or 1))
            cleanup_stack.push(nics[-1].close)
    except BaseException as error:
        cleanup_stack.run_after(error)
        raise
    return tuple(nics)
