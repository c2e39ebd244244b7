"""Software twins: drop-in libraries that emulate the hardware behind libibverbs, libcuda, libcufile and libhl-thunk.

Each library is in a separate folder below ``lib/`` in this package, so that a program can use one without the others.
``LD_LIBRARY_PATH`` selects them; ``gdrkit run --software`` sets it. Importing this package loads no library.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
