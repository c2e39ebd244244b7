"""Fixtures and hooks of the throughput measurements. Rates that were measured on a software twin are not printed."""

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
    """The Meter of this case, which measures and records rates. A case uses it once."""
    return Meter(request, evidence)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """After a case has passed its data checks, fail it if a rate is lower than the profile of this machine allows."""
    result = yield
    check_expected_numbers(item)
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_group_stats() -> list[object]:
    """Suppress the table of pytest-benchmark, which would show numbers of a twin as if they were of the machine."""
    return []


@pytest.fixture
def memory_kind(request: pytest.FixtureRequest, nic: Nic) -> RdmaMemoryKind:
    """Return the memory kind of the parameter; see ``support.memory_kinds.MEMORY_KINDS``."""
    device = None if request.param is None else request.getfixturevalue("device")
    return RdmaMemoryKind(nic=nic, device=device, route=request.param)
