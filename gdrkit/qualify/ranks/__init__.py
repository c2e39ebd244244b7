"""Qualification of several machines (``gdrkit qualify --mpi``).

MPI starts the ranks; all further communication uses TCP with timeouts. Rank 0 plans which NIC accesses which GPU, and
writes the records. Each rank measures in a child process, so that a crash or a hang fails one pair and not the job.
"""

from __future__ import annotations

from gdrkit.qualify.ranks.job import qualify_ranks

__all__ = ["qualify_ranks"]
