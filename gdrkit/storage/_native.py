"""Access to the native engine of the storage service, which is loaded at the first use.

``_engine`` is the native module (``native/storage``). It needs libibverbs, which a machine that only packs and parses
frames need not have.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from gdrkit.errors import Api, Reason, SetupMissing

__all__ = ["engine"]


@cache
def engine() -> Any:
    """Return the module ``gdrkit.storage._engine``.

    Raises
    ------
    SetupMissing
        The module was not built, or libibverbs is missing.
    """
    try:
        return importlib.import_module("gdrkit.storage._engine")
    except ImportError as error:
        raise SetupMissing(
            api=Api.LOADER,
            operation="dlopen",
            status=None,
            status_name="not loaded",
            arguments={"module": "gdrkit.storage._engine"},
            reason=Reason.LIBRARY_MISSING,
            what_to_do="install libibverbs (rdma-core) and a gdrkit whose native parts were built",
            detail=str(error),
        ) from error
