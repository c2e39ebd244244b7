"""The lab: the RDMA suites on a real kernel's RDMA stack, compared case by case with the software twins.

`python -m hardware.lab --help` lists its options. `nox -s lab` installs the programs that it needs, and runs it.
"""

from __future__ import annotations

__all__: list[str] = []
