"""The configuration of tiers, from a TOML file, the environment and the command line.

The default tiers come from a requirements document, the "GDS integration update": /nvme for files with 100 accesses or
more, /ssd for 10 to 99, /hdd for fewer. That document also states the speed of each tier. gdrkit uses these speeds only
in the output of ``gdrkit tiers bench``, beside the measured speeds.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdrkit.errors import Reason, UsageError
from gdrkit.serialization import from_json_data
from gdrkit.tiers.names import GDRKIT_FOLDER
from gdrkit.tiers.schedule import QuietHours, RunSettings
from gdrkit.units import GIB, KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["DEFAULT_TIERS", "Configuration", "DefaultTier", "Tier", "configure", "override_run", "parse_size"]

_CONFIG_VARIABLE, _TIERS_VARIABLE, _CATALOGUE_VARIABLE = "GDRKIT_TIERS_CONFIG", "GDRKIT_TIERS", "GDRKIT_TIERS_CATALOGUE"
_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")
_SIZE_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_UNIT_BYTES = {
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
    """A default tier, with the numbers that the GDS integration update states. gdrkit did not measure them.

    Attributes
    ----------
    directory : str
        Path of the tier.
    accesses_min : int
        Heat that a file needs for this tier. A new access adds 1 to the heat of its file.
    rate_gb_per_s, latency_us : float
        Stated rate in 10**9 bytes per second, and stated latency in microseconds.
    direct : bool
        Whether the document states a direct path to device memory.
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
        Folder of the files. If the tier has a disk of its own, the folder is the mount point of that disk.
    accesses_min : int
        Heat that a file needs for this tier. A new access adds 1 to the heat of its file.
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
        Fraction by which the heat of a file may fall below `accesses_min` of its tier before the file leaves the tier,
        from 0 to less than 1.
    headroom : float
        Fraction of a tier that stays free, from 0 to less than 1.
    landing : str
        Name of the tier in which new files are created. Empty: the last (slowest) tier.
    timeout_ms : int
        Longest time to wait for a lock of the catalogue that another process holds, in milliseconds.
    run : RunSettings
        The parameters of ``gdrkit tiers run``.

    Raises
    ------
    UsageError
        A value is invalid. The message names the parameter.
    """

    tiers: tuple[Tier, ...]
    catalogue: Path
    half_life_s: float = _WEEK_S
    hysteresis: float = 0.1
    headroom: float = 0.02
    landing: str = ""
    timeout_ms: int = 5000
    run: RunSettings = field(default_factory=RunSettings)

    def __post_init__(self) -> None:
        _check_configuration(self)

    def tier(self, name: str) -> Tier:
        """Return the tier with this name.

        Raises
        ------
        UsageError
            There is no such tier.
        """
        for tier in self.tiers:
            if tier.name == name:
                return tier
        message = f"the tier must be one of {', '.join(repr(tier.name) for tier in self.tiers)}, not {name!r}"
        raise UsageError(message)

    @property
    def landing_tier(self) -> Tier:
        """The tier in which new files are created."""
        return self.tier(self.landing) if self.landing else self.tiers[-1]


@dataclass(frozen=True, slots=True)
class _TierSettings:
    """The settings of one tier as the user wrote them, in the TOML file or in an argument."""

    name: str
    directory: str
    accesses_min: int | None = None
    capacity: str | int | None = None


@dataclass(frozen=True, slots=True)
class _RunTable:
    """The table ``run`` of a TOML file."""

    interval_s: float | None = None
    rate_per_s: str | int | None = None
    quiet_hours: tuple[str, ...] | None = None
    watch: str | None = None


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
    run: _RunTable = field(default_factory=_RunTable)


@dataclass(frozen=True, slots=True)
class _FileSettings:
    """The settings of a TOML file, with absolute paths. `parameters` are keyword arguments for Configuration."""

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
        A text ``NAME=DIRECTORY[,capacity=SIZE][,accesses_min=N]`` for each tier, fastest first. Empty: the value of
        ``GDRKIT_TIERS``, where tiers are separated by blanks or ``;``, else the tiers of the TOML file, else
        `DEFAULT_TIERS`.
    catalogue : Path or None
        Folder of the catalogue. None: the value of ``GDRKIT_TIERS_CATALOGUE``, else the folder in the TOML file, else a
        folder in the fastest tier.
    environ : mapping
        The environment variables.

    Raises
    ------
    UsageError
        A setting is invalid. The message names the setting.
    """
    toml_path = file or (Path(environ[_CONFIG_VARIABLE]) if environ.get(_CONFIG_VARIABLE) else None)
    file_settings = _read_toml_file(toml_path) if toml_path else _FileSettings()
    tier_texts = tiers or re.split(r"[;\s]+", environ.get(_TIERS_VARIABLE, "").strip())
    overriding_tiers = tuple(_parse_tier(text) for text in tier_texts if text)
    configured_tiers = _apply_defaults(overriding_tiers or file_settings.tiers)
    catalogue_folder = (
        catalogue
        or environ.get(_CATALOGUE_VARIABLE)
        or file_settings.catalogue
        or configured_tiers[0].directory / GDRKIT_FOLDER / "catalogue"
    )
    parameters: Any = file_settings.parameters  # from_json_data has checked the types.
    return Configuration(tiers=configured_tiers, catalogue=Path(catalogue_folder), **parameters)


