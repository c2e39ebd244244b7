"""How the cases here measure, and what is printed: numbers of hardware as such, numbers of anything else not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.rates import Meter, judge_numbers
from support.reach import Reach

if TYPE_CHECKING:
    from collections.abc import Generator

    from gdrkit.harness.evidence import Evidence
    from gdrkit.verbs import Nic


@pytest.fixture
def meter(request: pytest.FixtureRequest, evidence: Evidence) -> Meter:
    """What measures; a case that uses it measures once."""
    return Meter(request, evidence)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """A case whose bytes were right fails where it is slower than the profile of this hardware allows."""
    result = yield
    judge_numbers(item)
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_group_stats() -> list[object]:
    """No table of pytest-benchmark: it would print the numbers of a software twin as if they were of the machine."""
    return []


@pytest.fixture
def reach(request: pytest.FixtureRequest, nic: Nic) -> Reach:
    """Memory of the kind that the parameter says; see ``support.reach.KINDS``."""
    device = None if request.param is None else request.getfixturevalue("device")
    return Reach(nic=nic, device=device, route=request.param)
