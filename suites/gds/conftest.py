"""The fixtures of the cases about files and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.gds import engine_threads
from support.processes import wait_until

from gdrkit import gds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.cuda import Device

__all__ = ["engines_end", "kind", "owner"]


@pytest.fixture(autouse=True)
def engines_end() -> Iterator[None]:
    """Close the engines after each case, so that the harness sees whether they leave handles open."""
    yield
    gds.close_engines()
    gds.close_driver()
    # The kernel may list a thread for a short time after it was joined.
    wait_until(lambda: engine_threads() == 0, "the threads of the engines to end")


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """Return the kind of memory of the case; see ``support.gds.KINDS``."""
    return str(request.param)


@pytest.fixture
def owner(request: pytest.FixtureRequest, kind: str) -> Device | None:
    """Return the device that has the memory; None for host memory."""
    device: Device | None = None if kind == "host" else request.getfixturevalue("device")
    return device
