"""What a kind of machine is expected to do: one TOML file below hardware/profiles.

Level 4. A profile says on what its APIs run, which needs may be unmet there and for which reason, which registrations
must be refused there and how, and which routes must be direct. What a profile does not foresee fails a run, so that an
empty run can never look good.
"""

from __future__ import annotations

import errno as _errno
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from gdrkit import plain
from gdrkit.errors import Reason, UsageError, errno_name
from gdrkit.house import house

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from gdrkit.inventory.facts import Facts

__all__ = [
    "Expected",
    "Foreseen",
    "Match",
    "Profile",
    "Refused",
    "RefusedCause",
    "RequiredRoute",
    "choose_profile",
    "load_profile",
    "load_profiles",
]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A need that may be unmet; both are patterns of fnmatch."""

    need: str
    reason: str


@dataclass(frozen=True, slots=True)
class RefusedCause:
    """One way of registration that must be refused.

    Attributes
    ----------
    operation : str
        The function of libibverbs that says so.
    errno : str
        By its name.
    """

    operation: str
    errno: str

    def __str__(self) -> str:
        return f"{self.operation} with {self.errno}"


@dataclass(frozen=True, slots=True)
class Refused:
    """A registration that must be refused on such a machine.

    Attributes
    ----------
    need : str
        A pattern of fnmatch. A case that lacks nothing but needs of this pattern runs all the same, and must end with
        one :class:`~gdrkit.errors.RegistrationFailed` that has exactly these causes.
    causes : tuple of RefusedCause
        In the order in which the ways are tried.
    """

    need: str
    causes: tuple[RefusedCause, ...]


@dataclass(frozen=True, slots=True)
class RequiredRoute:
    """Routes that must be proven on hardware; all three are patterns of fnmatch.

    Attributes
    ----------
    device : str
        Of the device's number.
    nic : str
        Of the NIC's name.
    way : str
        ``dmabuf``, ``peer_memory`` or a pattern of them.
    enough : str
        ``each``: every route that the patterns match; ``device``: one route for each device that they match.
    """

    device: str = "*"
    nic: str = "*"
    way: str = "*"
    enough: str = "each"


@dataclass(frozen=True, slots=True)
class Expected:
    """What a measured number must be on such a machine.

    Attributes
    ----------
    case, number : str
        Patterns of fnmatch: of the case's id and of the number's name, which has the unit.
    source : str
        Who measured or published it.
    value : float or None
        What is expected, in the number's unit.
    limit_percent : float or None
        Instead of `value`: the share of what the slowest link of the way carries; asked where that is known.
    tolerance_percent : float
        By how much a number may be worse.
    better : str
        ``more`` or ``less``: a rate, or a time.
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
    """The machines that a profile is for; what is None is not asked.

    Attributes
    ----------
    gpu_count, nic_count : int or None
        As the APIs show them.
    gpu_name : str or None
        A pattern that every device's name matches.
    gaudi : str or None
        A pattern that the generation of every Gaudi matches, of which there is at least one.
    """

    gpu_count: int | None = None
    gpu_name: str | None = None
    nic_count: int | None = None
    gaudi: str | None = None

    @property
    def conditions(self) -> int:
        """How many there are; of two profiles that fit, the one that asks more is the better description."""
        return sum(value is not None for value in (self.gpu_count, self.gpu_name, self.nic_count, self.gaudi))


@dataclass(frozen=True, slots=True)
class Profile:
    """One profile.

    Attributes
    ----------
    name : str
        That of its file.
    about : str
        One sentence for people.
    substrate : mapping
        For each API the substrates (``hardware``, ``kernel_software``, ``twin``) that it may run on; an API that is not
        named may run on any.
    match : Match
        Which machines it describes.
    cases_min : int
        How many cases a qualification must really run.
    foreseen : tuple of Foreseen
        Needs that may be unmet.
    refused : tuple of Refused
        Registrations that must be refused.
    routes : tuple of RequiredRoute
        What must be direct.
    expected : tuple of Expected
        How fast it must be.
    """

    schema_version: int
    name: str
    about: str
    substrate: dict[str, tuple[str, ...]] = field(default_factory=dict)
    match: Match = field(default_factory=Match)
    cases_min: int = 1
    foreseen: tuple[Foreseen, ...] = ()
    refused: tuple[Refused, ...] = ()
    routes: tuple[RequiredRoute, ...] = ()
    expected: tuple[Expected, ...] = ()

    def foresees(self, need: str, reason: str) -> bool:
        """Whether `need` may be unmet for `reason` on such a machine."""
        return any(fnmatchcase(need, item.need) and fnmatchcase(reason, item.reason) for item in self.foreseen)

    def refusal(self, need: str) -> tuple[RefusedCause, ...] | None:
        """With which causes a registration must be refused where `need` is not met; None: nothing is said of that."""
        return next((item.causes for item in self.refused if fnmatchcase(need, item.need)), None)

    def misfits(self, facts: Facts, substrate: Mapping[str, str]) -> tuple[str, ...]:
        """Why this profile does not describe a machine with these facts, on this substrate; nothing when it does."""
        found = []
        for api, allowed in sorted(self.substrate.items()):
            actual = substrate.get(api, "none")
            if actual not in allowed:
                found.append(f"{api} runs on {actual}, not on {' or '.join(allowed)}")
        devices = facts.cuda.devices if facts.cuda else ()
        nics = facts.verbs.nics if facts.verbs else ()
        if self.match.gpu_count is not None and len(devices) != self.match.gpu_count:
            found.append(f"{len(devices)} CUDA devices, not {self.match.gpu_count}")
        if self.match.nic_count is not None and len(nics) != self.match.nic_count:
            found.append(f"{len(nics)} NICs, not {self.match.nic_count}")
        pattern = self.match.gpu_name
        if pattern is not None and not (devices and all(fnmatchcase(device.name, pattern) for device in devices)):
            found.append(f"not every CUDA device is a {pattern}")
        generations = [device.generation for device in facts.gaudi.devices] if facts.gaudi else []
        wanted = self.match.gaudi
        if wanted is not None and not (generations and all(fnmatchcase(one, wanted) for one in generations)):
            found.append(f"there is no {wanted}, or something else beside it")
        return tuple(found)


