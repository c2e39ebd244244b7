"""Qualification of several machines. MPI starts the ranks; all further communication uses TCP with deadlines.

Rank 0 plans which NIC accesses which GPU and writes the records. Each rank supervises a child process that measures, so
that a crash or a hang costs one row and not the whole job.
"""

from __future__ import annotations

from gdrkit.qualify.ranks.job import qualify_ranks

__all__ = ["qualify_ranks"]
