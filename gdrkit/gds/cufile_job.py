"""Transfers by cuFile: their division into calls, and the bytes that the calls have moved.

The extents of a transfer are one flat list with four numbers for each range: index of the file (here always 0), offset
in the file, device address, length in bytes. Ranges that follow each other both in the file and in memory are joined,
so that fewer calls transfer them. A part is the piece of a joined range that one call of cuFile transfers. Several
threads take the parts of a job and report their results in any order.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from gdrkit import cufile
from gdrkit.gds._native import native
from gdrkit.gds.totals import count_transfer
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gdrkit.errors import ApiError
    from gdrkit.gds._native import Failure
    from gdrkit.gds.buffer import TransferBuffer

__all__ = ["CufileJob", "CufilePart", "PartSource"]


class CufilePart(NamedTuple):
    """The piece of a range that one call of cuFile transfers.

    Attributes
    ----------
    range_index : int
        Index of the joined range.
    file_offset_bytes : int
        Offset of the first byte in the file.
    address : int
        Device address of the first byte.
    length_bytes : int
        Size in bytes.
    """

    range_index: int
    file_offset_bytes: int
    address: int
    length_bytes: int

    def without_first(self, moved_bytes: int) -> CufilePart:
        """Return the part without its first `moved_bytes`."""
        return CufilePart(
            self.range_index,
            self.file_offset_bytes + moved_bytes,
            self.address + moved_bytes,
            self.length_bytes - moved_bytes,
        )


class CufileJob:
    """A transfer by cuFile, with the interface of :class:`gdrkit.gds.transfer.TransferJob`. It is thread-safe.

    Attributes
    ----------
    write : bool
        True: write from memory into the file. False: read from the file into memory.
    durable : bool
        Whether a write is synced to the disk before the job is over.
    memory : TransferBuffer or None
        The memory of the extents. None: the memory is not registered with cuFile.
    proof : Proof
        The route that the counters showed. It is valid when the job is over.
    moved_bytes : int
        Bytes that arrived so far.
    failure : tuple or None
        The first failure.
    """

    def __init__(
        self, *, write: bool, extents: Sequence[int], durable: bool = False, memory: TransferBuffer | None = None
    ) -> None:
        self.write = write
        self.durable = durable
        self.memory = memory
        self.proof = cufile.Proof(cufile.Route.UNKNOWN, cufile.RouteState.UNPROVEN)
        self.moved_bytes = 0
        self.failure: Failure | None = None
        # For each range of the transfer: the index of the joined range that contains it, its offset in the joined
        # range, and its length.
        self._requested_ranges: list[tuple[int, int, int]] = []
        # For each joined range: its offset in the file, its device address, and its length.
        self._joined_ranges: list[tuple[int, int, int]] = []
        self._join_ranges(extents)
        # The lock is reentrant, because a signal handler may cancel the job while its thread has the lock.
        self._lock = threading.RLock()
        # The joined range of the next part, and the offset of the part in it.
        self._next_range_index = self._next_offset_bytes = 0
        # For each joined range: the numbers of bytes that arrived, by the offset in the range at which they begin.
        self._arrived_parts: list[dict[int, int]] = [{} for _ in self._joined_ranges]
        self._failed_part: dict[str, int] = {}  # Arguments of the error that name the failed part.
        self._why_failed = ""
        self._is_cancelled = False
        self._start_s = time.monotonic()
        self._duration_s = 0.0
        # An interrupted wait must not leave a Python lock held, so this object is native.
        self._completion = native.Completion()
        self._error: BaseException | None = None

    @property
    def route(self) -> cufile.Route:
        """The route that the counters showed; ``UNKNOWN`` if they showed none."""
        return self.proof.route

    @property
    def why_not_direct(self) -> str:
        """The reason why the transfer is not proven to be direct; empty if it is."""
        is_proven = self.proof.state is cufile.RouteState.PROVEN
        return "" if is_proven else f"cuFile: {self.proof.why or self._why_failed or self.proof.state.value}"

    @property
    def largest_range_bytes(self) -> int:
        """Size of the largest joined range, in bytes."""
        return max((length for _, _, length in self._joined_ranges), default=0)

    def count_parts(self, part_bytes: int) -> int:
        """Return how many parts of at most `part_bytes` the ranges are divided into."""
        return sum(-(-length // part_bytes) for _, _, length in self._joined_ranges)

    def choose_part_bytes(self, workers_count: int, part_bytes_max: int) -> int:
        """Return the size of parts that gives each worker two parts: a multiple of 1 MiB, at most `part_bytes_max`."""
        share_bytes = sum(length for _, _, length in self._joined_ranges) // (2 * workers_count)
        return max(MIB, min(part_bytes_max, share_bytes // MIB * MIB))

    def wait(self, timeout_us: int) -> bool:
        """Wait at most `timeout_us`, or without limit if it is negative. Return whether the transfer is over."""
        return self._completion.wait(timeout_us)

    def notify(self, queue: Any, token: int) -> None:  # noqa: ANN401 - native object.
        """Add the token to a native completion queue when the transfer is over; at once if it is over already."""
        self._completion.notify(queue, token)

    def end(self, error: BaseException | None = None) -> None:
        """End the transfer. With an error, :meth:`progress` raises it."""
        self._duration_s = time.monotonic() - self._start_s
        if self.memory is not None:  # A probe has no memory of a caller.
            count_transfer(self.route, sum(self.arrived()))
        self._error = error
        self._completion.end()

    def cancel(self) -> None:
        """Start no further call of cuFile. The job counts as cancelled only if it has parts that were not started."""
        with self._lock:
            self._is_cancelled = self._is_cancelled or self._has_parts_left()

    def progress(self) -> dict[str, Any]:
        """Return the progress. If an unexpected exception (not an ApiError) ended the transfer, raise it."""
        if self._error is not None and self._completion.is_over():
            raise self._error
        return {
            "bytes": self.moved_bytes,
            "direct_bytes": self.moved_bytes,
            "cancelled": self._is_cancelled,
            "failure": self.failure,
            "duration_s": self._duration_s,
            "route": self.route,
            "why_not_direct": self.why_not_direct,
            "counters": self.proof.moved,
            "failed_part": self._failed_part,
        }

    def arrived(self) -> Sequence[int]:
        """Return how many bytes of each range arrived from its beginning without a gap."""
        with self._lock:
            intervals = [_join_parts(parts) for parts in self._arrived_parts]
        arrived_bytes = []
        for range_index, offset, length in self._requested_ranges:
            begins, ends = intervals[range_index]
            interval_index = bisect.bisect_right(begins, offset) - 1
            interval_end = ends[interval_index] if interval_index >= 0 else offset
            arrived_bytes.append(min(length, max(0, interval_end - offset)))
        return arrived_bytes

    @property
    def is_stopped(self) -> bool:
        """Whether the job starts no further parts, because it failed or was cancelled."""
        return self._is_cancelled or self.failure is not None

    def take(self, part_bytes: int) -> CufilePart | None:
        """Return the next part of at most `part_bytes`, or None if no part is left, or the job failed or was cancelled.

        The caller must pass the result of the part to :meth:`complete` or :meth:`fail`.
        """
        with self._lock:
            if self.is_stopped or not self._has_parts_left():
                return None
            file_offset, address, length = self._joined_ranges[self._next_range_index]
            taken_bytes = self._next_offset_bytes
            part = CufilePart(
                self._next_range_index,
                file_offset + taken_bytes,
                address + taken_bytes,
                min(part_bytes, length - taken_bytes),
            )
            self._next_offset_bytes += part.length_bytes
            return part

    def complete(self, part: CufilePart, moved_bytes: int) -> None:
        """Store how many bytes of a part arrived. 0 means that the file ends there, and so does the range."""
        with self._lock:
            self.moved_bytes += moved_bytes
            range_index = part.range_index
            if moved_bytes == 0 and range_index == self._next_range_index:
                self._next_offset_bytes = self._joined_ranges[range_index][2]
            if moved_bytes:
                offset_bytes = part.file_offset_bytes - self._joined_ranges[range_index][0]
                self._arrived_parts[range_index][offset_bytes] = moved_bytes

    def fail(self, error: ApiError, part: CufilePart | None = None) -> None:
        """Store an error and the part that failed, unless an earlier error is stored."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = _make_failure(error)
            self._why_failed = str(error)
            if part is not None:
                self._failed_part = {
                    "failed_range_index": self._find_requested_index(part),
                    "failed_offset_bytes": part.file_offset_bytes,
                    "failed_length_bytes": part.length_bytes,
                }

    def fail_sync(self, error: OSError) -> None:
        """Store the error of fdatasync, unless an earlier error is stored."""
        with self._lock:
            self.failure = self.failure or ("kernel", "fdatasync", error.errno or 0, "")

    def _join_ranges(self, extents: Sequence[int]) -> None:
        """Join the ranges that follow each other in the file and in memory."""
        for file_offset, address, length in zip(extents[1::4], extents[2::4], extents[3::4], strict=True):
            if self._joined_ranges:
                joined_offset, joined_address, joined_length = self._joined_ranges[-1]
                if (file_offset, address) == (joined_offset + joined_length, joined_address + joined_length):
                    self._requested_ranges.append((len(self._joined_ranges) - 1, joined_length, length))
                    self._joined_ranges[-1] = (joined_offset, joined_address, joined_length + length)
                    continue
            self._requested_ranges.append((len(self._joined_ranges), 0, length))
            self._joined_ranges.append((file_offset, address, length))

    def _find_requested_index(self, part: CufilePart) -> int:
        """Return the index of the requested range that contains the first byte of a part."""
        part_position = (part.range_index, part.file_offset_bytes - self._joined_ranges[part.range_index][0])
        beginnings = [(range_index, offset) for range_index, offset, _ in self._requested_ranges]
        return bisect.bisect_right(beginnings, part_position) - 1

    def _has_parts_left(self) -> bool:
        """Return whether a part was not started yet. Skip the ranges whose parts were all started."""
        while self._next_range_index < len(self._joined_ranges):
            if self._next_offset_bytes < self._joined_ranges[self._next_range_index][2]:
                return True
            self._next_range_index, self._next_offset_bytes = self._next_range_index + 1, 0
        return False


