"""Storage tiers for cases: their configuration, files with known bytes, and the check of the tiers after a restart."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from gdrkit import pattern
from gdrkit.tiers import Configuration, Tier, TierManager

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from gdrkit.tiers import TierFinding

__all__ = ["TIER_NAMES", "check_tiers", "create_file", "make_configuration", "read_contents", "select_errors"]

# Names of the tiers, from the fastest to the slowest.
TIER_NAMES = ("nvme", "ssd", "hdd")
# Number of recent accesses (heat) that a file needs for each tier.
_ACCESSES_MIN = {"nvme": 100, "ssd": 10, "hdd": 0}


def make_configuration(root: Path, **changes: object) -> Configuration:
    """Create the folders of three tiers in `root`, and return their configuration, with the catalogue in `root` too."""
    for name in TIER_NAMES:
        (root / name).mkdir(exist_ok=True)
    tiers = tuple(Tier(name, root / name, _ACCESSES_MIN[name]) for name in TIER_NAMES)
    configuration = Configuration(tiers=tiers, catalogue=root / "catalogue", timeout_ms=20_000)
    return replace(configuration, **changes)  # type: ignore[arg-type] # `changes` are fields of Configuration.


def create_file(manager: TierManager, name: str, length_bytes: int, *, seed: int, tier: str | None = None) -> bytes:
    """Create a file with the pattern of the seed, move it to `tier` if one is given, and return its bytes."""
    data = pattern.payload(length_bytes, seed=seed)
    with manager.open(name, "a+") as file:
        assert os.pwrite(file.fileno(), data, 0) == length_bytes
        file.sync()
    if tier is not None:
        manager.move(name, tier)
    return data


def read_contents(manager: TierManager, name: str) -> bytes:
    """Read a file of the tiers, and return its contents."""
    with manager.open(name) as file:
        length_bytes = os.fstat(file.fileno()).st_size
        data = os.pread(file.fileno(), length_bytes, 0)
    assert len(data) == length_bytes
    return data


def select_errors(findings: list[TierFinding]) -> list[TierFinding]:
    """Return the findings that are errors and that the check did not repair."""
    return [finding for finding in findings if finding.needs_action]


def check_tiers(configuration: Configuration, data_by_name: Mapping[str, bytes]) -> None:
    """Require that each file is in exactly one tier, with all its bytes, and in the catalogue.

    The tiers must contain no other file. The check uses a new manager, as after a restart of the process.

    Parameters
    ----------
    configuration : Configuration
        The tiers and the catalogue.
    data_by_name : Mapping of str to bytes
        The expected contents of all files.
    """
    with TierManager(configuration) as manager:
        findings = manager.check()
        assert not select_errors(findings), findings
        assert not manager.catalogue.reserved_move_ids()
        for name, data in data_by_name.items():
            tier_names = [tier.name for tier in configuration.tiers if (tier.directory / name).exists()]
            assert len(tier_names) == 1, f"{name} is in {tier_names}"
            assert manager.find(name).tier == tier_names[0]
            assert read_contents(manager, name) == data, f"{name} in {tier_names[0]} has other bytes"
        for tier in configuration.tiers:
            internal_folder = tier.directory / ".gdrkit-tiers"
            remaining_files = [
                path for name in ("incoming", "moves", "retired", "kept") for path in (internal_folder / name).iterdir()
            ]
            assert not remaining_files, remaining_files
            file_names = {str(path.relative_to(tier.directory)) for path in tier.directory.rglob("*") if path.is_file()}
            unexpected_files = {name for name in file_names if not name.startswith(internal_folder.name)} - set(
                data_by_name
            )
            assert not unexpected_files, unexpected_files
