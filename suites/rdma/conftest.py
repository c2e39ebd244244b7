"""The fixture that gives these cases registered memory of the host or of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.reach import Reach

if TYPE_CHECKING:
    from gdrkit.verbs import Nic

__all__ = ["reach"]


@pytest.fixture
def reach(request: pytest.FixtureRequest, nic: Nic) -> Reach:
    """Return the memory kind of the parameter; see ``support.reach.KINDS``."""
    device = None if request.param is None else request.getfixturevalue("device")
    return Reach(nic=nic, device=device, route=request.param)
