"""Rules about the processes that use GPUs: CUDA IPC between them, and their descriptors."""

from __future__ import annotations

import re
from collections import Counter
from itertools import combinations
from typing import TYPE_CHECKING

from gdrkit.inventory.gpu_processes import GPU_PROCESSES
from gdrkit.inventory.rules.base import RuleContext, RuleResult, rule
from gdrkit.text import format_count
from gdrkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gdrkit.inventory.gpu_processes import GpuProcess

__all__ = ["RULES", "describe_dmabuf_holders"]

_PID_NAMESPACE = "PID namespace"
_IMEX_CHANNELS_FOLDER = "/dev/nvidia-caps-imex-channels"
_PTRACE_SCOPE_PATH = "/proc/sys/kernel/yama/ptrace_scope"
# With this ptrace_scope, no process may attach to another one, whatever its capabilities.
_PTRACE_SCOPE_NO_ATTACH = 3
# The link /proc/self/ns/pid in the first PID namespace of every machine (PROC_PID_INIT_INO of Linux).
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
# The rule reports a smaller limit of open descriptors than this one.
_DESCRIPTOR_LIMIT_MIN = 1024
# From this share of used descriptors on, the rule reports that a process or the machine will soon have none left.
_REPORTED_USE_PERCENT = 80
_LISTED_TEXTS_MAX, _COMPARED_PROCESSES_MAX = 4, 64


def _are_of_one_job(first: GpuProcess, second: GpuProcess) -> bool | None:
    """Return whether two processes are of one job, or None if that is unknown."""
    if first.job_variables and first.job_variables == second.job_variables:
        return True
    if set(first.job_variables) & set(second.job_variables):
        return None  # Some variables are equal, others are not: these may be two steps of one job.
    if dict(first.job_variables).keys() & dict(second.job_variables).keys():
        return False  # The same scheduler has given them different values.
    return None if first.rendezvous and first.rendezvous == second.rendezvous else False


