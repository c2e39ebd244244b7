"""Proof of the route that the bytes of cuFile transfers took.

A :class:`RouteMonitor` reads the counters of libcufile and of nvidia-fs before and after transfers. The increase of the
counters shows which route the bytes took. Only this evidence proves a route. The success of a call proves nothing,
because libcufile silently copies through host memory if there is no direct path.
"""

from __future__ import annotations

import contextlib
import enum
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gdrkit.cufile import parameters
from gdrkit.cufile.nvidia_fs import read_nvidia_fs
from gdrkit.cufile.obstacles import Cause, Obstacle, obstacles
from gdrkit.errors import ApiError, GdrkitError, Reason
from gdrkit.text import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gdrkit.cufile.driver import Driver
    from gdrkit.cufile.nvidia_fs import NvidiaFs, Tree
    from gdrkit.cufile.statistics import StatisticsSnapshot

__all__ = [
    "DirectPathError",
    "Proof",
    "Route",
    "RouteMonitor",
    "RouteState",
    "failed_registration_proof",
    "proof_from_counters",
]


_NVFS_COUNTER_NAMES = ("Reads.ok", "Writes.ok")
_UNEXPLAINED_OBSTACLE = Obstacle(
    Cause.UNEXPLAINED,
    "libcufile copied through host memory, and gdrkit found no cause",
    "read the log of libcufile (CUFILE_LOGFILE_PATH)",
)


class Route(enum.Enum):
    """The route of bytes between a file and memory.

    libcufile moves bytes by PCI peer-to-peer (``P2P``), through the driver nvidia-fs (``NVFS``), or through host memory
    (``POSIX``). ``ENGINE``: the copy engine of gdrkit.gds moved the bytes. ``RDMA``: a storage server moved them by
    RDMA. ``UNKNOWN``: there is no evidence.
    """

    P2P = "p2p"
    NVFS = "nvfs"
    POSIX = "posix"
    ENGINE = "engine"
    RDMA = "rdma"
    UNKNOWN = "unknown"


class RouteState(enum.Enum):
    """Whether the counters prove that the route was direct, and if not, why.

    ``UNPROVEN``: no counter shows the route. ``FELL_BACK``: the bytes went through host memory. ``NOT_POSSIBLE``:
    libcufile refused to register the file.
    """

    PROVEN = "proven"
    UNPROVEN = "unproven"
    FELL_BACK = "fell_back"
    NOT_POSSIBLE = "not_possible"


@dataclass(frozen=True, slots=True)
class Proof:
    """The evidence about the route of transfers, and the conclusion from it.

    Attributes
    ----------
    route : Route
        The route of the bytes; ``UNKNOWN`` without evidence.
    state : RouteState
        Whether the direct route is proven.
    evidence : str
        Source of the evidence: ``cufile statistics``, ``nvidia-fs counters``, or the failed call and its status if
        libcufile refused to register the file. Empty if there is no evidence.
    counter_increases : mapping
        Increase of each counter, by its name.
    causes : tuple of Obstacle
        Reasons why the route was not direct, or why it is unknown.
    """

    route: Route
    state: RouteState
    evidence: str = ""
    counter_increases: Mapping[str, int] = field(default_factory=dict)
    causes: tuple[Obstacle, ...] = ()

    @property
    def why(self) -> str:
        """All causes as one text; empty if the route was direct."""
        return "; ".join(f"{obstacle.text} ({obstacle.cause.value})" for obstacle in self.causes)

    def require_direct(self) -> None:
        """Raise an error if the route is not proven to be direct.

        Raises
        ------
        DirectPathError
            The route is not proven.
        """
        if self.state is not RouteState.PROVEN:
            raise DirectPathError(self)


class DirectPathError(GdrkitError):
    """The caller required direct transfers, but the route is not proven to be direct. ``proof`` has the evidence."""

    def __init__(self, proof: Proof) -> None:
        self.proof = proof
        super().__init__(
            f"the direct route has the state {proof.state.value}, and the bytes took the route {proof.route.value}: "
            f"{proof.why or 'the cause is unknown'}",
            reason=Reason.NO_ROUTE,
            what_to_do="; ".join(dict.fromkeys(obstacle.what_to_do for obstacle in proof.causes)),
        )


