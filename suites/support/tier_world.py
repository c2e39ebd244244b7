"""Tiers for cases: folders or mounts, files with known bytes, and what must hold of them whatever has happened."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from gdrkit import pattern
from gdrkit.tiers import Configuration, Tier, TierManager

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from gdrkit.tiers import TierFinding

__all__ = ["NAMES", "configuration_of", "contents", "expect", "place_file", "wrong"]

NAMES = ("nvme", "ssd", "hdd")
_LEAST = {"nvme": 100, "ssd": 10, "hdd": 0}


def configuration_of(root: Path, **changes: object) -> Configuration:
    """Three tiers in folders of `root`, which are made if they are not there; the catalogue beside them."""
    for name in NAMES:
        (root / name).mkdir(exist_ok=True)
    tiers = tuple(Tier(name, root / name, _LEAST[name]) for name in NAMES)
    made = Configuration(tiers=tiers, catalogue=root / "catalogue", timeout_ms=20_000)
    return replace(made, **changes)  # type: ignore[arg-type] # fields of it.


def place_file(manager: TierManager, name: str, length_bytes: int, *, seed: int, tier: str | None = None) -> bytes:
    """A new file of the pattern, in this tier if one is said; its bytes."""
    data = pattern.payload(length_bytes, seed=seed)
    with manager.open(name, "a+") as file:
        assert os.pwrite(file.fileno(), data, 0) == length_bytes
        file.sync()
    if tier is not None:
        manager.move(name, tier)
    return data


def contents(manager: TierManager, name: str) -> bytes:
    """The whole file, by its logical name."""
    with manager.open(name) as file:
        length = os.fstat(file.fileno()).st_size
        data = os.pread(file.fileno(), length, 0)
    assert len(data) == length
    return data


def wrong(findings: list[TierFinding]) -> list[TierFinding]:
    """What a check found that is not mended."""
    return [each for each in findings if each.is_wrong]


def expect(configuration: Configuration, files: Mapping[str, bytes], *, tell: Callable[[str], object] = print) -> None:
    """After a restart: every file has its bytes, in one tier, which the catalogue names, and nothing else is left."""
    with TierManager(configuration) as manager:
        findings = manager.check()
        assert not wrong(findings), findings
        assert not manager.catalogue.moves()
        for name, data in files.items():
            where = [tier.name for tier in configuration.tiers if (tier.directory / name).exists()]
            assert len(where) == 1, f"{name} is in {where}"
            assert manager.find(name).tier == where[0]
            assert contents(manager, name) == data, f"{name} in {where[0]} has other bytes"
        for tier in configuration.tiers:
            own = tier.directory / ".gdrkit-tiers"
            left = [each for folder in ("incoming", "moves", "retired", "kept") for each in (own / folder).iterdir()]
            assert not left, left
            there = {str(path.relative_to(tier.directory)) for path in tier.directory.rglob("*") if path.is_file()}
            strange = {each for each in there if not each.startswith(own.name)} - set(files)
            assert not strange, strange
