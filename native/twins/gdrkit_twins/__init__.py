"""Software twins: drop-in libraries that emulate the hardware behind libraries for RDMA and accelerators.

They are libibverbs, librdmacm, libcuda, libcudart, libnvidia-ml, libcufile and libhl-thunk. They are in four folders
below ``lib/`` in this package, so that a program can use one folder without the others. libcufile and libhl-thunk each
have their own folder. librdmacm is in the folder of libibverbs, which it needs. libcudart and libnvidia-ml are in the
folder of libcuda, because they have the same emulated GPUs.
``LD_LIBRARY_PATH`` selects the folders; ``gdrkit run --software`` sets it. Importing this package loads no library.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
