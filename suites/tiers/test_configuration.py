"""Which tiers there are: defaults, file, environment, arguments, and what is wrong with any of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdrkit.errors import UsageError
from gdrkit.tiers import SEED, Tier, configure
from gdrkit.tiers.configuration import parse_size

TOML = """
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


def test_without_a_word_the_tiers_are_those_of_the_update() -> None:
    found = configure(environ={})
    assert [(tier.name, str(tier.directory), tier.accesses_min) for tier in found.tiers] == [
        ("nvme", "/nvme", 100),
        ("ssd", "/ssd", 10),
        ("hdd", "/hdd", 0),
    ]
    assert [(seed.rate_gb_per_s, seed.latency_us) for seed in SEED.values()] == [(12, 10), (3.5, 100), (0.2, 5000)]
    assert found.catalogue == Path("/nvme/.gdrkit-tiers/catalogue")


def test_a_file_says_all(tmp_path: Path) -> None:
    path = tmp_path / "tiers.toml"
    path.write_text(TOML)
    found = configure(file=path, environ={})
    assert found.tiers == (Tier("fast", tmp_path / "a", 50, 3 << 29), Tier("slow", Path("/b"), 0))
    assert (found.catalogue, found.half_life_s, found.landing_tier.name) == (tmp_path / "index", 3600, "slow")
    assert configure(environ={"GDRKIT_TIERS_CONFIG": str(path)}) == found


def test_arguments_hold_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tiers.toml"
    path.write_text(TOML.replace('landing = "slow"', ""))
    environ = {"GDRKIT_TIERS_CONFIG": str(path), "GDRKIT_TIERS": "nvme=/x ssd=/y", "GDRKIT_TIERS_CATALOGUE": "/z"}
    found = configure(environ=environ)
    assert [tier.name for tier in found.tiers] == ["nvme", "ssd"]
    assert (found.half_life_s, found.catalogue) == (3600, Path("/z"))
    found = configure(
        tiers=["a=/1,capacity=4096", "b=/2,accesses_min=7", "c=/3"], catalogue=Path("/4"), environ=environ
    )
    assert [(tier.name, tier.accesses_min, tier.capacity_bytes) for tier in found.tiers] == [
        ("a", 100, 4096),
        ("b", 7, None),
        ("c", 0, None),
    ]
    assert found.catalogue == Path("/4")


@pytest.mark.parametrize(
    ("tiers", "says"),
    [
        (["nvme"], "no tier"),
        (["nvme="], "no tier"),
        (["a=/x,speed=3"], "what is speed"),
        (["a=/x,accesses_min=-1"], "number of accesses"),
        (["a=/x,capacity=much"], "no size"),
        (["hdd=/x", "hdd=/y"], "must differ"),
        (["a b=/x"], "words of letters"),
        (["../a=/x"], "words of letters"),
        (["ssd=/x", "hdd=/x"], "lies in it"),
        (["ssd=/x", "hdd=/x/y"], "lies in it"),
        (["a=/x,accesses_min=5", "b=/y,accesses_min=9", "c=/z"], "must fall"),
        (["a=/x,accesses_min=5"], "must fall"),
        (["a=/1", "b=/2", "c=/3", "d=/4"], "for which files"),
    ],
)
def test_tiers_that_cannot_be_are_refused(tiers: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        configure(tiers=tiers, catalogue=Path("/c"), environ={})


@pytest.mark.parametrize(
    "text",
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
        "this is no TOML",
    ],
)
def test_a_file_that_cannot_be_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tiers.toml"
    path.write_text(text)
    with pytest.raises(UsageError):
        configure(file=path, environ={})


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        configure(file=tmp_path / "none", environ={})


@pytest.mark.parametrize("where", ["/x", "/x/index", "/y/a/b"])
def test_a_catalogue_among_the_users_files_is_refused(where: str) -> None:
    with pytest.raises(UsageError, match="file of a tier"):
        configure(tiers=["nvme=/x", "ssd=/y"], catalogue=Path(where), environ={})


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("1 KiB", 1024), ("2GB", 2 * 10**9), ("1.5TiB", 3 << 39), ("0", 0), ("7 b", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "GiB", "1 XiB", "1e9", "0x10"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError):
        parse_size(text)
