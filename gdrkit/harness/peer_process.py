"""Program of the peer process of a test case: ``python -m gdrkit.harness.peer_process DESCRIPTOR``.

DESCRIPTOR is a socket that is connected to the process of the case. The peer reports that it is ready, and executes
requests until the socket is closed. It loads an API when the first request needs it, so a peer that gets only RDMA
requests does not load CUDA. The objects that the peer creates have handle numbers. The request ``reset`` closes them in
the reverse order of their creation.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

from gdrkit import evidence, handles
from gdrkit.errors import GdrkitError, UsageError
from gdrkit.harness.leaks import OpenObjects, count_new, count_twin_handles
from gdrkit.harness.peer_objects import ObjectTable
from gdrkit.harness.wire import Channel, error_to_json_data
from gdrkit.inventory.facts import select_substrate_libraries
from gdrkit.serialization import to_json_data

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["main", "serve"]

_EXIT_INTERNAL_ERROR = 70  # EX_SOFTWARE of sysexits.h


def serve(channel: Channel) -> None:
    """Serve requests until the case closes the socket."""
    request_server = _RequestServer(channel)
    channel.send({"ready": True, "process": os.getpid()})
    while (request := channel.receive()) is not None:
        reply: dict[str, Any] = {"id": request["id"]}
        try:
            reply["result"] = request_server.execute(request)
        except GdrkitError as error:
            reply["error"] = error_to_json_data(error)
        channel.send(reply)


def main() -> NoReturn:
    """Serve the requests from the socket DESCRIPTOR, and exit."""
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
        # Some cases leave objects open on purpose. A normal exit of Python would destroy them in an undefined order, so
        # os._exit is used.
        os._exit(0 if is_finished else _EXIT_INTERNAL_ERROR)


class _RequestServer:
    """The operations of a peer process, and the objects that they create."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._objects = ObjectTable()
        self._operations: dict[str, Callable[..., Any]] = {
            "close": self._objects.close,
            "exit": os._exit,
            "libraries": lambda: to_json_data(list(select_substrate_libraries(evidence.libraries()))),
            "modules": lambda: sorted({name.partition(".")[0] for name in sys.modules}),
            "reset": self._reset,
        }
        # An operation with a dot in its name, such as verbs.write, belongs to the group before the dot. Each group is a
        # module, such as gdrkit.harness.peer_verbs. The group `share` exports memory to other processes, and imports
        # memory from them.
        self._unloaded_groups = {"verbs", "cuda", "share"}

    def execute(self, request: dict[str, Any]) -> Any:  # noqa: ANN401 - each operation has its own result.
        """Execute the operation of a request and return its result."""
        operation, arguments = request["op"], request["arguments"]
        group = operation.partition(".")[0]
        if group in self._unloaded_groups:
            self._load_operations(group)
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

    def _load_operations(self, group: str) -> None:
        # The import of the module of a group loads the API, so a group is imported only when a request needs it.
        if group == "verbs":
            from gdrkit.harness.peer_verbs import operations
        elif group == "cuda":
            from gdrkit.harness.peer_cuda import operations
        else:
            from gdrkit.harness.peer_share import operations
        self._operations |= {f"{group}.{name}": operation for name, operation in operations(self._objects).items()}
        self._unloaded_groups.discard(group)

    def _reset(self) -> dict[str, Any]:
        self._objects.close_all()
        # Only open objects of gdrkit and open handles of the twins count as leaks here, not open descriptors.
        no_open_objects = OpenObjects(descriptors={}, object_counts={}, twin_handle_counts={})
        open_objects = OpenObjects(
            descriptors={}, object_counts=handles.live(), twin_handle_counts=count_twin_handles()
        )
        return {
            "leaked": count_new(no_open_objects, open_objects),
            "libraries": to_json_data(list(select_substrate_libraries(evidence.libraries()))),
        }


if __name__ == "__main__":
    main()
