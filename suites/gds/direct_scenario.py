"""A program that makes direct transfers with `gdrkit.gds`, for test_direct.py.

The program runs in a separate process. :mod:`support.cufile_child` describes the JSON objects that the program reads
and writes.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdrkit import cuda, evidence, gds, pattern, serialization
from gdrkit.errors import ApiError, GdrkitError
from gdrkit.inventory.facts import select_substrate_libraries
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["main"]

_FILE_BYTES = 1 * MIB


def _to_json_fields(result: gds.TransferResult) -> dict[str, Any]:
    return {"bytes": result.bytes, "route": result.route.value, "why_not_direct": result.why_not_direct}


def _get_result_or_error(call: Callable[[], gds.TransferResult]) -> dict[str, Any]:
    """Return the fields of the result of a call. If the call fails, return the fields of its error."""
    try:
        return _to_json_fields(call())
    except GdrkitError as error:
        fields: dict[str, Any] = {
            "error_class": type(error).__name__,
            "reason": error.reason.value,
            "message": str(error),
        }
        if isinstance(error, ApiError):
            fields |= {"api": error.api.value, "status": error.status, "errno": error.errno}
        if isinstance(error, gds.TransferFailed):
            fields |= _to_json_fields(error.partial_result) | {"range_bytes": list(error.partial_result.range_bytes)}
        return fields


def read_and_write(arguments: dict[str, Any]) -> dict[str, Any]:
    """Read and write with every method of `gds.File`. Return the routes, and whether the bytes are as expected."""
    path, seed = Path(arguments["path"]), int(arguments["seed"])
    data, new_data = (pattern.payload(_FILE_BYTES, seed=data_seed) for data_seed in (seed, seed + 1))
    report: dict[str, Any] = {}
    with cuda.Device(0) as device, device.allocate(_FILE_BYTES) as memory:
        with gds.File(path, "r+", direct=arguments.get("direct", "preferred")) as file:
            report["read"] = _get_result_or_error(lambda: file.read_into(memory))
            report["read_is_expected"] = memory.read() == data
            memory.fill(0)
            ranges = [(_FILE_BYTES // 2, _FILE_BYTES // 2), (0, _FILE_BYTES // 2)]
            report["readv"] = _get_result_or_error(lambda: file.readv(memory, ranges))
            report["readv_is_expected"] = memory.read() == data[_FILE_BYTES // 2 :] + data[: _FILE_BYTES // 2]
            report["unaligned_read"] = _get_result_or_error(
                lambda: file.read_into(memory, file_offset_bytes=3, length_bytes=5 * KIB)
            )
            report["unaligned_read_is_expected"] = memory.read(length_bytes=5 * KIB) == data[3 : 3 + 5 * KIB]
            memory.write(new_data)
            report["write"] = _get_result_or_error(lambda: file.write_from(memory))
            report["started_read"] = _get_result_or_error(lambda: file.start_read_into(memory).result())
        report["is_written"] = path.read_bytes() == new_data
    return report


def main() -> None:
    """Run the scenario with the arguments from standard input, and write its report."""
    arguments = json.loads(sys.stdin.read())
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        report = read_and_write(arguments)
    report["warnings"] = [
        str(warning.message) for warning in caught_warnings if issubclass(warning.category, gds.FallbackWarning)
    ]
    gds.close_engines()
    gds.close_driver()
    report["library_paths"] = " ".join(library.path for library in evidence.libraries())
    report["libraries"] = serialization.to_json_data(select_substrate_libraries(evidence.libraries()))
    with os.fdopen(arguments["result_fd"], "w", encoding="utf-8") as file:
        json.dump(report, file)


if __name__ == "__main__":
    main()
