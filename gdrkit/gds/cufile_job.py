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
        The memory of the extents. None for a probe: its memory is not registered with cuFile, and the job is not
        counted in :func:`gdrkit.gds.transfer_totals`.
    proof : Proof
        The evidence about the route of the bytes. It is valid when the job is over.
    moved_bytes : int
        Number of bytes that arrived so far.
    failure : tuple or None
        The first failed call; see ``_native.Failure``.
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
        # For each requested range: the index of the joined range that contains it, its offset in that joined range, and
        # its length.
        self._requested_ranges: list[tuple[int, int, int]] = []
        # For each joined range: its offset in the file, its device address, and its length.
        self._joined_ranges: list[tuple[int, int, int]] = []
        self._join_ranges(extents)
        # The lock is reentrant, because a signal handler may cancel the job while its thread has the lock.
        self._lock = threading.RLock()
        # The index of the joined range of the next part, and the offset of the part in this range.
        self._next_range_index = self._next_offset_bytes = 0
        # For each joined range: a dict from the offset of a part in the range to the number of its bytes that arrived.
        self._arrived_bytes_by_offset: list[dict[int, int]] = [{} for _ in self._joined_ranges]
        self._failed_part_arguments: dict[str, int] = {}  # Arguments of the error that name the failed part.
        self._failure_text = ""
        self._is_cancelled = False
        self._start_s = time.monotonic()
        self._duration_s = 0.0
        # An interrupted wait must not leave a Python lock held, so this object is native.
        self._completion = native.Completion()
        # The unexpected exception (not an ApiError) that ended the job.
        self._error: BaseException | None = None

    @property
    def route(self) -> cufile.Route:
        """The route that the counters showed; ``UNKNOWN`` if they showed none."""
        return self.proof.route

    @property
    def why_not_direct(self) -> str:
        """The reason why the transfer is not proven to be direct; empty if it is."""
        is_proven = self.proof.state is cufile.RouteState.PROVEN
        return "" if is_proven else f"cuFile: {self.proof.why or self._failure_text or self.proof.state.value}"

    @property
    def largest_range_bytes(self) -> int:
        """Size of the largest joined range, in bytes."""
        return max((length for _, _, length in self._joined_ranges), default=0)

    def count_parts(self, part_bytes: int) -> int:
        """Return into how many parts of at most `part_bytes` the ranges are divided."""
        return sum(-(-length // part_bytes) for _, _, length in self._joined_ranges)

    def choose_part_bytes(self, workers_count: int, part_bytes_max: int) -> int:
        """Return a size of parts that gives each worker about two parts: whole MiB, at most `part_bytes_max`."""
        even_part_bytes = sum(length for _, _, length in self._joined_ranges) // (2 * workers_count)
        return max(MIB, min(part_bytes_max, even_part_bytes // MIB * MIB))

    def wait(self, timeout_us: int) -> bool:
        """Wait at most `timeout_us`, or without limit if it is negative. Return whether the transfer is over."""
        return self._completion.wait(timeout_us)

    def notify(self, queue: Any, token: int) -> None:  # noqa: ANN401 - native object.
        """Add the token to a native completion queue when the transfer is over; at once if it is over already."""
        self._completion.notify(queue, token)

    def end(self, error: BaseException | None = None) -> None:
        """End the transfer. With an error, :meth:`progress` raises it."""
        self._duration_s = time.monotonic() - self._start_s
        if self.memory is not None:  # A probe, which moves no bytes for a caller, is not counted.
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
            "direct_bytes": self.moved_bytes,  # The file was opened with O_DIRECT.
            "cancelled": self._is_cancelled,
            "failure": self.failure,
            "duration_s": self._duration_s,
            "route": self.route,
            "why_not_direct": self.why_not_direct,
            "counters": self.proof.counter_increases,
            "failed_part": self._failed_part_arguments,
        }

    def arrived(self) -> Sequence[int]:
        """Return how many bytes of each range arrived from its beginning without a gap."""
        with self._lock:
            intervals = [_join_parts(length_by_offset) for length_by_offset in self._arrived_bytes_by_offset]
        arrived_bytes = []
        for range_index, offset, length in self._requested_ranges:
            begins, ends = intervals[range_index]
            # Only the last interval that begins at or before the range can contain the first byte of the range.
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
            offset_in_range = self._next_offset_bytes
            part = CufilePart(
                self._next_range_index,
                file_offset + offset_in_range,
                address + offset_in_range,
                min(part_bytes, length - offset_in_range),
            )
            self._next_offset_bytes += part.length_bytes
            return part

    def complete(self, part: CufilePart, moved_bytes: int) -> None:
        """Store how many bytes of a part arrived. 0: the file ends before it, and the rest of the range is skipped."""
        with self._lock:
            self.moved_bytes += moved_bytes
            range_index = part.range_index
            range_file_offset, _, range_bytes = self._joined_ranges[range_index]
            if moved_bytes == 0 and range_index == self._next_range_index:
                self._next_offset_bytes = range_bytes
            if moved_bytes:
                offset_in_range = part.file_offset_bytes - range_file_offset
                self._arrived_bytes_by_offset[range_index][offset_in_range] = moved_bytes

    def fail(self, error: ApiError, part: CufilePart | None = None) -> None:
        """Store an error and the part that failed, unless an earlier error is stored."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = _make_failure(error)
            self._failure_text = str(error)
            if part is not None:
                self._failed_part_arguments = {
                    "failed_range_index": self._find_requested_range_index(part),
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

    def _find_requested_range_index(self, part: CufilePart) -> int:
        """Return the index of the requested range that contains the first byte of a part."""
        part_position = (part.range_index, part.file_offset_bytes - self._joined_ranges[part.range_index][0])
        range_positions = [(range_index, offset) for range_index, offset, _ in self._requested_ranges]
        return bisect.bisect_right(range_positions, part_position) - 1

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
        """Make :meth:`take` return None from now on."""
        with self._lock:
            self._remaining_jobs.clear()

    def fail(self, error: ApiError) -> None:
        """Store an error in every job."""
        for job in self._all_jobs:
            job.fail(error)


def _join_parts(length_by_offset: Mapping[int, int]) -> tuple[list[int], list[int]]:
    """Return the beginnings and the ends of the intervals that parts cover, in ascending order.

    `length_by_offset` has the length of each part by its offset. Parts without a gap between them form one interval.
    """
    begins: list[int] = []
    ends: list[int] = []
    for offset, length in sorted(length_by_offset.items()):
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
