"""Transfers: what was asked for, how far it is, and what became of it.

A :class:`Transfer` is a future. It holds the memory and the file until the last byte has moved, whatever the
caller forgets meanwhile. Its result says how many bytes arrived and which route they took.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from gdrkit.cufile import Route
from gdrkit.errors import Api, ApiError, GdrkitError, Reason
from gdrkit.gds._native import Failure, api_error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gdrkit.gds.target import Target

__all__ = ["Route", "Transfer", "TransferFailed", "TransferSet", "Transferred", "Work", "ended"]

_PROGRESS_S = 0.05


# The ways of which direct ones are told: what the evidence of the route must say.
DIRECT_ROUTES = frozenset({Route.P2P, Route.NVFS, Route.RDMA})


class Transferred(NamedTuple):
    """What a transfer came to.

    Attributes
    ----------
    bytes : int
        How many arrived.
    route : Route
        Which way they really took.
    direct_io_bytes : int
        How many of them passed the page cache by (O_DIRECT).
    parts : tuple of int
        For each range, how many bytes arrived from its beginning on, without a gap.
    duration_s : float
        From the call to the last byte.
    why_not_direct : str
        Why the bytes did not go directly; empty where they did, or where nobody wanted it.
    """

    bytes: int
    route: Route
    direct_io_bytes: int
    parts: tuple[int, ...]
    duration_s: float
    why_not_direct: str = ""


class TransferFailed(ApiError):
    """A transfer ended before all of it had arrived.

    Attributes
    ----------
    transferred : Transferred
        What did arrive. Bytes behind the end of a part may have been moved too; none of them counts.
    """

    transferred: Transferred


class Work(Protocol):
    """What moves the bytes of one transfer: a job of the engine, or of a direct path."""

    @property
    def route(self) -> Route:
        """Which way the bytes took; once it is over."""

    @property
    def why_not_direct(self) -> str:
        """Why that was no direct one; empty where it was, or where none was wanted."""

    def wait(self, timeout_us: int) -> bool:
        """Whether it was over within the time; negative: as long as it takes."""

    def cancel(self) -> None:
        """Begin nothing new."""

    def progress(self) -> dict[str, Any]:
        """``bytes``, ``direct_bytes``, ``cancelled``, ``failure`` (:data:`~gdrkit.gds._native.Failure` or None)."""

    def arrived(self) -> Sequence[int]:
        """For each range, how many bytes arrived; once it is over."""


class TransferSet:
    """Transfers that were started and not settled yet, oldest first. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._transfers: OrderedDict[Transfer, None] = OrderedDict()

    def add(self, transfer: Transfer) -> None:
        """Add one."""
        with self._lock:
            self._transfers[transfer] = None

    def discard(self, transfer: Transfer) -> None:
        """Remove one, if it is there."""
        with self._lock:
            self._transfers.pop(transfer, None)

    def all(self) -> list[Transfer]:
        """Return those that are there now."""
        with self._lock:
            return list(self._transfers)

    def rotate(self, count: int) -> list[Transfer]:
        """Return the first ones, which become the last ones."""
        with self._lock:
            found = list(itertools.islice(self._transfers, count))
            for each in found:
                self._transfers.move_to_end(each)
            return found

    def take_after_fork(self) -> list[Transfer]:
        """Remove and return all, in the child of a fork: a thread that is not there may have the lock."""
        self._lock = threading.Lock()
        found = list(self._transfers)
        self._transfers.clear()
        return found


# Transfers that are under way are held here, since their memory must outlive them.
_running = TransferSet()
# Those of the process that forked this one: their threads are not here, so that nobody knows when they end.
_of_parent: list[Transfer] = []
# How many running transfers each start asks whether they are over. Two: all are asked in time, since one comes.
_ASKED_COUNT = 2


