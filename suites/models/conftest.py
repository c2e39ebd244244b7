"""The copy engines of gdrkit.gds are closed after each case, so that the harness can detect handles they left open."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gdrkit import gds

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["close_engines"]


@pytest.fixture(autouse=True)
def close_engines() -> Iterator[None]:
    """Close the copy engines after each case."""
    yield
    gds.close_engines()
