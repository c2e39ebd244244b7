"""Bus bandwidth of NCCL's all-reduce between all GPUs of this host, with memory that a NIC can access as well.

The cases compare memory that is registered with NCCL with unregistered memory of the same kind, in alternating rounds
of one run. Another case checks in the log of NCCL that NCCL uses the registered memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.nccl_job import LOOPBACK, NO_MULTICAST, read_rank_log, run_all_reduces
from support.rates import WARM_UP_ROUNDS, Meter, Rates

from gdrkit import nccl
from gdrkit.errors import Api
from gdrkit.harness.needs import cuda, host, needs, verbs, without_twin
from gdrkit.units import MIB

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.cuda import Device
    from gdrkit.harness.evidence import Evidence

# NCCL must not use a NIC, because the cases measure the links between the GPUs.
NCCL_ENVIRONMENT = {"NCCL_IB_DISABLE": "1"}
# Mark of the cases that start ranks (one process for each GPU). Each rank also registers its buffers with a NIC. NCCL
# uses the CUDA runtime, which the CUDA twin does not support.
NEEDS_RANKS = needs(
    cuda.device(count_min=2),
    cuda.vmm,
    verbs.nic(),
    verbs.dmabuf_region,
    without_twin(Api.CUDA),
    host.module("nvidia.nccl"),
)
# NCCL registers only memory that cuMemCreate allocated. ncclMemAlloc calls cuMemCreate as well.
REGISTRABLE_KINDS = ["vmm", "nccl"]
MEMORY_KINDS = [
    pytest.param("malloc", [], id="malloc"),
    *(pytest.param(kind, ["--registered"], id=kind) for kind in REGISTRABLE_KINDS),
]


@NEEDS_RANKS
@pytest.mark.parametrize("length_bytes", [pytest.param(size * MIB, id=f"{size}MiB") for size in (1, 256)])
@pytest.mark.parametrize(("memory", "options"), MEMORY_KINDS)
def test_all_reduce(
    meter: Meter,
    devices: tuple[Device, ...],
    evidence: Evidence,
    seed: int,
    tmp_path: Path,
    memory: str,
    options: list[str],
    length_bytes: int,
) -> None:
    rank_options = ["--memory", memory, "--seed", str(seed), *options]
    measure_all_reduce(meter, evidence, tmp_path, len(devices), rank_options, length_bytes, NCCL_ENVIRONMENT)


@NEEDS_RANKS
def test_all_reduce_with_few_channels(
    meter: Meter, devices: tuple[Device, ...], evidence: Evidence, seed: int, tmp_path: Path
) -> None:
    """With four channels, the copies into the buffers of NCCL limit the rate. With all channels, the links limit it."""
    environ = {**NCCL_ENVIRONMENT, "NCCL_MAX_NCHANNELS": "4"}
    options = ["--memory", "vmm", "--seed", str(seed), "--registered"]
    measure_all_reduce(meter, evidence, tmp_path, len(devices), options, 256 * MIB, environ)


def measure_all_reduce(
    meter: Meter,
    evidence: Evidence,
    folder: Path,
    ranks_count: int,
    options: list[str],
    length_bytes: int,
    environ: dict[str, str],
) -> None:
    """Run the ranks, and record the bus bandwidth of the all-reduces.

    Without the option ``--registered``, a rank has one pair of buffers, ``plain``. With the option, a rank also has the
    pair ``registered``, whose buffers are registered with NCCL.
    """
    size_options = ["--length-bytes", str(length_bytes), "--rounds", str(meter.run_count)]
    rank_results = run_all_reduces(folder, ranks_count, *size_options, *options, environ=environ)
    evidence["nccl"] = {
        "version": rank_results[0]["version"],
        "libraries": rank_results[0]["libraries"],
        "environment": {**NO_MULTICAST, **LOOPBACK, **environ},
    }
    if not meter.is_on:
        return
    # In an all-reduce of n devices, each device sends (and receives) 2 (n - 1) / n of the bytes. The slowest rank
    # determines the time of a round.
    sent_bytes = int(length_bytes * 2 * (ranks_count - 1) / ranks_count)
    rates = {}
    for pair_name in rank_results[0]["times_s"]:
        times_s = [
            max(rank_times_s)
            for rank_times_s in zip(*(rank_result["times_s"][pair_name] for rank_result in rank_results), strict=True)
        ]
        cpu_s = sum(sum(rank_result["cpu_s"][pair_name][WARM_UP_ROUNDS:]) for rank_result in rank_results)
        record_name = "bus" if pair_name == "plain" else f"{pair_name}_bus"
        rates[pair_name] = meter.record(
            record_name, Rates.from_times(sent_bytes, times_s[WARM_UP_ROUNDS:], cpu_s=cpu_s)
        )
    if "registered" in rates:
        evidence.number("registered_over_plain_ratio", rates["registered"].median / rates["plain"].median)


@NEEDS_RANKS
@pytest.mark.parametrize("memory", REGISTRABLE_KINDS)
def test_registered_memory_is_used(
    devices: tuple[Device, ...], evidence: Evidence, seed: int, tmp_path: Path, memory: str
) -> None:
    """NCCL logs each use of registered memory. It logs no use of unregistered memory."""
    length_bytes = 64 * MIB
    # Each rank has a log of its own.
    environ = {**NCCL_ENVIRONMENT, **nccl.log_environment(tmp_path)}
    options = ["--memory", memory, "--length-bytes", str(length_bytes), "--rounds", "1", "--seed", str(seed)]
    rank_results = run_all_reduces(tmp_path, len(devices), *options, "--registered", environ=environ)
    for rank, rank_result in enumerate(rank_results):
        log = read_rank_log(tmp_path, rank)
        # For each pair, a list for each buffer: the names of the transports that used the buffer.
        transports_by_pair = {
            pair_name: [sorted(log.transports_using_range(address, length_bytes)) for address in addresses]
            for pair_name, addresses in rank_result["addresses"].items()
        }
        evidence[f"rank{rank}"] = {"uses": transports_by_pair, "channels": log.channels}
        assert any("IPC" in transports for transports in transports_by_pair["registered"])
        assert not any(transports_by_pair["plain"])
