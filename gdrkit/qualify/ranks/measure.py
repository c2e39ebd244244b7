"""The measuring child of a rank: ``python -m gdrkit.qualify.ranks.measure DESCRIPTOR PARENT``.

The child opens NICs and devices, so that a crash or a hang ends only this process and not the rank. For each pair, the
child is the target, which allocates device memory, or the initiator, which transfers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import sys
from typing import TYPE_CHECKING, Any

from gdrkit import evidence, pattern
from gdrkit.cuda import Device
from gdrkit.errors import GdrkitError, UsageError
from gdrkit.host import die_with_parent
from gdrkit.inventory.facts import notable
from gdrkit.qualify.ranks.messages import MessageSocket, PeerGone
from gdrkit.registration import register
from gdrkit.serialization import to_json_data
from gdrkit.verbs import Direction, Endpoint, Initiator, Nic, RemoteRange

if TYPE_CHECKING:
    from gdrkit.cuda import DeviceMemory
    from gdrkit.verbs import QueuePair

__all__ = ["main"]

_SEND_TIMEOUT_S = 60.0
_DEPTH, _LIST_LENGTH = 32, 8
_WARM_UP_ROUNDS = 2


class _Operations:
    """The operations of the child, and the objects that are open for the current pair.

    The names of the public methods are the operations in requests.
    """

    def __init__(self) -> None:
        self._objects = contextlib.ExitStack()
        self._memory: DeviceMemory | None = None
        self._target: QueuePair | None = None
        self._initiator: Initiator | None = None

    def open_target(self, nic: str, device: int, length_bytes: int) -> dict[str, Any]:
        """Register device memory with a NIC. Return the endpoint to connect to, and the remote range."""
        self.close()
        opened = self._objects.enter_context(Nic.open(nic))
        memory = self._objects.enter_context(self._objects.enter_context(Device(device)).allocate(length_bytes))
        memory.fill(0)
        registration = self._objects.enter_context(register(memory, [opened]))
        completions = self._objects.enter_context(opened.completion_queue(depth=16))
        self._target = self._objects.enter_context(opened.queue_pair(completions))
        self._memory = memory
        return {
            "endpoint": self._target.endpoint().to_dict(),
            "remote": registration.remote(opened).to_dict(),
            "way": registration.route.value,
        }

    def connect(self, endpoint: dict[str, Any]) -> None:
        """Connect the queue pair of the target to that of the initiator."""
        if self._target is None:
            message = "connect is allowed only after open_target"
            raise UsageError(message)
        self._target.connect(Endpoint.from_dict(endpoint), reads_max=16)

    def open_initiator(self, nic: str, endpoint: dict[str, Any], length_bytes: int) -> dict[str, Any]:
        """Create the initiator, connected to the endpoint that `open_target` returned."""
        self.close()
        initiator = self._objects.enter_context(Initiator(nic, memory_bytes=length_bytes))
        initiator.connect([Endpoint.from_dict(endpoint)], reads_max=initiator.reads_max)
        self._initiator = initiator
        return {"endpoint": initiator.endpoints()[0].to_dict()}

    def run(self, direction: str, remote: dict[str, Any], seed: int, **sizes: int) -> dict[str, Any]:
        """Transfer data in rounds and return the rate in GB/s. A READ must return the pattern of the seed."""
        if self._initiator is None:
            message = "run is allowed only after open_initiator"
            raise UsageError(message)
        parsed_direction, remote_range, rounds = (
            Direction(direction),
            RemoteRange.from_dict(remote),
            sizes.pop("rounds"),
        )
        is_write = parsed_direction is Direction.WRITE
        # Before a READ, the local memory gets a different pattern.
        local_seed = seed if is_write else ~seed & 1
        self._initiator.write(pattern.payload(remote_range.length_bytes, seed=local_seed))
        rates = []
        for _ in range(rounds + _WARM_UP_ROUNDS):
            burst = self._initiator.run(parsed_direction, remote_range, depth=_DEPTH, list_length=_LIST_LENGTH, **sizes)
            rates.append(burst.moved_bytes / burst.elapsed_ns)
        if not is_write:
            pattern.check(self._initiator.read(), seed=seed)
        low, _, high = statistics.quantiles(rates[_WARM_UP_ROUNDS:], n=4)
        median = statistics.median(rates[_WARM_UP_ROUNDS:])
        return {"median": median, "spread_percent": (high - low) / median * 100}

    def fill(self, seed: int) -> None:
        """Write the pattern of the seed into the device memory."""
        if self._memory is not None:
            self._memory.write(pattern.payload(self._memory.length_bytes, seed=seed))

    def check(self, seed: int) -> None:
        """Check that the device memory holds the pattern of the seed."""
        if self._memory is not None:
            pattern.check(self._memory.read(), seed=seed)

    def libraries(self) -> object:
        """Return the libraries of the APIs that this process has loaded."""
        return to_json_data(list(notable(evidence.libraries())))

    def close(self) -> None:
        """Close the objects of the current pair, in the reverse order of their creation."""
        self._memory = self._target = self._initiator = None
        self._objects.close()


def main() -> None:
    """Execute the requests of the socket with the descriptor DESCRIPTOR, until its peer or the process PARENT ends."""
    die_with_parent(int(sys.argv[2]))  # A child that hangs in a driver does not notice a closed socket.
    connection = MessageSocket(socket.socket(fileno=int(sys.argv[1])))
    objects = _Operations()
    operations = {
        each.__name__: each
        for each in (
            *(objects.open_target, objects.open_initiator, objects.connect, objects.run),
            *(objects.fill, objects.check, objects.libraries, objects.close),
        )
    }
    with contextlib.suppress(PeerGone):
        connection.send({"process": os.getpid()}, timeout_s=_SEND_TIMEOUT_S)
        while True:
            request = connection.receive(timeout_s=None)
            try:
                reply = {"result": operations[request["do"]](**request["with"])}
            except GdrkitError as error:
                reply = {"error": str(error)}
            connection.send(reply, timeout_s=_SEND_TIMEOUT_S)
    objects.close()


if __name__ == "__main__":
    main()
