"""What the seam to pyverbs gives to the rest of the room: plain values of what libibverbs has in structures.

Level 2, pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DeviceRow", "GidRow", "MadeRegion", "PortRow", "WorkCompletion"]


class DeviceRow(NamedTuple):
    """One entry of ibv_get_device_list."""

    name: str
    node_guid: int


class PortRow(NamedTuple):
    """What of ibv_port_attr is used."""

    state: int
    active_mtu: int
    lid: int
    link_layer: int
    gid_count: int


class GidRow(NamedTuple):
    """One entry of ibv_query_gid_table."""

    port: int
    gid_index: int
    gid: str
    gid_type: int


@dataclass(frozen=True)
class MadeRegion:
    """A memory region, whoever made it; ``iova`` is the address that keys of it begin at."""

    lkey: int
    rkey: int
    iova: int
    close: Callable[[], None]


class WorkCompletion(NamedTuple):
    """What of ibv_wc is used; the immediate is in host order, None when there is none."""

    work_id: int
    status: int
    opcode: int
    length_bytes: int
    immediate: int | None
    vendor_error: int
    qp_number: int
