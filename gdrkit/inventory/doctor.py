"""The doctor, which applies every rule to a machine and lists what the machine lacks for direct transfers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from gdrkit import host, serialization
from gdrkit.host import Unreadable  # noqa: TC001 - types of fields are read at run time.
from gdrkit.inventory.gpu_processes import GPU_PROCESSES, NOT_READABLE
from gdrkit.inventory.rules import RULES, Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.inventory.machine import Machine
    from gdrkit.verdict import Verdict

__all__ = ["Diagnosis", "diagnose"]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of the doctor for one machine.

    Attributes
    ----------
    facts_digest : str
        Digest of the facts that the rules examined.
    missing : tuple of str
        Hardware and software that direct transfers need and that this machine does not have.
    findings : tuple of Finding
        One finding for each rule, in the order of the rules.
    unreadable : tuple of Unreadable
        Every file that could not be read, by a rule or when the facts were collected.
    privileges : tuple of str
        One text for each missing privilege: what cannot be read without the privilege, and the rules that need it.
    """

    schema_version: int
    facts_digest: str
    missing: tuple[str, ...]
    findings: tuple[Finding, ...]
    unreadable: tuple[Unreadable, ...]
    privileges: tuple[str, ...]

    def to_json(self) -> str:
        """Return the diagnosis as indented JSON in ASCII, which cannot control a terminal."""
        return json.dumps(serialization.to_json_data(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str = "diagnosis") -> Self:
        """Parse the output of :meth:`to_json`. `where` names the text in errors.

        Raises
        ------
        UsageError
            ``MALFORMED``: the text is not JSON, has an unsupported version, or has an invalid field.
        """
        return serialization.parse_versioned(cls, text, version=SCHEMA_VERSION, where=where)

    def findings_with(self, verdict: Verdict) -> tuple[Finding, ...]:
        """Return the findings with this verdict."""
        return tuple(finding for finding in self.findings if finding.verdict is verdict)


def diagnose(machine: Machine) -> Diagnosis:
    """Apply every rule to `machine` and return the diagnosis."""
    findings = tuple(rule.apply(machine) for rule in RULES)
    unreadable_by_path = {unreadable_file.path: unreadable_file for unreadable_file in machine.facts.unreadable}
    unreadable_by_path |= {
        unreadable_file.path: unreadable_file for finding in findings for unreadable_file in finding.unreadable
    }
    return Diagnosis(
        schema_version=SCHEMA_VERSION,
        facts_digest=machine.facts.digest,
        missing=tuple(_list_missing(machine)),
        findings=findings,
        unreadable=tuple(unreadable_by_path.values()),
        privileges=tuple(_list_missing_privileges(machine)),
    )


def _list_missing_privileges(machine: Machine) -> Iterator[str]:
    def list_rules_that_need(capability: str) -> str:
        return ", ".join(rule.code for rule in RULES if capability in rule.privilege)

    # `facts.python` is empty for an imported capture, which has only files. The privileges of the
    # process that read these files are unknown, so nothing is reported.
    if machine.facts.python and "CAP_SYS_ADMIN" not in machine.facts.limits.capabilities:
        yield f"PCI config space beyond 64 bytes needs CAP_SYS_ADMIN ({list_rules_that_need('CAP_SYS_ADMIN')})"
    observation = machine.observe(GPU_PROCESSES)
    if observation and NOT_READABLE in observation.seen:
        yield f"{observation.seen[NOT_READABLE]} ({list_rules_that_need('CAP_SYS_PTRACE')})"
    if machine.kernel_log.unreadable:
        yield f"the kernel log: {machine.kernel_log.unreadable} ({list_rules_that_need('CAP_SYSLOG')})"


def _list_missing(machine: Machine) -> Iterator[str]:
    facts, tree = machine.facts, host.HostTree.of(machine.files)

    def is_absent(path: str) -> bool:
        # A file that could not be read, or that is not in the capture, may exist.
        return not tree.exists(path) and all(unreadable_file.path != path for unreadable_file in tree.unreadable)

    has_gpu = any(host.is_gpu(function) for function in machine.pci_functions) or bool(
        facts.cuda and facts.cuda.devices
    )
    if not has_gpu and not _is_folder_unknown(tree, "/sys/bus/pci/devices"):
        yield "no NVIDIA GPU on PCI"
    if (
        facts.nvidia_driver_version is None
        and not (facts.cuda and facts.cuda.devices)
        and is_absent("/proc/driver/nvidia")
    ):
        yield "no NVIDIA driver"
    has_nic = bool(facts.rdma_devices or (facts.verbs and facts.verbs.nics))
    # This folder exists as soon as the first RDMA driver is loaded. It is empty if no device was found.
    rdma_folder = "/sys/class/infiniband"
    if not has_nic and not tree.names(rdma_folder) and not _is_folder_unknown(tree, rdma_folder):
        yield "no RDMA device"
    if is_absent("/proc/driver/nvidia-fs"):
        yield "no nvidia-fs"
    if not tree.names("/run/udev/data") and not _is_folder_unknown(tree, "/run/udev/data"):
        yield "no udev database (/run/udev/data)"
    # The search path of the loader is known only if gdrkit ran on the machine.
    if facts.python and not any(library.path for library in facts.libraries if library.soname == "libcufile.so.0"):
        yield "no libcufile.so.0 in the folders of the loader"


def _is_folder_unknown(tree: host.HostTree, folder: str) -> bool:
    """Return whether the names in a folder could not be read, or are not in the capture."""
    tree.names(folder)  # Adds the folder to `tree.unreadable` if it cannot be read.
    return any(unreadable_file.path == folder for unreadable_file in tree.unreadable)
