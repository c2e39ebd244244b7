"""Software twins: drop-in libraries that emulate the hardware behind libraries for RDMA and accelerators.

They are libibverbs, librdmacm, libcuda, libnvidia-ml, libcufile and libhl-thunk. Each is in a separate folder below
``lib/`` in this package, so that a program can use one without the others. Two libraries share a folder:
librdmacm with libibverbs, which it needs, and libnvidia-ml with libcuda, whose GPUs it describes. ``LD_LIBRARY_PATH``
selects the folders; ``gdrkit run --software`` sets it. Importing this package loads no library.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
