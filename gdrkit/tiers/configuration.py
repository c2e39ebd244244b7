"""The configuration of tiers, from a TOML file, the environment and the command line.

The defaults are those of the GDS integration update: /nvme for files with 100 accesses or more, /ssd for 10 to 99, /hdd
for fewer. The speeds that it states are only shown beside those that ``gdrkit tiers bench`` measures.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit.errors import Reason, UsageError
from gdrkit.serialization import from_json_data
from gdrkit.tiers.names import OWN_FOLDER
from gdrkit.units import GIB, KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["SEED", "Configuration", "SeedTier", "Tier", "configure", "parse_size"]

CONFIG, TIERS, CATALOGUE = "GDRKIT_TIERS_CONFIG", "GDRKIT_TIERS", "GDRKIT_TIERS_CATALOGUE"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
    "TIB": GIB << 10,
}
_WEEK_S = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class SeedTier:
    """A tier with the numbers that the GDS integration update states. They were not measured here."""

    directory: str
    accesses_min: int
    rate_gb_per_s: float
    latency_us: float
    direct: bool


SEED: Mapping[str, SeedTier] = {
    "nvme": SeedTier("/nvme", 100, 12.0, 10.0, direct=True),
    "ssd": SeedTier("/ssd", 10, 3.5, 100.0, direct=False),
    "hdd": SeedTier("/hdd", 0, 0.2, 5000.0, direct=False),
}


@dataclass(frozen=True, slots=True)
class Tier:
    """The configuration of one tier.

    Attributes
    ----------
    name : str
        Name of the tier in the catalogue.
    directory : Path
        Folder of its files. If the tier has its own disk, it is the mount point.
    accesses_min : int
        Heat that a file needs for this tier, in fresh accesses.
    capacity_bytes : int or None
        Space that gdrkit may fill, in bytes. None: the size of the file system.
    """

    name: str
    directory: Path
    accesses_min: int
    capacity_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Configuration:
    """The tiers, fastest first, and the parameters of placement.

    Attributes
    ----------
    tiers : tuple of Tier
        The tiers, at least one.
    catalogue : Path
        Folder of the catalogue.
    half_life_s : float
        Time after which an access counts half, in seconds.
    hysteresis : float
        Share of its tier's required heat that a file may lose before it must leave, from 0 to less than 1.
    headroom : float
        Share of a tier that is kept free, from 0 to less than 1.
    landing : str
        Tier of new files.
    timeout_ms : int
        Longest time to wait for another process that writes the catalogue, in milliseconds.
    """

    tiers: tuple[Tier, ...]
    catalogue: Path
    half_life_s: float = _WEEK_S
    hysteresis: float = 0.1
    headroom: float = 0.02
    landing: str = ""
    timeout_ms: int = 5000

    def __post_init__(self) -> None:
        _check(self)

    def tier(self, name: str) -> Tier:
        """Return the tier with this name.

        Raises
        ------
        UsageError
            There is no such tier.
        """
        for each in self.tiers:
            if each.name == name:
                return each
        message = f"there is no tier {name!r}"
        raise UsageError(message, what_to_do="name one of " + ", ".join(each.name for each in self.tiers))

    @property
    def landing_tier(self) -> Tier:
        """The tier of new files: the configured one, or the last (slowest) one."""
        return self.tier(self.landing) if self.landing else self.tiers[-1]


@dataclass(frozen=True, slots=True)
class _FileTier:
    name: str
    directory: str
    accesses_min: int | None = None
    capacity: str | int | None = None


@dataclass(frozen=True, slots=True)
class _File:
    tiers: tuple[_FileTier, ...] = ()
    catalogue: str | None = None
    half_life_s: float | None = None
    hysteresis: float | None = None
    headroom: float | None = None
    landing: str | None = None
    timeout_ms: int | None = None


@dataclass(frozen=True, slots=True)
class _Given:
    """The settings read so far. Later sources override earlier ones."""

    tiers: tuple[_FileTier, ...] = ()
    catalogue: str | None = None
    rest: dict[str, object] = field(default_factory=dict)


def configure(
    *,
    file: Path | None = None,
    tiers: Sequence[str] = (),
    catalogue: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Configuration:
    """Return the configuration. Arguments override the environment, which overrides the file.

    Parameters
    ----------
    file : Path or None
        A TOML file. None: the file that ``GDRKIT_TIERS_CONFIG`` names, if it is set.
    tiers : sequence of str
        ``NAME=DIRECTORY[,capacity=SIZE][,accesses_min=N]``, fastest first. Empty: the value of ``GDRKIT_TIERS``, where
        tiers are separated by blanks or ``;``.
    catalogue : Path or None
        Folder of the catalogue. None: the value of ``GDRKIT_TIERS_CATALOGUE``.
    environ : mapping
        The environment variables.

    Raises
    ------
    UsageError
        A setting is invalid. The message names it.
    """
    named = file or (Path(environ[CONFIG]) if environ.get(CONFIG) else None)
    given = _read(named) if named else _Given()
    words = tiers or re.split(r"[;\s]+", environ.get(TIERS, "").strip())
    said = tuple(_parse(word) for word in words if word)
    if said:
        given = replace(given, tiers=said)
    found = _with_defaults(given.tiers)
    where = catalogue or environ.get(CATALOGUE) or given.catalogue or found[0].directory / OWN_FOLDER / "catalogue"
    return Configuration(tiers=found, catalogue=Path(where), **given.rest)  # type: ignore[arg-type] # read by type above.


def parse_size(text: str | int) -> int:
    """Return a size such as ``900 GiB`` in bytes. GB means 10^9, GiB means 2^30.

    Raises
    ------
    UsageError
        The text is not a size.
    """
    found = _SIZE.fullmatch(str(text).strip())
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None:
        message = f"{str(text)[:40]!r} is no size"
        raise UsageError(message, what_to_do="write it as 900GiB, 1.5TB or 4096")
    return int(float(found[1]) * unit) if "." in found[1] else int(found[1]) * unit


def _read(path: Path) -> _Given:
    try:
        with path.open("rb") as file:
            found = from_json_data(_File, tomllib.load(file), where=str(path))
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}"
        raise UsageError(message, what_to_do="name a file of tiers, or leave it out") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        message = f"{path} is no TOML: {error}"
        raise UsageError(message, reason=Reason.MALFORMED) from error
    keys = ("half_life_s", "hysteresis", "headroom", "landing", "timeout_ms")
    rest = {key: getattr(found, key) for key in keys if getattr(found, key) is not None}
    base = path.resolve().parent
    tiers = tuple(replace(each, directory=str(base / each.directory)) for each in found.tiers)
    return _Given(tiers, None if found.catalogue is None else str(base / found.catalogue), rest)


def _parse(word: str) -> _FileTier:
    name, found, rest = word.partition("=")
    directory, *options = rest.split(",")
    pairs = dict(option.partition("=")[::2] for option in options)
    unknown = pairs.keys() - {"capacity", "accesses_min"}
    if not found or not directory or unknown:
        message = f"{word!r} is no tier" + (f": what is {', '.join(sorted(unknown))}?" if unknown else "")
        raise UsageError(
            message, what_to_do="write NAME=DIRECTORY, then ,capacity=900GiB and ,accesses_min=100 if wanted"
        )
    least = pairs.get("accesses_min")
    if least is not None and not least.isdecimal():
        message = f"{word!r}: {least!r} is no number of accesses"
        raise UsageError(message)
    return _FileTier(name, directory, None if least is None else int(least), pairs.get("capacity"))


def _with_defaults(tiers: tuple[_FileTier, ...]) -> tuple[Tier, ...]:
    said = tiers or tuple(_FileTier(name, seed.directory) for name, seed in SEED.items())
    by_place = [seed.accesses_min for seed in SEED.values()] if len(said) == len(SEED) else []
    found = []
    for place, each in enumerate(said):
        least = each.accesses_min
        if least is None:
            if place == len(said) - 1:
                least = 0
            elif each.name in SEED:
                least = SEED[each.name].accesses_min
            elif by_place:
                least = by_place[place]
            else:
                message = f"tier {each.name!r} does not say for which files it is"
                raise UsageError(message, what_to_do="add accesses_min, e.g. 100 for the hottest")
        capacity = None if each.capacity is None else parse_size(each.capacity)
        found.append(Tier(each.name, Path(each.directory), least, capacity))
    return tuple(found)


def _check(found: Configuration) -> None:
    names = [each.name for each in found.tiers]
    wrong = [name for name in names if not _NAME.fullmatch(name)]
    least = [each.accesses_min for each in found.tiers]
    if not names or wrong or len(set(names)) != len(names):
        message = f"the names of tiers must differ and be words of letters, digits, - and _: {names}"
        raise UsageError(message)
    if least != sorted(least, reverse=True) or least[-1] != 0:
        message = f"accesses_min must fall from tier to tier, to 0 for the last: {least}"
        raise UsageError(message)
    places = [each.directory.resolve() for each in found.tiers]
    if any(a == b or a in b.parents for i, a in enumerate(places) for j, b in enumerate(places) if i != j):
        message = "the directory of a tier is that of another one, or lies in it"
        raise UsageError(message, what_to_do="give each tier a directory of its own")
    where = found.catalogue.resolve()
    if any(place in where.parents and place / OWN_FOLDER not in where.parents for place in places) or where in places:
        message = f"the catalogue {where} would be a file of a tier"
        raise UsageError(message, what_to_do=f"name a folder outside of the tiers, or in {OWN_FOLDER} of one")
    if not (found.half_life_s > 0 and math.isfinite(found.half_life_s)):
        message = f"a half-life of {found.half_life_s} s is none"
        raise UsageError(message)
    if not (0 <= found.hysteresis < 1 and 0 <= found.headroom < 1 and found.timeout_ms >= 0):
        message = "hysteresis and headroom are parts from 0 to less than 1, timeout_ms is not negative"
        raise UsageError(message)
    if found.landing:
        found.tier(found.landing)
