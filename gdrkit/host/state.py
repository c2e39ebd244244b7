"""The folder in which gdrkit keeps what it has learned about this machine since the boot."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["STATE_VARIABLE", "state_folder"]

# The environment variable that names the folder.
STATE_VARIABLE = "GDRKIT_STATE"


def state_folder() -> Path:
    """Return the path of the folder: GDRKIT_STATE, or ``/dev/shm/gdrkit-<user id>``.

    The default folder is in memory, so a reboot deletes its contents. Programs that share iovs (buffers of USRBIO) must
    use the same folder.
    """
    return Path(os.environ.get(STATE_VARIABLE) or f"/dev/shm/gdrkit-{os.geteuid()}")  # noqa: S108 - a PrivateFolder.
