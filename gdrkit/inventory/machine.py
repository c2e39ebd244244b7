"""A machine as the rules of the doctor examine it: its files, its facts and the results of experiments.

The machine is either the host of this process, or a captured machine. Rules treat both alike.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import gdrkit
from gdrkit import evidence, host
from gdrkit.errors import Reason, UsageError
from gdrkit.inventory.capture import SCHEMA_VERSION, Capture, CapturedFiles, RecordedReads, Recorder
from gdrkit.inventory.child_query import ChildQuery
from gdrkit.inventory.facts import EXPANDABLE_SEGMENTS_VARIABLES
from gdrkit.inventory.gpu_processes import GPU_PROCESSES, observe_gpu_processes
from gdrkit.inventory.observation import Observation
from gdrkit.inventory.probe import probe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gdrkit.inventory.facts import Facts

__all__ = ["Machine", "captured_machine", "this_machine"]

# Environment variables that configure the libraries used by direct transfers.
_VARIABLE_NAMES = (*EXPANDABLE_SEGMENTS_VARIABLES, "LD_LIBRARY_PATH")
_VARIABLE_PREFIXES = ("CUFILE_", "UCX_", "NCCL_NET_GDR", "NCCL_DMABUF")
_EXPERIMENT_TIMEOUT_S = 10.0
# Limit of GPUs, NICs and NVMe controllers in a capture. Rules and the topology compare every pair of them.
_DEVICES_MAX = 512
# Folder for temporary files that must be on a disk. /tmp is often a tmpfs, which has no block device.
_TEMPORARY_FOLDER = "/var/tmp"  # noqa: S108 - each experiment has a folder of its own there.


@dataclass
class Machine:
    """One machine.

    Attributes
    ----------
    files : Files
        Access to the files of the machine, on the disk or in a capture.
    facts : Facts
        Facts about its hardware, its software and its APIs.
    kernel_log : KernelLog
        Messages of its kernel about devices.
    environment : mapping
        Environment variables that matter to direct transfers.
    observations : mapping
        Results of experiments, by the name of the experiment, and the processes that use a GPU.
    may_run_experiments : bool
        Whether experiments may run. On a captured machine they may not, and only their captured results exist.
    is_environment_known : bool
        False for a capture without facts, such as an imported one, because nothing recorded the environment of that
        machine.
    timeout_s : float
        Time limit of an experiment, in seconds.
    """

    files: host.Files
    facts: Facts
    kernel_log: evidence.KernelLog
    environment: Mapping[str, str]
    observations: dict[str, Observation] = field(default_factory=dict)
    may_run_experiments: bool = False
    is_environment_known: bool = True
    timeout_s: float = _EXPERIMENT_TIMEOUT_S

    @cached_property
    def pci_functions(self) -> tuple[host.PciDevice, ...]:
        """All PCI functions of the machine."""
        return host.pci_devices(host.HostTree.of(self.files))

    @cached_property
    def all_mounts(self) -> tuple[host.Mount, ...]:
        """All mounts of the machine."""
        return host.mounts(host.HostTree.of(self.files))

    @property
    def has_gpu_or_nic(self) -> bool:
        """Whether the machine has a GPU, an accelerator or an RDMA NIC, according to PCI, sysfs or its APIs."""
        facts = self.facts
        return bool(
            any(host.is_gpu(function) or host.is_nic(function) for function in self.pci_functions)
            or facts.rdma_devices
            or facts.accelerators
            or (facts.cuda and facts.cuda.devices)
            or (facts.verbs and facts.verbs.nics)
        )

    def observe(self, name: str) -> Observation | None:
        """Return the result of the experiment `name`, or None if there is no result and experiments may not run.

        The first call runs the experiment, in a child process with a time limit. The observation ``gpu_processes`` is
        no experiment: :func:`this_machine` has read the processes that use a GPU.
        """
        from gdrkit.inventory.experiments import EXPERIMENTS

        if name in EXPERIMENTS and name not in self.observations and self.may_run_experiments:
            # The folder and the files in it are removed even if the process of the experiment had to be killed.
            parent_folder = _TEMPORARY_FOLDER if os.access(_TEMPORARY_FOLDER, os.W_OK) else None
            with tempfile.TemporaryDirectory(prefix="gdrkit-experiment-", dir=parent_folder) as folder:
                # Without this variable libcufile would write its log into the current folder.
                cufile_variables = {"CUFILE_LOGFILE_PATH": f"{folder}/cufile.log"}
                environment = {**cufile_variables, **os.environ, "TMPDIR": folder}
                query = ChildQuery(["gdrkit.inventory.experiments", name], environment)
                observations_by_step, failure = query.result(self.timeout_s)
            self.observations[name] = Observation(name=name, seen=observations_by_step or {}, failure=failure)
        return self.observations.get(name)

    def capture(self) -> Capture:
        """Return a capture of everything that was read on the machine so far.

        :attr:`files` must be a :class:`Recorder` or a capture; otherwise the capture has no files.
        """
        recorded_reads = self.files.reads if isinstance(self.files, Recorder | CapturedFiles) else RecordedReads()
        return Capture(
            schema_version=SCHEMA_VERSION,
            origin=f"gdrkit {gdrkit.__version__} facts --save",
            answers=recorded_reads,
            facts=self.facts,
            kernel_log=self.kernel_log,
            environment=dict(self.environment),
            observations=tuple(self.observations.values()),
        )


def this_machine(
    *, query_apis: bool = True, record_files: bool = False, run_experiments: bool = True, facts: Facts | None = None
) -> Machine:
    """Return the machine on which this process runs.

    Parameters
    ----------
    query_apis : bool
        Whether to query the APIs of this machine, in child processes.
    record_files : bool
        Whether to record the files that are read, for :meth:`Machine.capture`.
    run_experiments : bool
        Whether rules may run experiments.
    facts : Facts or None
        The facts about this machine, if the caller already has them. Otherwise they are collected here.
    """
    files: host.Files = host.DiskFiles()
    files = Recorder(files) if record_files else files
    tree = host.HostTree.of(files)
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in _VARIABLE_NAMES or name.startswith(_VARIABLE_PREFIXES)
    }
    return Machine(
        files=files,
        facts=probe(tree, query_apis=query_apis) if facts is None else facts,
        kernel_log=evidence.kernel_log(host.HostTree()),
        environment=environment,
        # Reading every process takes time. Without /dev/nvidiactl no process has a GPU open, so none is read.
        observations={GPU_PROCESSES: observe_gpu_processes()} if Path("/dev/nvidiactl").exists() else {},
        may_run_experiments=run_experiments,
    )


def captured_machine(capture: Capture) -> Machine:
    """Return the machine that a capture describes. If the capture has no facts, they are read from its files.

    Raises
    ------
    UsageError
        ``MALFORMED``: the capture has more than 512 GPUs, NICs and NVMe controllers.
    """
    files = CapturedFiles(capture.answers)
    facts = capture.facts
    if facts is None:
        facts = probe(host.HostTree.of(files), environment=capture.environment, query_apis=False)
    kernel_log = capture.kernel_log or evidence.KernelLog(lines=(), unreadable="the kernel log is not in the capture")
    machine = Machine(
        files=files,
        facts=facts,
        kernel_log=kernel_log,
        environment=capture.environment,
        is_environment_known=capture.facts is not None,
        observations={observation.name: observation for observation in capture.observations},
    )
    pci_device_count = sum(
        host.is_gpu(function) or host.is_nic(function) or host.is_nvme(function) for function in machine.pci_functions
    )
    device_count = max(pci_device_count, len(facts.rdma_devices), len(facts.nvme), len(facts.gpus))
    if device_count > _DEVICES_MAX:
        message = f"capture: at most {_DEVICES_MAX} GPUs, NICs and NVMe controllers are supported, not {device_count}"
        raise UsageError(message, reason=Reason.MALFORMED)
    return machine
