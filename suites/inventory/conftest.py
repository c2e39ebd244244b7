"""Fixture with the captures of real machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

__all__ = ["captures"]


@pytest.fixture
def captures() -> Path:
    """The folder with the captures of real machines. A case that uses it must declare the need ``host.captures``."""
    return Path(os.environ["GDRKIT_CAPTURES"])
