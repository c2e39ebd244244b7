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
    """Return the memory kind for a parameter from ``MEMORY_KINDS``.

    The parameter None means host memory. A registration route means device memory that is registered by this route.
    """
    device = None if request.param is None else request.getfixturevalue("device")
    return RdmaMemoryKind(nic=nic, device=device, route=request.param)
