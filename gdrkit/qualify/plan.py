"""The plan of a qualification: the cases that can run on this machine, and the reason why each other case cannot.

The pytest plugin of gdrkit writes the plan as plan.json when pytest has collected the cases. ``gdrkit plan`` shows it.
A need is what a case requires of the machine. Cases can also run on software twins (libraries that emulate the
hardware).
"""

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


__all__ = ["CasePlan", "PlannedCase", "list_nox_sessions", "read_plan"]


@dataclass(frozen=True, slots=True)
class PlannedCase:
    """A case with its declared needs and the needs that this machine does not meet.

    Attributes
    ----------
    case : str
        Id of the case.
    title : str
        First line of the docstring of the case.
    needs : tuple of str
        Names of all needs of the case.
    unmet : tuple of CaseReason
        The needs that this machine does not meet, each with the reason.
    refused : bool
        Whether the case runs although a need is not met, because the profile states the error with which the case must
        fail on this machine.
    """

    case: str
    title: str
    needs: tuple[str, ...]
    unmet: tuple[CaseReason, ...]
    refused: bool = False


@dataclass(frozen=True, slots=True)
class CasePlan:
    """The cases of a run, in the order in which they run, and the name of the profile."""

    profile: str
    cases: tuple[PlannedCase, ...]

    @property
    def running(self) -> tuple[PlannedCase, ...]:
        """The cases whose needs are met."""
        return tuple(case for case in self.cases if not case.unmet)


def read_plan(path: Path) -> CasePlan:
    """Read the plan that the collecting child process wrote.

    Raises
    ------
    UsageError
        ``MALFORMED``: the file cannot be read or is not a plan.
    """
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        message = f"the plan of the cases {path} cannot be read: {error}"
        raise UsageError(message, reason=Reason.MALFORMED) from error
    return serialization.from_json_data(CasePlan, data, where="plan")


def list_nox_sessions(hardware: Mapping[Api, str], twins: frozenset[Api]) -> dict[str, dict[str, object]]:
    """Return the nox sessions (see noxfile.py), and for each of them whether it can run on this machine, and why.

    Parameters
    ----------
    hardware : mapping
        The result of :func:`gdrkit.launch.present_hardware`.
    twins : frozenset of Api
        The APIs whose twins are installed.

    Returns
    -------
    mapping
        For each session: ``fits`` (whether it can run), ``why`` (the reason), ``arguments`` (for the session), and
        ``hardware`` (whether it tests the hardware of the machine; ``nox -s hardware`` runs only such sessions).
    """
    hardware_text = "; ".join(text for _, text in sorted(hardware.items(), key=lambda pair: pair[0].value))
    nic_text = hardware.get(Api.VERBS, "")
    suites_fields = {"fits": bool(twins), "why": "the twins are installed" if twins else "the twins are not installed"}
    return {
        "qualify": {
            "fits": bool(hardware or twins),
            "hardware": True,
            "arguments": [] if hardware else ["--software"],
            "why": hardware_text or "no hardware here; it runs on the twins",
        },
        "direct": {
            "fits": bool(hardware),
            "hardware": True,
            "arguments": [],
            "why": hardware_text or "no RDMA device and no GPU here",
        },
        "lab": {
            "fits": bool(nic_text),
            "hardware": True,
            "arguments": [],
            "why": nic_text or "no RDMA device here; nox -s lab runs it in a virtual machine",
        },
        "suites": {**suites_fields, "hardware": False, "arguments": []},
    }
