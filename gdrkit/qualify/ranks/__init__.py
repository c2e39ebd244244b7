"""Qualification of transfers between several machines (``mpirun gdrkit qualify --mpi``).

A rank is one process of the MPI job. MPI only starts the ranks. All further communication uses TCP with timeouts. Rank
0 plans which NIC accesses which GPU, and writes the records. Such a combination is called a pair. Each rank measures in
a child process, so that a crash or a hang fails one pair and not the whole job.
"""

from __future__ import annotations

from gdrkit.qualify.ranks.job import qualify_ranks

__all__ = ["qualify_ranks"]
