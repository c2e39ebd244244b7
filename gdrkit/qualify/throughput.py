"""Comparison of measured numbers with the values that the profile expects and with the limits of the PCIe links.

The module performs no I/O. The caller passes only numbers that were measured on hardware, because the speed of a
software twin (a library that emulates the hardware) says nothing about the machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from gdrkit.report.substrate import Substrate
from gdrkit.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gdrkit.inventory import ExpectedNumber, Limit, Profile

__all__ = ["NumberCheck", "check_numbers", "ran_on_hardware"]

_RATE_SUFFIX = "_gb_per_s_median"
# A measured rate may exceed the limit of the link by this much: clocks have errors, and a link may run slightly faster
# than its nominal speed.
_LIMIT_TOLERANCE_PERCENT = 2.0


@dataclass(frozen=True, slots=True)
class NumberCheck:
    """Result of comparing one measured number with one bound.

    Attributes
    ----------
    number : str
        Name of the number in the record.
    found : float
        The measured value, in the unit that the name states.
    bound : float
        The smallest or largest accepted value, in the same unit.
    verdict : Verdict
        ``pass`` or ``fail``.
    text : str
        A sentence with the number, the bound and the origin of the bound.
    """

    number: str
    found: float
    bound: float
    verdict: Verdict
    text: str


def ran_on_hardware(apis: Iterable[str], substrate: Mapping[str, Substrate]) -> bool:
    """Return whether all of `apis` ran on hardware. The result is False if `apis` is empty.

    A number that was measured with these APIs describes the machine only if all of them ran on hardware.
    """
    api_names = tuple(apis)
    return bool(api_names) and all(substrate.get(api) is Substrate.HARDWARE for api in api_names)


def check_numbers(
    case: str, numbers: Mapping[str, float], *, profile: Profile, limits: Mapping[str, Limit]
) -> tuple[NumberCheck, ...]:
    """Compare the numbers of a case with the profile and the limits. The case must have run on hardware.

    Parameters
    ----------
    case : str
        Id of the case.
    numbers : mapping
        The numbers of the record, by name.
    profile : Profile
        The profile of the machine.
    limits : mapping
        The limits of the links. The key is the name of a rate without ``_gb_per_s_median``. A rate may have no limit.
    """
    checks = []
    for name, measured_value in numbers.items():
        limit = limits.get(name.removesuffix(_RATE_SUFFIX)) if name.endswith(_RATE_SUFFIX) else None
        if limit is not None:
            bound_value = limit.gb_per_s * (1 + _LIMIT_TOLERANCE_PERCENT / 100)
            text = f"{name} is {measured_value:.4g}; {limit.source} carries {limit.gb_per_s:.4g}"
            checks.append(_make_check(name, measured_value, bound_value, text, is_maximum=True))
        for expected in profile.expected:
            if fnmatchcase(case, expected.case) and fnmatchcase(name, expected.number):
                checks += _check_expected(expected, name, measured_value, limit)
    return tuple(checks)


def _check_expected(
    expected: ExpectedNumber, name: str, measured_value: float, limit: Limit | None
) -> list[NumberCheck]:
    if expected.value is not None:
        expected_value, origin = expected.value, expected.source
    elif limit is not None:
        expected_value = limit.gb_per_s * (expected.limit_percent or 0.0) / 100
        origin = f"{expected.limit_percent:g} % of {limit.gb_per_s:.4g}, {limit.source}; {expected.source}"
    else:
        return []  # The profile expects a percentage of the limit, but the limit is unknown.
    tolerance_ratio = expected.tolerance_percent / 100
    is_maximum = expected.better == "less"
    bound_value = expected_value * (1 + tolerance_ratio if is_maximum else 1 - tolerance_ratio)
    text = (
        f"{name} is {measured_value:.4g}; "
        f"expected {expected_value:.4g}, tolerance {expected.tolerance_percent:g} % ({origin})"
    )
    return [_make_check(name, measured_value, bound_value, text, is_maximum=is_maximum)]


def _make_check(name: str, measured_value: float, bound_value: float, text: str, *, is_maximum: bool) -> NumberCheck:
    is_met = measured_value <= bound_value if is_maximum else measured_value >= bound_value
    return NumberCheck(
        number=name,
        found=measured_value,
        bound=bound_value,
        verdict=Verdict.PASS if is_met else Verdict.FAIL,
        text=text,
    )
