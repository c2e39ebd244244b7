"""The operations by which a peer process shares device memory with the process of the test case.

They send and receive handle messages (:mod:`gdrkit.registration.handle_message`) through a socket that the case passes.
``export_gdr`` and ``import_gdr`` pass the handle in the reply and in the request instead.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING, Any

from gdrkit import cuda, verbs
from gdrkit.registration import gdr_handle, handle_message, share
from gdrkit.registration.handle import ShareKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gdrkit.harness.peer_objects import ObjectTable

__all__ = ["operations"]

_RECEIVE_TIMEOUT_MS = 10_000.0


def operations(objects: ObjectTable) -> dict[str, Callable[..., Any]]:
    """Return the sharing operations on the objects of this process, by name."""
    share_operations = _ShareOperations(objects)
    operation_names = "export import_memory register_dmabuf export_gdr import_gdr"
    return {name: getattr(share_operations, name) for name in operation_names.split()}


class _ShareOperations:
    """The operations. A request passes the parameters by name; `device`, `memory` and `nic` are handle numbers."""

    def __init__(self, objects: ObjectTable) -> None:
        self._objects = objects

    def export(
        self, memory: int, kind: int, offset_bytes: int, length_bytes: int | None, descriptors: list[int]
    ) -> None:
        source_memory = self._objects.get(memory, cuda.CudaMemory)
        with (
            share.export_memory(
                source_memory, kind=ShareKind(kind), offset_bytes=offset_bytes, length_bytes=length_bytes
            ) as message,
            _duplicate_socket(descriptors) as connection,
        ):
            message.send(connection)

    def import_memory(self, device: int, descriptors: list[int]) -> dict[str, Any]:
        with (
            _duplicate_socket(descriptors) as connection,
            handle_message.receive(connection, timeout_ms=_RECEIVE_TIMEOUT_MS) as message,
        ):
            return self._add_memory(share.import_memory(self._objects.get(device, cuda.Device), message))

    def register_dmabuf(self, nic: int, descriptors: list[int]) -> dict[str, Any]:
        with (
            _duplicate_socket(descriptors) as connection,
            handle_message.receive(connection, timeout_ms=_RECEIVE_TIMEOUT_MS) as message,
            share.import_dmabuf(message) as dmabuf,
        ):
            region = self._objects.get(nic, verbs.Nic).register_dmabuf(dmabuf)
        return {"handle": self._objects.add(region), "remote": region.remote().to_dict()}

    def export_gdr(self, memory: int) -> str:
        return gdr_handle.export_gdr(self._objects.get(memory, cuda.CudaMemory)).hex()

    def import_gdr(self, device: int, handle: str) -> dict[str, Any]:
        return self._add_memory(gdr_handle.import_gdr(self._objects.get(device, cuda.Device), bytes.fromhex(handle)))

    def _add_memory(self, memory: cuda.CudaMemory) -> dict[str, Any]:
        return {"handle": self._objects.add(memory), "address": memory.address, "length_bytes": memory.length_bytes}


@contextlib.contextmanager
def _duplicate_socket(descriptors: list[int]) -> Iterator[socket.socket]:
    """Yield a duplicate of the socket of the case, because the request server closes the received descriptor."""
    with socket.socket(fileno=os.dup(descriptors[0])) as connection:
        yield connection
