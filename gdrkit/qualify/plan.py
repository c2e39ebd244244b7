"""The plan of a run: the cases that would run here, and why the others would not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit import serialization
from gdrkit.errors import Api, Reason, UsageError
from gdrkit.report.record import CaseReason  # noqa: TC001 - types of fields are read at run time.

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


__all__ = ["Plan", "PlannedCase", "fitting_sessions", "read_plan"]


@dataclass(frozen=True, slots=True)
class PlannedCase:
    """A case, its needs by name, and those that are not met.

    If ``refused`` is true, the case runs all the same, because the profile states with which refusal it must end.
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
        """The cases whose needs are met."""
        return tuple(case for case in self.cases if not case.unmet)


def read_plan(path: Path) -> Plan:
    """Read the plan that the collecting child wrote."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        message = f"{path}: no plan: {error}"
        raise UsageError(message, reason=Reason.MALFORMED) from error
    return serialization.from_json_data(Plan, data, where="plan")


def fitting_sessions(hardware: Mapping[Api, str], twins: frozenset[Api]) -> dict[str, dict[str, object]]:
    """Return which sessions of the noxfile make sense on this machine, and why.

    Parameters
    ----------
    hardware : mapping
        The result of :func:`gdrkit.launch.present_hardware`.
    twins : frozenset of Api
        The twins that are installed.

    Returns
    -------
    mapping
        For each session ``fits``, ``why``, its ``arguments``, and ``hardware``: whether it is about the hardware of the
        machine. `nox -s hardware` chooses from the sessions for which ``hardware`` is true.
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
