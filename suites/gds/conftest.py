"""The fixtures of the cases about files and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.gds import engine_threads
from support.kill_world import until

from gdrkit import gds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.cuda import Device

__all__ = ["engines_end", "kind", "where"]


@pytest.fixture(autouse=True)
def engines_end() -> Iterator[None]:
    """No engine outlives its case, so that the harness sees what it held."""
    yield
    gds.close_engines()
    gds.close_driver()
    # A thread that was joined is listed until the kernel has buried it.
    until(lambda: engine_threads() == 0, "the threads of the engines to end")


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """Which memory the case is about; see ``support.gds.KINDS``."""
    return str(request.param)


@pytest.fixture
def where(request: pytest.FixtureRequest, kind: str) -> Device | None:
    """The device of that memory; None for host memory."""
    found: Device | None = None if kind == "host" else request.getfixturevalue("device")
    return found
