"""The peer process of a case: ``python -m gdrkit.harness.peer_process DESCRIPTOR``.

The process is spawned (never forked), reports that it is ready, and serves requests until its socket closes. It loads
an API at the first request that needs it, so a peer that gets only RDMA requests does not load CUDA. The objects that
it creates have handle numbers. ``reset`` closes them in the reverse order of their creation.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

from gdrkit import evidence, handles
from gdrkit.errors import GdrkitError, UsageError
from gdrkit.harness.leaks import OpenObjects, count_new, ledger_handles
from gdrkit.harness.peer_objects import ObjectTable
from gdrkit.harness.wire import Channel, error_to_json_data
from gdrkit.inventory.facts import notable
from gdrkit.serialization import to_json_data

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["main", "serve"]

_EXIT_INTERNAL_ERROR = 70  # EX_SOFTWARE of sysexits.h


def serve(channel: Channel) -> None:
    """Serve requests until the case closes the socket."""
    server = _Server(channel)
    channel.send({"ready": True, "process": os.getpid()})
    while (request := channel.receive()) is not None:
        reply: dict[str, Any] = {"id": request["id"]}
        try:
            reply["result"] = server.execute(request)
        except GdrkitError as error:
            reply["error"] = error_to_json_data(error)
        channel.send(reply)


def main() -> NoReturn:
    """Serve the socket with the descriptor DESCRIPTOR."""
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    is_finished = False
    try:
        serve(channel)
        is_finished = True
    except BrokenPipeError:
        is_finished = True  # The process of the case has ended.
    finally:
        if not is_finished:
            traceback.print_exc()
        sys.stderr.flush()
        # Some cases leave objects open on purpose. The interpreter would destroy them in an undefined order, so it is
        # not finalized.
        os._exit(0 if is_finished else _EXIT_INTERNAL_ERROR)


class _Server:
    """The operations of a peer process, and the objects that they create."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._objects = ObjectTable()
        self._operations: dict[str, Callable[..., Any]] = {
            "close": self._objects.close,
            "exit": os._exit,
            "libraries": lambda: to_json_data(list(notable(evidence.libraries()))),
            "modules": lambda: sorted({name.partition(".")[0] for name in sys.modules}),
            "reset": self._reset,
        }
        self._unloaded_groups = {"verbs", "cuda", "share"}

    def execute(self, request: dict[str, Any]) -> Any:  # noqa: ANN401 - each operation has its own result.
        """Execute the operation of a request and return its result."""
        operation, arguments = request["op"], request["arguments"]
        group = operation.partition(".")[0]
        if group in self._unloaded_groups:
            self._load(group)
        if operation not in self._operations:
            message = f"a peer has no operation {operation!r}"
            raise UsageError(message)
        descriptors = self._channel.take_descriptors(request["descriptors"])
        if not descriptors:
            return self._operations[operation](**arguments)
        try:
            return self._operations[operation](**arguments, descriptors=descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _load(self, group: str) -> None:
        # Importing a group loads its API, so the import happens at the first request.
        if group == "verbs":
            from gdrkit.harness.peer_verbs import operations
        elif group == "cuda":
            from gdrkit.harness.peer_cuda import operations
        else:
            from gdrkit.harness.peer_share import operations
        self._operations |= {f"{group}.{name}": call for name, call in operations(self._objects).items()}
        self._unloaded_groups.discard(group)

    def _reset(self) -> dict[str, Any]:
        self._objects.close_all()
        none = OpenObjects(descriptors={}, handles={}, ledgers={})
        remaining = OpenObjects(descriptors={}, handles=handles.live(), ledgers=ledger_handles())
        return {"leaked": count_new(none, remaining), "libraries": to_json_data(list(notable(evidence.libraries())))}


if __name__ == "__main__":
    main()
