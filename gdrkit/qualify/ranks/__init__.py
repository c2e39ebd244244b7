"""A qualification of several machines: MPI starts the ranks, everything after that goes over TCP with deadlines.

Level 6. Rank 0 plans which NIC reaches which GPU and writes the records; each rank supervises a child process that
measures, so that a death or a hang costs one row and not the job.
"""

from __future__ import annotations

from gdrkit.qualify.ranks.job import qualify_ranks

__all__ = ["qualify_ranks"]
