"""The software twins: libraries with the names and interfaces of RDMA verbs and the CUDA driver.

The libraries lie in ``lib/ibverbs`` and ``lib/cuda`` beside this file, a folder each, so that a program may get the one
and not the other. They are chosen by ``LD_LIBRARY_PATH``; ``gdrkit run --software`` sets it. Importing this package
opens neither.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