def override_run(
    settings: RunSettings,
    *,
    interval_s: float | None = None,
    rate: str | int | None = None,
    quiet_hours: Sequence[str] | None = None,
    watch: str | None = None,
) -> RunSettings:
    """Return `settings` with the given values. A value of None changes nothing.

    Parameters
    ----------
    settings : RunSettings
        The settings to change.
    interval_s, watch
        See :class:`~gdrkit.tiers.schedule.RunSettings`.
    rate : str, int or None
        Size that may be copied per second, such as ``200 MiB``.
    quiet_hours : sequence of str or None
        Periods of the day, such as ``08:00-18:30``.

    Raises
    ------
    UsageError
        A value is invalid. The message names the parameter.
    """
    changes: dict[str, Any] = {"interval_s": interval_s, "watch": watch}
    changes["rate_bytes_per_s"] = None if rate is None else parse_size(rate)
    changes["quiet_hours"] = None if quiet_hours is None else tuple(map(QuietHours.parse, quiet_hours))
    return replace(settings, **{key: value for key, value in changes.items() if value is not None})


def parse_size(text: str | int) -> int:
    """Return a size such as ``900 GiB`` in bytes. GB means 10^9, GiB means 2^30.

    Raises
    ------
    UsageError
        The text is not a size.
    """
    match = _SIZE_PATTERN.fullmatch(str(text).strip())
    unit_bytes = _UNIT_BYTES.get(match[2].upper()) if match else None
    if match is None or unit_bytes is None:
        message = f"a size must be a number, with or without a unit (900GiB, 1.5TB, 4096), not {str(text)[:40]!r}"
        raise UsageError(message)
    return int(float(match[1]) * unit_bytes) if "." in match[1] else int(match[1]) * unit_bytes


def _read_toml_file(path: Path) -> _FileSettings:
    try:
        with path.open("rb") as file:
            toml_file = from_json_data(_TomlFile, tomllib.load(file), where=str(path))
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}"
        raise UsageError(message, what_to_do="name a TOML file that defines tiers, or omit the option") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        message = f"{path} is not valid TOML: {error}"
        raise UsageError(message, reason=Reason.MALFORMED) from error
    parameter_names = ("half_life_s", "hysteresis", "headroom", "landing", "timeout_ms")
    parameters = {name: getattr(toml_file, name) for name in parameter_names if getattr(toml_file, name) is not None}
    run_table = toml_file.run
    parameters["run"] = override_run(
        RunSettings(),
        interval_s=run_table.interval_s,
        rate=run_table.rate_per_s,
        quiet_hours=run_table.quiet_hours,
        watch=run_table.watch,
    )
    base_folder = path.resolve().parent
    tiers = tuple(replace(tier, directory=str(base_folder / tier.directory)) for tier in toml_file.tiers)
    return _FileSettings(
        tiers, None if toml_file.catalogue is None else str(base_folder / toml_file.catalogue), parameters
    )


