"""What the twins of verbs and hl-thunk were called with in this process, in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from gdrkit import launch

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Call", "called", "matched", "parse"]


@dataclass(frozen=True)
class Call:
    """One call: name, arguments as they were written, and what it gave."""

    name: str
    arguments: dict[str, str] = field(default_factory=dict)
    result: str | None = None


def parse(line: str) -> Call:
    """``hlthunk_memory_unmap fd=5 device_virt_addr=0x1000 -> 0`` as a call."""
    text, _, result = line.partition(" -> ")
    name, *words = text.split()
    return Call(name, dict(word.split("=", 1) for word in words), result.strip() or None)


def called(*names: str) -> list[Call]:
    """The calls of these functions so far, of both twins, by their times."""
    lines: list[tuple[int, str]] = []
    for api in ("verbs", "hlthunk"):
        state = launch.twin_control().ledger(api) or {}
        for line in cast("list[str]", state.get("trace", [])):
            when, _, rest = line.partition(" ")
            lines.append((int(when), rest))
    calls = (parse(text) for _when, text in sorted(lines))
    return [call for call in calls if call.name in names]


def matched(vector: Iterable[Call], calls: Iterable[Call]) -> str | None:
    """Where calls differ from a vector, one sentence; None when they agree.

    A value ``$name`` in the vector stands for one value: the first that is met, and from then on that one.
    """
    meant: dict[str, str] = {}
    expected, actual = list(vector), list(calls)
    if [call.name for call in expected] != [call.name for call in actual]:
        return f"called were {[call.name for call in actual]}"
    for one, other in zip(expected, actual, strict=True):
        pairs = [(one.arguments[name], other.arguments.get(name), name) for name in one.arguments]
        pairs += [(one.result, other.result, "the result")] if one.result is not None else []
        for wanted, found, name in pairs:
            value = meant.setdefault(wanted, found or "") if wanted and wanted.startswith("$") else wanted
            if found is None or _value(found) != _value(value or ""):
                return f"{other.name}: {name} is {found} and not {wanted} ({value})"
    return None


def _value(text: str) -> int | str:
    try:
        return int(text, 0)
    except ValueError:
        return text
