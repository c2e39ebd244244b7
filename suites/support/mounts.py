"""ext4 and xfs file systems in image files, for cases about full or read-only disks and about a loss of power.

The functions mount the image files, so they need root.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from typing import TYPE_CHECKING

from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["mount_image_copy", "mount_new_file_system", "remount"]

# Default length of an image: the smallest file system that mkfs creates. The image is a sparse file.
_DEFAULT_LENGTH_BYTES = {"ext4": 64 * MIB, "xfs": 320 * MIB}
_MKFS_COMMANDS = {"ext4": ["mkfs.ext4", "-q", "-F", "-m", "0"], "xfs": ["mkfs.xfs", "-q", "-f"]}
# Mount options. With nouuid, xfs also mounts the copy of an image, which has the UUID of the mounted original.
_MOUNT_OPTIONS = {"ext4": "loop", "xfs": "loop,nouuid"}


@contextlib.contextmanager
def mount_new_file_system(file_system: str, mount: Path, *, length_bytes: int | None = None) -> Iterator[Path]:
    """Create a file system in an image file, mount it on the new folder `mount`, and yield the folder.

    The image file is beside the folder, and its name ends with ``.image``. `file_system` is ``ext4`` or ``xfs``.
    """
    image = mount.with_suffix(".image")
    with image.open("xb") as file:
        file.truncate(length_bytes or _DEFAULT_LENGTH_BYTES[file_system])
    _run(*_MKFS_COMMANDS[file_system], str(image))
    with _mount(file_system, image, mount):
        yield mount
    image.unlink()


@contextlib.contextmanager
def mount_image_copy(file_system: str, mount: Path, copy_mount: Path) -> Iterator[Path]:
    """Copy the image of a mounted file system, mount the copy on the new folder `copy_mount`, and yield the folder.

    The copy has the contents that the disk would have after a loss of power.
    """
    image = copy_mount.with_suffix(".image")
    _run("cp", "--sparse=always", str(mount.with_suffix(".image")), str(image))
    with _mount(file_system, image, copy_mount):
        yield copy_mount
    image.unlink()


def remount(mount: Path, mode: str) -> None:
    """Remount a file system with the mode ``ro`` or ``rw``."""
    _run("mount", "-o", f"remount,{mode}", str(mount))


@contextlib.contextmanager
def _mount(file_system: str, image: Path, mount: Path) -> Iterator[None]:
    mount.mkdir()
    _run("mount", "-t", file_system, "-o", _MOUNT_OPTIONS[file_system], str(image), str(mount))
    try:
        yield
    finally:
        # A failed case may have left files open. Then only the lazy unmount succeeds.
        completed = subprocess.run(["umount", str(mount)], capture_output=True, check=False, env=_make_environ())
        if completed.returncode != 0:
            _run("umount", "-l", str(mount))


def _run(*command: str) -> None:
    completed = subprocess.run(command, capture_output=True, text=True, check=False, env=_make_environ())
    assert completed.returncode == 0, f"{' '.join(command)} failed: {completed.stderr}"


def _make_environ() -> dict[str, str]:
    # These programs run without the libraries that `gdrkit run` preloads. With the audit library, the loader refuses
    # libraries whose thread-local storage needs a large alignment, such as liburcu, which mkfs.xfs uses.
    inherited_variables = {name: value for name, value in os.environ.items() if name not in {"LD_AUDIT", "LD_PRELOAD"}}
    return {**inherited_variables, "PATH": os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])}