def _find_obstacle(first: GpuProcess, second: GpuProcess) -> str | None:
    """Return why one process may be unable to open a CUDA IPC handle of the other, or None if no reason is known."""
    for title, attribute_name in (
        (_PID_NAMESPACE, "pid_namespace"),
        ("IPC namespace", "ipc_namespace"),
        ("user", "user_id"),
    ):
        values = {getattr(process, attribute_name) for process in (first, second)}
        if len(values - {None}) > 1:
            return f"another {title}"
    device_orders = {process.environment.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST") for process in (first, second)}
    if len(device_orders) > 1:
        return "another CUDA_DEVICE_ORDER"
    device_lists = [process.environment.get("CUDA_VISIBLE_DEVICES", "").split(",") for process in (first, second)]
    if device_lists[0] != device_lists[1] and sorted(device_lists[0]) == sorted(device_lists[1]):
        return "the same CUDA_VISIBLE_DEVICES in another order"
    return None


def _find_pairs_with_obstacle(processes: Sequence[GpuProcess]) -> Iterator[tuple[bool | None, str, str]]:
    """Yield an entry for each pair of processes that has an obstacle to CUDA IPC.

    An entry has three values: whether the two processes are of one job (None: unknown), the obstacle, and a text that
    names the processes and the obstacle.
    """
    # The rule compares only the first of several processes with equal values, because a hostile capture may contain a
    # great number of processes. A dict keeps the last value of a key, so the processes are inserted in reverse order.
    distinct_processes = {
        (
            process.pid_namespace,
            process.ipc_namespace,
            process.user_id,
            tuple(sorted(process.environment.items())),
        ): process
        for process in reversed(processes)
    }
    for first, second in combinations(list(reversed(distinct_processes.values()))[:_COMPARED_PROCESSES_MAX], 2):
        obstacle = _find_obstacle(first, second)
        if obstacle:
            yield _are_of_one_job(first, second), obstacle, f"{first.title} and {second.title}: {obstacle}"


def _find_ptrace_obstacle(context: RuleContext) -> str | None:
    """Return why processes may be unable to share memory that cuMemCreate allocated, or None if no reason is known."""
    ptrace_scope = context.tree.number(_PTRACE_SCOPE_PATH)
    context.record(_PTRACE_SCOPE_PATH, "does not exist" if ptrace_scope is None else ptrace_scope)
    if not context.has_expandable_segments or not ptrace_scope:
        return None
    if ptrace_scope < _PTRACE_SCOPE_NO_ATTACH and "CAP_SYS_PTRACE" in context.facts.limits.capabilities:
        return None
    return (
        "this environment enables expandable segments, which are shared by pidfd_getfd(2): "
        f"ptrace_scope {ptrace_scope} may forbid it"
    )


@rule(
    code="cuda-ipc-refused",
    title="processes of one job cannot share GPU memory by CUDA IPC",
    why="A process cannot open a CUDA IPC handle from another PID namespace. It fails with CUresult 201, or the "
    "library falls back to TCP or host memory and says nothing. Fabric handles, which need an IMEX channel, have no "
    "such limit. Events of CUDA IPC need a common /dev/shm, and memory of cuMemCreate is shared by descriptors, which "
    "need ptrace access.",
    remedy="start the containers with a common PID namespace (`--pid=container:NAME` or `--pid=host`; hostPID in "
    "Kubernetes), and for events with a common IPC namespace (`--ipc=container:NAME` or `--ipc=host`; hostIPC); for "
    "expandable segments set kernel.yama.ptrace_scope=0 or give CAP_SYS_PTRACE; or send the descriptor of a dma-buf "
    "over a Unix socket",
    reads="of every process that has /dev/nvidia-uvm open: user, /proc/*/ns/{pid,ipc}, CUDA_DEVICE_ORDER, "
    "CUDA_VISIBLE_DEVICES, and the variables that identify its job; /dev/nvidia-caps-imex-channels; "
    "/proc/sys/kernel/yama/ptrace_scope; PYTORCH_ALLOC_CONF, PYTORCH_CUDA_ALLOC_CONF",
    privilege="CAP_SYS_PTRACE for processes of other users",
    source="vllm-project/vllm #55906 (PID namespaces), openucx/ucx #11514 (PID namespaces, IMEX channels), "
    "LMCache/LMCache #4550 (events and IPC namespaces), pytorch/pytorch #165685 (pidfd_getfd); pidfd_getfd(2); Yama in "
    "the administrator's guide of Linux",
)
def _check_cuda_ipc_refused(context: RuleContext) -> RuleResult:
    if not context.has_gpu:
        return context.not_run("no GPU here")
    processes = [process for process in context.gpu_processes() if process.has_contexts]
    obstructed_pairs = list(_find_pairs_with_obstacle(processes))
    refused_pair_texts = [
        text
        for are_of_one_job, obstacle, text in obstructed_pairs
        if are_of_one_job and obstacle == f"another {_PID_NAMESPACE}"
    ]
    if (
        refused_pair_texts
        and not context.names(_IMEX_CHANNELS_FOLDER)
        and not context.is_uncaptured(_IMEX_CHANNELS_FOLDER)
    ):
        return context.fails(_join_shortened(refused_pair_texts))
    undecided_texts = [text for are_of_one_job, _, text in obstructed_pairs if are_of_one_job is not False]
    has_shared_job = any(
        count > 1 for count in Counter(process.job_variables for process in processes if process.job_variables).values()
    )
    obstacle = _find_ptrace_obstacle(context) if has_shared_job else None
    undecided_texts += [obstacle] if obstacle else []
    if undecided_texts:
        return context.unproven(
            f"CUDA IPC may be refused between processes of one job: {_join_shortened(undecided_texts)}"
        )
    if context.machine.observe(GPU_PROCESSES) is None:
        return context.not_run("the processes that use GPUs were not read")
    unseen_processes = "; ".join(filter(None, (_describe_namespace_gap(context), context.unread_gpu_processes)))
    seen_text = f"saw {format_count(len(processes), 'process', 'processes')} with CUDA contexts"
    unseen_suffix = f"; not seen: {unseen_processes}" if unseen_processes else ""
    if len(processes) > 1 and (has_shared_job or not obstructed_pairs):
        return context.passes(
            f"{seen_text}, and no two of one job differ in user, namespace or order of the GPUs{unseen_suffix}"
        )
    unrelated_text = (
        f", and nothing shows that they are of one job: {_join_shortened([text for _, _, text in obstructed_pairs])}"
    )
    return context.not_run(seen_text + (unrelated_text if obstructed_pairs else "") + unseen_suffix)


def _describe_namespace_gap(context: RuleContext) -> str | None:
    """Return what a process in a PID namespace of its own does not see, or None if this is the first namespace."""
    namespace = context.tree.link_name("/proc/self/ns/pid")
    context.record("/proc/self/ns/pid", namespace or "not readable")
    if namespace in (None, _FIRST_PID_NAMESPACE):
        return None
    return "processes outside of this PID namespace, which cannot share memory with those in it"


def _join_shortened(texts: Sequence[str]) -> str:
    remaining_text = f"; and {len(texts) - _LISTED_TEXTS_MAX} more" if len(texts) > _LISTED_TEXTS_MAX else ""
    return "; ".join(texts[:_LISTED_TEXTS_MAX]) + remaining_text


@rule(
    code="descriptors-low",
    title="a process runs out of descriptors",
    why="Some libraries keep one descriptor of a dma-buf for each registration. At the limit, "
    "cuMemGetHandleForAddressRange fails with CUDA_ERROR_OPERATING_SYSTEM (304), and open and socket with EMFILE.",
    remedy="raise the limit (`ulimit -n 1048576`, LimitNOFILE= in the unit, `--ulimit nofile=1048576` for a "
    "container), or fs.file-max for the machine; close the descriptor of a dma-buf after its registration, or use a "
    "registration cache",
    reads="/proc/self/limits, /proc/sys/fs/file-nr; of every process that has a GPU open: its descriptors, its "
    "dma-bufs and its limit",
    privilege="CAP_SYS_PTRACE for processes of other users",
    source="ofiwg/libfabric #12828",
)
def _check_descriptors_low(context: RuleContext) -> RuleResult:
    if not context.has_gpu and not context.has_nic:
        return context.not_run("neither a GPU nor an RDMA device here")
    causes = list(_find_exhausted_descriptors(context))
    descriptor_limit = context.facts.limits.open_files
    if descriptor_limit is not None:
        context.record("/proc/self/limits", f"Max open files {descriptor_limit}")
        if descriptor_limit < _DESCRIPTOR_LIMIT_MIN:
            causes.append(
                f"this process may open {format_count(descriptor_limit, 'descriptor')}, "
                "and a job may need one for each registration"
            )
    if causes:
        return context.fails(_join_shortened(causes))
    if descriptor_limit is None and not context.facts.limits.memlock_known:
        return context.not_run("the limit cannot be read")
    text = f"{'any number of' if descriptor_limit is None else descriptor_limit} descriptors may be open"
    process_count, unread_processes = len(context.gpu_processes()), context.unread_gpu_processes
    text += f", and none of {process_count} processes that use a GPU is near its limit" if process_count else ""
    return context.passes(f"{text}; not seen: {unread_processes}" if unread_processes else text)


def _find_exhausted_descriptors(context: RuleContext) -> Iterator[str]:
    """Yield a text for each process that has a GPU open, and for the machine, if few descriptors are left."""
    for process in context.gpu_processes():
        descriptor_limit = process.descriptors_max
        if descriptor_limit is not None and process.descriptors_count * 100 >= descriptor_limit * _REPORTED_USE_PERCENT:
            yield (
                f"{process.title} has {process.descriptors_count} of {descriptor_limit} descriptors open, "
                f"{process.dmabufs_count} of them dma-bufs"
            )
    # The file has the number of open files, an unused number, and the limit.
    file_nr_match = re.fullmatch(r"(\d+)\s+\d+\s+(\d+)", context.text("/proc/sys/fs/file-nr") or "")
    if file_nr_match and int(file_nr_match[1]) * 100 >= int(file_nr_match[2]) * _REPORTED_USE_PERCENT:
        yield f"the machine has {file_nr_match[1]} of {file_nr_match[2]} files open"


def describe_dmabuf_holders(context: RuleContext) -> str:
    """Return which processes hold dma-bufs, those with the most bytes first; empty if none is known."""
    holders = sorted(context.gpu_processes(), key=lambda process: -process.dmabuf_bytes)
    return _join_shortened(
        [
            f"{process.title} holds {process.dmabufs_count} dma-bufs with {format_bytes(process.dmabuf_bytes)}"
            for process in holders
            if process.dmabufs_count
        ]
    )


RULES = (_check_cuda_ipc_refused, _check_descriptors_low)