class RouteMonitor:
    """An observer of the counters during transfers.

    libcufile counts all transfers of the process, so no other transfers should run at the same time.

    Parameters
    ----------
    driver : Driver
        The open driver, with started statistics.
    tree : Tree
        Reader of the host's files.
    """

    def __init__(self, driver: Driver, tree: Tree) -> None:
        self._driver = driver
        self._tree = tree
        self.proof = Proof(Route.UNKNOWN, RouteState.UNPROVEN)

    @contextlib.contextmanager
    def watch(self, fd: int, *, transfer_obstacles: tuple[Obstacle, ...] = ()) -> Iterator[RouteMonitor]:
        """Read the counters before and after the block, and set :attr:`proof`.

        Parameters
        ----------
        fd : int
            Descriptor of the file of the transfers. If the route is not proven, the obstacles of the file become
            causes.
        transfer_obstacles : tuple of Obstacle
            Obstacles that these transfers have besides their file; see
            :func:`gdrkit.cufile.obstacles.transfer_obstacles`.
        """
        # Reset the proof, because an exception in the block must not leave the proof of earlier transfers.
        self.proof = Proof(Route.UNKNOWN, RouteState.UNPROVEN)
        statistics_before, error_text_before = self._read_statistics()
        nvfs_before = read_nvidia_fs(self._tree)
        yield self
        statistics_after, error_text_after = self._read_statistics()
        delta = (
            None if statistics_before is None or statistics_after is None else statistics_after.since(statistics_before)
        )
        nvfs = (nvfs_before, read_nvidia_fs(self._tree))
        statistics_error = error_text_before or error_text_after
        self.proof = proof_from_counters(
            delta=delta, nvfs=nvfs, causes=transfer_obstacles, statistics_error=statistics_error
        )
        if self.proof.state is not RouteState.PROVEN:
            # The causes are searched only if there is no proof, because the search reads several files, which takes
            # longer than a short transfer.
            causes = (*transfer_obstacles, *obstacles(self._tree, fd, compat_forced=_is_compat_forced()))
            self.proof = proof_from_counters(delta=delta, nvfs=nvfs, causes=causes, statistics_error=statistics_error)

    def _read_statistics(self) -> tuple[StatisticsSnapshot | None, str]:
        """Return the statistics of libcufile and an empty text, or None and the text of the error."""
        try:
            return self._driver.statistics.snapshot(), ""
        except ApiError as error:
            return None, str(error)


def proof_from_counters(
    *,
    delta: StatisticsSnapshot | None,
    nvfs: tuple[NvidiaFs | None, NvidiaFs | None] = (None, None),
    causes: tuple[Obstacle, ...] = (),
    statistics_error: str = "",
) -> Proof:
    """Return the proof that follows from the counters.

    Parameters
    ----------
    delta : StatisticsSnapshot or None
        Increase of the statistics of libcufile during the transfers; None if libcufile returned no statistics.
    nvfs : tuple
        Counters of nvidia-fs before and after the transfers; None if nvidia-fs is not loaded.
    causes : tuple of Obstacle
        Known obstacles.
    statistics_error : str
        The error if libcufile returned no statistics.
    """
    counts_by_route = _count_transfers_by_route(delta) if delta is not None else {}
    direct_count_by_route = {route: counts_by_route.get(route, 0) for route in (Route.P2P, Route.NVFS)}
    increases = _select_transfer_counters(delta)
    if counts_by_route.get(Route.POSIX):
        return Proof(
            Route.POSIX, RouteState.FELL_BACK, "cufile statistics", increases, causes or (_UNEXPLAINED_OBSTACLE,)
        )
    if uncounted_count := _count_transfers_without_route(delta):
        cause_text = f"libcufile does not count the route of {format_count(uncounted_count, 'transfer')}"
        advice = "use FileHandle.read and write instead of batches and vectors, because libcufile counts their routes"
        return Proof(
            Route.UNKNOWN,
            RouteState.UNPROVEN,
            "",
            increases,
            (Obstacle(Cause.NOT_COUNTED, cause_text, advice), *causes),
        )
    if any(direct_count_by_route.values()):
        route = max(direct_count_by_route, key=lambda candidate: direct_count_by_route[candidate])
        return Proof(route, RouteState.PROVEN, "cufile statistics", increases)
    nvfs_before, nvfs_after = nvfs
    if nvfs_before is not None and nvfs_after is not None and _is_nvfs_proven(nvfs_before, nvfs_after):
        nvfs_increases = {name: nvfs_after.increase(nvfs_before, name) for name in _NVFS_COUNTER_NAMES}
        return Proof(Route.NVFS, RouteState.PROVEN, "nvidia-fs counters", nvfs_increases)
    cause_text = statistics_error or "no counter of libcufile or nvidia-fs has increased"
    advice = "start the statistics at level 3 (Driver.statistics.start), with cuFile 1.15 or newer"
    return Proof(Route.UNKNOWN, RouteState.UNPROVEN, "", increases, (Obstacle(Cause.NOT_COUNTED, cause_text, advice),))


