"""Adapter of mpi4py. The ranks use MPI only once, to exchange the TCP addresses at which they listen.

MPI ends the whole job if one process dies, and its calls have no timeout. Therefore MPI is finalized before any
measurement.
"""

from __future__ import annotations

import importlib

from gdrkit.errors import Api, Reason, SetupMissing
from gdrkit.remedies import pip_install, system_install

__all__ = ["exchange_texts"]


def exchange_texts(text: str) -> tuple[int, list[str]]:
    """Send `text` to all ranks and finalize MPI. Return the number of this rank, and the texts of all ranks in order.

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
            what_to_do=f"{pip_install('mpi')}, and install an MPI library, e.g. {system_install('openmpi-bin')}",
            detail=str(error),
        ) from error
    communicator = mpi.COMM_WORLD
    rank, texts = int(communicator.Get_rank()), [str(text_of_rank) for text_of_rank in communicator.allgather(text)]
    mpi.Finalize()
    return rank, texts
