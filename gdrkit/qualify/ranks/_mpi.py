"""Adapter of mpi4py. It exchanges the addresses of the ranks, and is finalized before anything is measured.

MPI ends a whole job when one of its processes dies, and waits without a limit. Therefore it is used only once.
"""

from __future__ import annotations

import importlib

from gdrkit.errors import Api, Reason, SetupMissing

__all__ = ["gather"]


def gather(text: str) -> tuple[int, list[str]]:
    """Return the number of this rank and the text of each rank, by rank. MPI is finalized afterwards.

    Raises
    ------
    SetupMissing
        mpi4py or an MPI library is not installed.
    """
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise SetupMissing(
            api=Api.NONE,
            operation="import mpi4py",
            status=None,
            status_name=type(error).__name__,
            reason=Reason.LIBRARY_MISSING,
            what_to_do="pip install 'gdrkit[mpi]', and install an MPI library, e.g. apt-get install openmpi-bin",
            detail=str(error),
        ) from error
    ranks = mpi.COMM_WORLD
    rank, gathered = int(ranks.Get_rank()), [str(each) for each in ranks.allgather(text)]
    mpi.Finalize()
    return rank, gathered
