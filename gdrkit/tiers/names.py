"""Names of files in tiers. A name is a path relative to the folder of the tier, and is the same in every tier.

A name must not lead out of a tier, or into gdrkit's own folder in it. Symbolic links in a name are refused when the
file is opened (:mod:`gdrkit.tiers.folder`).
"""

from __future__ import annotations

import os

from gdrkit.errors import UsageError

__all__ = ["GDRKIT_FOLDER", "LOST_AND_FOUND", "check_name", "printable"]

GDRKIT_FOLDER = ".gdrkit-tiers"
# Folder that some file systems create in their root. It contains files that a check of the file system has found.
LOST_AND_FOUND = "lost+found"
# PATH_MAX without its NUL, and NAME_MAX.
_NAME_BYTES_MAX = 4095
_PART_BYTES_MAX = 255


def check_name(name: str) -> str:
    """Return the name if it is valid.

    Raises
    ------
    UsageError
        The name is empty, absolute, longer than Linux permits, contains ``.``, ``..``, an empty part or a NUL, or
        begins with `GDRKIT_FOLDER` or `LOST_AND_FOUND`.
    """
    encoded_name = os.fsencode(name)
    path_parts = encoded_name.split(b"/")
    if not encoded_name or b"\0" in encoded_name or any(path_part in {b"", b".", b".."} for path_part in path_parts):
        message = f"a name must be a relative path without empty, '.' and '..' parts, not {printable(name)!r}"
        raise UsageError(message, what_to_do="name the file relative to its tier, e.g. run-7/weights.bin")
    if len(encoded_name) > _NAME_BYTES_MAX or max(map(len, path_parts)) > _PART_BYTES_MAX:
        message = (
            f"a name must have at most {_NAME_BYTES_MAX} bytes, and each part at most {_PART_BYTES_MAX}, "
            f"not {len(encoded_name)} bytes with a part of {max(map(len, path_parts))}"
        )
        raise UsageError(message)
    if os.fsdecode(path_parts[0]) in {GDRKIT_FOLDER, LOST_AND_FOUND}:
        message = (
            f"a name must not begin with {GDRKIT_FOLDER} or {LOST_AND_FOUND}, which are reserved: {printable(name)!r}"
        )
        raise UsageError(message, what_to_do="choose another name")
    return name


def printable(name: str) -> str:
    """Return a name as text. Bytes that are not UTF-8 become escapes."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
