"""File systems in files, mounted for one case: real ones, of a size that a case can fill, that can be made read-only,
and of which a copy can be taken as a loss of power would leave it.
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

__all__ = ["mounted", "power_cut", "remount"]

# The least that mkfs makes; a hole in the file, but for what is written.
LENGTH_BYTES = {"ext4": 64 * MIB, "xfs": 320 * MIB}
_MAKE = {"ext4": ["mkfs.ext4", "-q", "-F", "-m", "0"], "xfs": ["mkfs.xfs", "-q", "-f"]}
# A copy has the identity of what it was made from, which xfs takes for a second mount of the same.
_OPTIONS = {"ext4": "loop", "xfs": "loop,nouuid"}


@contextlib.contextmanager
def mounted(kind: str, place: Path, *, length_bytes: int | None = None) -> Iterator[Path]:
    """A new file system, mounted on `place`, in the file ``place.image``."""
    image = place.with_suffix(".image")
    with image.open("xb") as file:
        file.truncate(length_bytes or LENGTH_BYTES[kind])
    _run(*_MAKE[kind], str(image))
    with _mount(kind, image, place):
        yield place
    image.unlink()


@contextlib.contextmanager
def power_cut(kind: str, place: Path, copy: Path) -> Iterator[Path]:
    """What would be found on the device of `place` if the power went now, mounted on `copy`."""
    image = copy.with_suffix(".image")
    _run("cp", "--sparse=always", str(place.with_suffix(".image")), str(image))
    with _mount(kind, image, copy):
        yield copy
    image.unlink()


def remount(place: Path, how: str) -> None:
    """``ro`` or ``rw``."""
    _run("mount", "-o", f"remount,{how}", str(place))


@contextlib.contextmanager
def _mount(kind: str, image: Path, place: Path) -> Iterator[None]:
    place.mkdir()
    _run("mount", "-t", kind, "-o", _OPTIONS[kind], str(image), str(place))
    try:
        yield
    finally:
        # Also when a case failed and left something open.
        done = subprocess.run(["umount", str(place)], capture_output=True, check=False, env=_environ())
        if done.returncode != 0:
            _run("umount", "-l", str(place))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_environ())
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def _environ() -> dict[str, str]:
    return {**os.environ, "PATH": os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])}
