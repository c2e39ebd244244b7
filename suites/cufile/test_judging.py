"""What the statistics of libcufile prove: direct is what was counted so, with nothing through the host beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gdrkit import cufile, host
from gdrkit.cufile import Cause, GpuCounters, Route, RouteState, Snapshot, judge, parameters

if TYPE_CHECKING:
    from pathlib import Path


def grown(basic: dict[str, int] | None = None, **counters: int) -> Snapshot:
    return Snapshot(basic or {}, gpus=(GpuCounters("GPU-0", counters),) if counters else ())


@pytest.mark.parametrize(
    ("delta", "route", "state"),
    [
        (grown(n_p2p_reads=3), Route.P2P, RouteState.PROVEN),
        (grown(n_nvfs_writes=1), Route.NVFS, RouteState.PROVEN),
        (grown(n_posix_reads=1), Route.POSIX, RouteState.FELL_BACK),
        (grown(n_p2p_reads=1000, n_posix_reads=1), Route.POSIX, RouteState.FELL_BACK),
        (grown({"batch_nvfs_submit_ops": 2}), Route.NVFS, RouteState.PROVEN),
        (grown({"batch_posix_enqueued_ops": 2}), Route.POSIX, RouteState.FELL_BACK),
        (grown({"batch_posix_enqueued_ops": 1}, n_p2p_reads=9), Route.POSIX, RouteState.FELL_BACK),
        (grown({"batch_total_submit_ops": 2, "batch_p2p_submit_ops": 2}), Route.P2P, RouteState.PROVEN),
        (grown({"batch_total_submit_ops": 2, "batch_p2p_submit_ops": 1}), Route.UNKNOWN, RouteState.UNPROVEN),
        (grown({"batch_total_submit_ops": 2, "batch_aio_submit_ops": 2}), Route.UNKNOWN, RouteState.UNPROVEN),
        (grown({"batch_total_submit_ops": 2}, n_p2p_reads=9), Route.UNKNOWN, RouteState.UNPROVEN),
        (grown({"batch_total_submit_ops": 2}, n_posix_reads=1), Route.POSIX, RouteState.FELL_BACK),
        (grown({"read_ops": 4}, n_total_reads=4), Route.UNKNOWN, RouteState.UNPROVEN),
        (grown(), Route.UNKNOWN, RouteState.UNPROVEN),
        (None, Route.UNKNOWN, RouteState.UNPROVEN),
    ],
)
def test_a_route_is_what_was_counted(delta: Snapshot | None, route: Route, state: RouteState) -> None:
    proof = judge(delta=delta)
    assert (proof.route, proof.state) == (route, state)
    assert bool(proof.causes) is (state is not RouteState.PROVEN)


@pytest.mark.parametrize(("version", "kept"), [(1150, False), (1180, True), (1200, True)])
def test_sizes_that_an_older_library_forgets_are_not_staged_there(version: int, kept: bool) -> None:  # noqa: FBT001
    """A driver of cuFile 1.15 had batches of 128 where 32 were staged, and 16 where cufile.json said so."""
    assert parameters.is_kept(parameters.Size.IO_BATCHSIZE, version=version) is kept
    assert parameters.is_kept(parameters.Size.MAX_IO_THREADS, version=version)


def test_the_causes_of_a_file_are_found_below_a_root(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with (tmp_path / "file").open("rb") as file:
        fd = file.fileno()
        bare = [found.cause for found in cufile.obstacles(host.HostTree(tmp_path / "root"), fd, compat_forced=True)]
        assert bare == [Cause.NO_UDEV_DATABASE, Cause.COMPAT_FORCED, Cause.NO_NVIDIA_FS, Cause.NOT_O_DIRECT]
        folder = tmp_path / "root" / "proc" / "driver" / "nvidia-fs"
        folder.mkdir(parents=True)
        (folder / "modules").write_text("")
        loaded = [found.cause for found in cufile.obstacles(host.HostTree(tmp_path / "root"), fd)]
        assert loaded == [Cause.NO_UDEV_DATABASE, Cause.NO_STORAGE_MODULE, Cause.NOT_O_DIRECT]
