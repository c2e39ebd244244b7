"""How suites look inside the twins that are loaded in this process.

Nothing is loaded by looking: the library is found in the memory map of the process, and only one that has the two
control functions is asked.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
from pathlib import Path

__all__ = ["ledger", "loaded", "set_faults"]

_FILES = {
    "verbs": "libibverbs.so",
    "cuda": "libcuda.so",
    "cufile": "libcufile.so",
    "hlthunk": "libhl-thunk.so",
}
_MAPPING = re.compile(r"^\S+ ..x. \S+ \S+ \d+\s+(/.*)$", re.MULTILINE)
_FIRST_BYTES = 4096


def loaded(api: str) -> ctypes.CDLL | None:
    """The twin of `api` (``verbs``, ``cuda``, ``cufile`` or ``hlthunk``) in this process; None when none is loaded, or
    when it is the real library.
    """
    for path in dict.fromkeys(
        _MAPPING.findall(Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape"))
    ):
        if os.path.basename(path).startswith(_FILES[api]):  # noqa: PTH119 - a path as the kernel wrote it.
            # Opened already, so this gives the same library; RTLD_NOLOAD makes sure that it can be no other.
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            if hasattr(library, "gdrkit_twin_ledger"):
                return library
    return None


def ledger(api: str) -> dict[str, object] | None:
    """The state of the twin of `api`: live handles by kind, calls by function, the seed; None when none is loaded."""
    library = loaded(api)
    if library is None:
        return None
    size = _FIRST_BYTES
    while True:
        buffer = ctypes.create_string_buffer(size)
        needed = int(library.gdrkit_twin_ledger(buffer, ctypes.c_size_t(size)))
        if needed < size:
            state = json.loads(buffer.value)
            if not isinstance(state, dict):
                message = f"the twin of {api} answered {state!r}"
                raise TypeError(message)
            return state
        # Another thread may add handles between two calls, so the size is asked again each time.
        size = needed + _FIRST_BYTES


def set_faults(api: str, plan: str) -> None:
    """Replace the fault plan of the twin of `api` in this process; calls are counted from 1 again.

    Raises
    ------
    OSError
        ENOENT: no twin of `api` is loaded here. EINVAL: the plan is malformed; the twin says on stderr where.
    """
    library = loaded(api)
    if library is None:
        raise OSError(errno.ENOENT, "no twin is loaded", api)
    code = int(library.gdrkit_twin_faults(plan.encode()))
    if code != 0:
        raise OSError(code, "the fault plan is malformed", plan)
