"""Types of the values that ``_pyverbs`` returns in place of the structures of libibverbs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DeviceEntry", "GidEntry", "NativeRegion", "PortAttributes", "WorkCompletion"]


class DeviceEntry(NamedTuple):
    """One entry of ibv_get_device_list."""

    name: str
    node_guid: int


class PortAttributes(NamedTuple):
    """The fields of ibv_port_attr that gdrkit uses."""

    state: int
    active_mtu: int
    lid: int
    link_layer: int
    gid_count: int


class GidEntry(NamedTuple):
    """One entry of ibv_query_gid_table."""

    port: int
    gid_index: int
    gid: str
    gid_type: int


@dataclass(frozen=True)
class NativeRegion:
    """A registered memory region. Work requests address its first byte as ``iova``."""

    lkey: int
    rkey: int
    iova: int
    close: Callable[[], None]


class WorkCompletion(NamedTuple):
    """The fields of ibv_wc that gdrkit uses. The immediate is in host byte order, or None if the request had none."""

    work_id: int
    status: int
    opcode: int
    length_bytes: int
    immediate: int | None
    vendor_error: int
    qp_number: int
