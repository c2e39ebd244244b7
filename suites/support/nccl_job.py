"""An all-reduce of NCCL by one process (rank) on each of several devices of this host."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from support.python_child import suites_environ
from support.rank_processes import run_ranks

from gdrkit import nccl

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LOOPBACK", "NO_MULTICAST", "read_rank_log", "run_all_reduces"]

# These variables turn multicast off. A multicast object that is not released can make the GPUs of a host unusable, also
# for other users.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
# All ranks are on one host, so they connect to each other over the loopback interface.
LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_SOCKET_FAMILY": "AF_INET"}
# Longest duration of a job. The jobs took 2 to 6 s on two H200. The first job takes longer, because it reads a library
# of 300 MB from the disk.
_TIMEOUT_S = 60.0


def run_all_reduces(folder: Path, rank_count: int, *options: str, environ: dict[str, str]) -> list[dict[str, Any]]:
    """Run the program :mod:`support.nccl_rank` for each device, and return the result that each rank printed.

    Parameters
    ----------
    folder : Path
        Existing folder for the logs of the ranks.
    rank_count : int
        Number of ranks.
    *options : str
        Options of the program.
    environ : dict
        Environment variables of NCCL. Multicast is always turned off.
    """
    rank_outputs = run_ranks(
        [
            [sys.executable, "-m", "support.nccl_rank", "--rank", str(rank), "--ranks", str(rank_count), *options]
            for rank in range(rank_count)
        ],
        folder=folder,
        environ=suites_environ({**os.environ, **LOOPBACK, **environ, **NO_MULTICAST}),
        deadline_s=_TIMEOUT_S,
    )
    return [json.loads(lines[-1]) for lines in rank_outputs]


def read_rank_log(folder: Path, rank: int) -> nccl.NcclLog:
    """Return what NCCL logged in a rank of the job that used the folder."""
    return nccl.NcclLog.read(folder / f"rank{rank}.nccl")
