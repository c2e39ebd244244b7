"""Search for the causes why transfers between a file and a GPU are not direct on this machine.

The functions read /proc and /run through a :class:`~gdrkit.cufile.nvidia_fs.Tree`, so that a caller can pass files of
another machine. The file descriptor itself must be open in this process.
"""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.cufile.nvidia_fs import Tree

__all__ = ["Cause", "Obstacle", "find_file_storage", "obstacles", "transfer_obstacles"]

_UDEV_FOLDER = "/run/udev/data"
_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
# File systems that hide the device that stores their data.
_LAYERED_FILE_SYSTEMS = frozenset({"overlay", "fuse", "9p"})
_DIRECT_ALIGNMENT_BYTES = 4096
# File systems on block devices that libcufile supports. It finds the device of a file in udev's database.
_BLOCK_FILE_SYSTEMS = frozenset({"ext4", "xfs"})


class Cause(enum.Enum):
    """Causes why transfers are not direct. The values are stable, so that programs and tests may compare them."""

    NO_UDEV_DATABASE = "no_udev_database"
    TMPFS = "tmpfs"
    FILE_SYSTEM = "file_system"
    COMPAT_FORCED = "compat_forced"
    NO_NVIDIA_FS = "no_nvidia_fs"
    NO_STORAGE_MODULE = "no_storage_module"
    NOT_O_DIRECT = "not_o_direct"
    UNALIGNED = "unaligned"
    HOST_MEMORY = "host_memory"
    # No counter shows the route of the transfer.
    NOT_COUNTED = "not_counted"
    UNEXPLAINED = "unexplained"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """One cause why transfers are not direct, with a description and advice.

    Attributes
    ----------
    cause : Cause
        The cause, for programs.
    text : str
        Description of the cause, for messages.
    what_to_do : str
        Advice how to remove the cause.
    prevents_registration : bool
        True: because of this cause, libcufile refuses to register the file. False: libcufile registers the file, but
        transfers are not direct.
    """

    cause: Cause
    text: str
    what_to_do: str
    prevents_registration: bool = False


@dataclass(frozen=True, slots=True)
class FileStorage:
    """The storage of a file: its device number, and the type of its file system if mountinfo lists it."""

    major: int
    minor: int
    file_system: str | None

    @property
    def udev_entry(self) -> str:
        """Path of the device's entry in udev's database."""
        return f"{_UDEV_FOLDER}/b{self.major}:{self.minor}"


def find_file_storage(tree: Tree, fd: int) -> FileStorage:
    """Return the storage of the file that a descriptor refers to.

    Raises
    ------
    OSError
        The descriptor is not open.
    """
    device_number = os.fstat(fd).st_dev
    major, minor = os.major(device_number), os.minor(device_number)
    return FileStorage(major, minor, _find_file_system(tree, f"{major}:{minor}"))


def obstacles(tree: Tree, fd: int, *, compat_forced: bool = False) -> tuple[Obstacle, ...]:
    """Return all obstacles to direct transfers with this file, the most fundamental one first.

    Parameters
    ----------
    tree : Tree
        Reader of the host's files.
    fd : int
        Descriptor of the file.
    compat_forced : bool
        Value of force_compat_mode in libcufile (:data:`gdrkit.cufile.parameters.Flag.FORCE_COMPAT_MODE`).
    """
    return tuple(_find_file_obstacles(tree, fd, compat_forced=compat_forced))


