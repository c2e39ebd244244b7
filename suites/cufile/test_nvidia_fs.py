"""The counters of the nvidia-fs kernel module prove a route only if no other process can have increased them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from gdrkit import host
from gdrkit.cufile import Cause, Route, RouteState, proof_from_counters, read_nvidia_fs

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.cufile import NvidiaFs

# /proc/driver/nvidia-fs/stats has these contents. nvfs_stats_show() of the kernel module prints them.
STATS_TEXT = """GDS Version: 1.15.0.42
NVFS statistics(ver: 4.0)
NVFS Driver(version: 2.28.2)
Mellanox PeerDirect Supported: True
IO stats: Enabled, peer IO stats: Disabled
Logging level: warn

Active Shadow-Buffer (MiB): 16
Active Process: 1
Batches				: n=0 ok=0 err=0 Avg-Submit-Latency(usec)=0
Reads				: n=41 ok=40 err=1 readMiB=160 io_state_err=0
Reads				: Bandwidth(MiB/s)=5120 Avg-Latency(usec)=780
Sparse Reads		        : n=0 io=0 holes=0 pages=0
Writes				: n=3 ok=3 err=0 writeMiB=12 io_state_err=0 pg-cache=0 pg-cache-fail=0 pg-cache-eio=0
Writes				: Bandwidth(MiB/s)=0 Avg-Latency(usec)=0
Mmap				: n=2 ok=2 err=0 munmap=1
Bar1-map			: n=2 ok=2 err=0 free=1 callbacks=0 active=1 delay-frees=0
Error				: cpu-gpu-pages=0 sg-ext=0 dma-map=0 dma-ref=0
Ops				: Read=0 Write=0 BatchIO=0
GPU 0000:1b:00.0 uuid:00112233-4455-6677-8899-aabbccddeeff : Registered_MiB=1 Cache_MiB=16 max_pinned_MiB=1
"""


def create_host_with_nvidia_fs(
    root: Path, stats_text: str = STATS_TEXT, modules_text: str = "nvme\nmlx5_ib extra\n"
) -> host.HostTree:
    """Write the files of nvidia-fs to /proc in the folder `root`, and return the host with this root."""
    folder = root / "proc" / "driver" / "nvidia-fs"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stats").write_text(stats_text)
    (folder / "modules").write_text(modules_text)
    return host.HostTree(root)


def read_counters(root: Path, stats_text: str = STATS_TEXT) -> NvidiaFs:
    """Return the counters that gdrkit reads if the file `stats` has these contents."""
    result = read_nvidia_fs(create_host_with_nvidia_fs(root, stats_text))
    assert result is not None
    return result


def test_counters_are_read(tmp_path: Path) -> None:
    nvidia_fs = read_counters(tmp_path)
    assert nvidia_fs.counting
    assert nvidia_fs.process_count == 1
    assert (nvidia_fs.counters["Reads.ok"], nvidia_fs.counters["Reads.err"], nvidia_fs.counters["Writes.writeMiB"]) == (
        40,
        1,
        12,
    )
    assert nvidia_fs.modules == ("mlx5_ib", "nvme")


def test_missing_nvidia_fs_has_no_counters(tmp_path: Path) -> None:
    assert read_nvidia_fs(host.HostTree(tmp_path)) is None


@pytest.mark.parametrize("stats_text", ["", "Reads : n= ok=x\n", "\0\n:::\n", "Active Process: many\n"])
def test_malformed_counters_are_ignored(tmp_path: Path, stats_text: str) -> None:
    nvidia_fs = read_counters(tmp_path, stats_text)
    assert (dict(nvidia_fs.counters), nvidia_fs.process_count, nvidia_fs.counting) == ({}, 0, False)


def test_transferred_bytes_are_whole_mib(tmp_path: Path) -> None:
    counters_before, counters_after = (
        read_counters(tmp_path),
        read_counters(tmp_path, STATS_TEXT.replace("readMiB=160", "readMiB=163")),
    )
    assert counters_after.transferred_bytes(counters_before, writing=False) == 3 << 20
    assert counters_after.transferred_bytes(counters_before, writing=True) == 0


def test_reads_of_this_process_prove_the_route(tmp_path: Path) -> None:
    counters_before, counters_after = (
        read_counters(tmp_path),
        read_counters(tmp_path, STATS_TEXT.replace("ok=40", "ok=44")),
    )
    proof = proof_from_counters(delta=None, nvfs=(counters_before, counters_after))
    assert (proof.route, proof.state, proof.evidence) == (Route.NVFS, RouteState.PROVEN, "nvidia-fs counters")
    assert proof.counter_increases == {"Reads.ok": 4, "Writes.ok": 0}


@pytest.mark.parametrize(
    "stats_text",
    [
        pytest.param(STATS_TEXT, id="unchanged"),
        pytest.param(STATS_TEXT.replace("ok=40", "ok=44").replace("Process: 1", "Process: 2"), id="another process"),
        pytest.param(STATS_TEXT.replace("ok=40", "ok=44").replace("IO stats: Enabled", "IO stats: Disabled"), id="off"),
        pytest.param(STATS_TEXT.replace("ok=40", "ok=39"), id="reset"),
    ],
)
def test_ambiguous_counters_are_unproven(tmp_path: Path, stats_text: str) -> None:
    proof = proof_from_counters(delta=None, nvfs=(read_counters(tmp_path), read_counters(tmp_path, stats_text)))
    assert (proof.route, proof.state) == (Route.UNKNOWN, RouteState.UNPROVEN)
    assert [cause.cause for cause in proof.causes] == [Cause.NOT_COUNTED]


def test_other_process_before_the_reads_is_unproven(tmp_path: Path) -> None:
    counters_after = read_counters(tmp_path, STATS_TEXT.replace("ok=40", "ok=44"))
    counters_before = replace(read_counters(tmp_path), process_count=2)
    assert proof_from_counters(delta=None, nvfs=(counters_before, counters_after)).state is RouteState.UNPROVEN
