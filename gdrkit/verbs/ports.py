"""RDMA devices of this machine, their ports and their GIDs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit.errors import ApiError, UsageError
from gdrkit.verbs import _pyverbs
from gdrkit.verbs.status import LinkLayer, PortState, mtu_bytes

if TYPE_CHECKING:
    from gdrkit.verbs._structures import DeviceEntry, GidEntry

__all__ = ["NicInfo", "PortInfo", "choose_gid", "list_nics", "query_ports"]

_SYSFS_FOLDER = Path("/sys/class/infiniband")

_ROCE_V2 = 2  # IBV_GID_TYPE_ROCE_V2
_IPV4_MAPPED_PREFIX = "0000:0000:0000:0000:0000:ffff:"
_LINK_LOCAL_PREFIX = "fe80:"


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
    """Properties of a device, queried without keeping the device open.

    Attributes
    ----------
    name : str
        The name, such as ``mlx5_0``.
    node_guid : str
        Four words of four hex digits, as in sysfs.
    driver : str or None
        The kernel driver of its PCI device (``mlx5_core``), or ``rxe``. None if there is no driver.
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
        return self.active_port is not None

    @property
    def active_port(self) -> int | None:
        """Number of the first active port, or None if no port is active."""
        return next((port.number for port in self.ports if port.active), None)


def list_nics() -> tuple[NicInfo, ...]:
    """Return the RDMA devices of this machine. Each device is opened for a moment to query its ports.

    Raises
    ------
    SetupMissing
        pyverbs or libibverbs is missing or does not fit, or the kernel has no RDMA support (errno ENOSYS).
    """
    return tuple(_query_device(entry) for entry in _pyverbs.list_devices())


def query_ports(context: object) -> tuple[PortInfo, ...]:
    """Return the ports of an open device, port 1 first."""
    return tuple(
        PortInfo(
            number=number,
            state=PortState(attributes.state),
            link_layer=LinkLayer(attributes.link_layer),
            lid=attributes.lid,
            mtu_bytes=mtu_bytes(attributes.active_mtu),
            gid_count=attributes.gid_count,
        )
        for number, attributes in enumerate(_pyverbs.query_ports(context), start=1)
    )


def choose_gid(context: object, ports: tuple[PortInfo, ...], port: PortInfo, gid_index: int | None) -> tuple[int, str]:
    """Return the index and the text of the GID that a port uses; :meth:`Nic.open` explains the order of preference.

    Raises
    ------
    UsageError
        The port has no GID, or none at `gid_index`.
    """
    # ibv_query_gid_table returns the GIDs of all ports, so it needs space for all of them.
    entries = _pyverbs.query_gids(context, sum(port_info.gid_count for port_info in ports))
    usable_entries = [entry for entry in entries if entry.port == port.number and gid_index in {None, entry.gid_index}]
    if not usable_entries:
        message = f"port {port.number} has no GID" + ("" if gid_index is None else f" at index {gid_index}")
        raise UsageError(message)

    def rank_gid(entry: GidEntry) -> tuple[bool, bool, bool, int]:
        # False sorts before True, so the preferred GID comes first.
        is_link_local = entry.gid.startswith(_LINK_LOCAL_PREFIX)
        return entry.gid_type != _ROCE_V2, not entry.gid.startswith(_IPV4_MAPPED_PREFIX), is_link_local, entry.gid_index

    if port.link_layer is LinkLayer.ETHERNET:
        usable_entries.sort(key=rank_gid)
    return usable_entries[0].gid_index, usable_entries[0].gid


def _query_device(entry: DeviceEntry) -> NicInfo:
    ports: tuple[PortInfo, ...] = ()
    failure: ApiError | None = None
    try:
        context = _pyverbs.open_device(entry.name)
    except ApiError as error:
        failure = error.clone()
    else:
        try:
            ports = query_ports(context)
        finally:
            _pyverbs.close("ibv_close_device", context)
    guid_digits = f"{entry.node_guid:016x}"
    return NicInfo(
        name=entry.name,
        node_guid=":".join(guid_digits[start : start + 4] for start in range(0, 16, 4)),
        driver=_read_driver_name(_SYSFS_FOLDER / entry.name),
        ports=ports,
        error=failure,
    )


def _read_driver_name(device_folder: Path) -> str | None:
    # rxe reports the device of its network interface as its own device. Only rxe has the file `parent`, which names
    # that interface.
    if (device_folder / "parent").exists():
        return "rxe"
    driver_link = device_folder / "device" / "driver"
    return driver_link.resolve().name if driver_link.exists() else None
