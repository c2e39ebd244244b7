"""Base of the rules: a rule, its finding, and the access to a machine that records what a rule reads."""

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
    """One value that a rule read: its source (a path or a query), and the value as text."""

    where: str
    what: str


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one rule on one machine.

    Attributes
    ----------
    code : str
        Code of the rule.
    verdict : Verdict
        ``fail``: the cause is present. ``pass``: the rule looked for the cause, and it is absent. ``not_run``: the
        machine has nothing that the cause could affect, or the rule cannot read it. ``unproven``: the values that were
        read do not decide it.
    text : str
        One sentence about this machine.
    what_to_do : str
        The rule's remedy if the verdict is ``fail``, else empty.
    read : tuple of Reading
        The values that the rule read.
    unreadable : tuple of Unreadable
        The files that the rule could not read.
    """

    code: str
    verdict: Verdict
    text: str
    what_to_do: str
    read: tuple[Reading, ...]
    unreadable: tuple[Unreadable, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """One known cause of a transfer that is not direct.

    Attributes
    ----------
    code : str
        Identifier of the rule, for ``gdrkit explain``.
    title : str
        The cause, in a few words.
    why : str
        The effect of the cause on transfers.
    remedy : str
        What to do against the cause.
    reads : str
        The sources that the rule reads, for people.
    privilege : str
        The privilege that is needed to read all of them; empty if none is needed.
    act : str
        Name of the experiment that the rule needs; empty for a rule that only reads.
    examine : callable
        The function that examines a machine.
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
        """Examine one machine and return the finding."""
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
    """Return a decorator that makes a rule of the function that examines a machine."""

    def made(examine: Callable[[Look], Answer]) -> Rule:
        return Rule(code, title, why, remedy, reads, privilege, act, examine)

    return made


