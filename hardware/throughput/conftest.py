"""Fixtures and hooks of the throughput measurements. pytest prints no rates, because the records contain the rates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.memory_kinds import RdmaMemoryKind
from support.rates import Meter, check_expected_numbers

if TYPE_CHECKING:
    from collections.abc import Generator

    from gdrkit.harness.evidence import Evidence
    from gdrkit.verbs import Nic


@pytest.fixture
def meter(request: pytest.FixtureRequest, evidence: Evidence) -> Meter:
    """The Meter of this case, which measures and records rates. A case calls `measure` at most once."""
    return Meter(request, evidence)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """After a case has passed its data checks, fail it if a number from hardware is worse than the profile expects."""
    result = yield
    check_expected_numbers(item)
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_group_stats() -> list[object]:
    """Suppress the table of pytest-benchmark, which does not show whether a software twin was measured."""
    return []


@pytest.fixture
def memory_kind(request: pytest.FixtureRequest, nic: Nic) -> RdmaMemoryKind:
    """Return the memory kind for the parameter: a registration route of device memory, or None for host memory."""
    device = None if request.param is None else request.getfixturevalue("device")
    return RdmaMemoryKind(nic=nic, device=device, route=request.param)
