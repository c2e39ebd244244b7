"""The counters of the kernel driver nvidia-fs.

Level 2. They are of the whole machine: they prove a transfer of this process only while no other process uses
nvidia-fs. Source of the format: ``src/nvfs-stat.c`` of gds-nvidia-fs 2.28.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NvidiaFs", "Tree", "nvidia_fs"]

_FOLDER = "/proc/driver/nvidia-fs"
_PAIR = re.compile(r"([A-Za-z][\w()%/-]*)=(\d+)")
_MIB_BYTES = 1 << 20


class Tree(Protocol):
    """A host's file tree under some root: :class:`gdrkit.host.HostTree`."""

    def text(self, name: str) -> str | None:
        """What a file holds; None when there is none."""

    def exists(self, name: str) -> bool:
        """Whether something of that name is there."""


@dataclass(frozen=True, slots=True)
class NvidiaFs:
    """The counters at one moment.

    Attributes
    ----------
    counting : bool
        Whether it counts reads and writes at all (module parameter ``rw_stats_enabled``).
    process_count : int
        How many processes use it now.
    counters : mapping
        ``Reads.ok``, ``Writes.err`` and so on, by line and name.
    modules : tuple of str
        The storage drivers that it knows, e.g. ``nvme``.
    """

    counting: bool
    process_count: int
    counters: Mapping[str, int]
    modules: tuple[str, ...]

    def moved(self, before: NvidiaFs, name: str) -> int:
        """What a counter grew by."""
        return self.counters.get(name, 0) - before.counters.get(name, 0)

    def bytes_moved(self, before: NvidiaFs, *, writing: bool) -> int:
        """Bytes read or written since; nvidia-fs counts whole MiB."""
        return self.moved(before, "Writes.writeMiB" if writing else "Reads.readMiB") * _MIB_BYTES


def nvidia_fs(tree: Tree) -> NvidiaFs | None:
    """Read them below the root of `tree`; None where nvidia-fs is not loaded."""
    text = tree.text(f"{_FOLDER}/stats")
    if text is None:
        return None
    counters: dict[str, int] = {}
    processes = 0
    for line in text.splitlines():
        head, _, rest = line.partition(":")
        name = head.strip()
        if name == "Active Process":
            processes = int(rest) if rest.strip().isdecimal() else 0
        counters |= {f"{name}.{key}": int(value) for key, value in _PAIR.findall(rest)}
    modules = tree.text(f"{_FOLDER}/modules") or ""
    return NvidiaFs(
        counting="IO stats: Enabled" in text,
        process_count=processes,
        counters=counters,
        modules=tuple(sorted({word for line in modules.splitlines() for word in line.split()[:1]})),
    )
