"""Classes for all rules: a rule, its finding, and the access to a machine, which records what a rule reads."""

from __future__ import annotations

import errno
import re
import zlib
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
from gdrkit.inventory.facts import EXPANDABLE_SEGMENTS_VARIABLES
from gdrkit.inventory.gpu_processes import GPU_PROCESSES, NOT_READABLE, GpuProcess
from gdrkit.units import MIB
from gdrkit.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gdrkit.inventory.facts import Facts
    from gdrkit.inventory.machine import Machine
    from gdrkit.inventory.observation import Observation

__all__ = [
    "MEMORY_PEERS_FOLDER",
    "PEER_MEMORY_CLIENTS",
    "PEER_MEMORY_MODULES",
    "Finding",
    "Reading",
    "Rule",
    "RuleContext",
    "RuleResult",
    "rule",
]

# The verdict of a rule, and one sentence about the machine.
RuleResult: TypeAlias = tuple[Verdict, str]

# The kernel modules of NVIDIA for peer memory, and the names under which they register with the RDMA stack. The RDMA
# stacks of vendors list the registered names in MEMORY_PEERS_FOLDER.
PEER_MEMORY_MODULES = ("nvidia_peermem", "nv_peer_mem")
PEER_MEMORY_CLIENTS = ("nv_mem", "nv_mem_nc")
MEMORY_PEERS_FOLDER = "/sys/kernel/mm/memory_peers"
_VALUE_CHARACTERS_MAX = 160
_LISTED_NAMES_MAX = 8


