"""Comparison of measured numbers with the profile of the machine and the limits of its links.

The module is pure. Only numbers of hardware are judged, because a software twin has no expected speed.
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

__all__ = ["Judgement", "is_of_hardware", "judge"]

_RATE = "_gb_per_s_median"
# A measured rate may exceed the limit by this, due to clock errors and links that run slightly above nominal.
_ABOVE_LIMIT_PERCENT = 2.0


@dataclass(frozen=True, slots=True)
class Judgement:
    """A number, its bound, and whether it meets the bound.

    Attributes
    ----------
    number : str
        Name of the number in the record.
    found : float
        The measured value.
    bound : float
        The minimum or maximum value.
    verdict : Verdict
        ``pass`` or ``fail``.
    text : str
        One sentence.
    """

    number: str
    found: float
    bound: float
    verdict: Verdict
    text: str


def is_of_hardware(apis: Iterable[str], substrate: Mapping[str, Substrate]) -> bool:
    """Return whether numbers about these APIs are numbers of the machine; False if there are no APIs."""
    names = tuple(apis)
    return bool(names) and all(substrate.get(api) is Substrate.HARDWARE for api in names)


def judge(
    case: str, numbers: Mapping[str, float], *, profile: Profile, limits: Mapping[str, Limit]
) -> tuple[Judgement, ...]:
    """Judge the numbers of a case, which must be of hardware.

    Parameters
    ----------
    case : str
        Id of the case.
    numbers : mapping
        The numbers as in its record.
    profile : Profile
        The profile of the machine.
    limits : mapping
        The limit of the path of each rate, by the part of its name before ``_gb_per_s_median``.
    """
    judged = []
    for number, found in numbers.items():
        limit = limits.get(number.removesuffix(_RATE)) if number.endswith(_RATE) else None
        if limit is not None:
            bound = limit.gb_per_s * (1 + _ABOVE_LIMIT_PERCENT / 100)
            text = f"{number} is {found:.4g}; {limit.why} carries {limit.gb_per_s:.4g}"
            judged.append(_judged(number, found, bound, text, is_most=True))
        for expected in profile.expected:
            if fnmatchcase(case, expected.case) and fnmatchcase(number, expected.number):
                judged += _beside(expected, number, found, limit)
    return tuple(judged)


def _beside(expected: ExpectedNumber, number: str, found: float, limit: Limit | None) -> list[Judgement]:
    if expected.value is not None:
        value, origin = expected.value, expected.source
    elif limit is not None:
        value = limit.gb_per_s * (expected.limit_percent or 0.0) / 100
        origin = f"{expected.limit_percent:g} % of {limit.gb_per_s:.4g}, {limit.why}; {expected.source}"
    else:
        return []  # The limit of the links is unknown, so a share of it is undefined.
    share = expected.tolerance_percent / 100
    is_most = expected.better == "less"
    bound = value * (1 + share if is_most else 1 - share)
    text = f"{number} is {found:.4g}; expected {value:.4g}, tolerance {expected.tolerance_percent:g} % ({origin})"
    return [_judged(number, found, bound, text, is_most=is_most)]


def _judged(number: str, found: float, bound: float, text: str, *, is_most: bool) -> Judgement:
    is_met = found <= bound if is_most else found >= bound
    return Judgement(
        number=number, found=found, bound=bound, verdict=Verdict.PASS if is_met else Verdict.FAIL, text=text
    )
