"""The report of `gdrkit run --report`: what the programs of one run did on the twins."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["read_moved_bytes", "read_report"]


def read_report(path: Path) -> dict[str, Any]:
    """Return the report, or an empty one if `gdrkit run` did not write it because it was killed."""
    if not path.exists():
        return {}
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def read_moved_bytes(path: Path, api: str = "verbs") -> int:
    """Return the number of bytes that the programs of the run moved over the twin of `api`."""
    api_use = read_report(path).get("apis", {}).get(api, {})
    return int(api_use.get("moved_bytes", 0))
