"""The captures of real machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

__all__ = ["captures"]


@pytest.fixture
def captures() -> Path:
    """The folder with them; for cases that need ``host.captures``."""
    return Path(os.environ["GDRKIT_CAPTURES"])