class Look:
    """Access of a rule to one machine. It records the values that were read and the files that could not be read."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.tree = HostTree.of(machine.files)
        self._read: dict[str, str] = {}

    @property
    def facts(self) -> Facts:
        """The facts about the machine."""
        return self.machine.facts

    @property
    def read(self) -> tuple[Reading, ...]:
        """The values that were read until now."""
        return tuple(Reading(where, what) for where, what in self._read.items())

    def saw(self, where: str, what: object) -> None:
        """Record that `what` was read from `where`; a long text is truncated."""
        text = str(what)
        self._read[where] = text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."

    def text(self, path: str) -> str | None:
        """Return the text of a file, or None if it cannot be read."""
        found = self.tree.text(path)
        self.saw(path, self._absence(path) if found is None else found or "nothing in it")
        return found

    def exists(self, path: str) -> bool:
        """Return whether the path exists."""
        found = self.tree.exists(path)
        self.saw(path, "is there" if found else self._absence(path))
        return found

    def lines(self, path: str, *words: str) -> tuple[str, ...]:
        """Return the lines of a file that contain one of the words."""
        found = self.tree.lines(path, words)
        self.saw(f"{path} ({', '.join(words)})", "; ".join(found) or self._absence(path, "no such line"))
        return found

    def names(self, path: str) -> tuple[str, ...]:
        """Return the names in a folder."""
        found = self.tree.names(path)
        self.saw(path, ", ".join(found[:8]) + (" ..." if len(found) > 8 else "") or self._absence(path, "nothing"))  # noqa: PLR2004 - enough to recognize it.
        return found

    def unread(self, path: str) -> str | None:
        """Return the name of the errno with which a file could not be read; None if it was read or does not exist."""
        return next((item.errno_name for item in self.tree.unreadable if item.path == path), None)

    def is_uncaptured(self, path: str) -> bool:
        """Return whether the path was not read when the machine was captured."""
        return any(item.path == path and item.errno == errno.ENODATA for item in self.tree.unreadable)

    def _absence(self, path: str, otherwise: str = "not there") -> str:
        refused = self.unread(path)
        return otherwise if refused is None else "not in the capture" if refused == "ENODATA" else f"refused: {refused}"

    @cached_property
    def gpus(self) -> tuple[PciDevice, ...]:
        """The GPUs on the PCI bus."""
        return tuple(one for one in self.machine.functions if is_gpu(one))

    @cached_property
    def nic_functions(self) -> tuple[PciDevice, ...]:
        """The PCI functions of the RDMA devices; if no RDMA device is known, all functions that look like RDMA NICs."""
        known = {device.pci_address for device in self.facts.rdma_devices}
        named = tuple(one for one in self.machine.functions if one.address in known)
        return named or tuple(one for one in self.machine.functions if is_nic(one))

    @cached_property
    def nvme_functions(self) -> tuple[PciDevice, ...]:
        """The NVMe controllers on the PCI bus."""
        return tuple(one for one in self.machine.functions if is_nvme(one))

    @property
    def has_gpu(self) -> bool:
        """Whether there is a GPU, according to PCI or to the driver."""
        return bool(self.gpus or (self.facts.cuda and self.facts.cuda.devices))

    @property
    def has_nic(self) -> bool:
        """Whether there is an RDMA device, according to the kernel or to verbs."""
        return bool(self.facts.rdma_devices or (self.facts.verbs and self.facts.verbs.nics))

    @property
    def has_peer_memory(self) -> bool:
        """Whether a kernel module that lets NICs register device addresses is loaded."""
        places = (
            "/sys/module/nvidia_peermem",
            "/sys/module/nv_peer_mem",
            "/sys/kernel/mm/memory_peers/nv_mem",
            "/sys/kernel/mm/memory_peers/nv_mem_nc",
        )
        return any([self.exists(place) for place in places])  # noqa: C419 - every path must be recorded.

    def possible_ways(self) -> set[str]:
        """Return the routes by which any NIC was seen to register memory of any device."""
        for route in self.facts.routes:
            self.saw(
                f"registration of GPU {route.device_index} with {route.nic} by {route.way}",
                "works" if route.possible or route.failure is None else route.failure.message,
            )
        return {route.way for route in self.facts.routes if route.possible}

    def pairs(self) -> Iterator[tuple[PciDevice, PciDevice, Distance]]:
        """Yield every pair of a GPU with a NIC or NVMe controller, and their distance."""
        for gpu in self.gpus:
            for other in (*self.nic_functions, *self.nvme_functions):
                yield gpu, other, pci_distance(self.tree, gpu.address, other.address)

    def bridges_between(self, one: str, other: str) -> tuple[str, ...]:
        """Return the bridges between two functions below one host bridge, without the bridges that both are below."""
        first, second = pci_path(self.tree, one)[:-1], pci_path(self.tree, other)[:-1]
        shared = set(first) & set(second)
        return tuple(part for part in (*first, *second) if part not in shared)

    def config(self) -> tuple[str | None, dict[str, object]]:
        """Return the path and the contents of the cufile.json that the library would read."""
        path, found = cufile_json.read_config(self.tree, self.machine.environment)
        self.saw(path or cufile_json.DEFAULT_PATH, "read" if path else "not there; the library's defaults hold")
        return path, found

    def file_systems(self) -> tuple[tuple[Mount, BlockDevice | None], ...]:
        """Return the mounts that hold data: those on a block device, and those of a network or cluster file system."""
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
        """Return the result of an experiment; see :meth:`Machine.observe`."""
        seen = self.machine.observe(name)
        for where, what in seen.seen.items() if seen else ():
            self.saw(where, what)
        return seen

    def tried_cufile(self, name: str) -> Observation | None:
        """Return the result of an experiment with cuFile; None if there is none, or if a library for it is missing."""
        found = {library.soname for library in self.facts.libraries if library.path}
        return self.observed(name) if {"libcufile.so.0", "libcuda.so.1"} <= found else None

    @staticmethod
    def passes(text: str) -> Answer:
        """Return the answer that the cause was looked for and is absent."""
        return Verdict.PASS, text

    @staticmethod
    def fails(text: str) -> Answer:
        """Return the answer that the cause is present."""
        return Verdict.FAIL, text

    @staticmethod
    def not_run(text: str) -> Answer:
        """Return the answer that there is nothing that the cause could affect, or that nothing could be read."""
        return Verdict.NOT_RUN, text

    @staticmethod
    def unproven(text: str) -> Answer:
        """Return the answer that the values that were read do not decide it."""
        return Verdict.UNPROVEN, text
