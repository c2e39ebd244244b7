"""A direct route is proven only if a counter of libcufile shows it and no counter shows a copy through host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gdrkit import cufile, host
from gdrkit.cufile import Cause, GpuCounters, Route, RouteState, StatisticsSnapshot, parameters, proof_from_counters

if TYPE_CHECKING:
    from pathlib import Path


def make_snapshot(basic_counters: dict[str, int] | None = None, **gpu_counters: int) -> StatisticsSnapshot:
    """Return statistics of libcufile with these basic counters, and these counters of one GPU."""
    gpus = (GpuCounters("GPU-0", gpu_counters),) if gpu_counters else ()
    return StatisticsSnapshot(basic_counters or {}, gpus=gpus)


@pytest.mark.parametrize(
    ("delta", "route", "state"),
    [
        (make_snapshot(n_p2p_reads=3), Route.P2P, RouteState.PROVEN),
        (make_snapshot(n_nvfs_writes=1), Route.NVFS, RouteState.PROVEN),
        (make_snapshot(n_posix_reads=1), Route.POSIX, RouteState.FELL_BACK),
        (make_snapshot(n_p2p_reads=1000, n_posix_reads=1), Route.POSIX, RouteState.FELL_BACK),
        (make_snapshot({"batch_nvfs_submit_ops": 2}), Route.NVFS, RouteState.PROVEN),
        (make_snapshot({"batch_posix_enqueued_ops": 2}), Route.POSIX, RouteState.FELL_BACK),
        (make_snapshot({"batch_posix_enqueued_ops": 1}, n_p2p_reads=9), Route.POSIX, RouteState.FELL_BACK),
        (make_snapshot({"batch_total_submit_ops": 2, "batch_p2p_submit_ops": 2}), Route.P2P, RouteState.PROVEN),
        (make_snapshot({"batch_total_submit_ops": 2, "batch_p2p_submit_ops": 1}), Route.UNKNOWN, RouteState.UNPROVEN),
        (make_snapshot({"batch_total_submit_ops": 2, "batch_aio_submit_ops": 2}), Route.UNKNOWN, RouteState.UNPROVEN),
        (make_snapshot({"batch_total_submit_ops": 2}, n_p2p_reads=9), Route.UNKNOWN, RouteState.UNPROVEN),
        (make_snapshot({"batch_total_submit_ops": 2}, n_posix_reads=1), Route.POSIX, RouteState.FELL_BACK),
        (make_snapshot({"read_ops": 4}, n_total_reads=4), Route.UNKNOWN, RouteState.UNPROVEN),
        (make_snapshot(), Route.UNKNOWN, RouteState.UNPROVEN),
        (None, Route.UNKNOWN, RouteState.UNPROVEN),
    ],
)
def test_route_follows_from_the_counters(delta: StatisticsSnapshot | None, route: Route, state: RouteState) -> None:
    proof = proof_from_counters(delta=delta)
    assert (proof.route, proof.state) == (route, state)
    assert bool(proof.causes) is (state is not RouteState.PROVEN)


@pytest.mark.parametrize(("version", "is_staged"), [(1150, False), (1180, True), (1200, True)])
def test_sizes_that_cufile_1_15_discards_are_not_staged(version: int, is_staged: bool) -> None:  # noqa: FBT001
    """libcufile 1.15 was observed to ignore a batch size of 32 that was set before the driver opened.

    The open driver used 16 if cufile.json set this size, and 128 otherwise.
    """
    assert parameters.keeps_staged_size(parameters.Size.IO_BATCHSIZE, version=version) is is_staged
    assert parameters.keeps_staged_size(parameters.Size.MAX_IO_THREADS, version=version)


def test_averages_of_a_difference_are_those_of_its_operations() -> None:
    """After two reads of 100 us and three of 700 us, the difference has the average 700 us, not 460 us - 100 us."""
    snapshot_before = make_snapshot(
        {"read_ops": 2, "read_lat_sum_us": 200, "read_lat_avg_us": 100, "write_lat_avg_us": 9}
    )
    snapshot_after = make_snapshot(
        {"read_ops": 5, "read_lat_sum_us": 2300, "read_lat_avg_us": 460, "write_lat_avg_us": 9}
    )
    assert snapshot_after.since(snapshot_before).basic == {
        "read_ops": 3,
        "read_lat_sum_us": 2100,
        "read_lat_avg_us": 700,
    }
    # With two operations of 9 us each, the average of the difference equals the average before.
    one_write = make_snapshot({"write_ops": 1, "write_lat_sum_us": 9, "write_lat_avg_us": 9})
    two_writes = make_snapshot({"write_ops": 2, "write_lat_sum_us": 18, "write_lat_avg_us": 9})
    assert two_writes.since(one_write).basic == {"write_ops": 1, "write_lat_sum_us": 9, "write_lat_avg_us": 9}


def test_difference_has_no_rates_and_the_last_batch() -> None:
    """A difference of two rates means nothing, so it is left out. A counter of the last batch keeps its later value."""
    rate_counters = {"read_bw_bytes_per_sec": 5, "read_ops_per_sec": 5, "batch_read_bw_bytes": 5}
    snapshot_before = make_snapshot(
        {**rate_counters, "read_bytes": 10, "last_batch_read_bytes": 30}, read_utilization=1, n_p2p_reads=1
    )
    snapshot_after = make_snapshot(
        {**dict.fromkeys(rate_counters, 3), "read_bytes": 14, "last_batch_read_bytes": 20},
        read_utilization=3,
        read_bw_bytes_per_sec=3,
        n_p2p_reads=2,
    )
    difference = snapshot_after.since(snapshot_before)
    assert difference.basic == {"read_bytes": 4, "last_batch_read_bytes": 20}
    assert difference.gpus == (GpuCounters("GPU-0", {"n_p2p_reads": 1}),)


def test_obstacles_are_found_below_a_root(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with (tmp_path / "file").open("rb") as file:
        fd = file.fileno()
        host_tree = host.HostTree(tmp_path / "root")
        causes_without_nvidia_fs = [obstacle.cause for obstacle in cufile.obstacles(host_tree, fd, compat_forced=True)]
        assert causes_without_nvidia_fs == [
            Cause.NO_UDEV_DATABASE,
            Cause.COMPAT_FORCED,
            Cause.NO_NVIDIA_FS,
            Cause.NOT_O_DIRECT,
        ]
        nvidia_fs_folder = tmp_path / "root" / "proc" / "driver" / "nvidia-fs"
        nvidia_fs_folder.mkdir(parents=True)
        (nvidia_fs_folder / "modules").write_text("")
        causes_with_nvidia_fs = [obstacle.cause for obstacle in cufile.obstacles(host_tree, fd)]
        assert causes_with_nvidia_fs == [Cause.NO_UDEV_DATABASE, Cause.NO_STORAGE_MODULE, Cause.NOT_O_DIRECT]
