"""Software twins: drop-in libraries that emulate the hardware behind five libraries for RDMA and accelerators.

They are libibverbs, librdmacm, libcuda, libcufile and libhl-thunk, in separate folders below ``lib/`` in this package,
so that a program can use one without the others; only librdmacm shares a folder, that of libibverbs, which it needs.
``LD_LIBRARY_PATH`` selects them; ``gdrkit run --software`` sets it. Importing this package loads no library.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
