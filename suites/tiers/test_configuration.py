"""The configuration of tiers: defaults, file, environment, arguments and their errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdrkit.errors import UsageError
from gdrkit.tiers import DEFAULT_TIERS, Tier, configure
from gdrkit.tiers.configuration import parse_size
from gdrkit.tiers.tables import format_size
from gdrkit.units import MIB

TIERS_TOML = """
catalogue = "index"
half_life_s = 3600
landing = "slow"

[[tiers]]
name = "fast"
directory = "a"
accesses_min = 50
capacity = "1.5 GiB"

[[tiers]]
name = "slow"
directory = "/b"
"""


def test_default_tiers_are_the_required_ones() -> None:
    configuration = configure(environ={})
    assert [(tier.name, str(tier.directory), tier.accesses_min) for tier in configuration.tiers] == [
        ("nvme", "/nvme", 100),
        ("ssd", "/ssd", 10),
        ("hdd", "/hdd", 0),
    ]
    assert [(tier.rate_gb_per_s, tier.latency_us) for tier in DEFAULT_TIERS.values()] == [
        (12, 10),
        (3.5, 100),
        (0.2, 5000),
    ]
    assert configuration.catalogue == Path("/nvme/.gdrkit-tiers/catalogue")


def test_file_sets_every_parameter(tmp_path: Path) -> None:
    path = tmp_path / "tiers.toml"
    path.write_text(TIERS_TOML)
    configuration = configure(file=path, environ={})
    assert configuration.tiers == (Tier("fast", tmp_path / "a", 50, 1536 * MIB), Tier("slow", Path("/b"), 0))
    assert (configuration.catalogue, configuration.half_life_s, configuration.landing_tier.name) == (
        tmp_path / "index",
        3600,
        "slow",
    )
    assert configure(environ={"GDRKIT_TIERS_CONFIG": str(path)}) == configuration


def test_arguments_override_the_environment_and_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tiers.toml"
    path.write_text(TIERS_TOML.replace('landing = "slow"', ""))
    environ = {"GDRKIT_TIERS_CONFIG": str(path), "GDRKIT_TIERS": "nvme=/x ssd=/y", "GDRKIT_TIERS_CATALOGUE": "/z"}
    configuration = configure(environ=environ)
    assert [tier.name for tier in configuration.tiers] == ["nvme", "ssd"]
    assert (configuration.half_life_s, configuration.catalogue) == (3600, Path("/z"))
    configuration = configure(
        tiers=["a=/1,capacity=4096", "b=/2,accesses_min=7", "c=/3"], catalogue=Path("/4"), environ=environ
    )
    assert [(tier.name, tier.accesses_min, tier.capacity_bytes) for tier in configuration.tiers] == [
        ("a", 100, 4096),
        ("b", 7, None),
        ("c", 0, None),
    ]
    assert configuration.catalogue == Path("/4")


@pytest.mark.parametrize(
    ("tiers", "error_text"),
    [
        (["nvme"], "a tier must be NAME=DIRECTORY"),
        (["nvme="], "a tier must be NAME=DIRECTORY"),
        (["a=/x,speed=3"], "must be capacity or accesses_min, not speed"),
        (["a=/x,accesses_min=-1"], "must be a number of accesses, not '-1'"),
        (["a=/x,capacity=much"], "a size must be a number, with or without a unit"),
        (["hdd=/x", "hdd=/y"], "must differ"),
        (["a b=/x"], "consist of letters"),
        (["../a=/x"], "consist of letters"),
        (["ssd=/x", "hdd=/x"], "or inside that directory"),
        (["ssd=/x", "hdd=/x/y"], "or inside that directory"),
        (["a=/x,accesses_min=5", "b=/y,accesses_min=9", "c=/z"], "must not increase"),
        (["a=/x,accesses_min=5"], "must not increase"),
        (["a=/1", "b=/2", "c=/3", "d=/4"], "'a' must have accesses_min"),
    ],
)
def test_invalid_tiers_are_refused(tiers: list[str], error_text: str) -> None:
    with pytest.raises(UsageError, match=error_text):
        configure(tiers=tiers, catalogue=Path("/c"), environ={})


@pytest.mark.parametrize(
    "toml_text",
    [
        "half_life_s = 0",
        "half_life_s = -1",
        "half_life_s = nan",
        "half_life_s = inf",
        "hysteresis = 1",
        "headroom = 1.5",
        "timeout_ms = -1",
        'landing = "tape"',
        "unknown = 1",
        "half_life_s = 'long'",
        "tiers = 3",
        "[[tiers]]\nname = 'a'",
        "this is not TOML",
    ],
)
def test_invalid_file_is_refused(tmp_path: Path, toml_text: str) -> None:
    path = tmp_path / "tiers.toml"
    path.write_text(toml_text)
    with pytest.raises(UsageError):
        configure(file=path, environ={})


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        configure(file=tmp_path / "none", environ={})


@pytest.mark.parametrize("folder", ["/x", "/x/index", "/y/a/b"])
def test_catalogue_inside_a_tier_is_refused(folder: str) -> None:
    with pytest.raises(UsageError, match="must be outside the tiers"):
        configure(tiers=["nvme=/x", "ssd=/y"], catalogue=Path(folder), environ={})


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("4096", 4096), ("1 KiB", 1024), ("2GB", 2 * 10**9), ("1.5TiB", 3 << 39), ("0", 0), ("7 b", 7)],
)
def test_size_is_parsed(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    ("size_bytes", "expected_text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1023 << 10, "1023 KiB"), (1 << 40, "1 TiB")],
)
def test_size_is_written_without_an_exponent(size_bytes: int, expected_text: str) -> None:
    assert format_size(size_bytes) == expected_text


@pytest.mark.parametrize("text", ["", "-1", "GiB", "1 XiB", "1e9", "0x10"])
def test_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_size(text)
