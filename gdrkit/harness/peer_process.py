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
from gdrkit.harness.wire import Channel, error_to_plain
from gdrkit.inventory.facts import notable
from gdrkit.serialization import to_json_data

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Objects", "main", "serve"]

_EXIT_BROKEN = 70  # EX_SOFTWARE of sysexits.h


class Objects:
    """The objects that this process has made for its case, by handle number."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}
        self._next = 1

    def add(self, made: object) -> int:
        """Keep an object and return its number, which is never used again."""
        number, self._next = self._next, self._next + 1
        self._made[number] = made
        return number

    def get(self, number: int, kind: type) -> Any:  # noqa: ANN401 - the result has the type `kind`.
        """Return the object of this number.

        Raises
        ------
        UsageError
            There is no such object, or it has another type.
        """
        made = self._made.get(number)
        if number not in self._made or not isinstance(made, kind):
            message = f"handle {number} is no open {kind.__name__}"
            raise UsageError(message)
        return made

    def close(self, number: int) -> None:
        """Close one object."""
        self.get(number, object).close()
        self._made.pop(number)

    def close_all(self) -> None:
        """Close all objects, last made first.

        The first error is raised after all were closed. The other errors are added to it as notes.
        """
        first: GdrkitError | None = None
        for number in sorted(self._made, reverse=True):
            try:
                self._made.pop(number).close()
            except GdrkitError as error:
                if first is None:
                    first = error
                else:
                    first.add_note(f"then also: {error}")
        if first is not None:
            raise first


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
        self._objects = Objects()
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
