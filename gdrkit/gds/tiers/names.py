"""The names of files in tiers: relative, plain, the same in every tier.

Level 4. What could lead out of a tier, or into the folder that gdrkit keeps in it, is no name. That no component is a
symbolic link is seen when a file is opened (:mod:`gdrkit.gds.tiers.folder`).
"""

from __future__ import annotations

import os

from gdrkit.errors import UsageError

__all__ = ["LOST_AND_FOUND", "OWN_FOLDER", "check_name", "shown"]

OWN_FOLDER = ".gdrkit-tiers"
# Of a file system, in its root.
LOST_AND_FOUND = "lost+found"
_NAME_BYTES_MAX = 4095
_PART_BYTES_MAX = 255


def check_name(name: str) -> str:
    """The name, if it is one.

    Raises
    ------
    UsageError
        It is empty, absolute, longer than Linux has names, has a ``.``, a ``..``, an empty part or a NUL, or begins
        with a name that is not the user's.
    """
    data = os.fsencode(name)
    parts = data.split(b"/")
    if not data or b"\0" in data or any(part in {b"", b".", b".."} for part in parts):
        message = f"{shown(name)!r} is no name of a file in a tier"
        raise UsageError(message, what_to_do="name it relative to the tier, e.g. run-7/weights.bin, without . and ..")
    if len(data) > _NAME_BYTES_MAX or max(map(len, parts)) > _PART_BYTES_MAX:
        message = f"a name of {len(data)} bytes, with a part of {max(map(len, parts))}, is too long"
        raise UsageError(message, what_to_do=f"at most {_NAME_BYTES_MAX} bytes, each part at most {_PART_BYTES_MAX}")
    if os.fsdecode(parts[0]) in {OWN_FOLDER, LOST_AND_FOUND}:
        message = f"{shown(name)!r} is not a user's"
        raise UsageError(message, what_to_do="choose another name")
    return name


def shown(name: str) -> str:
    """A name as text: bytes that are no UTF-8 as escapes."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
