"""Fixtures of the cases about transfers between files and memory (gdrkit.gds)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.gds import count_engine_threads
from support.processes import wait_until

from gdrkit import gds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.cuda import Device

__all__ = ["close_engines", "memory_kind", "owner_device"]


@pytest.fixture(autouse=True)
def close_engines() -> Iterator[None]:
    """Close the engines and the cuFile driver after each case, because the harness then reports open handles."""
    yield
    gds.close_engines()
    gds.close_driver()
    # The kernel may list a thread for a short time after it was joined.
    wait_until(lambda: count_engine_threads() == 0, "the threads of the engines to end")


@pytest.fixture
def memory_kind(request: pytest.FixtureRequest) -> str:
    """Return the kind of memory of the case; see ``support.gds.MEMORY_KINDS``."""
    return str(request.param)


@pytest.fixture
def owner_device(request: pytest.FixtureRequest, memory_kind: str) -> Device | None:
    """Return the device that allocates the memory of the case; None for host memory."""
    device: Device | None = None if memory_kind == "host" else request.getfixturevalue("device")
    return device