def load_profile(name: str, *, folder: Path | None = None) -> Profile:
    """Read the profile `name`.

    Raises
    ------
    UsageError
        There is none of that name, or its file is malformed.
    """
    import tomllib

    folder = house().profiles if folder is None else folder
    path = folder / f"{name}.toml"
    known = sorted(file.stem for file in folder.glob("*.toml"))
    if name not in known:
        message = f"no profile {name!r}"
        raise UsageError(message, what_to_do="choose from " + (", ".join(known) or "nothing: no profile is installed"))
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        message = f"profile {path}: {error}"
        raise UsageError(message, reason=Reason.MALFORMED) from error
    profile = plain.from_plain(Profile, {**data, "name": name}, where=f"profile {name}")
    _check(profile)
    return profile


def load_profiles(*, folder: Path | None = None) -> tuple[Profile, ...]:
    """Read all profiles, by name."""
    folder = house().profiles if folder is None else folder
    return tuple(load_profile(path.stem, folder=folder) for path in sorted(folder.glob("*.toml")))


def choose_profile(profiles: Sequence[Profile], facts: Facts, substrate: Mapping[str, str]) -> Profile:
    """The profile that describes a machine best: of those that fit, the one that asks most.

    Raises
    ------
    UsageError
        None fits.
    """
    fitting = [profile for profile in profiles if not profile.misfits(facts, substrate)]
    if not fitting:
        message = "no profile fits this machine"
        raise UsageError(message, what_to_do="name one with --profile")
    return max(fitting, key=lambda profile: (profile.match.conditions, len(profile.substrate), profile.name))


def _check(profile: Profile) -> None:
    problems = []
    if profile.schema_version != SCHEMA_VERSION:
        problems.append(f"schema_version {profile.schema_version} is not {SCHEMA_VERSION}")
    unknown = {name for names in profile.substrate.values() for name in names} - {"hardware", "kernel_software", "twin"}
    problems += [f"substrate {name!r} does not exist" for name in sorted(unknown)]
    problems += [
        f"enough = {route.enough!r} is neither 'each' nor 'device'"
        for route in profile.routes
        if route.enough not in ("each", "device")
    ]
    causes = [cause for item in profile.refused for cause in item.causes]
    problems += [f"errno {cause.errno!r} has no number" for cause in causes if not _is_errno(cause.errno)]
    problems += [f"the refusal of {item.need} has no cause" for item in profile.refused if not item.causes]
    problems += [text for item in profile.expected if (text := _wrong_expectation(item))]
    if problems:
        message = f"profile {profile.name}: " + "; ".join(problems)
        raise UsageError(message, reason=Reason.MALFORMED)


def _wrong_expectation(item: Expected) -> str:
    name = f"expected {item.number} of {item.case}"
    if (item.value is None) == (item.limit_percent is None):
        return f"{name} needs one of value and limit_percent"
    if not 0 <= item.tolerance_percent < 100 or (item.value or item.limit_percent or 0) <= 0:  # noqa: PLR2004 - percent.
        return f"{name} has a number that is out of range"
    if item.better not in {"more", "less"}:
        return f"{name}: better = {item.better!r} is neither 'more' nor 'less'"
    return "" if item.source else f"{name} has no source"


def _is_errno(name: str) -> bool:
    """Whether :func:`gdrkit.errors.errno_name` gives this very name to some number; an alias would never be met."""
    return name in {errno_name(number) for number in (*_errno.errorcode, 524)}
