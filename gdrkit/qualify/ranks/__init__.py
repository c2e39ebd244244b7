"""Qualification of transfers between several machines (``mpirun gdrkit qualify --mpi``).

A rank is one process of the MPI job. MPI starts the ranks and exchanges the address of rank 0. All further
communication uses TCP with timeouts. Rank 0 plans the pairs, and writes a record for each. In a pair, a NIC of one rank
accesses GPU memory of another rank through a NIC of that rank. Each rank measures in a child process, so that a crash
or a hang fails one pair and not the whole job.
"""

from __future__ import annotations

from gdrkit.qualify.ranks.job import qualify_ranks

__all__ = ["qualify_ranks"]
