"""Fixtures for the cases of storage tiers: a configuration of three tiers in folders, and a manager of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.gds import count_engine_threads
from support.processes import wait_until
from support.tier_world import make_configuration

from gdrkit import gds
from gdrkit.tiers import TierManager

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gdrkit.tiers import Configuration


@pytest.fixture(autouse=True)
def close_engines() -> Iterator[None]:
    """Close the copy engines after each case, so that the harness finds only the handles that the case left open."""
    yield
    gds.close_engines()
    gds.close_driver()
    wait_until(lambda: count_engine_threads() == 0, "the threads of the engines to end")


@pytest.fixture
def configuration(tmp_path: Path) -> Configuration:
    """Return the configuration of three tiers in folders."""
    return make_configuration(tmp_path)


@pytest.fixture
def manager(configuration: Configuration) -> Iterator[TierManager]:
    """Yield a manager of three tiers in folders."""
    with TierManager(configuration) as tier_manager:
        yield tier_manager
