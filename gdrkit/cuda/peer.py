"""Access of one device to the memory of another.

Level 2. Without it a copy between two devices goes through the host, and nobody says so: the driver stages it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from gdrkit.cuda import _driver, _results
from gdrkit.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.cuda.device import Device

__all__ = ["can_access_peer", "peer_access"]


def can_access_peer(device: Device, peer: Device) -> bool:
    """Whether `device` could reach the memory of `peer` directly (cuDeviceCanAccessPeer)."""
    return bool(_driver.integer("cuDeviceCanAccessPeer", dev=device.ordinal, peerDev=peer.ordinal))


@contextlib.contextmanager
def peer_access(device: Device, peer: Device) -> Iterator[None]:
    """Let the work of `device` reach the memory of `peer` directly, as long as the block lasts; one direction.

    Where it is allowed already, by whomever, it stays so afterwards.

    Raises
    ------
    ApiError
        CUDA_ERROR_PEER_ACCESS_UNSUPPORTED and others of cuCtxEnablePeerAccess.
    """
    theirs = peer.context_handle()
    is_ours = _enable(device, theirs)
    try:
        yield
    finally:
        if is_ours:
            with device.current():
                _driver.call("cuCtxDisablePeerAccess", peerContext=theirs)


def _enable(device: Device, theirs: int) -> bool:
    """Whether it was not allowed before."""
    with device.current():
        try:
            _driver.call("cuCtxEnablePeerAccess", peerContext=theirs, Flags=0)
        except ApiError as error:
            if error.status != _results.PEER_ACCESS_ALREADY_ENABLED:
                raise
            return False
    return True
