"""Loader of ``_initiator``, the native module of :mod:`gdrkit.verbs.initiator`, at its first use.

The extension module is built from ``native/verbs``. It reports failures as OSError. This module turns them into the
error of the verb that failed.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from gdrkit.loader import NEEDS_LIBIBVERBS, LazyModule
from gdrkit.verbs import _errors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.verbs import _initiator as native
else:
    native = LazyModule("gdrkit.verbs._initiator", what_to_do=NEEDS_LIBIBVERBS)

__all__ = ["native", "raise_as_verbs_error"]


@contextlib.contextmanager
def raise_as_verbs_error(*, pinned_bytes: int = 0, **arguments: object) -> Iterator[None]:
    """Turn an OSError of the native module into the error of the verb that failed."""
    try:
        yield
    except OSError as error:
        # The native module sets the text of its errors to "<verb>" or "<verb> (<detail>)".
        operation, _, detail = str(error.strerror).partition(" (")
        raise _errors.error_of(
            operation=operation,
            error_number=error.errno,
            arguments=arguments,
            detail=detail.removesuffix(")"),
            pinned_bytes=pinned_bytes,
        ) from error
