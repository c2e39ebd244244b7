"""What would run here, and why the rest would not.

Level 6.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit import plain
from gdrkit.errors import Api, Reason, UsageError
from gdrkit.report.record import CaseReason  # noqa: TC001 - types of fields are read at run time.

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


__all__ = ["Plan", "PlannedCase", "fitting_sessions", "read_plan"]


@dataclass(frozen=True, slots=True)
class PlannedCase:
    """One case, its needs by name, and those that are not met.

    ``refused``: it runs all the same, since the profile states with which refusal it must end.
    """

    case: str
    title: str
    needs: tuple[str, ...]
    unmet: tuple[CaseReason, ...]
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """The cases of a run, in the order in which they run."""

    profile: str
    cases: tuple[PlannedCase, ...]

    @property
    def running(self) -> tuple[PlannedCase, ...]:
        """Those whose needs are met."""
        return tuple(case for case in self.cases if not case.unmet)


def read_plan(path: Path) -> Plan:
    """Read what the collecting child has written."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        message = f"{path}: no plan: {error}"
        raise UsageError(message, reason=Reason.MALFORMED) from error
    return plain.from_plain(Plan, data, where="plan")


def fitting_sessions(hardware: Mapping[Api, str], twins: frozenset[Api]) -> dict[str, dict[str, object]]:
    """Which sessions of the noxfile make sense on this machine, and why.

    Parameters
    ----------
    hardware : mapping
        What :func:`gdrkit.launch.present_hardware` found.
    twins : frozenset of Api
        The twins that are installed.

    Returns
    -------
    mapping
        For each session ``fits``, ``why``, its ``arguments``, and whether it is about the ``hardware`` of the machine:
        those `nox -s hardware` chooses from.
    """
    there = "; ".join(what for _, what in sorted(hardware.items(), key=lambda pair: pair[0].value))
    nics = hardware.get(Api.VERBS, "")
    on_twins = {"fits": bool(twins), "why": "the twins are installed" if twins else "the twins are not installed"}
    return {
        "qualify": {
            "fits": bool(hardware or twins),
            "hardware": True,
            "arguments": [] if hardware else ["--software"],
            "why": there or "no hardware here; it runs on the twins",
        },
        "direct": {
            "fits": bool(hardware),
            "hardware": True,
            "arguments": [],
            "why": there or "no RDMA device and no GPU here",
        },
        "lab": {
            "fits": bool(nics),
            "hardware": True,
            "arguments": [],
            "why": nics or "no RDMA device here; by itself it runs in a virtual machine",
        },
        "suites": {**on_twins, "hardware": False, "arguments": []},
    }
