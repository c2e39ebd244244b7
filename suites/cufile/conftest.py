"""Fixture for the cuFile cases: a runner that calls cuFile in child processes, with a file of known bytes on a disk."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.cufile_scenarios import ScenarioRunner

from gdrkit import pattern
from gdrkit.harness.case import CASE_KEY
from gdrkit.harness.needs.cufile import DISK_FOLDER
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.inventory import Facts


@pytest.fixture
def scenarios(request: pytest.FixtureRequest, seed: int, facts: Facts) -> Iterator[ScenarioRunner]:
    """Yield a runner of cuFile scenarios, with a file of 1 MiB on a disk.

    A scenario is a function that calls cuFile in a child process.
    """
    with tempfile.TemporaryDirectory(prefix="gdrkit-cufile-", dir=DISK_FOLDER) as folder:
        data_path = Path(folder) / "data"
        data_path.write_bytes(pattern.payload(MIB, seed=seed))
        yield ScenarioRunner(data_path, seed, request.node.stash[CASE_KEY], facts)
