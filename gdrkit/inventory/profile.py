"""Profiles: the expected behaviour of a kind of machine, each in one TOML file below hardware/profiles.

A profile states for each API the substrate on which it must run: hardware, software in the kernel, or a software twin
(a library that emulates the hardware). It also lists the foreseen absences (needs of test cases that may be unmet, with
the reason), the registrations that must fail, with the error, and the routes that must be direct. A need that is unmet
and not foreseen fails the run, so a run in which no case ran cannot pass.
"""

from __future__ import annotations

import errno as _errno
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from gdrkit import serialization
from gdrkit.errors import Reason, UsageError, errno_name
from gdrkit.host import DMI_NAMES
from gdrkit.install_paths import install_paths
from gdrkit.inventory.links import LINK_QUANTITIES, ExpectedLink

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from gdrkit.inventory.facts import Facts

__all__ = [
    "ExpectedNumber",
    "ExpectedRefusal",
    "ForeseenAbsence",
    "Match",
    "Profile",
    "RefusalCause",
    "RequiredRoute",
    "choose_profile",
    "load_profile",
    "load_profiles",
]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class ForeseenAbsence:
    """A need of test cases that may be unmet, and the reason. Both attributes are patterns of fnmatch."""

    need: str
    reason: str


@dataclass(frozen=True, slots=True)
class RefusalCause:
    """The expected error of one registration route that must be refused.

    Attributes
    ----------
    operation : str
        Name of the libibverbs function that fails.
    errno : str
        Name of the errno.
    """

    operation: str
    errno: str

    def __str__(self) -> str:
        return f"{self.operation} with {self.errno}"


@dataclass(frozen=True, slots=True)
class ExpectedRefusal:
    """A registration that must be refused on such a machine.

    Attributes
    ----------
    need : str
        A pattern of fnmatch. If all unmet needs of a case match it, the case runs nevertheless. It must then end with a
        :class:`~gdrkit.errors.RegistrationFailed` that has exactly these causes.
    causes : tuple of RefusalCause
        The expected errors, in the order in which the routes are tried.
    """

    need: str
    causes: tuple[RefusalCause, ...]


@dataclass(frozen=True, slots=True)
class RequiredRoute:
    """Routes that must be proven on hardware. `device`, `nic` and `way` are patterns of fnmatch.

    Attributes
    ----------
    device : str
        Pattern of the index of the CUDA device.
    nic : str
        Pattern of the NIC name.
    way : str
        Method of registration: ``dmabuf``, ``peer_memory`` or a pattern of them.
    enough : str
        ``each``: every route that matches must be proven. ``device``: one of them must be proven for each device.
    """

    device: str = "*"
    nic: str = "*"
    way: str = "*"
    enough: str = "each"


@dataclass(frozen=True, slots=True)
class ExpectedNumber:
    """The expected value of a measured number on such a machine.

    Attributes
    ----------
    case, number : str
        Patterns of fnmatch for the case's id and for the number's name, which includes the unit.
    source : str
        Measurement or publication of the expected value.
    value : float or None
        The expected value, in the unit of the number.
    limit_percent : float or None
        Used instead of `value`: the expected percentage of the rate of the slowest link of the path. The number is
        checked only if the rate of this link is known.
    tolerance_percent : float
        Percentage by which a measured number may be worse than expected.
    better : str
        ``more`` if a larger number is better, as for a rate; ``less`` if a smaller number is better, as for a time.
    """

    case: str
    number: str
    source: str
    value: float | None = None
    limit_percent: float | None = None
    tolerance_percent: float = 10.0
    better: str = "more"


@dataclass(frozen=True, slots=True)
class Match:
    """The conditions that a machine must meet for a profile. An attribute that is None is not a condition.

    Attributes
    ----------
    gpu_count, nic_count : int or None
        Number of devices that CUDA reports, and number of NICs that verbs reports.
    gpu_name : str or None
        Pattern that the names of all GPUs must match. The machine must have at least one GPU.
    gaudi : str or None
        Pattern that the generations of all Gaudi devices must match. The machine must have at least one.
    dmi : mapping
        Patterns of the firmware's strings in :attr:`Facts.dmi`, by their name, e.g. ``product_name``.
    """

    gpu_count: int | None = None
    gpu_name: str | None = None
    nic_count: int | None = None
    gaudi: str | None = None
    dmi: dict[str, str] = field(default_factory=dict)

    @property
    def condition_count(self) -> int:
        """Number of conditions. If two profiles fit, the profile with more conditions is preferred."""
        conditions = (self.gpu_count, self.gpu_name, self.nic_count, self.gaudi)
        return sum(value is not None for value in conditions) + len(self.dmi)


