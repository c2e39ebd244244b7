"""The pins on disk. A pin keeps a file in one tier. Users set pins, so the pins must survive the loss of the catalogue.

The pins are in the file ``pins.json`` in the ``.gdrkit-tiers`` folder of the fastest tier. The file is always replaced
as a whole.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from gdrkit.tiers.kernel_errors import convert_os_errors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gdrkit.tiers.folder import TierFolder

__all__ = ["read_pins", "write_pins"]

_PINS_FILE_NAME = "pins.json"


def read_pins(folder: TierFolder) -> dict[str, str]:
    """Return the tier of each pinned file. The result is empty if there are no pins, or if they cannot be read."""
    gdrkit_folder_fd = folder.find_gdrkit_folder_fd()
    if gdrkit_folder_fd is None:
        return {}
    try:
        descriptor = os.open(_PINS_FILE_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=gdrkit_folder_fd)
    except OSError:
        return {}
    with os.fdopen(descriptor, encoding="ascii") as file:
        try:
            pins = json.load(file)
        except ValueError:
            return {}
    return {str(name): str(tier) for name, tier in pins.items()} if isinstance(pins, dict) else {}


def write_pins(folder: TierFolder, pins: Mapping[str, str]) -> None:
    """Replace all pins, and sync them to the disk. The caller must exclude other processes that write pins."""
    with convert_os_errors("write pins", tier=folder.name):
        gdrkit_folder_fd = folder.gdrkit_folder_fd()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(
            os.open(_PINS_FILE_NAME + ".new", flags, 0o600, dir_fd=gdrkit_folder_fd), "w", encoding="ascii"
        ) as file:
            json.dump(pins, file, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        os.rename(_PINS_FILE_NAME + ".new", _PINS_FILE_NAME, src_dir_fd=gdrkit_folder_fd, dst_dir_fd=gdrkit_folder_fd)
        os.fsync(gdrkit_folder_fd)
