"""Fuzz target of the parsers of memory handles: ``python -m property.fuzz_handles --seconds 20``."""

from __future__ import annotations

import dataclasses
import hashlib

from support import fuzz

from gdrkit.host import ProcessIdentity
from gdrkit.registration.gdr_handle import GDR_HANDLE_BYTES, GdrHandle
from gdrkit.registration.handle import SHARE_HANDLE_BYTES, ShareHandle, ShareKind

__all__ = ["TARGET"]

# A packed share handle is a body, followed by the first 16 bytes of the SHA-256 of the body.
_CHECKSUM_BYTES = 16
_BODY_BYTES = SHARE_HANDLE_BYTES - _CHECKSUM_BYTES


def _check_parsers(data: bytes) -> None:
    """Parse the data as a share handle and as a GDR handle.

    For each of the two, the data is parsed unchanged, and again with a valid checksum (share handle) or with a valid
    length (GDR handle).
    """
    # A fuzzer cannot guess a SHA-256. Only data with a valid SHA-256 reaches the code after the check of the SHA-256.
    body = data[:_BODY_BYTES].ljust(_BODY_BYTES, b"\0")
    for candidate in (data, body + hashlib.sha256(body).digest()[:_CHECKSUM_BYTES]):
        fuzz.require_round_trip(lambda packed: ShareHandle.parse(packed).pack(), candidate)
    for candidate in (data, data[:GDR_HANDLE_BYTES].ljust(GDR_HANDLE_BYTES, b"\0")):
        fuzz.require_round_trip(lambda packed: GdrHandle.parse(packed).pack(), candidate)


def _pack_valid_share_handles() -> list[bytes]:
    """Return a packed share handle of each kind."""
    ipc_handle = ShareHandle(
        kind=ShareKind.IPC,
        allocation_bytes=1 << 20,
        offset_bytes=5,
        length_bytes=7,
        ipc=bytes(range(64)),
        device_uuid=bytes(range(1, 17)),
        owner=ProcessIdentity(boot_id=bytes(range(16)), process_id=1234, pid_namespace=4026531836, started_ticks=99),
    )
    vmm_handle = dataclasses.replace(
        ipc_handle,
        kind=ShareKind.VMM,
        allocation_bytes=6 << 20,
        length_bytes=5 << 20,
        chunk_bytes=2 << 20,
        descriptor_count=3,
        ipc=bytes(64),
    )
    dmabuf_handle = dataclasses.replace(
        ipc_handle, kind=ShareKind.DMABUF, address=(1 << 40) + 5, descriptor_count=1, ipc=bytes(64)
    )
    return [handle.pack() for handle in (ipc_handle, vmm_handle, dmabuf_handle)]


TARGET = fuzz.FuzzTarget(_check_parsers, _pack_valid_share_handles(), (ShareHandle, GdrHandle), length_max_bytes=384)

if __name__ == "__main__":
    fuzz.main({"handles": TARGET})
