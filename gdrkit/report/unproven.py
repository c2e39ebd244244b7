"""Groups of cases that did not run or that ran on software, with the hardware that they need to prove something.

A need is what a case requires of the machine. The profile of the machine can list needs that may be unmet on this
machine; such an unmet need is foreseen. Software means a software twin (a library that emulates the hardware) or a
software device of the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from gdrkit.report.record import Verdict
from gdrkit.report.sweep import describes_hardware, measured_apis, parse_number_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.report.record import Record

__all__ = ["UnprovenCases", "needed_hardware", "unproven_cases"]

# The hardware that meets a need. The first pattern that matches the name of the need applies.
_HARDWARE_BY_NEED = (
    ("cuda.device(count_min=*)", "that many NVIDIA GPUs in one host, with their driver"),
    ("cuda.*", "an NVIDIA GPU that supports it (data centre or professional), with its driver"),
    ("verbs.nic(count_min=*)", "that many RDMA NICs with an active port"),
    ("verbs.dmabuf_region", "an RDMA NIC whose driver supports dma-buf regions (mlx5 of Linux 5.12 or newer)"),
    ("verbs.peer_memory", "an RDMA NIC and a GPU whose driver has nvidia-peermem"),
    ("verbs.no_way_to_devices", "nothing: the case is for machines whose NICs cannot register device memory"),
    ("verbs.*", "an RDMA NIC"),
    ("cufile.*", "an NVIDIA GPU, and storage that GPUDirect Storage supports"),
    ("gaudi.*", "an Intel Gaudi accelerator with the driver habanalabs"),
    ("software(*)", "nothing: the case is about the software twin itself; add --software"),
    ("host.*", "no hardware: this host must be set up for it"),
)
# The hardware on which the cases of an API prove something.
_HARDWARE_BY_API = {
    "verbs": "an RDMA NIC with an active port",
    "cuda": "an NVIDIA GPU with its driver",
    "cufile": "an NVIDIA GPU with GPUDirect Storage (nvidia-fs or P2PDMA)",
    "hlthunk": "an Intel Gaudi accelerator with the driver habanalabs",
}
_SOFTWARE_TEXTS = {"twin": "on a software twin of {}", "kernel_software": "with {} on software in the kernel"}


@dataclass(frozen=True, slots=True)
class UnprovenCases:
    """Cases that proved nothing about hardware, all for one reason.

    Attributes
    ----------
    need_or_api : str
        Name of the unmet need, or of the API that did not run on hardware.
    reason : str
        Why the cases proved nothing.
    needed : str
        The hardware that the cases need to prove something.
    ran : bool
        Whether the cases ran.
    foreseen : bool
        Whether the profile lists the need as one that may be unmet. True for cases that ran.
    cases : tuple of str
        The ids of the cases.
    """

    need_or_api: str
    reason: str
    needed: str
    ran: bool
    foreseen: bool
    cases: tuple[str, ...]


_NO_RATE_MEASURED = UnprovenCases(
    "throughput",
    "no rate was measured: rates of software say nothing about a machine",
    "an NVIDIA GPU with its driver, for RDMA an RDMA NIC too; hardware/throughput has the cases",
    ran=False,
    foreseen=True,
    cases=(),
)


def unproven_cases(records: Sequence[Record]) -> tuple[UnprovenCases, ...]:
    """Return the groups of cases that proved nothing about hardware.

    The first groups are the cases that did not run: first those with an unforeseen unmet need, then those with a
    foreseen one. The cases that ran on software follow.
    """
    cases_not_run: dict[tuple[bool, str, str], list[str]] = {}
    cases_on_software: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if record.verdict is Verdict.NOT_RUN:
            for reason in record.reasons:
                cases_not_run.setdefault((reason.foreseen is True, reason.need or "", reason.text), []).append(
                    record.case
                )
        # An earlier case may have loaded other APIs into the same process, so only the APIs that the case needs count.
        for api in measured_apis(record):
            if (substrate := record.substrate.get(api, "")) in _SOFTWARE_TEXTS:
                cases_on_software.setdefault((api, substrate), []).append(record.case)
    groups = [
        UnprovenCases(need, reason_text, needed_hardware(need), ran=False, foreseen=foreseen, cases=tuple(cases))
        for (foreseen, need, reason_text), cases in sorted(cases_not_run.items())
    ]
    groups += [
        UnprovenCases(
            api,
            f"ran {_SOFTWARE_TEXTS[substrate].format(api)}, which proves nothing about hardware",
            _HARDWARE_BY_API.get(api, f"hardware of {api}"),
            ran=True,
            foreseen=True,
            cases=tuple(cases),
        )
        for (api, substrate), cases in sorted(cases_on_software.items())
    ]
    if not any(_measures_hardware(record) for record in records):
        groups.append(_NO_RATE_MEASURED)
    return tuple(groups)


def _measures_hardware(record: Record) -> bool:
    """Return whether a record has a rate or a time that was measured on hardware."""
    return describes_hardware(record) and any(
        parse_number_name(number_name).better_sign for number_name in record.numbers
    )


def needed_hardware(need: str) -> str:
    """Return a description of the hardware that meets the need with this name."""
    return next(
        (hardware for pattern, hardware in _HARDWARE_BY_NEED if fnmatchcase(need, pattern)), "see the name of the need"
    )
