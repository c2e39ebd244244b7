"""Direct access of one device to the memory of another.

Without peer access the driver stages a copy between two devices through the host. The copy still succeeds, so success
does not prove that it was direct.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from gdrkit.cuda import _driver, _results
from gdrkit.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.cuda.context import PrimaryContext

__all__ = ["can_access_peer", "peer_access"]


def can_access_peer(device: PrimaryContext, peer: PrimaryContext) -> bool:
    """Return whether `device` can access the memory of `peer` directly (cuDeviceCanAccessPeer)."""
    return bool(_driver.call_int("cuDeviceCanAccessPeer", dev=device.device_handle, peerDev=peer.device_handle))


@contextlib.contextmanager
def peer_access(device: PrimaryContext, peer: PrimaryContext) -> Iterator[None]:
    """Allow the work of `device` to access the memory of `peer` directly inside the block, in this direction only.

    If access was enabled before, it stays enabled afterwards.

    Raises
    ------
    ApiError
        cuCtxEnablePeerAccess failed, for example with CUDA_ERROR_PEER_ACCESS_UNSUPPORTED.
    """
    peer_context = peer.context_handle()
    is_newly_enabled = _enable_access(device, peer_context)
    try:
        yield
    finally:
        if is_newly_enabled:
            with device.current():
                _driver.call("cuCtxDisablePeerAccess", peerContext=peer_context)


def _enable_access(device: PrimaryContext, peer_context: int) -> bool:
    """Enable the access of `device` to `peer_context`. Return False if it was enabled before."""
    with device.current():
        try:
            _driver.call("cuCtxEnablePeerAccess", peerContext=peer_context, Flags=0)
        except ApiError as error:
            if error.status != _results.PEER_ACCESS_ALREADY_ENABLED:
                raise
            return False
    return True
