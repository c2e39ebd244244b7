"""Reader of the counters of the kernel driver nvidia-fs, in /proc/driver/nvidia-fs.

nvidia-fs counts the transfers of all processes together. So the counters prove a transfer of this process only if no
other process uses nvidia-fs at the same time. Source of the format: ``src/nvfs-stat.c`` of gds-nvidia-fs 2.28.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NvidiaFs", "Tree", "read_nvidia_fs"]

_PROC_FOLDER = "/proc/driver/nvidia-fs"
_COUNTER_PATTERN = re.compile(r"([A-Za-z][\w()%/-]*)=(\d+)")
_MIB_BYTES = 1 << 20


class Tree(Protocol):
    """The interface of a reader of a host's files: :class:`gdrkit.host.HostTree`."""

    def text(self, name: str) -> str | None:
        """Return the text of a file, or None if it does not exist."""

    def exists(self, name: str) -> bool:
        """Return whether the path exists."""


@dataclass(frozen=True, slots=True)
class NvidiaFs:
    """The counters of nvidia-fs at one moment.

    Attributes
    ----------
    counting : bool
        Whether nvidia-fs counts reads and writes (module parameter ``rw_stats_enabled``).
    process_count : int
        Number of processes that use nvidia-fs now.
    counters : mapping
        Counters by the name of their line in the file, a dot and their own name: ``Reads.ok``, ``Writes.err``.
    modules : tuple of str
        Storage drivers that nvidia-fs supports, e.g. ``nvme``.
    """

    counting: bool
    process_count: int
    counters: Mapping[str, int]
    modules: tuple[str, ...]

    def increase(self, before: NvidiaFs, counter_name: str) -> int:
        """Return the increase of a counter since `before`."""
        return self.counters.get(counter_name, 0) - before.counters.get(counter_name, 0)

    def transferred_bytes(self, before: NvidiaFs, *, writing: bool) -> int:
        """Return the number of bytes read or written since `before`. nvidia-fs counts only complete MiB."""
        return self.increase(before, "Writes.writeMiB" if writing else "Reads.readMiB") * _MIB_BYTES


def read_nvidia_fs(tree: Tree) -> NvidiaFs | None:
    """Read and return the counters. Return None if nvidia-fs is not loaded."""
    stats_text = tree.text(f"{_PROC_FOLDER}/stats")
    if stats_text is None:
        return None
    counters: dict[str, int] = {}
    process_count = 0
    for line in stats_text.splitlines():
        # A line is "Reads : n=5 ok=5 err=0 readMiB=1", for example.
        line_title, _, counters_text = line.partition(":")
        line_name = line_title.strip()
        if line_name == "Active Process":
            process_count = int(counters_text) if counters_text.strip().isdecimal() else 0
        counters |= {
            f"{line_name}.{counter_name}": int(value) for counter_name, value in _COUNTER_PATTERN.findall(counters_text)
        }
    modules_text = tree.text(f"{_PROC_FOLDER}/modules") or ""
    return NvidiaFs(
        counting="IO stats: Enabled" in stats_text,
        process_count=process_count,
        counters=counters,
        modules=tuple(sorted({name for line in modules_text.splitlines() for name in line.split()[:1]})),
    )
