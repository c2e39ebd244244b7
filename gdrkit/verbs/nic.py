"""RDMA devices: their list, and an open device with a protection domain.

A :class:`Nic` owns everything that is made from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from gdrkit.errors import ApiError, ClosedResource, Reason, Unsupported, UsageError
from gdrkit.handles import Handle, ReleaseStack
from gdrkit.units import HOST_PAGE_BYTES
from gdrkit.verbs import _pyverbs
from gdrkit.verbs.completion import CompletionQueue
from gdrkit.verbs.queue_pair import QueuePair
from gdrkit.verbs.region import Region
from gdrkit.verbs.status import Access, LinkLayer, PortState, mtu_bytes

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable
    from types import TracebackType

    from gdrkit.buffers import DmabufRange
    from gdrkit.verbs._rows import DeviceRow, GidRow

__all__ = ["Nic", "NicInfo", "PortInfo", "list_nics"]

_SYSFS = Path("/sys/class/infiniband")
_ALL_ACCESS = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE

_ROCE_V2 = 2  # IBV_GID_TYPE_ROCE_V2
_IPV4_MAPPED = "0000:0000:0000:0000:0000:ffff:"
_LINK_LOCAL = "fe80:"


@dataclass(frozen=True)
class PortInfo:
    """One port of a device."""

    number: int
    state: PortState
    link_layer: LinkLayer
    lid: int
    mtu_bytes: int
    gid_count: int

    @property
    def active(self) -> bool:
        """Whether the port is active, so that it can carry traffic."""
        return self.state is PortState.ACTIVE


@dataclass(frozen=True)
class NicInfo:
    """Properties of a device that is not in use.

    Attributes
    ----------
    name : str
        The name, such as ``mlx5_0``.
    node_guid : str
        Four words of four hex digits, as in sysfs.
    driver : str or None
        The kernel driver of its PCI device (``mlx5_core``), or ``rxe``. None if it has none.
    ports : tuple of PortInfo
        The ports. It is empty if the device could not be opened.
    error : ApiError or None
        The error if the device could not be opened.
    """

    name: str
    node_guid: str
    driver: str | None
    ports: tuple[PortInfo, ...]
    error: ApiError | None

    @property
    def active(self) -> bool:
        """Whether a port is active."""
        return any(port.active for port in self.ports)


def list_nics() -> tuple[NicInfo, ...]:
    """Return the RDMA devices of this machine. Each device is opened for a moment to query its ports.

    Raises
    ------
    SetupMissing
        pyverbs or libibverbs is missing or does not fit, or the kernel has no RDMA support (errno ENOSYS).
    """
    return tuple(_info(row) for row in _pyverbs.list_devices())


class Nic:
    """An open device with one port and one protection domain.

    Regions, completion queues and queue pairs belong to it. :meth:`close` closes those that are still open, in the
    reverse order of their creation. This order is always right, because a queue pair is made after its completion
    queues.

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
        self.name = name
        self._children = ReleaseStack()
        self._closed = False
        self._dmabuf_error: Unsupported | None = None
        self._dmabuf_asked = False
        try:
            self._context = _pyverbs.open_device(name)
            self._children.push(lambda: _pyverbs.close("ibv_close_device", self._context))
            ports = _ports(self._context)
            if not 1 <= port <= len(ports):
                message = f"{name} has no port {port}, but {len(ports)}"
                raise UsageError(message)  # noqa: TRY301 - what was opened is closed below.
            self.port = ports[port - 1]
            self.gid_index, self.gid = _choose_gid(self._context, ports, self.port, gid_index)
            self._domain = _pyverbs.allocate_domain(self._context)
            self._children.push(lambda: _pyverbs.close("ibv_dealloc_pd", self._domain))
        except BaseException as error:
            self._children.run_after(error)
            raise
        self._handle = Handle("verbs.nic")

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
            Index in the port's GID table. With None, on Ethernet: a RoCE v2 GID, and among those one of IPv4, else of
            IPv6, else link-local; RoCE v1 only if there is no RoCE v2. With None, on InfiniBand: the first GID.

        Raises
        ------
        UsageError
            NO_DEVICE: there is no such device. BAD_ARGUMENT: there is no such port or GID.
        SetupMissing
            EACCES, EPERM: this user may not open /dev/infiniband.
        """
        names = [row.name for row in _pyverbs.list_devices()]
        if name not in names:
            message = f"there is no RDMA device {name!r}; there are {names}"
            raise UsageError(message, reason=Reason.NO_DEVICE)
        return cls(name, port=port, gid_index=gid_index)

    @property
    def closed(self) -> bool:
        """Whether the device was closed."""
        return self._closed

    @property
    def context(self) -> object:
        """The ``Context`` object of pyverbs."""
        self._check_open()
        return self._context

    @property
    def domain(self) -> object:
        """The ``PD`` object of pyverbs."""
        self._check_open()
        return self._domain

    def supports_dmabuf(self) -> bool:
        """Return whether device, driver and kernel can import dma-bufs at all; see :meth:`dmabuf_error`."""
        return self.dmabuf_error() is None

    def dmabuf_error(self) -> ApiError | None:
        """Return the error of importing dma-bufs, as a new object at each call, or None if the import is supported.

        The probe registers a descriptor that is not open. EBADF means that only the descriptor was wrong. This result,
        and the result that the NIC does not support the import at all, are cached. Any other failure (ENOMEM, ...) may
        be temporary, so the next call repeats the probe.
        """
        if not self._dmabuf_asked:
            refusal = _pyverbs.probe_dmabuf(self.domain, length_bytes=HOST_PAGE_BYTES, access=int(_ALL_ACCESS))
            if refusal is not None and not isinstance(refusal, Unsupported):
                return refusal
            self._dmabuf_error = None if refusal is None else refusal.fresh()
            self._dmabuf_asked = True
        return None if self._dmabuf_error is None else self._dmabuf_error.fresh()

    def register_host(self, buffer: bytearray | mmap.mmap | memoryview, *, access: Access = _ALL_ACCESS) -> Region:
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
        keeper, address = _pyverbs.host_address(view)
        made = _pyverbs.register_address(
            self.domain, address=address, length_bytes=view.nbytes, access=int(access), device=False
        )
        return Region(self, made, length_bytes=view.nbytes, memory=view, keeper=keeper)

    def register_pages(self, address: int, *, length_bytes: int, access: Access = _ALL_ACCESS) -> Region:
        """Register host memory by its address. The owner of the memory keeps it mapped until the region is closed.

        Raises
        ------
        SetupMissing, ApiError
            See :meth:`register_host`. EFAULT: a part of the memory is not mapped and writable.
        """
        if address <= 0 or length_bytes <= 0:
            message = f"{length_bytes} bytes at {address:#x} cannot be registered"
            raise UsageError(message)
        made = _pyverbs.register_address(
            self.domain, address=address, length_bytes=length_bytes, access=int(access), device=False
        )
        return Region(self, made, length_bytes=length_bytes, memory=None, keeper=None)

    def register_address(self, address: int, *, length_bytes: int, access: Access = _ALL_ACCESS) -> Region:
        """Register device memory by its address (peer memory). The owner of the memory keeps it allocated.

        Raises
        ------
        Unsupported
            EFAULT, PEER_MEMORY_UNSUPPORTED: no kernel driver knows the address as device memory.
        """
        if address <= 0 or length_bytes <= 0:
            message = f"{length_bytes} bytes at {address:#x} cannot be registered"
            raise UsageError(message)
        made = _pyverbs.register_address(
            self.domain, address=address, length_bytes=length_bytes, access=int(access), device=True
        )
        return Region(self, made, length_bytes=length_bytes, memory=None, keeper=None)

    def register_dmabuf(self, source: DmabufRange, *, access: Access = _ALL_ACCESS) -> Region:
        """Register a range of a dma-buf.

        Parameters
        ----------
        source : DmabufRange
            The range. It is borrowed, and may be closed once the region exists: the region keeps the dma-buf alive.
        access : Access
            Access rights of the keys. REMOTE_WRITE also needs LOCAL_WRITE.

        Raises
        ------
        Unsupported
            EOPNOTSUPP, EPROTONOSUPPORT, 524 (DMABUF_REGION_UNSUPPORTED): the driver, the kernel or the topology does
            not support it.
        ApiError
            EBADF: the descriptor is not open. EINVAL: it is not a dma-buf, or the range is not inside it.
        """
        made = _pyverbs.register_dmabuf(
            self.domain,
            fd=source.fd,
            offset_bytes=source.offset_bytes,
            length_bytes=source.length_bytes,
            iova=source.address,
            access=int(access),
        )
        return Region(self, made, length_bytes=source.length_bytes, memory=None, keeper=None)

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

        Without a `receive_queue`, `send_queue` gets the completions of both sends and receives.
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

    def on_close(self, close: Callable[[], None]) -> Callable[[], None]:
        """Call `close` before the device is closed. Return a function that cancels this."""
        self._check_open()
        return self._children.push(close)

    def close(self) -> None:
        """Close everything that was made from the device, then the protection domain and the device.

        A second close does nothing.

        Raises
        ------
        ApiError
            Some objects could not be closed. The error is that of the first one, with the others as notes. Another
            close tries again.
        """
        if self._closed:
            return
        self._children.run()
        self._closed = True
        self._handle.release()

    def _check_open(self) -> None:
        if self._closed:
            what = f"RDMA device {self.name}"
            raise ClosedResource(what)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Nic({self.name}{', closed' if self._closed else f', gid={self.gid}'})"


def _info(row: DeviceRow) -> NicInfo:
    ports: tuple[PortInfo, ...] = ()
    failure: ApiError | None = None
    try:
        context = _pyverbs.open_device(row.name)
    except ApiError as error:
        failure = error.fresh()
    else:
        try:
            ports = _ports(context)
        finally:
            _pyverbs.close("ibv_close_device", context)
    guid = f"{row.node_guid:016x}"
    return NicInfo(
        name=row.name,
        node_guid=":".join(guid[start : start + 4] for start in range(0, 16, 4)),
        driver=_driver(_SYSFS / row.name),
        ports=ports,
        error=failure,
    )


def _driver(folder: Path) -> str | None:
    # rxe reports the device of its network interface as its own device. Only rxe has the file `parent`, which names
    # that interface.
    if (folder / "parent").exists():
        return "rxe"
    driver = folder / "device" / "driver"
    return driver.resolve().name if driver.exists() else None


def _ports(context: object) -> tuple[PortInfo, ...]:
    return tuple(
        PortInfo(
            number=number,
            state=PortState(row.state),
            link_layer=LinkLayer(row.link_layer),
            lid=row.lid,
            mtu_bytes=mtu_bytes(row.active_mtu),
            gid_count=row.gid_count,
        )
        for number, row in enumerate(_pyverbs.query_ports(context), start=1)
    )


def _choose_gid(context: object, ports: tuple[PortInfo, ...], port: PortInfo, wanted: int | None) -> tuple[int, str]:
    # The library needs space for the GID tables of all ports.
    rows = _pyverbs.query_gids(context, sum(each.gid_count for each in ports))
    usable = [row for row in rows if row.port == port.number and wanted in {None, row.gid_index}]
    if not usable:
        message = f"port {port.number} has no GID" + ("" if wanted is None else f" at index {wanted}")
        raise UsageError(message)

    def preference(row: GidRow) -> tuple[bool, bool, bool, int]:
        routable = not row.gid.startswith(_LINK_LOCAL)
        return row.gid_type != _ROCE_V2, not row.gid.startswith(_IPV4_MAPPED), not routable, row.gid_index

    if port.link_layer is LinkLayer.ETHERNET:
        usable.sort(key=preference)
    return usable[0].gid_index, usable[0].gid
