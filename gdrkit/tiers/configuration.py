"""The configuration of tiers, from a TOML file, the environment and the command line.

The defaults are those of the GDS integration update: /nvme for files with 100 accesses or more, /ssd for 10 to 99, /hdd
for fewer. The speeds that it states only appear beside those that ``gdrkit tiers bench`` measures.
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

__all__ = ["DEFAULT_TIERS", "Configuration", "DefaultTier", "Tier", "configure", "parse_size"]

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
class DefaultTier:
    """A default tier, with the numbers that the GDS integration update states for it. gdrkit did not measure them.

    Attributes
    ----------
    directory : str
        Path of the tier.
    accesses_min : int
        Heat that a file needs for this tier, in fresh accesses.
    rate_gb_per_s, latency_us : float
        Stated rate in 10**9 bytes per second, and stated latency in microseconds.
    direct : bool
        Whether the update states a direct path to device memory.
    """

    directory: str
    accesses_min: int
    rate_gb_per_s: float
    latency_us: float
    direct: bool


DEFAULT_TIERS: Mapping[str, DefaultTier] = {
    "nvme": DefaultTier("/nvme", 100, 12.0, 10.0, direct=True),
    "ssd": DefaultTier("/ssd", 10, 3.5, 100.0, direct=False),
    "hdd": DefaultTier("/hdd", 0, 0.2, 5000.0, direct=False),
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
        Half-life of an access, in seconds: an access of this age counts half.
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
        message = f"the tier must be one of {', '.join(repr(each.name) for each in self.tiers)}, not {name!r}"
        raise UsageError(message)

    @property
    def landing_tier(self) -> Tier:
        """The tier of new files: the configured one, or the last (slowest) one."""
        return self.tier(self.landing) if self.landing else self.tiers[-1]


@dataclass(frozen=True, slots=True)
class _TierSettings:
    """The settings of one tier, as the TOML file or an argument states them."""

    name: str
    directory: str
    accesses_min: int | None = None
    capacity: str | int | None = None


@dataclass(frozen=True, slots=True)
class _TomlFile:
    """The contents of a TOML file."""

    tiers: tuple[_TierSettings, ...] = ()
    catalogue: str | None = None
    half_life_s: float | None = None
    hysteresis: float | None = None
    headroom: float | None = None
    landing: str | None = None
    timeout_ms: int | None = None


@dataclass(frozen=True, slots=True)
class _Settings:
    """The settings of a TOML file, with absolute paths. `parameters` are fields of :class:`Configuration`."""

    tiers: tuple[_TierSettings, ...] = ()
    catalogue: str | None = None
    parameters: dict[str, object] = field(default_factory=dict)


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
    path = file or (Path(environ[CONFIG]) if environ.get(CONFIG) else None)
    settings = _read_file(path) if path else _Settings()
    words = tiers or re.split(r"[;\s]+", environ.get(TIERS, "").strip())
    parsed = tuple(_parse_tier(word) for word in words if word)
    configured = _with_defaults(parsed or settings.tiers)
    folder = (
        catalogue or environ.get(CATALOGUE) or settings.catalogue or configured[0].directory / OWN_FOLDER / "catalogue"
    )
    return Configuration(tiers=configured, catalogue=Path(folder), **settings.parameters)  # type: ignore[arg-type] # read by type above.


def parse_size(text: str | int) -> int:
    """Return a size such as ``900 GiB`` in bytes. GB means 10^9, GiB means 2^30.

    Raises
    ------
    UsageError
        The text is not a size.
    """
    match = _SIZE.fullmatch(str(text).strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        message = f"a size must be a number with a unit, such as 900GiB, 1.5TB or 4096, not {str(text)[:40]!r}"
        raise UsageError(message)
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def _read_file(path: Path) -> _Settings:
    try:
        with path.open("rb") as file:
            contents = from_json_data(_TomlFile, tomllib.load(file), where=str(path))
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}"
        raise UsageError(message, what_to_do="name a TOML file that defines tiers, or omit the option") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        message = f"{path} is not valid TOML: {error}"
        raise UsageError(message, reason=Reason.MALFORMED) from error
    keys = ("half_life_s", "hysteresis", "headroom", "landing", "timeout_ms")
    parameters = {key: getattr(contents, key) for key in keys if getattr(contents, key) is not None}
    base = path.resolve().parent
    tiers = tuple(replace(each, directory=str(base / each.directory)) for each in contents.tiers)
    return _Settings(tiers, None if contents.catalogue is None else str(base / contents.catalogue), parameters)


def _parse_tier(word: str) -> _TierSettings:
    """Return the settings of one tier, from the text NAME=DIRECTORY[,capacity=SIZE][,accesses_min=N]."""
    name, equals_sign, rest = word.partition("=")
    directory, *options = rest.split(",")
    values = dict(option.partition("=")[::2] for option in options)
    unknown = values.keys() - {"capacity", "accesses_min"}
    if unknown:
        message = f"the options of a tier must be capacity or accesses_min, not {', '.join(sorted(unknown))} ({word!r})"
        raise UsageError(message)
    if not equals_sign or not directory:
        message = f"a tier must be NAME=DIRECTORY[,capacity=SIZE][,accesses_min=N], not {word!r}"
        raise UsageError(message)
    accesses_min = values.get("accesses_min")
    if accesses_min is not None and not accesses_min.isdecimal():
        message = f"accesses_min must be a number of accesses, not {accesses_min!r} ({word!r})"
        raise UsageError(message)
    return _TierSettings(name, directory, None if accesses_min is None else int(accesses_min), values.get("capacity"))


def _with_defaults(tiers: tuple[_TierSettings, ...]) -> tuple[Tier, ...]:
    """Return the configured tiers, or the default tiers if none is configured, with the defaults for missing values."""
    settings = tiers or tuple(_TierSettings(name, default.directory) for name, default in DEFAULT_TIERS.items())
    by_position = [default.accesses_min for default in DEFAULT_TIERS.values()]
    result = []
    for position, each in enumerate(settings):
        accesses_min = each.accesses_min
        if accesses_min is None:
            if position == len(settings) - 1:
                accesses_min = 0
            elif each.name in DEFAULT_TIERS:
                accesses_min = DEFAULT_TIERS[each.name].accesses_min
            elif len(settings) == len(by_position):
                accesses_min = by_position[position]
            else:
                message = f"tier {each.name!r} has no accesses_min"
                raise UsageError(message, what_to_do="add accesses_min, e.g. 100 for the hottest files")
        capacity_bytes = None if each.capacity is None else parse_size(each.capacity)
        result.append(Tier(each.name, Path(each.directory), accesses_min, capacity_bytes))
    return tuple(result)


def _check(configuration: Configuration) -> None:
    names = [each.name for each in configuration.tiers]
    is_valid = all(_NAME.fullmatch(name) for name in names)
    thresholds = [each.accesses_min for each in configuration.tiers]
    if not names or not is_valid or len(set(names)) != len(names):
        message = f"the names of tiers must differ and consist of letters, digits, '.', '-' and '_', not {names}"
        raise UsageError(message)
    if thresholds != sorted(thresholds, reverse=True) or thresholds[-1] != 0:
        message = f"accesses_min must decrease from tier to tier and be 0 for the last tier, not {thresholds}"
        raise UsageError(message)
    folders = [each.directory.resolve() for each in configuration.tiers]
    if any(a == b or a in b.parents for i, a in enumerate(folders) for j, b in enumerate(folders) if i != j):
        message = "the directory of a tier is the directory of another tier, or is inside it"
        raise UsageError(message, what_to_do="configure a separate directory for each tier")
    catalogue = configuration.catalogue.resolve()
    is_in_tier = any(each in catalogue.parents and each / OWN_FOLDER not in catalogue.parents for each in folders)
    if is_in_tier or catalogue in folders:
        message = f"the catalogue {catalogue} would be a file of a tier"
        raise UsageError(
            message, what_to_do=f"name a folder outside the tiers, or in the {OWN_FOLDER} folder of a tier"
        )
    if not (configuration.half_life_s > 0 and math.isfinite(configuration.half_life_s)):
        message = f"half_life_s must be positive and finite, not {configuration.half_life_s}"
        raise UsageError(message)
    for key in ("hysteresis", "headroom"):
        value = getattr(configuration, key)
        if not 0 <= value < 1:
            message = f"{key} must be at least 0 and less than 1, not {value}"
            raise UsageError(message)
    if configuration.timeout_ms < 0:
        message = f"timeout_ms must be at least 0, not {configuration.timeout_ms}"
        raise UsageError(message)
    if configuration.landing:
        configuration.tier(configuration.landing)
