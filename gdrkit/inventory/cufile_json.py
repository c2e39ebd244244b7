"""Reader of cufile.json, the configuration file of libcufile, which is JSON with comments.

This module finds the file that the library would read, and parses it. Only the library itself, once it is open, can
report the settings that it really uses.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from gdrkit.errors import Reason, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gdrkit.host import HostTree

__all__ = ["DEFAULT_PATH", "config_path", "get_value", "parse_config", "read_config"]

DEFAULT_PATH = "/etc/cufile.json"
_PATH_VARIABLE = "CUFILE_ENV_PATH_JSON"
# Matches a string or a comment. A whole string is matched, so that a comment sign in it does not begin a comment.
_STRING_OR_COMMENT = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
# Matches a string, or a comma after the last entry of an object or array. The file that NVIDIA ships has such commas.
_STRING_OR_LAST_COMMA = re.compile(r'"(?:[^"\\]|\\.)*"|,(?=\s*[}\]])')


def config_path(tree: HostTree, environment: Mapping[str, str]) -> str | None:
    """Return the path that the library would read, or None if there is no file and the library uses its defaults.

    A relative path in CUFILE_ENV_PATH_JSON gives None, too.
    """
    path = environment.get(_PATH_VARIABLE) or DEFAULT_PATH
    return path if path.startswith("/") and tree.exists(path) else None


def parse_config(text: str, *, name: str = "cufile.json") -> dict[str, Any]:
    """Parse the text of a cufile.json and return its top-level object. `name` is used in errors.

    Raises
    ------
    UsageError
        ``MALFORMED``: the text is not JSON with comments, or its top-level value is not an object.
    """
    json_text = text
    for pattern in (_STRING_OR_COMMENT, _STRING_OR_LAST_COMMA):
        json_text = pattern.sub(lambda match: match[0] if match[0].startswith('"') else " ", json_text)
    try:
        data = json.loads(json_text)
    except (ValueError, RecursionError) as error:
        message = f"{name}: not JSON with comments: {error}"
        raise UsageError(message, reason=Reason.MALFORMED, what_to_do="fix the file, or remove it") from error
    if not isinstance(data, dict):
        message = f"{name}: the top-level value is not an object"
        raise UsageError(message, reason=Reason.MALFORMED, what_to_do="fix the file, or remove it")
    return data


def read_config(tree: HostTree, environment: Mapping[str, str]) -> tuple[str | None, dict[str, Any]]:
    """Return the path and the contents of cufile.json, or None and an empty mapping if there is no file.

    The mapping is also empty if the file exists, but cannot be read.

    Raises
    ------
    UsageError
        See :func:`parse_config`.
    """
    path = config_path(tree, environment)
    text = None if path is None else tree.text(path)
    return path, {} if text is None or path is None else parse_config(text, name=path)


def get_value(config: Mapping[str, Any], *keys: str) -> Any:  # noqa: ANN401 - a JSON value of any type.
    """Return the value at the end of `keys`, one key for each level of nested objects; None if it does not exist."""
    config_part: Any = config
    for key in keys:
        if not isinstance(config_part, dict):
            return None
        config_part = config_part.get(key)
    return config_part
