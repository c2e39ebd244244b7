"""Program of the measuring child of a rank: ``python -m gdrkit.qualify.ranks.measure DESCRIPTOR PARENT``.

DESCRIPTOR is a socket connected to the rank, and PARENT the process id of the rank. Only the child opens NICs and GPUs,
so that a crash or a hang ends the child and not the rank. In each pair, the child of one rank is the target: it
allocates GPU memory. The child of another rank is the initiator: it writes into that memory and reads from it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

from gdrkit import evidence, pattern
from gdrkit.cuda import Device
from gdrkit.errors import GdrkitError, UsageError
from gdrkit.host import HostTree, die_with_parent, read_port_counters
from gdrkit.inventory.facts import select_substrate_libraries
from gdrkit.qualify.ranks.messages import MessageSocket, PeerGone
from gdrkit.registration import register
from gdrkit.serialization import to_json_data
from gdrkit.verbs import Direction, Endpoint, Initiator, RemoteRange, open_active_nics

if TYPE_CHECKING:
    from gdrkit.cuda import DeviceMemory
    from gdrkit.verbs import Nic, QueuePair

__all__ = ["main"]

_SEND_TIMEOUT_S = 60.0
# Outstanding operations of a measurement, and operations that one ibv_post_send posts.
_QUEUE_DEPTH, _WORK_REQUESTS_PER_POST = 32, 8
_WARM_UP_ROUNDS = 2
# Number of operations in one burst of a balance, each of which moves an equal part of the memory, and how many of them
# are outstanding.
_BURST_OPERATIONS, _BURST_DEPTH = 16, 8


class _Operations:
    """The operations that the rank can request, and the objects that are open for its current pairs.

    Each public method is an operation. A request has the name of the method and its arguments.
    """

    def __init__(self) -> None:
        self._open_objects = contextlib.ExitStack()
        self._memory: DeviceMemory | None = None
        self._target_queue_pair: QueuePair | None = None
        self._initiator: Initiator | None = None
        self._nic_and_port: tuple[str, int] = "", 0  # Name of the NIC that was opened last, and number of its port.

    def open_target(self, nic: str, device: int, length_bytes: int) -> dict[str, Any]:
        """Allocate memory of the CUDA device `device`, register it with the NIC `nic`, and create a queue pair.

        Return the endpoint of the queue pair, the address and key of the memory, and the method of the registration.
        """
        self.close()
        opened_nic = self._open_nic(nic)
        memory = self._open_objects.enter_context(
            self._open_objects.enter_context(Device(device)).allocate(length_bytes)
        )
        memory.fill(0)
        registration = self._open_objects.enter_context(register(memory, [opened_nic]))
        completion_queue = self._open_objects.enter_context(opened_nic.completion_queue(depth=16))
        self._target_queue_pair = self._open_objects.enter_context(opened_nic.queue_pair(completion_queue))
        self._memory = memory
        return {
            "endpoint": self._target_queue_pair.endpoint().to_dict(),
            "remote": registration.remote(opened_nic).to_dict(),
            "way": registration.route.value,
        }

    def connect(self, endpoint: dict[str, Any]) -> None:
        """Connect the queue pair of the target to the queue pair of the initiator."""
        if self._target_queue_pair is None:
            message = "connect is allowed only after open_target"
            raise UsageError(message)
        self._target_queue_pair.connect(Endpoint.from_dict(endpoint), reads_max=16)

    def open_initiator(self, nic: str, endpoint: dict[str, Any], length_bytes: int) -> dict[str, Any]:
        """Create an initiator with `length_bytes` of memory, and connect it to `endpoint`, the result of open_target.

        If this process also has a target, it stays open: in a balance, each process has a target and an initiator.
        """
        if self._target_queue_pair is None:
            self.close()
        self._open_nic(nic)
        initiator = self._open_objects.enter_context(Initiator(nic, memory_bytes=length_bytes))
        initiator.connect([Endpoint.from_dict(endpoint)], reads_max=initiator.reads_max)
        self._initiator = initiator
        return {"endpoint": initiator.endpoints()[0].to_dict()}

    def run(self, direction: str, remote: dict[str, Any], seed: int, **transfer_options: int) -> dict[str, Any]:
        """Transfer data in rounds. Return the median rate in GB/s, the interquartile range in percent, and the bytes.

        `direction` is ``write`` or ``read``. The memory of the target must hold the pattern of the seed before a read.
        `transfer_options` has ``rounds``, and ``length_bytes`` and ``operations`` of each round for Initiator.run.
        """
        if self._initiator is None:
            message = "run is allowed only after open_initiator"
            raise UsageError(message)
        transfer_direction, remote_range, rounds = (
            Direction(direction),
            RemoteRange.from_dict(remote),
            transfer_options.pop("rounds"),
        )
        is_write = transfer_direction is Direction.WRITE
        # Before a READ, the local memory gets another pattern, so that a READ without effect is detected.
        # The pattern differs, because ~seed & 1 and the seed differ in the lowest bit.
        local_seed = seed if is_write else ~seed & 1
        self._initiator.write(pattern.payload(remote_range.length_bytes, seed=local_seed))
        rates_gb_per_s, moved_bytes = [], 0
        for _ in range(rounds + _WARM_UP_ROUNDS):
            transfer = self._initiator.run(
                transfer_direction,
                remote_range,
                depth=_QUEUE_DEPTH,
                list_length=_WORK_REQUESTS_PER_POST,
                **transfer_options,
            )
            rates_gb_per_s.append(transfer.moved_bytes / transfer.elapsed_ns)
            moved_bytes += transfer.moved_bytes
        if not is_write:
            pattern.check(self._initiator.read(), seed=seed)
        lower_quartile, _, upper_quartile = statistics.quantiles(rates_gb_per_s[_WARM_UP_ROUNDS:], n=4)
        median_gb_per_s = statistics.median(rates_gb_per_s[_WARM_UP_ROUNDS:])
        spread_percent = (upper_quartile - lower_quartile) / median_gb_per_s * 100
        return {"median": median_gb_per_s, "spread_percent": spread_percent, "moved_bytes": moved_bytes}

    def balance(self, remote: dict[str, Any], seed: int, duration_s: float) -> dict[str, Any]:
        """WRITE the pattern of the seed and READ it back in turn, for `duration_s` seconds, and check the read data.

        Return the number of bytes that moved in each direction, and the elapsed time.
        """
        if self._initiator is None:
            message = "balance is allowed only after open_initiator"
            raise UsageError(message)
        remote_range = RemoteRange.from_dict(remote)
        self._initiator.write(pattern.payload(remote_range.length_bytes, seed=seed))
        started_s, moved_bytes = time.monotonic(), 0
        while not moved_bytes or time.monotonic() - started_s < duration_s:
            # A burst moves all of the memory once, first to the target, then back.
            for direction in (Direction.WRITE, Direction.READ):
                if not moved_bytes and direction is Direction.READ:
                    # From here on, the memory has the pattern only if this READ moves the bytes.
                    self._initiator.write(bytes(remote_range.length_bytes))
                self._run_burst(direction, remote_range)
            moved_bytes += remote_range.length_bytes
        elapsed_s = time.monotonic() - started_s
        pattern.check(self._initiator.read(), seed=seed)
        return {"moved_bytes": moved_bytes, "elapsed_s": elapsed_s}

    def _run_burst(self, direction: Direction, remote_range: RemoteRange) -> None:
        """Move all of the memory once."""
        assert self._initiator is not None  # noqa: S101 - balance() has checked it.
        self._initiator.run(
            direction,
            remote_range,
            length_bytes=remote_range.length_bytes // _BURST_OPERATIONS,
            operations=_BURST_OPERATIONS,
            depth=_BURST_DEPTH,
        )

    def fill(self, seed: int) -> None:
        """Write the pattern of the seed into the device memory."""
        if self._memory is not None:
            self._memory.write(pattern.payload(self._memory.length_bytes, seed=seed))

    def check(self, seed: int) -> None:
        """Check that the device memory holds the pattern of the seed."""
        if self._memory is not None:
            pattern.check(self._memory.read(), seed=seed)

    def counters(self) -> object:
        """Return the counters of the port of the NIC that was opened last."""
        return to_json_data(read_port_counters(HostTree(), *self._nic_and_port))

    def libraries(self) -> object:
        """Return the libraries of CUDA, verbs and other APIs that this process has loaded."""
        return to_json_data(list(select_substrate_libraries(evidence.libraries())))

    def _open_nic(self, name: str) -> Nic:
        """Open a NIC at its first active port. :meth:`close` closes it."""
        (nic,) = open_active_nics([name])
        self._open_objects.enter_context(nic)
        self._nic_and_port = name, nic.port.number
        return nic

    def close(self) -> None:
        """Close all open objects, in the reverse order of their creation."""
        self._memory = self._target_queue_pair = self._initiator = None
        self._open_objects.close()


def main() -> None:
    """Execute the requests from the socket DESCRIPTOR until the rank closes the socket or ends."""
    die_with_parent(int(sys.argv[2]))  # While it hangs in a driver, this child does not notice a closed socket.
    connection = MessageSocket(socket.socket(fileno=int(sys.argv[1])))
    measuring_operations = _Operations()
    operations = {
        operation.__name__: operation
        for operation in (
            *(
                measuring_operations.open_target,
                measuring_operations.open_initiator,
                measuring_operations.connect,
                measuring_operations.run,
            ),
            *(
                measuring_operations.balance,
                measuring_operations.fill,
                measuring_operations.check,
                measuring_operations.counters,
                measuring_operations.libraries,
                measuring_operations.close,
            ),
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
    measuring_operations.close()


if __name__ == "__main__":
    main()
