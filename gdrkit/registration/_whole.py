"""Registration of a whole allocation, which makes one entry of a region cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdrkit.errors import GdrkitError, Reason, UsageError
from gdrkit.registration._entries import Entry, Key, end_of
from gdrkit.registration.policy import register

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gdrkit.buffers import DeviceBuffer
    from gdrkit.registration.policy import RegistrationRoute
    from gdrkit.verbs import Access, Nic

__all__ = ["register_whole"]


def register_whole(
    key: Key,
    memory: DeviceBuffer,
    nics: Sequence[Nic],
    *,
    access: Access,
    route: RegistrationRoute | None,
    give_back: Callable[[Entry], None],
) -> Entry:
    """Register all chunks under `memory` and return the new entry.

    The caller has read `key`, the allocation key of `memory`, before this call.

    Raises
    ------
    UsageError
        BUSY: the allocation key has changed. Nothing stays registered.
    """
    whole = memory.allocation()
    try:
        registration = register(whole, nics, access=access, route=route)
        # The caller read the key before the registration. Only if the key still holds now, the registered memory is the
        # memory that the key names.
        if (whole.address, whole.length_bytes) != (key[0][0], end_of(key) - key[0][0]) or not whole.presence(key)():
            message = "the memory was freed or remapped while it was registered"
            raise UsageError(message, reason=Reason.BUSY)  # noqa: TRY301 - what was made is closed below.
    except BaseException as error:
        try:
            whole.close()
        except GdrkitError as second:
            error.add_note(f"then, while undoing: {second}")
        raise
    return Entry(key, whole, registration, give_back)