class PartSource:
    """The parts of several jobs, in order. It is thread-safe.

    Attributes
    ----------
    parts_count : int
        Number of parts of all jobs.
    """

    def __init__(self, jobs: Sequence[CufileJob], part_bytes: int) -> None:
        self._lock = threading.Lock()
        self._remaining_jobs = deque(jobs)
        self._all_jobs = tuple(jobs)
        self._part_bytes = part_bytes
        self.parts_count = sum(job.count_parts(part_bytes) for job in jobs)

    def take(self) -> tuple[CufileJob, CufilePart] | None:
        """Return the next part and its job, or None if all parts were taken."""
        with self._lock:
            while self._remaining_jobs:
                part = self._remaining_jobs[0].take(self._part_bytes)
                if part is not None:
                    return self._remaining_jobs[0], part
                self._remaining_jobs.popleft()
            return None

    def stop(self) -> None:
        """Give no more parts."""
        with self._lock:
            self._remaining_jobs.clear()

    def fail(self, error: ApiError) -> None:
        """Store an error in every job."""
        for job in self._all_jobs:
            job.fail(error)


def _join_parts(parts: Mapping[int, int]) -> tuple[list[int], list[int]]:
    """Return the beginnings and the ends of the intervals that the parts cover, from the lowest offset on."""
    begins: list[int] = []
    ends: list[int] = []
    for offset, length in sorted(parts.items()):
        if ends and ends[-1] == offset:
            ends[-1] += length
        else:
            begins.append(offset)
            ends.append(offset + length)
    return begins, ends


def _make_failure(error: ApiError) -> Failure:
    """Return the error in the form in which the native engine reports failures."""
    if error.errno is not None:
        return "kernel", error.operation, error.errno, error.status_name
    return error.api.value, error.operation, error.status or 0, error.status_name
