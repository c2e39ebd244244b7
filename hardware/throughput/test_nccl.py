"""Bus bandwidth of NCCL's all-reduce between all GPUs of this host, with memory that a NIC can access as well."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import pytest
from support.python_child import suites_environ
from support.rank_processes import run_ranks
from support.rates import WARM_UP_ROUNDS, Meter, Rates

from gdrkit.harness.needs import cuda, host, needs, verbs
from gdrkit.units import MIB

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.cuda import Device
    from gdrkit.harness.evidence import Evidence

# A multicast object that its owner does not release can make the GPUs of a host unusable, also for other users.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
# All ranks are on one host, so NCCL must not use a NIC. The ranks connect to each other over the loopback interface.
NCCL_ENVIRONMENT = {**NO_MULTICAST, "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_SOCKET_FAMILY": "AF_INET"}
# Longest duration of a case. The cases took 2 to 6 s on two H200. The first case takes longer, because it reads a
# library of 300 MB from the disk.
RANKS_TIMEOUT_S = 45.0

MEMORY_KINDS = [
    pytest.param("malloc", [], id="malloc"),
    pytest.param("vmm", [], id="vmm"),
    pytest.param("vmm", ["--registered"], id="vmm_registered"),
]


@needs(cuda.device(count_min=2), cuda.vmm, verbs.nic(), verbs.dmabuf_region, host.module("nvidia.nccl"))
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
    rank_count = len(devices)
    common_options = ["--ranks", str(rank_count), "--memory", memory, "--length-bytes", str(length_bytes)]
    common_options += ["--rounds", str(meter.runs_count), "--seed", str(seed), *options]
    rank_outputs = run_ranks(
        [
            [sys.executable, "-m", "support.nccl_rank", "--rank", str(rank), *common_options]
            for rank in range(rank_count)
        ],
        folder=tmp_path,
        environ=suites_environ({**os.environ, **NCCL_ENVIRONMENT}),
        deadline_s=RANKS_TIMEOUT_S,
    )
    results = [json.loads(lines[-1]) for lines in rank_outputs]
    evidence["nccl"] = {
        "version": results[0]["version"],
        "libraries": results[0]["libraries"],
        "environment": NCCL_ENVIRONMENT,
    }
    if meter.is_on:
        # In an all-reduce of n devices, each device sends and receives 2 (n - 1) / n of the bytes. The time of a round
        # is that of the slowest rank.
        carried_bytes = int(length_bytes * 2 * (rank_count - 1) / rank_count)
        times_s = [max(rank_times) for rank_times in zip(*(result["times_s"] for result in results), strict=True)]
        cpu_s = sum(sum(result["cpu_s"][WARM_UP_ROUNDS:]) for result in results)
        meter.record("bus", Rates.from_times(carried_bytes, times_s[WARM_UP_ROUNDS:], cpu_s=cpu_s))
