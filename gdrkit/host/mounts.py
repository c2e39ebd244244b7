"""What is mounted where, from /proc/self/mountinfo, and what lies below a block device.

Level 2. Source: proc(5), section mountinfo.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gdrkit.host.tree import HostTree

__all__ = ["BlockDevice", "Mount", "block_device", "mount_of", "mounts"]

_FIELDS_MIN = 10


@dataclass(frozen=True, slots=True)
class Mount:
    """One mount.

    Attributes
    ----------
    device : str
        ``major:minor`` of the file system; 0:N for one without a block device.
    mount_point : str
        Where.
    kind : str
        ``ext4``, ``overlay``, ...
    source : str
        What was mounted, as it was named then.
    options : tuple of str
        Of the mount and of the file system.
    """

    device: str
    mount_point: str
    kind: str
    source: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BlockDevice:
    """What is below a block device.

    Attributes
    ----------
    number : str
        ``major:minor``.
    name : str
        Of the whole disk, e.g. ``nvme0n1`` for a partition of it.
    mapper : str or None
        The uuid of a device-mapper device, e.g. ``LVM-...``.
    raid_level : str or None
        ``raid0`` ... of an md device.
    has_integrity : bool
        Whether it keeps integrity metadata with each block.
    """

    number: str
    name: str
    mapper: str | None
    raid_level: str | None
    has_integrity: bool


def mounts(tree: HostTree) -> tuple[Mount, ...]:
    """Every mount of this process, in their order; a line that is none is left out."""
    lines = (tree.text("/proc/self/mountinfo") or "").splitlines()
    return tuple(found for line in lines if (found := _mount(line)) is not None)


def mount_of(found: tuple[Mount, ...], path: str) -> Mount | None:
    """The mount that `path`, absolute and without links, lies on."""

    def holds(mount: Mount) -> bool:
        return path == mount.mount_point or path.startswith(mount.mount_point.rstrip("/") + "/")

    # Of two on the same place the later one hides the other.
    return max(
        (mount for mount in reversed(found) if holds(mount)), key=lambda mount: len(mount.mount_point), default=None
    )


def block_device(tree: HostTree, number: str) -> BlockDevice | None:
    """What is below the block device of this ``major:minor``; None when sysfs has none."""
    folder = f"/sys/dev/block/{number}"
    parts = tree.link_parts(folder)
    if not parts:
        return None
    is_partition = tree.exists(f"{folder}/partition")
    name = parts[-2] if is_partition and len(parts) > 1 else parts[-1]
    whole = f"/sys/class/block/{name}"
    return BlockDevice(
        number=number,
        name=name,
        mapper=tree.text(f"{folder}/dm/uuid"),
        raid_level=tree.text(f"{whole}/md/level"),
        has_integrity=tree.number(f"{whole}/integrity/device_is_integrity_capable") == 1,
    )


def _mount(line: str) -> Mount | None:
    fields = line.split(" ")
    if len(fields) < _FIELDS_MIN or "-" not in fields[6:]:
        return None
    # Optional fields stand before the dash, as many as there are.
    dash = fields.index("-", 6)
    behind = fields[dash + 1 :]
    if len(behind) < 3:  # noqa: PLR2004 - kind, source, options.
        return None
    return Mount(
        device=fields[2],
        mount_point=_plain(fields[4]),
        kind=behind[0],
        source=_plain(behind[1]),
        options=(*fields[5].split(","), *behind[2].split(",")),
    )


def _plain(text: str) -> str:
    r"""Without the escapes of the kernel: a blank is ``\040``."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8) & 0xFF), text)
