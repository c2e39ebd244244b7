"""The tables that the rules of the project read: levels, exceptions, and the files that may name a foreign library."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["IMPORT_CIRCLES", "LEVELS", "SAME_LEVEL", "SEAMS", "SIBLINGS_LEVEL"]

# These are the packages of gdrkit/ by level. Imports only go down.
LEVELS: tuple[frozenset[str], ...] = (
    frozenset({"__init__", "errors", "exit_code", "install_paths", "text", "units", "verdict"}),
    frozenset(
        {"buffers", "children", "faultplan", "forks", "handles", "loader", "pattern", "scm_rights", "serialization"}
    ),
    frozenset({"cuda", "cufile", "gaudi", "host", "verbs"}),
    frozenset({"evidence", "launch", "registration"}),
    frozenset({"gds", "inventory", "storage"}),
    frozenset({"report", "tiers", "usrbio"}),
    frozenset({"qualify"}),
    frozenset({"__main__", "cli", "cli_files", "cli_inventory", "cli_report", "cli_tiers", "harness"}),
)

# These pairs may import a package of their own level. Packages of level 2 are never listed: they are the real APIs and
# do not know each other.
SAME_LEVEL: frozenset[tuple[str, str]] = frozenset(
    {
        ("__main__", "cli"),
        ("buffers", "handles"),
        ("cli", "cli_files"),
        ("cli", "cli_inventory"),
        ("cli", "cli_report"),
        ("cli", "cli_tiers"),
        ("exit_code", "errors"),
    }
)

SIBLINGS_LEVEL = 2

# The modules of these sets still import each other, in a circle. A set is removed with its circle, and none is added.
IMPORT_CIRCLES: frozenset[frozenset[str]] = frozenset(
    {
        frozenset({"gdrkit.storage.batch", "gdrkit.storage.client", "gdrkit.storage.file"}),
    }
)

# These files may name a foreign module, or a native module of the project, which has no types either. ctypes can open
# any library, so only seams may use it.
SEAMS: Mapping[str, frozenset[str]] = {
    "pyverbs": frozenset({"gdrkit/verbs/_pyverbs.py"}),
    # This entry precedes that of the package that contains the module, because the first matching name decides.
    "cuda.bindings.cufile": frozenset({"gdrkit/cufile/_cufile.py"}),
    "cuda": frozenset({"gdrkit/cuda/_driver.py"}),
    "kvikio": frozenset({"gdrkit/cufile/_kvikio.py"}),
    "pynvml": frozenset({"gdrkit/host/_nvml.py"}),
    "mpi4py": frozenset({"gdrkit/qualify/ranks/_mpi.py"}),
    "mfusepy": frozenset({"gdrkit/usrbio/fuse/_mfusepy.py"}),
    "gdrkit.usrbio._hf3fs": frozenset({"gdrkit/usrbio/_library.py"}),
    "gdrkit.usrbio._loop": frozenset({"gdrkit/usrbio/agent/_agent_loop.py"}),
    "gdrkit.verbs._initiator": frozenset({"gdrkit/verbs/_native.py"}),
    "sqlite3": frozenset({"gdrkit/tiers/_sqlite.py"}),
    "gdrkit.storage._engine": frozenset({"gdrkit/storage/_native.py"}),
    "gdrkit.gds._engine": frozenset({"gdrkit/gds/_native.py"}),
    "ctypes": frozenset(
        {
            "gdrkit/cuda/_dlpack.py",
            "gdrkit/cuda/_driver.py",
            "gdrkit/cufile/_cufile.py",
            "gdrkit/gaudi/_hlthunk.py",
            "gdrkit/host/_libc.py",
            "gdrkit/usrbio/fuse/_mfusepy.py",
            "gdrkit/verbs/_layout.py",
            "gdrkit/verbs/_pyverbs.py",
        }
    ),
}
