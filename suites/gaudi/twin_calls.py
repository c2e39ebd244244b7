"""The calls of this process to the verbs twin and the hl-thunk twin, and their comparison with expected calls.

A twin is a library that emulates the hardware below an API.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from gdrkit import launch

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Call", "find_difference", "parse_call", "read_calls"]


@dataclass(frozen=True)
class Call:
    """A call: its name, its arguments as text, and its result."""

    name: str
    arguments: dict[str, str] = field(default_factory=dict)
    result: str | None = None


def parse_call(line: str) -> Call:
    """Parse a call such as ``hlthunk_memory_unmap fd=5 device_virt_addr=0x1000 -> 0``."""
    call_text, _, result = line.partition(" -> ")
    name, *argument_texts = call_text.split()
    return Call(name, dict(argument_text.split("=", 1) for argument_text in argument_texts), result.strip() or None)


def read_calls(*function_names: str) -> list[Call]:
    """Return the calls of these functions to both twins so far, ordered by time."""
    timed_calls: list[tuple[int, str]] = []
    for api in ("verbs", "hlthunk"):
        ledger = launch.twin_control().ledger(api) or {}
        for line in cast("list[str]", ledger.get("trace", [])):
            time_ns, _, call_text = line.partition(" ")
            timed_calls.append((int(time_ns), call_text))
    calls = (parse_call(call_text) for _time_ns, call_text in sorted(timed_calls))
    return [call for call in calls if call.name in function_names]


def find_difference(expected_calls: Iterable[Call], actual_calls: Iterable[Call]) -> str | None:
    """Return the first difference of two sequences of calls as a sentence, or None if they agree.

    A value ``$name`` in an expected call is a variable. The variable gets the actual value at its first use, and each
    later use must have the same value.
    """
    variables: dict[str, str] = {}
    expected_calls, actual_calls = list(expected_calls), list(actual_calls)
    if [call.name for call in expected_calls] != [call.name for call in actual_calls]:
        return f"the calls are {[call.name for call in actual_calls]}, not {[call.name for call in expected_calls]}"
    for expected_call, actual_call in zip(expected_calls, actual_calls, strict=True):
        comparisons = [
            (expected_call.arguments[name], actual_call.arguments.get(name), name) for name in expected_call.arguments
        ]
        if expected_call.result is not None:
            comparisons.append((expected_call.result, actual_call.result, "the result"))
        for expected_value, value, value_name in comparisons:
            is_variable = bool(expected_value) and expected_value.startswith("$")
            assigned_value = variables.setdefault(expected_value, value or "") if is_variable else expected_value
            if value is None or _parse_number(value) != _parse_number(assigned_value or ""):
                return f"{actual_call.name}: {value_name} is {value}, not {expected_value} ({assigned_value})"
    return None


def _parse_number(text: str) -> int | str:
    try:
        return int(text, 0)
    except ValueError:
        return text
