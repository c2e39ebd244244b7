"""Scenario of direct transfers of `gdrkit.gds` in its own process; see :mod:`support.cufile_child` for its protocol."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdrkit import cuda, evidence, gds, pattern, serialization
from gdrkit.errors import ApiError, GdrkitError
from gdrkit.inventory.facts import notable
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["main"]

_LENGTH = 1 * MIB


def _result_json(result: gds.Transferred) -> dict[str, Any]:
    return {"bytes": result.bytes, "route": result.route.value, "why": result.why_not_direct}


def _tried(call: Callable[[], gds.Transferred]) -> dict[str, Any]:
    """Return the result of a call, or its error."""
    try:
        return _result_json(call())
    except GdrkitError as error:
        fields: dict[str, Any] = {"kind": type(error).__name__, "reason": error.reason.value, "message": str(error)}
        if isinstance(error, ApiError):
            fields |= {"api": error.api.value, "status": error.status, "errno": error.errno}
        if isinstance(error, gds.TransferFailed):
            fields |= _result_json(error.transferred) | {"parts": list(error.transferred.parts)}
        return fields


def there_and_back(asked: dict[str, Any]) -> dict[str, Any]:
    """Reads and writes of every kind that a file has; whether each byte is right, and which way it went."""
    path, seed = Path(asked["path"]), int(asked["seed"])
    data, other = (pattern.payload(_LENGTH, seed=each) for each in (seed, seed + 1))
    found: dict[str, Any] = {}
    with cuda.Device(0) as device, device.allocate(_LENGTH) as memory:
        with gds.File(path, "r+", direct=asked.get("direct", "preferred")) as file:
            found["read"] = _tried(lambda: file.read_into(memory))
            found["read_right"] = memory.read() == data
            memory.fill(0)
            ranges = [(_LENGTH // 2, _LENGTH // 2), (0, _LENGTH // 2)]
            found["readv"] = _tried(lambda: file.readv(memory, ranges))
            found["readv_right"] = memory.read() == data[_LENGTH // 2 :] + data[: _LENGTH // 2]
            found["odd"] = _tried(lambda: file.read_into(memory, file_offset_bytes=3, length_bytes=5 * KIB))
            found["odd_right"] = memory.read(length_bytes=5 * KIB) == data[3 : 3 + 5 * KIB]
            memory.write(other)
            found["write"] = _tried(lambda: file.write_from(memory))
            found["future"] = _tried(lambda: file.start_read_into(memory).result())
        found["written"] = path.read_bytes() == other
    return found


def main() -> None:
    """Run it, and write the answer."""
    asked = json.loads(sys.stdin.read())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        answer = there_and_back(asked)
    answer["warnings"] = [str(each.message) for each in said if issubclass(each.category, gds.FallbackWarning)]
    gds.close_engines()
    gds.close_driver()
    answer["opened"] = " ".join(each.path for each in evidence.libraries())
    answer["libraries"] = serialization.to_json_data(notable(evidence.libraries()))
    with os.fdopen(asked["answer_fd"], "w", encoding="utf-8") as file:
        json.dump(answer, file)


if __name__ == "__main__":
    main()
