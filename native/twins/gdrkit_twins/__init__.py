"""The software twins: libraries with the names and interfaces of RDMA verbs, the CUDA driver, cuFile and hl-thunk.

Each library has a folder of its own below ``lib/`` beside this file, so that a program may get one and not the others.
They are chosen by ``LD_LIBRARY_PATH``; ``gdrkit run --software`` sets it. Importing this package opens none.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