def transfer_obstacles(*, alignment_bits: int, host_memory: bool = False) -> tuple[Obstacle, ...]:
    """Return the obstacles that one transfer has in addition to the obstacles of its file.

    Parameters
    ----------
    alignment_bits : int
        Bitwise or of all offsets, addresses and lengths of the transfer, in bytes. Its lowest set bit is their common
        alignment.
    host_memory : bool
        Whether the memory is host memory.
    """
    found_obstacles = []
    if host_memory:
        found_obstacles.append(Obstacle(Cause.HOST_MEMORY, "the memory is host memory", "use memory of a GPU"))
    if alignment_bits % _DIRECT_ALIGNMENT_BYTES:
        found_obstacles.append(
            Obstacle(
                Cause.UNALIGNED,
                f"an offset, an address or a length is not a multiple of {_DIRECT_ALIGNMENT_BYTES} bytes",
                f"align them to {_DIRECT_ALIGNMENT_BYTES} bytes",
            )
        )
    return tuple(found_obstacles)


def _find_file_obstacles(tree: Tree, fd: int, *, compat_forced: bool) -> Iterator[Obstacle]:
    storage = find_file_storage(tree, fd)
    if storage.file_system in _MEMORY_FILE_SYSTEMS:
        yield Obstacle(
            Cause.TMPFS,
            f"the file is on {storage.file_system}, which is not storage",
            "put the file on a disk",
            prevents_registration=True,
        )
    else:
        yield from _find_storage_obstacles(tree, storage)
    if compat_forced:
        yield Obstacle(
            Cause.COMPAT_FORCED,
            "the settings of libcufile force compat mode (force_compat_mode)",
            "remove CUFILE_FORCE_COMPAT_MODE, or force_compat_mode in cufile.json",
        )
    yield from _find_nvidia_fs_obstacles(tree)
    if not _read_open_flags(fd) & os.O_DIRECT:
        yield Obstacle(Cause.NOT_O_DIRECT, "the file was opened without O_DIRECT", "open it with O_DIRECT")


def _find_storage_obstacles(tree: Tree, storage: FileStorage) -> Iterator[Obstacle]:
    udev_entry_text = tree.text(storage.udev_entry)
    if udev_entry_text is None or "E:ID_FS_USAGE=filesystem" not in udev_entry_text.splitlines():
        yield Obstacle(
            Cause.NO_UDEV_DATABASE,
            f"{storage.udev_entry} has no ID_FS_USAGE=filesystem, so libcufile does not find the device of the file",
            "mount /run/udev of the host into the container, read-only",
            prevents_registration=True,
        )
    if storage.file_system is not None and storage.file_system not in _BLOCK_FILE_SYSTEMS:
        is_layered = storage.file_system.partition(".")[0] in _LAYERED_FILE_SYSTEMS
        yield Obstacle(
            Cause.FILE_SYSTEM,
            f"the file is on {storage.file_system}" + (", which hides the device below it" if is_layered else ""),
            "put the file on ext4 or xfs, or on a network file system that cuFile supports",
        )


def _find_nvidia_fs_obstacles(tree: Tree) -> Iterator[Obstacle]:
    if not tree.exists("/proc/driver/nvidia-fs"):
        yield Obstacle(
            Cause.NO_NVIDIA_FS,
            "nvidia-fs is not loaded",
            "load nvidia-fs, or let cuFile use PCI P2PDMA (cuFile 1.15, a kernel with CONFIG_PCI_P2PDMA)",
        )
        return
    modules = tree.text("/proc/driver/nvidia-fs/modules")
    if not modules:
        yield Obstacle(
            Cause.NO_STORAGE_MODULE,
            "nvidia-fs supports none of the loaded storage drivers",
            "build nvidia-fs against the storage drivers that are loaded (it binds their symbols by name)",
        )


def _find_file_system(tree: Tree, device_number: str) -> str | None:
    """Return the type of the file system on the device ``major:minor``, or None if mountinfo does not list it."""
    # A line of mountinfo (proc(5)): 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw
    for line in (tree.text("/proc/self/mountinfo") or "").splitlines():
        mount_fields, _, type_fields = line.partition(" - ")
        mount_words = mount_fields.split()
        if len(mount_words) > 2 and mount_words[2] == device_number and type_fields:  # noqa: PLR2004 - the third field.
            return type_fields.split()[0]
    return None


def _read_open_flags(fd: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_GETFL)
