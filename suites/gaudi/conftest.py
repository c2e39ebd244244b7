"""Fixtures of the cases about Gaudi, an accelerator of Intel, and its library hl-thunk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from gaudi.raw_hlthunk import RawDevice

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["raw_device"]


@pytest.fixture
def raw_device() -> Iterator[RawDevice]:
    """Yield a device that was opened with the C functions of hl-thunk, without gdrkit."""
    with RawDevice() as device:
        yield device
