"""cufile.json: which file libcufile would read, and what stands in it.

Level 4. It is JSON with comments. Only the file is read here; what the library makes of it shows after it was opened.
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
# Strings first, so that what looks like a comment inside of one stays.
_COMMENTS = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
# The file that NVIDIA ships has a comma behind the last entry of some objects once its comments are gone.
_LAST_COMMAS = re.compile(r'"(?:[^"\\]|\\.)*"|,(?=\s*[}\]])')


def config_path(tree: HostTree, environment: Mapping[str, str]) -> str | None:
    """The file that the library would read; None when there is none, and its own defaults hold."""
    path = environment.get(_VARIABLE) or DEFAULT_PATH
    return path if path.startswith("/") and tree.exists(path) else None


def parse_config(text: str, *, name: str = "cufile.json") -> dict[str, Any]:
    """Read it.

    Raises
    ------
    UsageError
        ``MALFORMED``: no JSON with comments, or no object.
    """
    plain = text
    for pattern in (_COMMENTS, _LAST_COMMAS):
        plain = pattern.sub(lambda found: found[0] if found[0].startswith('"') else " ", plain)
    try:
        data = json.loads(plain)
    except (ValueError, RecursionError) as error:
        message = f"{name}: no JSON with comments: {error}"
        raise UsageError(message, reason=Reason.MALFORMED, what_to_do="mend the file, or remove it") from error
    if not isinstance(data, dict):
        message = f"{name}: no object"
        raise UsageError(message, reason=Reason.MALFORMED, what_to_do="mend the file, or remove it")
    return data


def read_config(tree: HostTree, environment: Mapping[str, str]) -> tuple[str | None, dict[str, Any]]:
    """Path and contents; nothing in it when there is no file.

    Raises
    ------
    UsageError
        As :func:`parse_config`.
    """
    path = config_path(tree, environment)
    text = None if path is None else tree.text(path)
    return path, {} if text is None or path is None else parse_config(text, name=path)


def value(config: Mapping[str, Any], *keys: str) -> Any:  # noqa: ANN401 - whatever JSON has there.
    """What stands below these keys; None when there is nothing."""
    found: Any = config
    for key in keys:
        if not isinstance(found, dict):
            return None
        found = found.get(key)
    return found
