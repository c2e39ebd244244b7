"""The seam of mpi4py: it says who the ranks are, and is left before anything is measured.

Level 6. MPI ends a whole job when one of its processes dies, and waits without a limit; so it is used once.
"""

from __future__ import annotations

import importlib

from gdrkit.errors import Api, Reason, SetupMissing

__all__ = ["gather"]


def gather(text: str) -> tuple[int, list[str]]:
    """The number of this rank, and what each rank gave, by rank; MPI is finished afterwards.

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
