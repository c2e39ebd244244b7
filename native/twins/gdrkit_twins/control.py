"""Query the state of the twins that are loaded in this process, and replace their fault plans.

These functions load no library. They search the memory map of the process for the twins, and use a library only if it
exports ``gdrkit_twin_ledger``.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
from pathlib import Path

__all__ = ["get_loaded_twin", "ledger", "set_faults"]

_LIBRARY_NAME_PREFIXES = {
    "verbs": "libibverbs.so",
    "rdmacm": "librdmacm.so",
    "cuda": "libcuda.so",
    "cufile": "libcufile.so",
    "hlthunk": "libhl-thunk.so",
}
# A line of /proc/self/maps about an executable mapping of a file. The group is the path of the file.
_EXECUTABLE_MAPPING = re.compile(r"^\S+ ..x. \S+ \S+ \d+\s+(/.*)$", re.MULTILINE)
_BUFFER_STEP_BYTES = 4096


def get_loaded_twin(api: str) -> ctypes.CDLL | None:
    """Return the loaded twin of `api` (``verbs``, ``rdmacm``, ``cuda``, ``cufile`` or ``hlthunk``).

    Return None if this process has not loaded that library, or has loaded the real one.
    """
    name_prefix = _LIBRARY_NAME_PREFIXES[api]
    for path in dict.fromkeys(
        _EXECUTABLE_MAPPING.findall(Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape"))
    ):
        if os.path.basename(path).startswith(name_prefix):  # noqa: PTH119 - a path as printed by the kernel.
            # RTLD_NOLOAD returns the library that is already loaded, and never loads another one.
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            if hasattr(library, "gdrkit_twin_ledger"):
                return library
    return None


def ledger(api: str) -> dict[str, object] | None:
    """Return the state of the twin of `api`: live handles, calls of each function, the seed and more.

    native/twins/control/control.h describes the fields. Return None if no twin of `api` is loaded.
    """
    library = get_loaded_twin(api)
    if library is None:
        return None
    size_bytes = _BUFFER_STEP_BYTES
    while True:
        buffer = ctypes.create_string_buffer(size_bytes)
        needed_bytes = int(library.gdrkit_twin_ledger(buffer, ctypes.c_size_t(size_bytes)))
        if needed_bytes < size_bytes:
            state = json.loads(buffer.value)
            if not isinstance(state, dict):
                message = f"gdrkit_twin_ledger of the {api} twin returned {state!r}, expected a JSON object"
                raise TypeError(message)
            return state
        # Another thread may add handles before the next call, so the next buffer is larger than needed now.
        size_bytes = needed_bytes + _BUFFER_STEP_BYTES


def set_faults(api: str, plan: str) -> None:
    """Replace the fault plan of the loaded twin of `api`. The next call of each function is call 1 of the new plan.

    Raises
    ------
    OSError
        ENOENT: no twin of `api` is loaded in this process. EINVAL: the plan is malformed; the twin prints the error on
        stderr.
    """
    library = get_loaded_twin(api)
    if library is None:
        raise OSError(errno.ENOENT, "no twin is loaded in this process", api)
    error_number = int(library.gdrkit_twin_faults(plan.encode()))
    if error_number != 0:
        raise OSError(error_number, "malformed fault plan", plan)
