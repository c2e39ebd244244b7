"""The peer process of a case: ``python -m gdrkit.harness.peer_process DESCRIPTOR``.

The process is spawned (never forked), reports that it is ready, and serves requests until its socket closes. It opens
an API only when a request needs it, so a peer that gets only RDMA requests does not load CUDA. Every object that it
makes has a numbered handle. ``reset`` closes all objects, last made first.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

from gdrkit import evidence, handles
from gdrkit.errors import GdrkitError, UsageError
from gdrkit.harness.leaks import Snapshot, grown, ledger_handles
from gdrkit.harness.peer_objects import ObjectTable
from gdrkit.harness.wire import Channel, error_to_plain
from gdrkit.inventory.facts import notable
from gdrkit.serialization import to_json_data

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["main", "serve"]

_EXIT_BROKEN = 70  # EX_SOFTWARE of sysexits.h


def serve(channel: Channel) -> None:
    """Serve requests until the other side closes the socket."""
    server = _Server(channel)
    channel.send({"ready": True, "process": os.getpid()})
    while (request := channel.receive()) is not None:
        answer: dict[str, Any] = {"id": request["id"]}
        try:
            answer["result"] = server.answer(request)
        except GdrkitError as error:
            answer["error"] = error_to_plain(error)
        channel.send(answer)


def main() -> NoReturn:
    """Serve the socket whose descriptor is the only argument."""
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    is_done = False
    try:
        serve(channel)
        is_done = True
    except BrokenPipeError:
        is_done = True  # The process of the case has ended, so this one ends, too.
    finally:
        if not is_done:
            traceback.print_exc()
        sys.stderr.flush()
        # The interpreter is not finalized: it would destroy in undefined order what a case left open on purpose.
        os._exit(0 if is_done else _EXIT_BROKEN)


class _Server:
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
        self._groups = {"verbs", "cuda", "share"}

    def answer(self, request: dict[str, Any]) -> Any:  # noqa: ANN401 - each operation has its own result.
        """Execute one operation and return its result."""
        operation, arguments = request["op"], request["arguments"]
        group = operation.partition(".")[0]
        if group in self._groups:
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
        # The imports are not at the top, so that a peer does not load an API that the case does not use.
        if group == "verbs":
            from gdrkit.harness.peer_verbs import operations
        elif group == "cuda":
            from gdrkit.harness.peer_cuda import operations
        else:
            from gdrkit.harness.peer_share import operations
        self._operations |= {f"{group}.{name}": call for name, call in operations(self._objects).items()}
        self._groups.discard(group)

    def _reset(self) -> dict[str, Any]:
        self._objects.close_all()
        nothing = Snapshot(descriptors={}, handles={}, ledgers={})
        left = Snapshot(descriptors={}, handles=handles.live(), ledgers=ledger_handles())
        return {"leaked": grown(nothing, left), "libraries": to_json_data(list(notable(evidence.libraries())))}


if __name__ == "__main__":
    main()
