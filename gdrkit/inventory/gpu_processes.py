"""The processes that use a GPU: their users, namespaces and descriptors, and the variables that choose their GPUs.

The result is an :class:`~gdrkit.inventory.Observation`, so that a capture contains it. For privacy, the observation
contains neither the names of other open files nor other variables of the processes.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from gdrkit import evidence, host, serialization
from gdrkit.errors import Reason, UsageError, errno_name
from gdrkit.inventory.observation import Observation
from gdrkit.text import single_line

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["GPU_PROCESSES", "NOT_READABLE", "GpuProcess", "observe_gpu_processes"]

# The name of the observation, and the name of its step that says how many processes could not be read.
GPU_PROCESSES = "gpu_processes"
NOT_READABLE = "not readable"
_GPU_CHOICE_VARIABLES = ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES")
# Variables of schedulers and MPI. All processes of a job have the same value, and every other job has another value.
_JOB_VARIABLES = ("SLURM_JOB_ID", "PMIX_NAMESPACE", "PBS_JOBID", "LSB_JOBID", "OMPI_MCA_ess_base_jobid")
# The address at which the processes of a job meet. It does not identify the job, because two jobs in containers may
# both use localhost and the default port.
_RENDEZVOUS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
_GPU_NODE = re.compile(r"nvidia\d+")


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """One process that has a GPU open. A value that could not be read is None.

    Attributes
    ----------
    user_id : int or None
        ID of the effective user.
    pid_namespace, ipc_namespace : int or None
        Inode numbers of the namespaces of the process.
    gpus : tuple of str
        The open device nodes, e.g. ``nvidia0``.
    has_contexts : bool
        Whether nvidia-uvm is open, as in every process with a CUDA context. Programs that only monitor GPUs do not open
        it.
    descriptors_count, descriptors_max : int and int or None
        Number of open descriptors, and the soft limit of this number.
    dmabufs_count, dmabuf_bytes : int
        Number of dma-bufs that the process holds, and the sum of their sizes in bytes.
    environment : mapping
        The variables that choose and order GPUs, and the variables of schedulers and of the rendezvous.
    """

    process_id: int
    program: str
    user_id: int | None
    pid_namespace: int | None
    ipc_namespace: int | None
    gpus: tuple[str, ...]
    has_contexts: bool
    descriptors_count: int
    descriptors_max: int | None
    dmabufs_count: int
    dmabuf_bytes: int
    environment: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the JSON text with which an observation describes one process.

        Raises
        ------
        UsageError
            ``MALFORMED``: the text is not JSON or has an invalid field.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            message = f"the observation of a process is not JSON: {text[:80]!r}"
            raise UsageError(message, reason=Reason.MALFORMED) from error
        return serialization.from_json_data(cls, data, where="the observation of a process")

    @property
    def title(self) -> str:
        """The name of the process in texts: its ID, and the program name, which a process can choose freely."""
        return f"pid {self.process_id} ({single_line(self.program)})"

    @property
    def job_variables(self) -> tuple[tuple[str, str], ...]:
        """Names and values of the variables that identify the job of the process; empty if no scheduler set them."""
        return tuple((name, self.environment[name]) for name in _JOB_VARIABLES if name in self.environment)

    @property
    def rendezvous(self) -> tuple[str, ...]:
        """The address and the port at which the processes of the job meet; empty if neither is set."""
        return tuple(self.environment[name] for name in _RENDEZVOUS_VARIABLES if name in self.environment)


def observe_gpu_processes(*, folder: str = "/dev") -> Observation:
    """Observe every process of this PID namespace that has a GPU open, except the calling process.

    Parameters
    ----------
    folder : str
        The folder of the device nodes.
    """
    tree, text_by_step, count_by_errno = host.HostTree(), {}, dict[str, int]()
    for pid in sorted(filter(str.isdecimal, tree.names("/proc")), key=int):
        try:
            target_by_descriptor = evidence.descriptor_targets(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue  # The process has ended.
        except OSError as error:
            count_by_errno[errno_name(error.errno)] = count_by_errno.get(errno_name(error.errno), 0) + 1
            continue
        device_node_names = {
            target.removeprefix(f"{folder}/")
            for target in target_by_descriptor.values()
            if target.startswith(f"{folder}/")
        }
        gpus = sorted(node for node in device_node_names if _GPU_NODE.fullmatch(node))
        if (gpus or "nvidia-uvm" in device_node_names) and int(pid) != os.getpid():
            process = _read_gpu_process(
                tree, pid, target_by_descriptor, gpus, has_contexts="nvidia-uvm" in device_node_names
            )
            text_by_step[process.title] = json.dumps(serialization.to_json_data(process))
    if count_by_errno:
        unreadable_count = sum(count_by_errno.values())
        text_by_step[NOT_READABLE] = (
            f"whether {unreadable_count} other processes use a GPU ({', '.join(count_by_errno)}): "
            "this needs CAP_SYS_PTRACE"
        )
    return Observation(GPU_PROCESSES, seen=text_by_step)


def _read_gpu_process(
    tree: host.HostTree, pid: str, target_by_descriptor: dict[int, str], gpus: Iterable[str], *, has_contexts: bool
) -> GpuProcess:
    # The line has the real, the effective, the saved and the file system user ID.
    effective_user_match = re.search(r"^Uid:\s+\d+\s+(\d+)", tree.text(f"/proc/{pid}/status") or "", re.MULTILINE)
    environ_text = (tree.data(f"/proc/{pid}/environ") or b"").decode("utf-8", "backslashreplace")
    variables = dict(entry.partition("=")[::2] for entry in environ_text.split("\0") if "=" in entry)
    dmabufs = evidence.held_dmabufs(tree, pid, target_by_descriptor)
    return GpuProcess(
        process_id=int(pid),
        program=(tree.text(f"/proc/{pid}/comm") or "").strip(),
        user_id=int(effective_user_match[1]) if effective_user_match else None,
        pid_namespace=_read_namespace(tree, pid, "pid"),
        ipc_namespace=_read_namespace(tree, pid, "ipc"),
        gpus=tuple(gpus),
        has_contexts=has_contexts,
        descriptors_count=len(target_by_descriptor),
        descriptors_max=host.process_limits(tree, process=pid).open_files,
        dmabufs_count=len(dmabufs),
        dmabuf_bytes=sum(dmabuf.size_bytes for dmabuf in dmabufs),
        environment={
            name: variables[name]
            for name in (*_GPU_CHOICE_VARIABLES, *_JOB_VARIABLES, *_RENDEZVOUS_VARIABLES)
            if name in variables
        },
    )


def _read_namespace(tree: host.HostTree, pid: str, namespace_type: str) -> int | None:
    match = re.fullmatch(rf"{namespace_type}:\[(\d+)\]", tree.link_name(f"/proc/{pid}/ns/{namespace_type}") or "")
    return int(match[1]) if match else None
