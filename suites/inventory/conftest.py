"""Fixture with the folder of the captures of real machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

__all__ = ["captures_folder"]


@pytest.fixture
def captures_folder() -> Path:
    """Return the folder with the captures of real machines. Cases that use it must have the need ``host.captures``."""
    return Path(os.environ["GDRKIT_CAPTURES"])
