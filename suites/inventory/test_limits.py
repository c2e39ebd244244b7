"""Limits of the transfer rate: links of GPUs according to NVML or sysfs, and active ports."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from inventory.healthy_machine import GPU_ADDRESS, HEALTHY_FILES, make_machine
from support.hosts import make_host_facts

from gdrkit.host import NvmlFacts
from gdrkit.inventory import device_limit, path_limit, topology

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.inventory import Facts

FACTS = make_host_facts(gpu_count=1, nic_count=1)


def compute_gpu_limit_gb_per_s(facts: Facts) -> float | None:
    """Return the limit of GPU 0 in GB/s, or None if it is unknown."""
    limit = device_limit(facts, devices={0}, nics=())
    return None if limit is None else round(limit.gb_per_s, 2)


@pytest.mark.parametrize(
    ("speed", "width", "limit_gb_per_s"),
    [
        ("64.0 GT/s PCIe", "16", 118.0),
        ("32.0 GT/s PCIe", "16", 63.02),
        ("16.0 GT/s PCIe", "16", 31.51),
        ("8.0 GT/s", "8", 7.88),
        ("5.0 GT/s PCIe", "4", 2.0),
        ("Unknown", "16", None),
        (None, None, None),
        ("32.0 GT/s PCIe", "63?", None),
        ("32.0 GT/s PCIe", "0", None),
        ("32.0 GT/s PCIe", "9" * 5000, None),
    ],
)
def test_limit_of_a_link_follows_from_speed_and_width(
    speed: str | None, width: str | None, limit_gb_per_s: float | None
) -> None:
    (gpu,) = FACTS.gpus
    gpu_with_link = dataclasses.replace(gpu, link_speed=speed, link_width=width)
    assert compute_gpu_limit_gb_per_s(dataclasses.replace(FACTS, gpus=(gpu_with_link,))) == limit_gb_per_s


def test_limit_of_a_path_is_its_slowest_link() -> None:
    limit = device_limit(FACTS, devices={0}, nics={"mlx5_0"})
    assert limit is not None
    assert (limit.gb_per_s, limit.source) == (50.0, "the port of mlx5_0, 400 Gb/sec (4X NDR)")
    assert device_limit(FACTS, devices={7}, nics={"mlx5_7"}) is None


def test_port_that_is_down_is_not_a_limit() -> None:
    (nic,) = FACTS.rdma_devices
    (port,) = nic.ports
    inactive_port = dataclasses.replace(port, number=2, state="DOWN", rate="10 Gb/sec (4X SDR)")
    facts = dataclasses.replace(FACTS, rdma_devices=(dataclasses.replace(nic, ports=(port, inactive_port)),))
    limit = device_limit(facts, devices=(), nics={"mlx5_0"})
    assert limit is not None
    assert limit.gb_per_s == 50.0


def test_limit_of_an_idle_gpu_is_its_maximum_link(tmp_path: Path) -> None:
    (speed_path,) = (path for path in HEALTHY_FILES if path.endswith(f"/{GPU_ADDRESS}/current_link_speed"))
    idle_machine = make_machine(tmp_path, files={speed_path: "2.5 GT/s PCIe\n"})
    assert compute_gpu_limit_gb_per_s(idle_machine.facts) == 63.02
    limit = path_limit(topology(idle_machine), idle_machine.facts, ["GPU0"])
    assert limit is not None
    assert round(limit.gb_per_s, 2) == 63.02
    # If NVML does not report the maximum, the speed at which the link runs now is the limit.
    facts = idle_machine.facts
    assert facts.nvml is not None
    (link,) = facts.nvml.gpus
    link_without_maximum = dataclasses.replace(link, link_generation_max=None)
    nvml = NvmlFacts(driver_version="580.159.04", gpus=(link_without_maximum,))
    assert compute_gpu_limit_gb_per_s(dataclasses.replace(facts, nvml=nvml)) == 4.0


def test_limit_is_unknown_in_a_virtual_machine() -> None:
    facts = dataclasses.replace(FACTS, virtual_machine="kvm")
    assert device_limit(facts, devices={0}, nics={"mlx5_0"}) is None
