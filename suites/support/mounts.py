"""Real file systems in image files, which a case mounts, fills, makes read-only, or copies as after a loss of power."""

from __future__ import annotations

import contextlib
import os
import subprocess
from typing import TYPE_CHECKING

from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["mounted", "power_cut", "remount"]

# The smallest file systems that mkfs creates. The image is sparse.
LENGTH_BYTES = {"ext4": 64 * MIB, "xfs": 320 * MIB}
_MAKE = {"ext4": ["mkfs.ext4", "-q", "-F", "-m", "0"], "xfs": ["mkfs.xfs", "-q", "-f"]}
# A copy has the UUID of the original, and xfs refuses to mount the same UUID twice.
_OPTIONS = {"ext4": "loop", "xfs": "loop,nouuid"}


@contextlib.contextmanager
def mounted(file_system: str, mount: Path, *, length_bytes: int | None = None) -> Iterator[Path]:
    """Create an ext4 or xfs in the file ``mount.image``, mount it on a new folder, and yield the folder."""
    image = mount.with_suffix(".image")
    with image.open("xb") as file:
        file.truncate(length_bytes or LENGTH_BYTES[file_system])
    _run(*_MAKE[file_system], str(image))
    with _mount(file_system, image, mount):
        yield mount
    image.unlink()


@contextlib.contextmanager
def power_cut(file_system: str, mount: Path, copy: Path) -> Iterator[Path]:
    """Copy the image of a mounted file system, as after a loss of power, and yield the copy mounted on a new folder."""
    image = copy.with_suffix(".image")
    _run("cp", "--sparse=always", str(mount.with_suffix(".image")), str(image))
    with _mount(file_system, image, copy):
        yield copy
    image.unlink()


def remount(mount: Path, mode: str) -> None:
    """Remount a file system with the mode ``ro`` or ``rw``."""
    _run("mount", "-o", f"remount,{mode}", str(mount))


@contextlib.contextmanager
def _mount(file_system: str, image: Path, mount: Path) -> Iterator[None]:
    mount.mkdir()
    _run("mount", "-t", file_system, "-o", _OPTIONS[file_system], str(image), str(mount))
    try:
        yield
    finally:
        # A case that failed may have left files open. The lazy unmount then succeeds.
        done = subprocess.run(["umount", str(mount)], capture_output=True, check=False, env=_environ())
        if done.returncode != 0:
            _run("umount", "-l", str(mount))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_environ())
    assert done.returncode == 0, f"{' '.join(command)} failed: {done.stderr}"


def _environ() -> dict[str, str]:
    return {**os.environ, "PATH": os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])}
