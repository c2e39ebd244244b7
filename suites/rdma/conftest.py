"""The fixture `memory_kind`: the kind of memory that a case registers, host memory or device memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.memory_kinds import RdmaMemoryKind

if TYPE_CHECKING:
    from gdrkit.verbs import Nic

__all__ = ["memory_kind"]


@pytest.fixture
def memory_kind(request: pytest.FixtureRequest, nic: Nic) -> RdmaMemoryKind:
    """Return host memory for the parameter None, or device memory for a registration route, from ``MEMORY_KINDS``."""
    device = None if request.param is None else request.getfixturevalue("device")
    return RdmaMemoryKind(nic=nic, device=device, route=request.param)
