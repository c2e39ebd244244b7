"""The measuring child of a rank: ``python -m gdrkit.qualify.ranks.measure DESCRIPTOR PARENT``.

The child opens NICs and devices, so that a crash or a hang affects only this process. One side holds device memory, the
other initiates transfers. Both are closed before the next pair.
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
from gdrkit.qualify.ranks.lines import Gone, Lines
from gdrkit.registration import register
from gdrkit.serialization import to_json_data
from gdrkit.verbs import Direction, Endpoint, Initiator, Nic, RemoteRange

if TYPE_CHECKING:
    from gdrkit.cuda import DeviceMemory
    from gdrkit.verbs import QueuePair

__all__ = ["main"]

_ANSWER_S = 60.0
_DEPTH, _LIST_LENGTH = 32, 8
_WARM_UP_ROUNDS = 2


class _Side:
    """The objects that this process has open for the present pair."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self._memory: DeviceMemory | None = None
        self._pair: QueuePair | None = None
        self._initiator: Initiator | None = None

    def hold(self, nic: str, device: int, length_bytes: int) -> dict[str, Any]:
        """Register device memory with a NIC, and return how to connect to it and address it."""
        self.drop()
        opened = self._open.enter_context(Nic.open(nic))
        memory = self._open.enter_context(self._open.enter_context(Device(device)).allocate(length_bytes))
        memory.fill(0)
        registration = self._open.enter_context(register(memory, [opened]))
        queue = self._open.enter_context(opened.completion_queue(depth=16))
        self._pair = self._open.enter_context(opened.queue_pair(queue))
        self._memory = memory
        return {
            "endpoint": self._pair.endpoint().to_dict(),
            "remote": registration.remote(opened).to_dict(),
            "way": registration.route.value,
        }

    def connect(self, endpoint: dict[str, Any]) -> None:
        """Connect the queue pair to that of the initiator."""
        if self._pair is None:
            message = "nothing is held"
            raise UsageError(message)
        self._pair.connect(Endpoint.from_dict(endpoint), reads_max=16)

    def initiate(self, nic: str, endpoint: dict[str, Any], length_bytes: int) -> dict[str, Any]:
        """Create the initiator, connected to the endpoint that `hold` returned."""
        self.drop()
        initiator = self._open.enter_context(Initiator(nic, memory_bytes=length_bytes))
        initiator.connect([Endpoint.from_dict(endpoint)], reads_max=initiator.reads_max)
        self._initiator = initiator
        return {"endpoint": initiator.endpoints()[0].to_dict()}

    def run(self, direction: str, remote: dict[str, Any], seed: int, **sizes: int) -> dict[str, Any]:
        """Transfer bytes. Data that comes from the peer must be the stream of the seed."""
        if self._initiator is None:
            message = "nothing was begun"
            raise UsageError(message)
        way, there, rounds = Direction(direction), RemoteRange.from_dict(remote), sizes.pop("rounds")
        self._initiator.write(pattern.payload(there.length_bytes, seed=seed if way is Direction.WRITE else ~seed & 1))
        rates = []
        for _ in range(rounds + _WARM_UP_ROUNDS):
            burst = self._initiator.run(way, there, depth=_DEPTH, list_length=_LIST_LENGTH, **sizes)
            rates.append(burst.moved_bytes / burst.elapsed_ns)
        if way is Direction.READ:
            pattern.check(self._initiator.read(), seed=seed)
        low, _, high = statistics.quantiles(rates[_WARM_UP_ROUNDS:], n=4)
        median = statistics.median(rates[_WARM_UP_ROUNDS:])
        return {"median": median, "spread_percent": (high - low) / median * 100}

    def fill(self, seed: int) -> None:
        """Write the stream of the seed into the memory."""
        if self._memory is not None:
            self._memory.write(pattern.payload(self._memory.length_bytes, seed=seed))

    def check(self, seed: int) -> None:
        """Check that the memory holds the stream of the seed."""
        if self._memory is not None:
            pattern.check(self._memory.read(), seed=seed)

    def libraries(self) -> object:
        """Return the libraries that this process has loaded."""
        return to_json_data(list(notable(evidence.libraries())))

    def drop(self) -> None:
        """Close what was opened, last first."""
        self._memory = self._pair = self._initiator = None
        self._open.close()


def main() -> None:
    """Serve the socket whose descriptor is the first argument, as long as the process of the second argument lives."""
    die_with_parent(int(sys.argv[2]))  # A child that hangs in a driver does not notice a closed socket.
    lines = Lines(socket.socket(fileno=int(sys.argv[1])))
    side = _Side()
    operations = {
        each.__name__: each
        for each in (side.hold, side.connect, side.initiate, side.run, side.fill, side.check, side.libraries, side.drop)
    }
    with contextlib.suppress(Gone):
        lines.send({"process": os.getpid()}, limit_s=_ANSWER_S)
        while True:
            asked = lines.receive(limit_s=None)
            try:
                answer = {"result": operations[asked["do"]](**asked["with"])}
            except GdrkitError as error:
                answer = {"error": str(error)}
            lines.send(answer, limit_s=_ANSWER_S)
    side.drop()


if __name__ == "__main__":
    main()
