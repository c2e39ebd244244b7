"""The lab runs the RDMA suites on a real kernel's RDMA stack, and compares each case with its result on software twins.

A software twin is a drop-in library that emulates the hardware.

`python -m hardware.lab --help` lists its options. `nox -s lab` installs the programs that the lab needs, and runs the
lab.
"""

from __future__ import annotations

__all__: list[str] = []