@dataclass(eq=False)
class Transfer:
    """A transfer under way: a future.

    Not for direct use: the methods of :class:`gdrkit.gds.File` and :func:`gdrkit.gds.read_files` make one.
    """

    work: Work
    lengths: Sequence[int]
    targets: Sequence[Target]
    arguments: Mapping[str, object]
    must_fill: bool
    why_not_direct: str = ""
    direct_required: bool = False
    keep: object = None
    group: TransferSet | None = None
    _began: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _result: Transferred | None = None
    _error: GdrkitError | None = None

    def __post_init__(self) -> None:
        for group in self._groups():
            group.add(self)
        # A caller that drops a future never settles it; the next transfers do.
        for each in _running.rotate(_ASKED_COUNT):
            if each is not self and each.work.wait(0):
                for group in each._groups():  # noqa: SLF001 - of this class.
                    group.discard(each)
                each._settle()  # noqa: SLF001

    @property
    def bytes_moved(self) -> int:
        """How many bytes have arrived so far."""
        return int(self.work.progress()["bytes"])

    @property
    def length_bytes(self) -> int:
        """How many were asked for."""
        return sum(self.lengths)

    def done(self) -> bool:
        """Whether it is over."""
        return self.work.wait(0)

    def cancel(self) -> bool:
        """Begin nothing new; what is under way ends by itself. False when there was nothing left to begin."""
        self.work.cancel()
        return bool(self.work.progress()["cancelled"])

    def exception(self, timeout_s: float | None = None) -> GdrkitError | None:
        """Wait, and give the error of :meth:`result` instead of raising it."""
        self._wait(timeout_s)
        self._settle()
        return self._error

    def result(
        self, timeout_s: float | None = None, *, on_progress: Callable[[int, int], None] | None = None
    ) -> Transferred:
        """Wait until it is over.

        Parameters
        ----------
        timeout_s : float or None
            How long; None: as long as it takes.
        on_progress : callable or None
            Called about twenty times a second with the bytes that arrived and the bytes asked for, and at the end.
            What it raises cancels the transfer.

        Raises
        ------
        TransferFailed
            The kernel or the driver refused (``errno``, ``status``), a file was too short (END_OF_FILE), or somebody
            cancelled it (CANCELLED); ``transferred`` says what arrived.
        TimeoutError
            It is not over yet; it goes on.
        """
        if on_progress is None:
            self._wait(timeout_s)
        else:
            self._watch(timeout_s, on_progress)
        self._settle()
        if self._error is not None:
            raise self._error
        assert self._result is not None  # noqa: S101 - settled without an error.
        return self._result

    def _wait(self, timeout_s: float | None) -> None:
        if not self.work.wait(-1 if timeout_s is None else int(timeout_s * 1e6)):
            message = f"{self.bytes_moved} of {self.length_bytes} bytes moved so far"
            raise TimeoutError(message)

    def _watch(self, timeout_s: float | None, on_progress: Callable[[int, int], None]) -> None:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not self.work.wait(int(_PROGRESS_S * 1e6)):
                on_progress(self.bytes_moved, self.length_bytes)
                if end is not None and time.monotonic() >= end:
                    self._wait(0)
            on_progress(self.bytes_moved, self.length_bytes)
        except TimeoutError:
            raise
        except BaseException:
            self.work.cancel()
            self.work.wait(-1)
            self._settle()
            raise

    def _settle(self) -> None:
        """Once it is over: let everything go, and keep what became of it."""
        with self._lock:
            if self._result is not None:
                return
            progress, parts = self.work.progress(), tuple(self.work.arrived())
            # What arrived behind a gap counts neither here nor there.
            count = sum(parts)
            self._result = Transferred(
                bytes=count,
                route=self.work.route,
                direct_io_bytes=min(int(progress["direct_bytes"]), count),
                parts=parts,
                duration_s=time.monotonic() - self._began,
                why_not_direct=self.why_not_direct or self.work.why_not_direct,
            )
            self._error = self._judge(progress, self._result)
            for each in self.targets:
                each.release()
            self.targets, self.keep = (), None
        for group in self._groups():
            group.discard(self)

    def _groups(self) -> tuple[TransferSet, ...]:
        return (_running,) if self.group is None else (_running, self.group)

    def _judge(self, progress: dict[str, Any], result: Transferred) -> GdrkitError | None:
        failure: Failure | None = progress["failure"]
        arguments = {**self.arguments, "transferred_bytes": result.bytes}
        detail = f"{result.bytes} of {self.length_bytes} bytes were moved"
        if failure is not None:
            error = api_error(failure, arguments=arguments, kind=TransferFailed, detail=detail)
        elif progress["cancelled"]:
            error = ended(arguments, detail, reason=Reason.CANCELLED)
        elif self.must_fill and result.parts != tuple(self.lengths):
            error = ended(arguments, detail)
        elif self.direct_required and result.bytes and result.route not in DIRECT_ROUTES:
            detail = f"bytes went by {result.route.value}: {result.why_not_direct}"
            error = ended(arguments, detail, reason=Reason.NOT_DIRECT)
        else:
            return None
        if isinstance(error, TransferFailed):
            error.transferred = result
        return error


def _forget_after_fork() -> None:
    for each in _running.take_after_fork():
        _of_parent.append(each)
        if each.group is not None:
            each.group.take_after_fork()


os.register_at_fork(after_in_child=_forget_after_fork)


def ended(arguments: Mapping[str, object], detail: str, *, reason: Reason = Reason.END_OF_FILE) -> TransferFailed:
    """The error for a transfer that nobody refused and that ended early all the same."""
    return TransferFailed(
        api=Api.NONE,
        operation="transfer",
        status=None,
        status_name=reason.name,
        arguments=arguments,
        reason=reason,
        detail=detail,
    )
