"""Mounts of this process from /proc/self/mountinfo (proc(5)), and the properties of a block device from sysfs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gdrkit.host.tree import HostTree

__all__ = ["BlockDevice", "Mount", "block_device", "mount_of", "mounts"]

# The shortest line of mountinfo has six fields, a dash and three fields.
_MOUNT_FIELDS_MIN = 10


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo.

    Attributes
    ----------
    device : str
        ``major:minor`` of the file system; ``0:N`` if it has no block device.
    mount_point : str
        Absolute path of the mount point.
    kind : str
        File system type: ``ext4``, ``overlay``, ...
    source : str
        Mount source, such as ``/dev/nvme0n1p1`` or ``server:/export``.
    options : tuple of str
        Options of the mount and of the file system.
    """

    device: str
    mount_point: str
    kind: str
    source: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BlockDevice:
    """Properties of a block device.

    Attributes
    ----------
    number : str
        ``major:minor``.
    name : str
        Name of the disk, e.g. ``nvme0n1``. For a partition, it is the name of the disk that contains it.
    mapper : str or None
        UUID of a device-mapper device, e.g. ``LVM-...``.
    raid_level : str or None
        RAID level of an md device, e.g. ``raid0``.
    has_integrity : bool
        Whether the device can store integrity metadata with each block.
    """

    number: str
    name: str
    mapper: str | None
    raid_level: str | None
    has_integrity: bool


def mounts(tree: HostTree) -> tuple[Mount, ...]:
    """Return every mount of this process, in the order of mountinfo. A malformed line is left out."""
    lines = (tree.text("/proc/self/mountinfo") or "").splitlines()
    return tuple(mount for line in lines if (mount := _parse_mount(line)) is not None)


def mount_of(table: tuple[Mount, ...], path: str) -> Mount | None:
    """Return the mount on which `path` lies, or None if no mount in the table contains it, e.g. in a chroot.

    `path` must be absolute and contain no symbolic links.
    """

    def contains(mount: Mount) -> bool:
        return path == mount.mount_point or path.startswith(mount.mount_point.rstrip("/") + "/")

    # If two mounts have the same mount point, the later one hides the earlier one. The table is reversed, because max()
    # returns the first of several longest mount points.
    return max(
        (mount for mount in reversed(table) if contains(mount)), key=lambda mount: len(mount.mount_point), default=None
    )


def block_device(tree: HostTree, device_number: str) -> BlockDevice | None:
    """Return the properties of the block device ``major:minor``, or None if sysfs does not have it."""
    folder = f"/sys/dev/block/{device_number}"
    path_parts = tree.link_parts(folder)
    if not path_parts:
        return None
    is_partition = tree.exists(f"{folder}/partition")
    # The folder of a partition is inside the folder of its disk.
    name = path_parts[-2] if is_partition and len(path_parts) > 1 else path_parts[-1]
    disk_folder = f"/sys/class/block/{name}"
    return BlockDevice(
        number=device_number,
        name=name,
        mapper=tree.text(f"{folder}/dm/uuid"),
        raid_level=tree.text(f"{disk_folder}/md/level"),
        has_integrity=tree.number(f"{disk_folder}/integrity/device_is_integrity_capable") == 1,
    )


def _parse_mount(line: str) -> Mount | None:
    fields = line.split(" ")
    if len(fields) < _MOUNT_FIELDS_MIN or "-" not in fields[6:]:
        return None
    # A line has six fields, a variable number of optional fields, a dash, and three fields (proc(5)).
    dash_index = fields.index("-", 6)
    fields_after_dash = fields[dash_index + 1 :]
    if len(fields_after_dash) < 3:  # noqa: PLR2004 - kind, source, options.
        return None
    return Mount(
        device=fields[2],
        mount_point=_unescape(fields[4]),
        kind=fields_after_dash[0],
        source=_unescape(fields_after_dash[1]),
        options=(*fields[5].split(","), *fields_after_dash[2].split(",")),
    )


def _unescape(text: str) -> str:
    r"""Undo the octal escapes of the kernel: a blank is written as ``\040``."""
    return re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8) & 0xFF), text)
