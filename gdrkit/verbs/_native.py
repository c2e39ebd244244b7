"""Loader of the native measuring initiator. The first use imports it.

The extension module ``_initiator`` is built from ``native/verbs``. It reports failures as OSError; this module turns
them into the error of the verb that failed.
"""

from __future__ import annotations

import contextlib
import importlib
from functools import cache
from typing import TYPE_CHECKING, Any

from gdrkit.errors import Api, Reason, SetupMissing
from gdrkit.verbs import _errors

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["module", "raise_as_verbs_error"]

_NAME = "gdrkit.verbs._initiator"


@cache
def module() -> Any:
    """Return the module ``gdrkit.verbs._initiator``.

    Raises
    ------
    SetupMissing
        The module was not built, or libibverbs is missing.
    """
    try:
        return importlib.import_module("gdrkit.verbs._initiator")
    except ImportError as error:
        raise SetupMissing(
            api=Api.LOADER,
            operation="dlopen",
            status=None,
            status_name="not loaded",
            arguments={"module": _NAME},
            reason=Reason.LIBRARY_MISSING,
            what_to_do="install libibverbs (rdma-core) and a gdrkit whose native parts were built",
            detail=str(error),
        ) from error


@contextlib.contextmanager
def raise_as_verbs_error(*, pinned_bytes: int = 0, **arguments: object) -> Iterator[None]:
    """Turn an OSError of the native module into the error of the verb that failed."""
    try:
        yield
    except OSError as error:
        operation, _, detail = str(error.strerror).partition(" (")
        raise _errors.error_of(
            operation=operation,
            number=error.errno,
            arguments=arguments,
            detail=detail.removesuffix(")"),
            pinned_bytes=pinned_bytes,
        ) from error