@dataclass(frozen=True, slots=True)
class Reading:
    """One value that a rule has read: its source `where` (a path or a query), and the value `what` as text."""

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
        machine has nothing that the cause could affect, or the rule cannot read the values that it needs.
        ``unproven``: the rule has read its values, and they do not show whether the cause is present.
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
        The sources that the rule reads, as a text for people.
    privilege : str
        The privilege that is needed to read all sources; empty if none is needed.
    experiment : str
        Name of the experiment that the rule needs; empty for a rule that only reads.
    source : str
        Document or issue that states the cause or its limits; empty if it is common knowledge.
    examine : callable
        The function that examines a machine.
    """

    code: str
    title: str
    why: str
    remedy: str
    reads: str
    privilege: str
    experiment: str
    source: str
    examine: Callable[[RuleContext], RuleResult]

    def apply(self, machine: Machine) -> Finding:
        """Examine one machine and return the finding."""
        context = RuleContext(machine)
        try:
            verdict, text = self.examine(context)
        except GdrkitError as error:
            verdict, text = Verdict.UNPROVEN, f"the rule failed: {error}"
        return Finding(
            code=self.code,
            verdict=verdict,
            text=text,
            what_to_do=self.remedy if verdict is Verdict.FAIL else "",
            read=context.readings,
            unreadable=context.tree.unreadable,
        )


def rule(
    *,
    code: str,
    title: str,
    why: str,
    remedy: str,
    reads: str,
    privilege: str = "",
    experiment: str = "",
    source: str = "",
) -> Callable[[Callable[[RuleContext], RuleResult]], Rule]:
    """Return a decorator that turns a function into a :class:`Rule`. The function examines a machine."""

    def decorator(examine: Callable[[RuleContext], RuleResult]) -> Rule:
        return Rule(code, title, why, remedy, reads, privilege, experiment, source, examine)

    return decorator


def _decompress(data: bytes | None) -> str:
    """Return the text of gzip data, or an empty text if it is not gzip.

    At most 4 MiB are returned, because a capture may contain any data.
    """
    decompressor = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)  # 16: with the header of gzip
    try:
        return decompressor.decompress(data, max_length=4 * MIB).decode("utf-8", "replace") if data else ""
    except zlib.error:
        return ""


class RuleContext:
    """Access of a rule to one machine. It records the values that were read and the files that could not be read."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.tree = HostTree.of(machine.files)
        self._value_by_source: dict[str, str] = {}

    @property
    def facts(self) -> Facts:
        """The facts about the machine."""
        return self.machine.facts

    @property
    def readings(self) -> tuple[Reading, ...]:
        """The values that were read so far."""
        return tuple(Reading(source, value) for source, value in self._value_by_source.items())

    def record(self, source: str, value: object) -> None:
        """Record that `value` was read from `source`. A long text is truncated."""
        text = str(value)
        is_short = len(text) <= _VALUE_CHARACTERS_MAX
        self._value_by_source[source] = text if is_short else text[: _VALUE_CHARACTERS_MAX - 3] + "..."

    def text(self, path: str) -> str | None:
        """Return the text of a file, or None if it cannot be read."""
        text = self.tree.text(path)
        self.record(path, self._describe_absence(path) if text is None else text or "empty")
        return text

    def exists(self, path: str) -> bool:
        """Return whether the path exists."""
        path_exists = self.tree.exists(path)
        self.record(path, "exists" if path_exists else self._describe_absence(path))
        return path_exists

    def lines(self, path: str, *words: str) -> tuple[str, ...]:
        """Return the lines of a file that contain one of the words."""
        lines = self.tree.lines(path, words)
        self.record(f"{path} ({', '.join(words)})", "; ".join(lines) or self._describe_absence(path, "no such line"))
        return lines

    def names(self, path: str) -> tuple[str, ...]:
        """Return the names in a folder."""
        names = self.tree.names(path)
        text = ", ".join(names[:_LISTED_NAMES_MAX]) + (" ..." if len(names) > _LISTED_NAMES_MAX else "")
        self.record(path, text or self._describe_absence(path, "no entry"))
        return names

    def read_error(self, path: str) -> str | None:
        """Return the name of the errno of a failed read; None if the file was read or does not exist."""
        return next(
            (unreadable_file.errno_name for unreadable_file in self.tree.unreadable if unreadable_file.path == path),
            None,
        )

    def is_uncaptured(self, path: str) -> bool:
        """Return whether the machine is a capture, and the capture does not contain the path."""
        return any(
            unreadable_file.path == path and unreadable_file.errno == errno.ENODATA
            for unreadable_file in self.tree.unreadable
        )

    def _describe_absence(self, path: str, default: str = "does not exist") -> str:
        """Return the text to record if nothing was read from a path: the error of the read, or `default`."""
        error = self.read_error(path)
        return default if error is None else "not in the capture" if error == "ENODATA" else f"not readable: {error}"

    @cached_property
    def gpus(self) -> tuple[PciDevice, ...]:
        """The GPUs on the PCI bus."""
        return tuple(function for function in self.machine.pci_functions if is_gpu(function))

    @cached_property
    def nic_functions(self) -> tuple[PciDevice, ...]:
        """The PCI functions of the RDMA devices. If no RDMA device is known, all PCI functions that may be NICs."""
        addresses = {device.pci_address for device in self.facts.rdma_devices}
        rdma_functions = tuple(function for function in self.machine.pci_functions if function.address in addresses)
        return rdma_functions or tuple(function for function in self.machine.pci_functions if is_nic(function))

    @cached_property
    def nvme_functions(self) -> tuple[PciDevice, ...]:
        """The NVMe controllers on the PCI bus."""
        return tuple(function for function in self.machine.pci_functions if is_nvme(function))

    @property
    def has_gpu(self) -> bool:
        """Whether there is a GPU, according to PCI or to the driver."""
        return bool(self.gpus or (self.facts.cuda and self.facts.cuda.devices))

    @property
    def has_nic(self) -> bool:
        """Whether there is an RDMA device, according to the kernel or to verbs."""
        return bool(self.facts.rdma_devices or (self.facts.verbs and self.facts.verbs.nics))

    def not_run_without_gpu_and_nic(self) -> RuleResult | None:
        """Return the result ``not_run`` if the machine has no GPU or no RDMA device, and None if it has both."""
        if not self.has_gpu:
            return self.not_run("no GPU here")
        return None if self.has_nic else self.not_run("no RDMA device here")

    @property
    def has_peer_memory(self) -> bool:
        """Whether a kernel module is loaded with which a NIC can register addresses of GPU memory."""
        paths = (
            *(f"/sys/module/{name}" for name in PEER_MEMORY_MODULES),
            *(f"{MEMORY_PEERS_FOLDER}/{name}" for name in PEER_MEMORY_CLIENTS),
        )
        return any([self.exists(path) for path in paths])  # noqa: C419 - every path must be recorded.

    def working_registration_methods(self) -> set[str]:
        """Return the methods by which at least one NIC could register the memory of a GPU, and record all attempts."""
        for route in self.facts.routes:
            self.record(
                f"registration of GPU {route.device_index} with {route.nic} by {route.way}",
                "works" if route.possible or route.failure is None else route.failure.message,
            )
        return {route.way for route in self.facts.routes if route.possible}

    def gpu_and_device_pairs(self) -> Iterator[tuple[PciDevice, PciDevice, Distance]]:
        """Yield every pair of a GPU with a NIC or NVMe controller, and their distance."""
        for gpu in self.gpus:
            for device in (*self.nic_functions, *self.nvme_functions):
                yield gpu, device, pci_distance(self.tree, gpu.address, device.address)

    def bridges_between(self, first_address: str, second_address: str) -> tuple[str, ...]:
        """Return the bridges on the path between two functions that are below the same host bridge.

        Bridges that are above both functions are not on that path.
        """
        first_path, second_path = pci_path(self.tree, first_address)[:-1], pci_path(self.tree, second_address)[:-1]
        common_bridges = set(first_path) & set(second_path)
        return tuple(address for address in (*first_path, *second_path) if address not in common_bridges)

    @property
    def has_expandable_segments(self) -> bool:
        """Whether the environment enables expandable segments of PyTorch."""
        settings = {name: self.machine.environment.get(name, "") for name in EXPANDABLE_SEGMENTS_VARIABLES}
        for name, setting in settings.items():
            self.record(name, setting or "not set")
        return any("expandable_segments:true" in setting.lower().replace(" ", "") for setting in settings.values())

    def gpu_processes(self) -> tuple[GpuProcess, ...]:
        """Return the processes that have a GPU open, as far as they could be read."""
        observation = self.machine.observe(GPU_PROCESSES)
        steps = observation.seen if observation else {}
        processes = tuple(GpuProcess.parse(text) for step_name, text in steps.items() if step_name != NOT_READABLE)
        for process in processes:
            self.record(
                process.title,
                f"user {process.user_id}, namespaces {process.pid_namespace} and {process.ipc_namespace}, "
                f"{process.descriptors_count} of {process.descriptors_max} descriptors",
            )
        return processes

    @property
    def unread_gpu_processes(self) -> str | None:
        """A text that says how many processes could not be read; None if all were read, or if none was tried."""
        observation = self.machine.observe(GPU_PROCESSES)
        return observation.seen.get(NOT_READABLE) if observation else None

    def bar1_range(self, address: str) -> tuple[int, int] | None:
        """Return the first and the last physical address of BAR1 of a GPU, or None if sysfs does not have them."""
        lines = (self.text(f"/sys/bus/pci/devices/{address}/resource") or "").splitlines()
        # BAR0 has the registers. BAR1 is a 64-bit BAR and takes two lines; the first line has its address range.
        bounds = re.findall(r"0x[0-9a-f]+", lines[1]) if len(lines) > 1 else []
        return (int(bounds[0], 16), int(bounds[1], 16)) if len(bounds) > 1 and int(bounds[1], 16) else None

    def kernel_version(self) -> tuple[int, int]:
        """Return the first two numbers of the version of Linux, or (0, 0) if it is unknown."""
        version_match = re.match(r"(\d+)\.(\d+)", self.text("/proc/sys/kernel/osrelease") or "")
        return (int(version_match[1]), int(version_match[2])) if version_match else (0, 0)

    def kernel_config(self) -> str:
        """Return the configuration of the kernel, from /boot or /proc/config.gz; empty if it cannot be read."""
        release = self.text("/proc/sys/kernel/osrelease") or ""
        config = self.tree.text(f"/boot/config-{release}") or _decompress(self.tree.data("/proc/config.gz"))
        self.record(
            f"/boot/config-{release} or /proc/config.gz", "read" if config else "does not exist or is not readable"
        )
        return config

    def cufile_config(self) -> tuple[str | None, dict[str, object]]:
        """Return the path and the contents of the cufile.json that the library would read."""
        path, config = cufile_json.read_config(self.tree, self.machine.environment)
        self.record(path or cufile_json.DEFAULT_PATH, "read" if path else "does not exist; libcufile uses its defaults")
        return path, config

    def file_systems(self) -> tuple[tuple[Mount, BlockDevice | None], ...]:
        """Return the mounts that may hold data files, each with its block device or None.

        These are mounts on a block device, and mounts of network and cluster file systems, overlay, tmpfs and zfs.
        Mounts below /dev, /sys, /proc, /run and /etc are not included. If a device has several mounts, only the last
        one is included.
        """
        types_without_block_device = (
            "lustre",
            "nfs",
            "nfs4",
            "wekafs",
            "beegfs",
            "gpfs",
            "scatefs",
            "virtiofs",
            "overlay",
            "tmpfs",
            "zfs",
        )
        # The last mount of each device.
        mount_by_device = {}
        for mount in self.machine.all_mounts:
            is_on_block_device = not mount.device.startswith("0:")
            if (is_on_block_device or mount.kind in types_without_block_device) and not mount.mount_point.startswith(
                ("/dev", "/sys", "/proc", "/run", "/etc")
            ):
                mount_by_device[mount.device] = mount
                self.record(f"mountinfo {mount.mount_point}", f"{mount.kind} on {mount.source}")
        return tuple((mount, block_device(self.tree, mount.device)) for mount in mount_by_device.values())

    def observe(self, name: str) -> Observation | None:
        """Return the result of an experiment, and record its observations; see :meth:`Machine.observe`."""
        observation = self.machine.observe(name)
        for source, value in observation.seen.items() if observation else ():
            self.record(source, value)
        return observation

    def observe_cufile(self, name: str) -> Observation | None:
        """Return the result of an experiment with cuFile, or None if it was not run or a library for it is missing.

        The libraries are libcufile and libcuda.
        """
        installed_sonames = {library.soname for library in self.facts.libraries if library.path}
        return self.observe(name) if {"libcufile.so.0", "libcuda.so.1"} <= installed_sonames else None

    @staticmethod
    def passes(text: str) -> RuleResult:
        """Return the result of a rule that looked for its cause and did not find it."""
        return Verdict.PASS, text

    @staticmethod
    def fails(text: str) -> RuleResult:
        """Return the result of a rule that found its cause."""
        return Verdict.FAIL, text

    @staticmethod
    def not_run(text: str) -> RuleResult:
        """Return the result of a rule whose cause could affect nothing here, or that could not read its values."""
        return Verdict.NOT_RUN, text

    @staticmethod
    def unproven(text: str) -> RuleResult:
        """Return the result of a rule whose values do not show whether its cause is present."""
        return Verdict.UNPROVEN, text
