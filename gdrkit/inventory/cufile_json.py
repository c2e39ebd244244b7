"""Reader of cufile.json, the configuration of libcufile: JSON with comments.

This module finds the file that the library would read, and parses it. The settings that the library really uses are
known only after the library was opened.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from gdrkit.errors import Reason, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gdrkit.host import HostTree

__all__ = ["DEFAULT_PATH", "config_path", "parse_config", "read_config", "value"]

DEFAULT_PATH = "/etc/cufile.json"
_VARIABLE = "CUFILE_ENV_PATH_JSON"
# Strings come first, so that a string that contains a comment sign is not changed.
_COMMENTS = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
# Without its comments, the file that NVIDIA ships has a comma after the last entry of some objects.
_LAST_COMMAS = re.compile(r'"(?:[^"\\]|\\.)*"|,(?=\s*[}\]])')


def config_path(tree: HostTree, environment: Mapping[str, str]) -> str | None:
    """Return the path that the library would read, or None if there is no file and the library uses its defaults."""
    path = environment.get(_VARIABLE) or DEFAULT_PATH
    return path if path.startswith("/") and tree.exists(path) else None


def parse_config(text: str, *, name: str = "cufile.json") -> dict[str, Any]:
    """Parse the text of a cufile.json and return its top-level object.

    Raises
    ------
    UsageError
        ``MALFORMED``: the text is not JSON with comments, or its top-level value is not an object.
    """
    stripped = text
    for pattern in (_COMMENTS, _LAST_COMMAS):
        stripped = pattern.sub(lambda match: match[0] if match[0].startswith('"') else " ", stripped)
    try:
        data = json.loads(stripped)
    except (ValueError, RecursionError) as error:
        message = f"{name}: not JSON with comments: {error}"
        raise UsageError(message, reason=Reason.MALFORMED, what_to_do="fix the file, or remove it") from error
    if not isinstance(data, dict):
        message = f"{name}: the top-level value is not an object"
        raise UsageError(message, reason=Reason.MALFORMED, what_to_do="fix the file, or remove it")
    return data


def read_config(tree: HostTree, environment: Mapping[str, str]) -> tuple[str | None, dict[str, Any]]:
    """Return the path and the contents; None and an empty mapping if there is no file.

    Raises
    ------
    UsageError
        See :func:`parse_config`.
    """
    path = config_path(tree, environment)
    text = None if path is None else tree.text(path)
    return path, {} if text is None or path is None else parse_config(text, name=path)


def value(config: Mapping[str, Any], *keys: str) -> Any:  # noqa: ANN401 - a JSON value of any type.
    """Return the value at the path of `keys`, or None if there is none."""
    current: Any = config
    for key in keys:
        if not isinstance(current, dict):
            return None
        current = current.get(key)
    return current
