"""Cases that did not run or proved nothing, and the hardware that would change that."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from gdrkit.report.record import Verdict
from gdrkit.report.sweep import is_shown, measured_apis, split_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.report.record import Record

__all__ = ["Lock", "locks", "unlocked_by"]

# The first pattern that matches the name of a need applies.
_NEEDS = (
    ("cuda.device(count_min=*)", "that many NVIDIA GPUs in one host, with their driver"),
    ("cuda.*", "an NVIDIA GPU of a class that has it (data centre or professional), with its driver"),
    ("verbs.nic(count_min=*)", "that many RDMA NICs with an active port"),
    ("verbs.dmabuf_region", "an RDMA NIC whose driver takes dma-buf regions (mlx5 of Linux 5.12 or newer)"),
    ("verbs.peer_memory", "an RDMA NIC beside a GPU whose driver has nvidia-peermem"),
    ("verbs.no_way_to_devices", "nothing: the case is about machines that cannot do it"),
    ("verbs.*", "an RDMA NIC"),
    ("cufile.*", "an NVIDIA GPU, and storage that GPUDirect Storage supports"),
    ("gaudi.*", "an Intel Gaudi accelerator with the driver habanalabs"),
    ("software(*)", "nothing: the case is about the software twin itself; add --software"),
    ("host.*", "no hardware: this host must be set up for it"),
)
# The hardware that each API needs to prove something.
_APIS = {
    "verbs": "an RDMA NIC with an active port",
    "cuda": "an NVIDIA GPU with its driver",
    "cufile": "an NVIDIA GPU with GPUDirect Storage (nvidia-fs or P2PDMA)",
    "hlthunk": "an Intel Gaudi accelerator with the driver habanalabs",
}
_BENEATH = {"twin": "on a software twin of {}", "kernel_software": "on software in the kernel beneath {}"}


@dataclass(frozen=True, slots=True)
class Lock:
    """Cases that showed less than they could, all for one reason.

    Attributes
    ----------
    what : str
        An unmet need, or the API that did not run on hardware.
    reason : str
        The reason.
    key : str
        The hardware that would unlock the cases.
    ran : bool
        Whether the cases ran, but proved nothing about hardware.
    foreseen : bool
        Whether the profile foresees that the cases do not run.
    cases : tuple of str
        The ids of the cases.
    """

    what: str
    reason: str
    key: str
    ran: bool
    foreseen: bool
    cases: tuple[str, ...]


_NO_RATE = Lock(
    "throughput",
    "no rate was measured: what software moves in a second says nothing about a machine",
    "an NVIDIA GPU with its driver, for RDMA an RDMA NIC too; hardware/throughput has the cases",
    ran=False,
    foreseen=True,
    cases=(),
)


def locks(records: Sequence[Record]) -> tuple[Lock, ...]:
    """Return the locks of a run: cases that did not run, unforeseen first, then cases that ran without hardware."""
    unrun: dict[tuple[bool, str, str], list[str]] = {}
    beneath: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if record.verdict is Verdict.NOT_RUN:
            for reason in record.reasons:
                unrun.setdefault((reason.foreseen is True, reason.need or "", reason.text), []).append(record.case)
        # Not all loaded APIs count, because an earlier case of the process may have loaded them.
        for api in measured_apis(record):
            if (name := record.substrate.get(api, "")) in _BENEATH:
                beneath.setdefault((api, name), []).append(record.case)
    found = [
        Lock(need, text, unlocked_by(need), ran=False, foreseen=foreseen, cases=tuple(cases))
        for (foreseen, need, text), cases in sorted(unrun.items())
    ]
    found += [
        Lock(
            api,
            f"ran {_BENEATH[name].format(api)}, which proves nothing about hardware",
            _APIS.get(api, f"hardware of {api}"),
            ran=True,
            foreseen=True,
            cases=tuple(cases),
        )
        for (api, name), cases in sorted(beneath.items())
    ]
    if not any(_measures(record) for record in records):
        found.append(_NO_RATE)
    return tuple(found)


def _measures(record: Record) -> bool:
    return is_shown(record) and any(split_number(name).better for name in record.numbers)


def unlocked_by(need: str) -> str:
    """Return the hardware that meets a need, by the name of the need."""
    return next((key for pattern, key in _NEEDS if fnmatchcase(need, pattern)), "what the need names")
