"""A measuring initiator: native code that issues bursts of RDMA WRITEs or READs to a passive peer.

The initiator has its own protection domain, queue pairs, completion queue and host memory, and runs without the GIL.
The peer does nothing during a transfer. It needs a region and, for each queue pair of the initiator, a connected queue
pair of :class:`~gdrkit.verbs.Nic`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from gdrkit.buffers import check_range
from gdrkit.errors import Api, ApiError, ClosedResource, Reason, UsageError
from gdrkit.handles import Handle
from gdrkit.verbs import _native
from gdrkit.verbs.completion import Completion
from gdrkit.verbs.status import Status
from gdrkit.verbs.wire import Endpoint

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from gdrkit.verbs.wire import RemoteRange

__all__ = ["Burst", "Direction", "Initiator", "Latencies"]

_TIME_LIMIT_S = 10.0  # Default of `time_limit_s`: the longest wait for the next completion.
_LENGTH_BYTES_MAX = 2**31  # The largest message (InfiniBand specification).


class Direction(enum.Enum):
    """The direction of a transfer, as seen from the initiator."""

    WRITE = "write"
    READ = "read"


@dataclass(frozen=True, slots=True)
class Burst:
    """The result of a burst.

    Attributes
    ----------
    elapsed_ns : int
        Time from before the first post until after the last completion was polled, in nanoseconds.
    operations, length_bytes : int
        Number of operations, and size of each in bytes.
    """

    elapsed_ns: int
    operations: int
    length_bytes: int

    @property
    def moved_bytes(self) -> int:
        """The number of bytes that all operations moved."""
        return self.operations * self.length_bytes


@dataclass(frozen=True, slots=True)
class Latencies:
    """The latencies of operations that ran one after another.

    ``times_ns`` has the time from the post to the completion of each operation, in order.
    """

    times_ns: tuple[int, ...]
    length_bytes: int


class Initiator:
    """Queue pairs and registered host memory on one device.

    Parameters
    ----------
    nic_name : str
        The name of the device, as in :func:`~gdrkit.verbs.list_nics`.
    memory_bytes : int
        Size of the local host memory, above 0. A burst divides this memory, from its first byte, into slots of the size
        of one operation.
    queue_pairs : int
        Number of queue pairs, 1 to 1024.
    depth_max : int
        Largest number of outstanding operations of one queue pair, 1 to 16384.

    Raises
    ------
    ApiError
        A verb failed.
    SetupMissing
        The native parts of gdrkit were not built, or libibverbs is missing.
    UsageError
        An argument is out of range.
    """

    def __init__(self, nic_name: str, *, memory_bytes: int, queue_pairs: int = 1, depth_max: int = 128) -> None:
        maximums = {"memory_bytes": 2**40, "queue_pairs": 1024, "depth_max": 16384}
        for name, maximum in maximums.items():
            value = {"memory_bytes": memory_bytes, "queue_pairs": queue_pairs, "depth_max": depth_max}[name]
            if not 1 <= value <= maximum:
                message = f"{name} must be from 1 to {maximum}, not {value}"
                raise UsageError(message)
        self.nic_name = nic_name
        self.memory_bytes = memory_bytes
        # With `pinned_bytes`, the error can name RLIMIT_MEMLOCK. The other arguments appear in the error message.
        with _native.raise_as_verbs_error(pinned_bytes=memory_bytes, nic=nic_name, memory_bytes=memory_bytes):
            self._native: _native.native.Initiator | None = _native.native.Initiator(
                nic_name, memory_bytes=memory_bytes, queue_pairs=queue_pairs, depth_max=depth_max
            )
        self._handle = Handle("verbs.initiator")

    @property
    def closed(self) -> bool:
        """Whether the initiator was closed."""
        return self._native is None

    @property
    def reads_max(self) -> int:
        """Largest number of outstanding RDMA READs of one queue pair of this device."""
        return int(self._require_native().reads_max)

    def endpoints(self) -> tuple[Endpoint, ...]:
        """Return the endpoints of the queue pairs. The peer connects one queue pair to each of them."""
        return tuple(Endpoint.from_dict(fields) for fields in self._require_native().endpoints)

    def connect(self, peers: Sequence[Endpoint], *, reads_max: int = 1) -> None:
        """Connect each queue pair to a queue pair of the peer, in the order of :meth:`endpoints`.

        This is possible only once. `reads_max` is the largest number of outstanding RDMA READs of each queue pair.

        Raises
        ------
        ApiError
            ibv_modify_qp failed, or `peers` has more or fewer endpoints than there are queue pairs (EINVAL).
        """
        peer_fields = [peer.to_dict() for peer in peers]
        with _native.raise_as_verbs_error(peers=len(peers), reads_max=reads_max):
            self._require_native().connect(peer_fields, reads_max=reads_max)

    def write(self, data: bytes | bytearray | memoryview, *, offset_bytes: int = 0) -> None:
        """Copy bytes into the local memory."""
        view = memoryview(data).cast("B")
        check_range(offset_bytes=offset_bytes, length_bytes=view.nbytes, size_bytes=self.memory_bytes)
        self._require_native().memory()[offset_bytes : offset_bytes + view.nbytes] = view

    def read(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> bytes:
        """Return a copy of a part of the local memory. A length of None means up to the end."""
        length_bytes = self.memory_bytes - offset_bytes if length_bytes is None else length_bytes
        check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=self.memory_bytes)
        return bytes(self._require_native().memory()[offset_bytes : offset_bytes + length_bytes])

    def run(
        self,
        direction: Direction,
        remote: RemoteRange,
        *,
        length_bytes: int,
        operations: int,
        depth: int = 1,
        list_length: int = 1,
        time_limit_s: float = _TIME_LIMIT_S,
    ) -> Burst:
        """Transfer slots of `length_bytes` in order. After the last slot, continue with the first.

        There are as many slots as fit into `remote` and into the local memory.

        Parameters
        ----------
        direction : Direction
            WRITE writes to the memory of the peer, READ reads from it.
        remote : RemoteRange
            The memory of the peer, which is divided into slots like the local memory. Slot n of this side is
            transferred to or from slot n of the peer.
        length_bytes, operations : int
            Size of each operation in bytes, and number of operations.
        depth : int
            Number of outstanding operations, over all queue pairs.
        list_length : int
            Number of operations that one ibv_post_send posts, at most `depth`.
        time_limit_s : float
            Longest wait for the next completion, in seconds.

        Raises
        ------
        ApiError
            An operation failed; the error has its completion status, and the queue pairs are in the error state.
            TIMEOUT: there was no completion in time. EINVAL: `depth` or `list_length` is too large.
        UsageError
            An argument is out of range.
        """
        for name, value in (("depth", depth), ("list_length", list_length)):
            if not 1 <= value < 2**32:
                message = f"{name} must be from 1 to {2**32 - 1}, not {value}"
                raise UsageError(message)
        result = self._run_native_method(
            "run",
            remote,
            time_limit_s,
            direction=direction,
            length_bytes=length_bytes,
            operations=operations,
            depth=depth,
            list_length=list_length,
        )
        return Burst(elapsed_ns=result["elapsed_ns"], operations=operations, length_bytes=length_bytes)

    def run_singly(
        self,
        direction: Direction,
        remote: RemoteRange,
        *,
        length_bytes: int,
        operations: int,
        time_limit_s: float = _TIME_LIMIT_S,
    ) -> Latencies:
        """Run operations one by one on the first queue pair, and return the time of each; see :meth:`run`."""
        result = self._run_native_method(
            "run_singly", remote, time_limit_s, direction=direction, length_bytes=length_bytes, operations=operations
        )
        return Latencies(times_ns=tuple(result["times_ns"]), length_bytes=length_bytes)

    def close(self) -> None:
        """Destroy the queue pairs and the completion queue, then deregister and free the memory.

        A second close does nothing.
        """
        if self._native is not None:
            self._native = None
            self._handle.release()

    def _run_native_method(
        self,
        method_name: str,
        remote: RemoteRange,
        time_limit_s: float,
        *,
        direction: Direction,
        length_bytes: int,
        operations: int,
        **depth_options: int,
    ) -> dict[str, Any]:
        """Call a method of the native initiator. Return its result, or raise an error if an operation failed."""
        options = {"length_bytes": length_bytes, "operations": operations, **depth_options}
        options["slots"] = self._count_slots(remote, length_bytes, operations)
        native = self._require_native()
        with _native.raise_as_verbs_error(nic=self.nic_name, direction=direction.value, **options):
            result: dict[str, Any] = getattr(native, method_name)(
                to_peer=direction is Direction.WRITE,
                remote_address=remote.address,
                remote_key=remote.rkey,
                time_limit_s=time_limit_s,
                **options,
            )
        self._check_result(result, direction, time_limit_s)
        return result

    def _count_slots(self, remote: RemoteRange, length_bytes: int, operations: int) -> int:
        """Return how many slots fit into the memory of both sides. Check that the arguments are in range."""
        available_bytes = min(remote.length_bytes, self.memory_bytes)
        length_bytes_max = min(_LENGTH_BYTES_MAX, available_bytes)
        if not 1 <= length_bytes <= length_bytes_max:
            message = f"length_bytes must be from 1 to {length_bytes_max} for these memories, not {length_bytes}"
            raise UsageError(message)
        if not 1 <= operations < 2**48:
            message = f"operations must be from 1 to {2**48 - 1}, not {operations}"
            raise UsageError(message)
        # The native code counts slots with 32 bits.
        return min(available_bytes // length_bytes, 2**32 - 1)

    def _check_result(self, result: dict[str, Any], direction: Direction, time_limit_s: float) -> None:
        """Raise an ApiError if an operation failed or did not complete in time."""
        completed_operations = result["done"]
        if result["timed_out"]:
            raise ApiError(
                api=Api.VERBS,
                operation="ibv_poll_cq",
                status=None,
                status_name="no completion",
                arguments={"nic": self.nic_name, "direction": direction.value, "done": completed_operations},
                reason=Reason.TIMEOUT,
                what_to_do="check that the peer process runs, and that its queue pairs are connected to this initiator",
                detail=f"none within {time_limit_s:g} s",
            )
        # expect() raises the error of the completion status if it is not SUCCESS.
        Completion(
            work_id=completed_operations,  # The error then tells how many operations completed before the failure.
            status=Status(result["status"]),
            request=f"rdma_{direction.value}",
            opcode=None,
            length_bytes=0,
            immediate=None,
            vendor_error=result["vendor_error"],
            qp_number=0,
        ).expect()

    def _require_native(self) -> _native.native.Initiator:
        if self._native is None:
            resource = f"initiator on {self.nic_name}"
            raise ClosedResource(resource)
        return self._native

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Initiator({self.nic_name}{', closed' if self.closed else ''}, memory_bytes={self.memory_bytes})"
