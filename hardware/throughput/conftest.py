"""Fixtures and hooks of the throughput measurements. Rates that were measured on a software twin are not printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.rates import Meter, check_expected_numbers
from support.reach import Reach

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
    """Suppress the table of pytest-benchmark, which would present numbers of a twin as those of the machine."""
    return []


@pytest.fixture
def reach(request: pytest.FixtureRequest, nic: Nic) -> Reach:
    """Memory of the kind in the parameter; see ``support.reach.KINDS``."""
    device = None if request.param is None else request.getfixturevalue("device")
    return Reach(nic=nic, device=device, route=request.param)