@dataclass(frozen=True, slots=True)
class Profile:
    """The expected behaviour of one kind of machine.

    Attributes
    ----------
    name : str
        Name of the file of the profile, without the suffix ``.toml``.
    about : str
        Description in one sentence.
    extends : str
        Name of the profile whose absences, refusals, routes, links and numbers this profile inherits; empty for none.
    substrate : mapping
        For each API the allowed substrates (``hardware``, ``kernel_software``, ``twin``). An API that is not named may
        run on any substrate.
    match : Match
        Conditions that the machine must meet.
    cases_min : int
        Smallest number of cases that a qualification must run.
    foreseen : tuple of ForeseenAbsence
        Needs that may be unmet.
    refused : tuple of ExpectedRefusal
        Registrations that must be refused.
    routes : tuple of RequiredRoute
        Routes that must be direct.
    links : tuple of ExpectedLink
        PCIe, NVLink and network links that the machine must have.
    expected : tuple of ExpectedNumber
        Expected values of measured numbers.
    """

    schema_version: int
    name: str
    about: str
    extends: str = ""
    substrate: dict[str, tuple[str, ...]] = field(default_factory=dict)
    match: Match = field(default_factory=Match)
    cases_min: int = 1
    foreseen: tuple[ForeseenAbsence, ...] = ()
    refused: tuple[ExpectedRefusal, ...] = ()
    routes: tuple[RequiredRoute, ...] = ()
    links: tuple[ExpectedLink, ...] = ()
    expected: tuple[ExpectedNumber, ...] = ()

    def foresees(self, need: str, reason: str) -> bool:
        """Return whether `need` may be unmet for `reason` on such a machine."""
        return any(fnmatchcase(need, entry.need) and fnmatchcase(reason, entry.reason) for entry in self.foreseen)

    def refusal(self, need: str) -> tuple[RefusalCause, ...] | None:
        """Return the errors with which a registration must fail if `need` is unmet, or None if it may succeed."""
        return next((entry.causes for entry in self.refused if fnmatchcase(need, entry.need)), None)

    def misfits(self, facts: Facts, substrate: Mapping[str, str]) -> tuple[str, ...]:
        """Return the reasons why this profile does not fit a machine. `substrate` has the actual substrate of each API.

        The result is empty if the profile fits.
        """
        reasons = []
        for api, allowed_substrates in sorted(self.substrate.items()):
            actual_substrate = substrate.get(api, "none")
            if actual_substrate not in allowed_substrates:
                reasons.append(f"{api} runs on {actual_substrate}, not on {' or '.join(allowed_substrates)}")
        devices = facts.cuda.devices if facts.cuda else ()
        nics = facts.verbs.nics if facts.verbs else ()
        if self.match.gpu_count is not None and len(devices) != self.match.gpu_count:
            reasons.append(f"{len(devices)} CUDA devices, not {self.match.gpu_count}")
        if self.match.nic_count is not None and len(nics) != self.match.nic_count:
            reasons.append(f"{len(nics)} NICs, not {self.match.nic_count}")
        gpu_pattern = self.match.gpu_name
        if gpu_pattern is not None and not (
            devices and all(fnmatchcase(device.name, gpu_pattern) for device in devices)
        ):
            reasons.append(f"not every CUDA device is a {gpu_pattern}")
        generations = [device.generation for device in facts.gaudi.devices] if facts.gaudi else []
        generation_pattern = self.match.gaudi
        if generation_pattern is not None and not (
            generations and all(fnmatchcase(generation, generation_pattern) for generation in generations)
        ):
            reasons.append(f"there is no {generation_pattern}, or not every Gaudi is one")
        reasons += [
            f"{name} of DMI is {facts.dmi.get(name, 'unknown')}, not {pattern}"
            for name, pattern in self.match.dmi.items()
            if not fnmatchcase(facts.dmi.get(name, ""), pattern)
        ]
        return tuple(reasons)


def load_profile(name: str, *, folder: Path | None = None) -> Profile:
    """Read the profile `name`.

    Raises
    ------
    UsageError
        There is no profile of that name, or its file is malformed.
    """
    return _load_profile(name, install_paths().profiles if folder is None else folder, ())


