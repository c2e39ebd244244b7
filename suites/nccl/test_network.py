"""NCCL reduces memory of gdrkit by the NCCL plug-in for NICs, and the NICs access the device memory directly.

All ranks run on one host. Environment variables forbid NVLink, PCIe and shared memory, so NCCL must use the NICs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.nccl_job import read_rank_log, run_all_reduces

from gdrkit import nccl
from gdrkit.errors import Api
from gdrkit.harness.needs import cuda, host, needs, verbs, without_twin
from gdrkit.units import MIB

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.harness.evidence import Evidence

# NCCL needs NICs of the kernel and the CUDA runtime. The verbs twin (a library that emulates NICs) has no NICs of the
# kernel, and the CUDA twin does not support the runtime.
NEEDS_NICS = needs(
    cuda.device(count_min=2),
    cuda.vmm,
    verbs.nic(),
    verbs.dmabuf_region,
    without_twin(Api.VERBS),
    without_twin(Api.CUDA),
    host.module("nvidia.nccl"),
)
RANKS_COUNT = 2
ENVIRON_WITH_NICS_ONLY = {
    "NCCL_NET": "IB",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    # With SYS, NCCL uses GPUDirect RDMA between a GPU and a NIC at any distance.
    "NCCL_NET_GDR_LEVEL": "SYS",
}


@pytest.mark.qualify
@NEEDS_NICS
@pytest.mark.parametrize("memory_type", ["vmm", "nccl"])
def test_network_plug_in_accesses_device_memory(
    tmp_path: Path, evidence: Evidence, seed: int, memory_type: str
) -> None:
    environ = {**ENVIRON_WITH_NICS_ONLY, **nccl.log_environment(tmp_path)}
    options = ["--memory", memory_type, "--length-bytes", str(16 * MIB), "--rounds", "1", "--seed", str(seed)]
    # Each rank checks the bytes of its result.
    results = run_all_reduces(tmp_path, RANKS_COUNT, *options, "--registered", environ=environ)
    evidence["nccl"] = {"version": results[0]["version"], "libraries": results[0]["libraries"]}
    for rank, result in enumerate(results):
        log = read_rank_log(tmp_path, rank)
        transports_by_buffer = [
            sorted(log.transports_using_range(address, 16 * MIB)) for address in result["addresses"]["registered"]
        ]
        evidence[f"rank{rank}"] = {
            "network": log.network,
            "channels": dict(log.channels),
            "registered": transports_by_buffer,
        }
        assert log.network == "IB"
        assert log.channels
        assert all(channel_transport.startswith("NET/IB/") for channel_transport in log.channels)
        assert any(channel_transport.endswith("/GDRDMA") for channel_transport in log.channels)
