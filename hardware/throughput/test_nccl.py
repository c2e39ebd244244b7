"""Bus bandwidth of NCCL's all-reduce between all devices, with pool buffers that NICs and NCCL can access."""

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
# On one host no NIC takes part, and the ranks find each other by the loopback interface.
ENVIRONMENT = {**NO_MULTICAST, "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_SOCKET_FAMILY": "AF_INET"}
# Cases took 2 to 6 s on two H200. The first read of a library of 300 MB from a disk takes longer.
DEADLINE_S = 45.0

KINDS = [
    pytest.param("malloc", [], id="malloc"),
    pytest.param("vmm", [], id="vmm"),
    pytest.param("vmm", ["--registered"], id="vmm_registered"),
]


@needs(cuda.device(count_min=2), cuda.vmm, verbs.nic(), verbs.dmabuf_region, host.module("nvidia.nccl"))
@pytest.mark.parametrize("length_bytes", [pytest.param(size * MIB, id=f"{size}MiB") for size in (1, 256)])
@pytest.mark.parametrize(("memory", "options"), KINDS)
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
    ranks = len(devices)
    common = ["--ranks", str(ranks), "--memory", memory, "--length-bytes", str(length_bytes)]
    common += ["--rounds", str(meter.runs_count), "--seed", str(seed), *options]
    output = run_ranks(
        [[sys.executable, "-m", "support.nccl_rank", "--rank", str(rank), *common] for rank in range(ranks)],
        folder=tmp_path,
        environ=suites_environ({**os.environ, **ENVIRONMENT}),
        deadline_s=DEADLINE_S,
    )
    results = [json.loads(lines[-1]) for lines in output]
    evidence["nccl"] = {
        "version": results[0]["version"],
        "libraries": results[0]["libraries"],
        "environment": ENVIRONMENT,
    }
    if meter.is_on:
        # This is the traffic of each link: each of n devices sends and receives 2 (n - 1) / n of the bytes. The slowest
        # rank counts.
        carried_bytes = int(length_bytes * 2 * (ranks - 1) / ranks)
        times_s = [max(each) for each in zip(*(rank["times_s"] for rank in results), strict=True)]
        meter.record("bus", Rates.of(carried_bytes, times_s[WARM_UP_ROUNDS:]))