def _load_profile(name: str, folder: Path, extended_by: tuple[str, ...]) -> Profile:
    """Read the profile `name`. Each profile in `extended_by` extends the next one, and the last one extends `name`."""
    import tomllib

    path = folder / f"{name}.toml"
    profile_names = sorted(file.stem for file in folder.glob("*.toml"))
    if name not in profile_names:
        choices_text = ", ".join(profile_names)
        message = (
            f"the profile must be one of {choices_text}, not {name!r}" if choices_text else f"no profile is in {folder}"
        )
        raise UsageError(message)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        message = f"profile {path}: {error}"
        raise UsageError(message, reason=Reason.MALFORMED) from error
    profile = serialization.from_json_data(Profile, {**data, "name": name}, where=f"profile {name}")
    _check_profile(profile)
    if not profile.extends:
        return profile
    if profile.extends in (*extended_by, name):
        message = f"profile {name}: extends must not lead back to {profile.extends!r}"
        raise UsageError(message, reason=Reason.MALFORMED)
    base_profile = _load_profile(profile.extends, folder, (*extended_by, name))
    return replace(
        profile,
        foreseen=base_profile.foreseen + profile.foreseen,
        refused=base_profile.refused + profile.refused,
        routes=base_profile.routes + profile.routes,
        links=base_profile.links + profile.links,
        expected=base_profile.expected + profile.expected,
    )


def load_profiles(*, folder: Path | None = None) -> tuple[Profile, ...]:
    """Read all profiles and return them in the order of their names."""
    folder = install_paths().profiles if folder is None else folder
    return tuple(load_profile(path.stem, folder=folder) for path in sorted(folder.glob("*.toml")))


def choose_profile(profiles: Sequence[Profile], facts: Facts, substrate: Mapping[str, str]) -> Profile:
    """Return the profile that fits the machine and has the most conditions.

    If several such profiles have equally many conditions, return the profile that names substrates for more APIs, and
    among equal ones the last by name.

    Raises
    ------
    UsageError
        No profile fits.
    """
    candidates = [profile for profile in profiles if not profile.misfits(facts, substrate)]
    if not candidates:
        message = "no profile fits this machine"
        raise UsageError(message, what_to_do="choose a profile with --profile")
    return max(candidates, key=lambda profile: (profile.match.condition_count, len(profile.substrate), profile.name))


def _check_profile(profile: Profile) -> None:
    """Raise an error that lists everything that is wrong in a profile."""
    problems = []
    if profile.schema_version != SCHEMA_VERSION:
        problems.append(f"schema_version must be {SCHEMA_VERSION}, not {profile.schema_version}")
    unknown_substrates = {name for names in profile.substrate.values() for name in names} - {
        "hardware",
        "kernel_software",
        "twin",
    }
    problems += [
        f"substrate must be hardware, kernel_software or twin, not {name!r}" for name in sorted(unknown_substrates)
    ]
    problems += [
        f"enough must be 'each' or 'device', not {route.enough!r}"
        for route in profile.routes
        if route.enough not in ("each", "device")
    ]
    causes = [cause for entry in profile.refused for cause in entry.causes]
    problems += [f"{cause.errno!r} is not the name of an errno" for cause in causes if not _is_errno(cause.errno)]
    problems += [f"the refusal of {entry.need} has no cause" for entry in profile.refused if not entry.causes]
    problems += [problem for entry in profile.expected if (problem := _find_number_problem(entry))]
    problems += [problem for link in profile.links if (problem := _find_link_problem(link))]
    problems += [
        f"match.dmi must be one of {', '.join(DMI_NAMES)}, not {name!r}"
        for name in profile.match.dmi
        if name not in DMI_NAMES
    ]
    if problems:
        message = f"profile {profile.name}: " + "; ".join(problems)
        raise UsageError(message, reason=Reason.MALFORMED)


def _find_number_problem(entry: ExpectedNumber) -> str:
    """Return what is wrong with an expected number, or an empty text."""
    entry_title = f"expected {entry.number} of {entry.case}"
    if (entry.value is None) == (entry.limit_percent is None):
        return f"{entry_title} needs either value or limit_percent"
    if not 0 <= entry.tolerance_percent < 100 or (entry.value or entry.limit_percent or 0) <= 0:  # noqa: PLR2004 - percent.
        return f"{entry_title} has a number that is out of range"
    if entry.better not in {"more", "less"}:
        return f"{entry_title}: better must be 'more' or 'less', not {entry.better!r}"
    return "" if entry.source else f"{entry_title} has no source"


def _find_link_problem(link: ExpectedLink) -> str:
    """Return what is wrong with an expected link, or an empty text."""
    if link.quantity not in LINK_QUANTITIES:
        return f"quantity must be one of {', '.join(LINK_QUANTITIES)}, not {link.quantity!r}"
    if link.at_least <= 0 or link.count < 1:
        return f"link {link.quantity} has a number that is out of range"
    return "" if link.source else f"link {link.quantity} has no source"


def _is_errno(name: str) -> bool:
    """Return whether :func:`gdrkit.errors.errno_name` returns this name for some number.

    Some errnos have an alias, such as ENOTSUP for EOPNOTSUPP. errno_name() never returns an alias, so a profile must
    not contain one.
    """
    # 524 is ENOTSUPP, which only the kernel defines and which the errno module does not have.
    return name in {errno_name(number) for number in (*_errno.errorcode, 524)}
