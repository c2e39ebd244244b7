"""Tables for the import rules of gdrkit: levels of packages, exceptions, and the importers of foreign modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["API_BINDING_LEVEL", "IMPORTS_WITHIN_A_LEVEL", "IMPORT_CIRCLES", "IMPORT_LEVELS", "SEAMS"]

# The packages and modules of gdrkit/ by level, level 0 first. A package imports only from lower levels.
IMPORT_LEVELS: tuple[frozenset[str], ...] = (
    frozenset({"__init__", "errors", "exit_code", "install_paths", "remedies", "text", "units", "verdict"}),
    frozenset(
        {"buffers", "children", "faultplan", "forks", "handles", "loader", "pattern", "scm_rights", "serialization"}
    ),
    frozenset({"cuda", "cufile", "gaudi", "host", "verbs"}),
    frozenset({"evidence", "launch", "nccl", "registration"}),
    frozenset({"gds", "inventory", "storage", "twin_run"}),
    frozenset({"report", "safetensors", "tiers", "usrbio"}),
    frozenset({"monitor", "observe", "qualify"}),
    frozenset(
        {
            "__main__",
            "cli",
            "cli_files",
            "cli_inventory",
            "cli_observe",
            "cli_report",
            "cli_serve",
            "cli_tiers",
            "harness",
        }
    ),
)

# In each pair, the first package may import the second, although both have the same level. Packages of level 2 are
# never listed: each package wraps one foreign API, and must not depend on another API.
IMPORTS_WITHIN_A_LEVEL: frozenset[tuple[str, str]] = frozenset(
    {
        ("__main__", "cli"),
        ("buffers", "handles"),
        ("cli", "cli_files"),
        ("cli", "cli_inventory"),
        ("cli", "cli_observe"),
        ("cli", "cli_report"),
        ("cli", "cli_serve"),
        ("cli", "cli_tiers"),
        ("exit_code", "errors"),
    }
)

# The index in IMPORT_LEVELS of the packages that wrap one foreign API each.
API_BINDING_LEVEL = 2

# The modules of each set import each other in a circle. Remove a set when its circle is gone, and add no further set.
IMPORT_CIRCLES: frozenset[frozenset[str]] = frozenset(
    {
        frozenset({"gdrkit.storage.batch", "gdrkit.storage.client", "gdrkit.storage.file"}),
    }
)

# The files that may import each foreign module, and each native module of the project. A foreign module has no types,
# so one file, the seam of the module, wraps it. ctypes can open any library, so only the listed files may use it.
SEAMS: Mapping[str, frozenset[str]] = {
    "pyverbs": frozenset({"gdrkit/verbs/_pyverbs.py"}),
    # The entry `cuda` matches cuda.bindings.cufile, too. The first matching entry decides, so this entry stands first.
    "cuda.bindings.cufile": frozenset({"gdrkit/cufile/_cufile.py"}),
    "cuda": frozenset({"gdrkit/cuda/_driver.py"}),
    "kvikio": frozenset({"gdrkit/cufile/_kvikio.py"}),
    "pynvml": frozenset({"gdrkit/host/_nvml.py"}),
    "mpi4py": frozenset({"gdrkit/qualify/ranks/_mpi.py"}),
    "mfusepy": frozenset({"gdrkit/usrbio/fuse/_mfusepy.py"}),
    "gdrkit.usrbio._hf3fs": frozenset({"gdrkit/usrbio/_library.py"}),
    "gdrkit.usrbio._loop": frozenset({"gdrkit/usrbio/agent/_agent_loop.py"}),
    "gdrkit.verbs._initiator": frozenset({"gdrkit/verbs/_native.py"}),
    "torch": frozenset({"gdrkit/safetensors/_torch.py"}),
    "safetensors": frozenset({"gdrkit/safetensors/_torch.py"}),
    "prometheus_client": frozenset({"gdrkit/monitor/_prometheus.py"}),
    "sqlite3": frozenset({"gdrkit/tiers/_sqlite.py"}),
    "gdrkit.storage._engine": frozenset({"gdrkit/storage/_native.py"}),
    "gdrkit.gds._engine": frozenset({"gdrkit/gds/_native.py"}),
    "ctypes": frozenset(
        {
            "gdrkit/cuda/_dlpack.py",
            "gdrkit/cuda/_driver.py",
            "gdrkit/cufile/_cufile.py",
            "gdrkit/gaudi/_hlthunk.py",
            "gdrkit/host/_fanotify.py",
            "gdrkit/host/_libc.py",
            "gdrkit/nccl/_nccl.py",
            "gdrkit/usrbio/fuse/_mfusepy.py",
            "gdrkit/verbs/_layout.py",
            "gdrkit/verbs/_pyverbs.py",
        }
    ),
}
