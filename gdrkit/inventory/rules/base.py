"""The form of a rule, and what it looks with.

Level 4.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from gdrkit.errors import GdrkitError
from gdrkit.host import (
    BlockDevice,
    Distance,
    HostTree,
    Mount,
    PciDevice,
    Unreadable,
    block_device,
    is_gpu,
    is_nic,
    is_nvme,
    pci_distance,
    pci_path,
)
from gdrkit.inventory import cufile_json
from gdrkit.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gdrkit.inventory.facts import Facts
    from gdrkit.inventory.machine import Machine
    from gdrkit.inventory.observation import Observation

__all__ = ["Answer", "Finding", "Look", "Reading", "Rule", "rule"]

Answer: TypeAlias = tuple[Verdict, str]

_SHOWN_CHARACTERS = 160
_SMALLEST_NUMA = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """One thing that was read: where, and what stood there."""

    where: str
    what: str


@dataclass(frozen=True, slots=True)
class Finding:
    """What one rule found on one machine.

    Attributes
    ----------
    code : str
        Of the rule.
    verdict : Verdict
        ``fail``: this cause is here. ``pass``: it was looked for and is not. ``not_run``: there is nothing that it
        could concern, or it cannot be read. ``unproven``: what was read leaves it open.
    text : str
        One sentence about this machine.
    what_to_do : str
        The rule's remedy, where it fails.
    read : tuple of Reading
        What was looked at.
    unreadable : tuple of Unreadable
        What could not be read.
    """

    code: str
    verdict: Verdict
    text: str
    what_to_do: str
    read: tuple[Reading, ...]
    unreadable: tuple[Unreadable, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """One cause for which a transfer is not direct.

    Attributes
    ----------
    code : str
        Its name, for ``gdrkit explain``.
    title : str
        The cause, in a few words.
    why : str
        Why it matters.
    remedy : str
        What to do.
    reads : str
        Where it looks, for people.
    privilege : str
        What is needed to read all of it; empty for nothing.
    act : str
        The act that it wants; empty for a rule that reads.
    examine : callable
        Looks.
    """

    code: str
    title: str
    why: str
    remedy: str
    reads: str
    privilege: str
    act: str
    examine: Callable[[Look], Answer]

    def apply(self, machine: Machine) -> Finding:
        """Look at one machine."""
        look = Look(machine)
        try:
            verdict, text = self.examine(look)
        except GdrkitError as error:
            verdict, text = Verdict.UNPROVEN, f"cannot be judged: {error}"
        return Finding(
            code=self.code,
            verdict=verdict,
            text=text,
            what_to_do=self.remedy if verdict is Verdict.FAIL else "",
            read=look.read,
            unreadable=look.tree.unreadable,
        )


def rule(
    *, code: str, title: str, why: str, remedy: str, reads: str, privilege: str = "", act: str = ""
) -> Callable[[Callable[[Look], Answer]], Rule]:
    """Make a rule of the function that looks."""

    def made(examine: Callable[[Look], Answer]) -> Rule:
        return Rule(code, title, why, remedy, reads, privilege, act, examine)

    return made


class Look:
    """What a rule looks with: it keeps what was read, and what refused to be."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.tree = HostTree.of(machine.files)
        self._read: dict[str, str] = {}

    @property
    def facts(self) -> Facts:
        """Of the machine."""
        return self.machine.facts

    @property
    def read(self) -> tuple[Reading, ...]:
        """What was read until now."""
        return tuple(Reading(where, what) for where, what in self._read.items())

    def saw(self, where: str, what: object) -> None:
        """Keep that this was read."""
        text = str(what)
        self._read[where] = text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."

    def text(self, path: str) -> str | None:
        """The text of a file."""
        found = self.tree.text(path)
        self.saw(path, self._absence(path) if found is None else found or "nothing in it")
        return found

    def exists(self, path: str) -> bool:
        """Whether something is there."""
        found = self.tree.exists(path)
        self.saw(path, "is there" if found else self._absence(path))
        return found

    def lines(self, path: str, *words: str) -> tuple[str, ...]:
        """Lines of a file that hold one of the words."""
        found = self.tree.lines(path, words)
        self.saw(f"{path} ({', '.join(words)})", "; ".join(found) or self._absence(path, "no such line"))
        return found

    def names(self, path: str) -> tuple[str, ...]:
        """What is in a folder."""
        found = self.tree.names(path)
        self.saw(path, ", ".join(found[:8]) + (" ..." if len(found) > 8 else "") or self._absence(path, "nothing"))  # noqa: PLR2004 - enough to know it by.
        return found

    def unread(self, path: str) -> str | None:
        """Why a file could not be read, by the name of the errno; None when it could, or is not there."""
        return next((item.errno_name for item in self.tree.unreadable if item.path == path), None)

    def is_uncaptured(self, path: str) -> bool:
        """Whether nobody asked for this when the machine was captured."""
        return any(item.path == path and item.errno == errno.ENODATA for item in self.tree.unreadable)

    def _absence(self, path: str, otherwise: str = "not there") -> str:
        refused = self.unread(path)
        return otherwise if refused is None else "not in the capture" if refused == "ENODATA" else f"refused: {refused}"

    @cached_property
    def gpus(self) -> tuple[PciDevice, ...]:
        """GPUs on PCI."""
        return tuple(one for one in self.machine.functions if is_gpu(one))

    @cached_property
    def nic_functions(self) -> tuple[PciDevice, ...]:
        """NICs on PCI: what RDMA devices stand on, or what looks like a NIC that does RDMA where none is known."""
        known = {device.pci_address for device in self.facts.rdma_devices}
        named = tuple(one for one in self.machine.functions if one.address in known)
        return named or tuple(one for one in self.machine.functions if is_nic(one))

    @cached_property
    def nvme_functions(self) -> tuple[PciDevice, ...]:
        """NVMe controllers on PCI."""
        return tuple(one for one in self.machine.functions if is_nvme(one))

    @property
    def has_gpu(self) -> bool:
        """Whether there is one, by PCI or by the driver."""
        return bool(self.gpus or (self.facts.cuda and self.facts.cuda.devices))

    @property
    def has_nic(self) -> bool:
        """Whether there is an RDMA device, by the kernel or by verbs."""
        return bool(self.facts.rdma_devices or (self.facts.verbs and self.facts.verbs.nics))

    @property
    def has_peer_memory(self) -> bool:
        """Whether a module by which NICs take device addresses is loaded."""
        places = (
            "/sys/module/nvidia_peermem",
            "/sys/module/nv_peer_mem",
            "/sys/kernel/mm/memory_peers/nv_mem",
            "/sys/kernel/mm/memory_peers/nv_mem_nc",
        )
        return any([self.exists(place) for place in places])  # noqa: C419 - all are to be seen.

    def possible_ways(self) -> set[str]:
        """The ways in which any NIC was seen to register memory of any device."""
        for route in self.facts.routes:
            self.saw(
                f"registration of GPU {route.device_index} with {route.nic} by {route.way}",
                "works" if route.possible or route.failure is None else route.failure.message,
            )
        return {route.way for route in self.facts.routes if route.possible}

    def pairs(self) -> Iterator[tuple[PciDevice, PciDevice, Distance]]:
        """Every GPU with every NIC and NVMe, and how far they are from each other."""
        for gpu in self.gpus:
            for other in (*self.nic_functions, *self.nvme_functions):
                yield gpu, other, pci_distance(self.tree, gpu.address, other.address)

    def bridges_between(self, one: str, other: str) -> tuple[str, ...]:
        """Bridges that traffic between two functions below one host bridge passes, but for the one they share."""
        first, second = pci_path(self.tree, one)[:-1], pci_path(self.tree, other)[:-1]
        shared = set(first) & set(second)
        return tuple(part for part in (*first, *second) if part not in shared)

    def config(self) -> tuple[str | None, dict[str, object]]:
        """The cufile.json that holds: its path and contents."""
        path, found = cufile_json.read_config(self.tree, self.machine.environment)
        self.saw(path or cufile_json.DEFAULT_PATH, "read" if path else "not there; the library's defaults hold")
        return path, found

    def file_systems(self) -> tuple[tuple[Mount, BlockDevice | None], ...]:
        """Mounts that hold data: on a block device, or of a network or cluster."""
        kinds = ("lustre", "nfs", "nfs4", "wekafs", "beegfs", "gpfs", "scatefs", "virtiofs", "overlay", "tmpfs", "zfs")
        found = {}
        for mount in self.machine.all_mounts:
            on_block = not mount.device.startswith("0:")
            if (on_block or mount.kind in kinds) and not mount.mount_point.startswith(
                ("/dev", "/sys", "/proc", "/run", "/etc")
            ):
                found[mount.device] = mount
                self.saw(f"mountinfo {mount.mount_point}", f"{mount.kind} on {mount.source}")
        return tuple((mount, block_device(self.tree, mount.device)) for mount in found.values())

    def observed(self, name: str) -> Observation | None:
        """What acting showed."""
        seen = self.machine.observe(name)
        for where, what in seen.seen.items() if seen else ():
            self.saw(where, what)
        return seen

    def tried_cufile(self, name: str) -> Observation | None:
        """What acting by cuFile showed; None where nobody has tried, or a library for it is missing."""
        found = {library.soname for library in self.facts.libraries if library.path}
        return self.observed(name) if {"libcufile.so.0", "libcuda.so.1"} <= found else None

    @staticmethod
    def passes(text: str) -> Answer:
        """The cause was looked for, and is not here."""
        return Verdict.PASS, text

    @staticmethod
    def fails(text: str) -> Answer:
        """The cause is here."""
        return Verdict.FAIL, text

    @staticmethod
    def not_run(text: str) -> Answer:
        """There is nothing that it could concern, or nothing could be read."""
        return Verdict.NOT_RUN, text

    @staticmethod
    def unproven(text: str) -> Answer:
        """What was read leaves it open."""
        return Verdict.UNPROVEN, text