def failed_registration_proof(tree: Tree, fd: int, error: ApiError) -> Proof:
    """Return the proof for a file that libcufile refused to register: an unknown route, with the causes."""
    file_obstacles = obstacles(tree, fd, compat_forced=_is_compat_forced())
    causes = tuple(obstacle for obstacle in file_obstacles if obstacle.prevents_registration)
    if not causes:
        causes = (Obstacle(Cause.UNEXPLAINED, str(error), error.what_to_do, prevents_registration=True),)
    return Proof(Route.UNKNOWN, RouteState.NOT_POSSIBLE, f"{error.operation} failed: {error.status_name}", {}, causes)


def _count_transfers_by_route(delta: StatisticsSnapshot) -> dict[Route, int]:
    """Return the number of transfers on each route that libcufile counts."""
    counts_by_route = {
        route: delta.total(f"n_{route.value}_reads") + delta.total(f"n_{route.value}_writes")
        for route in (Route.P2P, Route.NVFS, Route.POSIX)
    }
    # libcufile counts batches in the first level of its statistics, and some versions count them in the third level,
    # too. If both levels have counts, the larger POSIX count is returned, so that a batch through host memory is
    # visible even beside direct reads.
    batch_count_by_route = {
        Route.P2P: delta.basic.get("batch_p2p_submit_ops", 0),
        Route.NVFS: delta.basic.get("batch_nvfs_submit_ops", 0),
        Route.POSIX: delta.basic.get("batch_posix_enqueued_ops", 0),
    }
    if not any(counts_by_route.values()):
        return batch_count_by_route
    return counts_by_route | {Route.POSIX: max(counts_by_route[Route.POSIX], batch_count_by_route[Route.POSIX])}


def _count_transfers_without_route(delta: StatisticsSnapshot | None) -> int:
    """Return the number of batch transfers whose route libcufile does not report.

    libcufile does not count the route of transfers that it submits to the kernel's asynchronous I/O (aio). In compat
    mode, it submits all transfers of batches to aio (observed with 1.15 and 1.20).
    """
    if delta is None:
        return 0
    count_with_route = sum(delta.basic.get(f"batch_{route}_submit_ops", 0) for route in ("p2p", "nvfs"))
    return max(0, delta.basic.get("batch_total_submit_ops", 0) - count_with_route)


def _select_transfer_counters(delta: StatisticsSnapshot | None) -> dict[str, int]:
    """Return the increases of the counters of transfers (totals over all GPUs) and of batches."""
    if delta is None:
        return {}
    gpu_counter_names = sorted({name for gpu in delta.gpus for name in gpu.counters if name.startswith("n_")})
    batch_counters = {
        name: value for name, value in delta.basic.items() if name.startswith("batch_") and "_ops" in name
    }
    return {name: delta.total(name) for name in gpu_counter_names} | batch_counters


def _is_nvfs_proven(before: NvidiaFs, after: NvidiaFs) -> bool:
    """Return whether the counters of nvidia-fs have increased, and no other process was using nvidia-fs."""
    is_only_process = max(before.process_count, after.process_count) <= 1
    has_increased = any(after.increase(before, name) > 0 for name in _NVFS_COUNTER_NAMES)
    return after.counting and is_only_process and has_increased


def _is_compat_forced() -> bool:
    """Return whether the environment or the settings of libcufile force compat mode."""
    if os.environ.get("CUFILE_FORCE_COMPAT_MODE", "").lower() in {"1", "true"}:
        return True
    try:
        return parameters.flag(parameters.Flag.FORCE_COMPAT_MODE)
    except ApiError:
        # This version of libcufile does not have the parameter.
        return False
