"""What the cases about Gaudi begin with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.raw_hlthunk import RawDevice

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["raw"]


@pytest.fixture
def raw() -> Iterator[RawDevice]:
    """A device as a C program has it."""
    with RawDevice() as device:
        yield device