def _parse_tier(text: str) -> _TierSettings:
    """Return the settings of one tier, from a text NAME=DIRECTORY[,capacity=SIZE][,accesses_min=N]."""
    name, equals_sign, directory_and_options = text.partition("=")
    directory, *option_texts = directory_and_options.split(",")
    options = dict(option_text.partition("=")[::2] for option_text in option_texts)
    unknown_options = options.keys() - {"capacity", "accesses_min"}
    if unknown_options:
        option_names = ", ".join(sorted(unknown_options))
        message = f"the options of a tier must be capacity or accesses_min, not {option_names} ({text!r})"
        raise UsageError(message)
    if not equals_sign or not directory:
        message = f"a tier must be NAME=DIRECTORY[,capacity=SIZE][,accesses_min=N], not {text!r}"
        raise UsageError(message)
    accesses_min_text = options.get("accesses_min")
    if accesses_min_text is not None and not accesses_min_text.isdecimal():
        message = f"accesses_min must be a number of accesses, not {accesses_min_text!r} ({text!r})"
        raise UsageError(message)
    accesses_min = None if accesses_min_text is None else int(accesses_min_text)
    return _TierSettings(name, directory, accesses_min, options.get("capacity"))


def _apply_defaults(tiers: tuple[_TierSettings, ...]) -> tuple[Tier, ...]:
    """Return the configured tiers, or the default tiers if none is configured, with the defaults for missing values."""
    tier_settings = tiers or tuple(_TierSettings(name, default.directory) for name, default in DEFAULT_TIERS.items())
    default_accesses_min = [default.accesses_min for default in DEFAULT_TIERS.values()]
    configured_tiers = []
    for position, tier in enumerate(tier_settings):
        accesses_min = tier.accesses_min
        if accesses_min is None:
            # The last tier is for all other files. Another tier gets the default of its name, or the default of its
            # position if there are as many tiers as default tiers.
            if position == len(tier_settings) - 1:
                accesses_min = 0
            elif tier.name in DEFAULT_TIERS:
                accesses_min = DEFAULT_TIERS[tier.name].accesses_min
            elif len(tier_settings) == len(default_accesses_min):
                accesses_min = default_accesses_min[position]
            else:
                message = f"tier {tier.name!r} must have accesses_min, because it has no default"
                raise UsageError(message, what_to_do="add accesses_min, e.g. 100 for the hottest files")
        capacity_bytes = None if tier.capacity is None else parse_size(tier.capacity)
        configured_tiers.append(Tier(tier.name, Path(tier.directory), accesses_min, capacity_bytes))
    return tuple(configured_tiers)


def _check_configuration(configuration: Configuration) -> None:
    tier_names = [tier.name for tier in configuration.tiers]
    are_names_valid = all(_NAME_PATTERN.fullmatch(name) for name in tier_names)
    thresholds = [tier.accesses_min for tier in configuration.tiers]
    if not tier_names or not are_names_valid or len(set(tier_names)) != len(tier_names):
        message = f"the names of tiers must differ and consist of letters, digits, '.', '-' and '_', not {tier_names}"
        raise UsageError(message)
    if thresholds != sorted(thresholds, reverse=True) or thresholds[-1] != 0:
        message = f"accesses_min must not increase from tier to tier, and must be 0 for the last tier, not {thresholds}"
        raise UsageError(message)
    folders = [tier.directory.resolve() for tier in configuration.tiers]
    if any(outer == inner or outer in inner.parents for outer, inner in itertools.permutations(folders, 2)):
        message = "the directory of a tier must not be the directory of another tier, or inside that directory"
        raise UsageError(message, what_to_do="configure a separate directory for each tier")
    catalogue = configuration.catalogue.resolve()
    is_in_tier = any(
        folder in catalogue.parents and folder / GDRKIT_FOLDER not in catalogue.parents for folder in folders
    )
    if is_in_tier or catalogue in folders:
        message = (
            f"the catalogue must be outside the tiers, or in the {GDRKIT_FOLDER} folder of a tier, not in {catalogue}"
        )
        raise UsageError(message, what_to_do="correct --catalogue, GDRKIT_TIERS_CATALOGUE or the TOML file")
    if not (configuration.half_life_s > 0 and math.isfinite(configuration.half_life_s)):
        message = f"half_life_s must be positive and finite, not {configuration.half_life_s}"
        raise UsageError(message)
    for name in ("hysteresis", "headroom"):
        fraction = getattr(configuration, name)
        if not 0 <= fraction < 1:
            message = f"{name} must be at least 0 and less than 1, not {fraction}"
            raise UsageError(message)
    if configuration.timeout_ms < 0:
        message = f"timeout_ms must be at least 0, not {configuration.timeout_ms}"
        raise UsageError(message)
    if configuration.landing:
        configuration.tier(configuration.landing)
