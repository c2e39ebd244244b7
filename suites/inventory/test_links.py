"""Comparison of the links of a machine (PCIe, NVLink, ports of the NICs) with the links that its profile expects."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from gdrkit.errors import Reason, UsageError
from gdrkit.harness.needs import host, needs
from gdrkit.host import GpuHealth, GpuLink, HostTree, NvmlFacts, PortFacts, RdmaDevice, dmi_strings
from gdrkit.inventory import (
    CudaDeviceFacts,
    CudaFacts,
    ExpectedLink,
    Facts,
    captured_machine,
    choose_profile,
    link_shortfalls,
    load_profile,
    load_profiles,
    probe,
    read_capture,
)

if TYPE_CHECKING:
    from pathlib import Path

PUBLIC_PROFILES = ["aws-p5", "azure-ndv5", "dgx-h100", "dgx-h200", "gb200", "hgx-h100", "hgx-h200", "oci-h100"]
HARDWARE_SUBSTRATE = {"cuda": "hardware", "verbs": "hardware"}
GPU_COUNT = 8


def make_gpu_link(index: int, *, nvlinks: int = 18, lanes: int = 16) -> GpuLink:
    health = GpuHealth(None, None, None, None, None, None, None, None, active_nvlinks=nvlinks)
    # The link of this idle GPU runs with generation 1 of 5.
    return GpuLink(f"0000:{index:02x}:00.0", 1, 5, lanes, 16, 0, None, None, {}, health)


def make_nic(index: int, *, rate: str = "400 Gb/sec (4X NDR)", state: str = "ACTIVE") -> RdmaDevice:
    port = PortFacts(number=1, state=state, physical_state="LinkUp", rate=rate, link_layer="InfiniBand")
    return RdmaDevice(f"mlx5_{index}", "mlx5_core", True, None, None, None, None, (port,))  # noqa: FBT003 - has_device.


@pytest.fixture
def dgx_facts(tmp_path: Path) -> Facts:
    """Return facts about a DGX H100: eight ports with 400 Gbit/s, and two storage ports, one slow and one down."""
    empty_facts = probe(HostTree(tmp_path / "empty"), query_apis=False)
    cuda_devices = tuple(
        CudaDeviceFacts(index, "NVIDIA H100 80GB HBM3", "", f"0000:{index:02x}:00.0", {}) for index in range(GPU_COUNT)
    )
    nics = [
        *(make_nic(index) for index in range(8)),
        make_nic(8, rate="200 Gb/sec (4X HDR)"),
        make_nic(9, state="DOWN"),
    ]
    return replace(
        empty_facts,
        cuda=CudaFacts("13.0", cuda_devices, ()),
        nvml=NvmlFacts("580.159.04", tuple(map(make_gpu_link, range(GPU_COUNT)))),
        rdma_devices=tuple(nics),
        dmi={"sys_vendor": "NVIDIA", "product_name": "DGXH100"},
    )


def replace_gpu(facts: Facts, gpu: GpuLink) -> Facts:
    """Return facts in which this GPU replaces the GPU with the same address."""
    assert facts.nvml is not None
    gpus = tuple(gpu if facts_gpu.pci_bus_id == gpu.pci_bus_id else facts_gpu for facts_gpu in facts.nvml.gpus)
    return replace(facts, nvml=replace(facts.nvml, gpus=gpus))


def test_dgx_is_recognized_and_has_its_links(dgx_facts: Facts) -> None:
    profile = choose_profile(load_profiles(), dgx_facts, HARDWARE_SUBSTRATE)
    assert profile.name == "dgx-h100"
    assert {link.quantity for link in profile.links} == {
        "gpu_nvlinks",
        "gpu_pcie_generation",
        "gpu_pcie_lanes",
        "nic_gbit_per_s",
    }
    assert link_shortfalls(profile.links, dgx_facts) == ()


def test_degraded_gpu_links_are_named(dgx_facts: Facts) -> None:
    degraded_facts = replace_gpu(replace_gpu(dgx_facts, make_gpu_link(3, nvlinks=17)), make_gpu_link(5, lanes=8))
    nvlinks_shortfall, lanes_shortfall = link_shortfalls(load_profile("hgx-h100").links, degraded_facts)
    assert nvlinks_shortfall.startswith("gpu_nvlinks: 7 of 8 have 18 (0000:03:00.0 has 17); source: https://")
    assert lanes_shortfall.startswith("gpu_pcie_lanes: 7 of 8 have 16 (0000:05:00.0 has 8); source: https://")


@pytest.mark.parametrize(
    ("change", "expected_text"), [({"state": "DOWN"}, "mlx5_0 port 1 has 0"), ({"rate": "100"}, "has 100")]
)
def test_slow_or_inactive_port_is_named(dgx_facts: Facts, change: dict[str, str], expected_text: str) -> None:
    degraded_facts = replace(dgx_facts, rdma_devices=(make_nic(0, **change), *dgx_facts.rdma_devices[1:]))
    (shortfall,) = link_shortfalls(load_profile("dgx-h100").links, degraded_facts)
    assert shortfall.startswith("nic_gbit_per_s: 7 of 8 have 400")
    assert expected_text in shortfall


def test_missing_nic_is_a_shortfall(dgx_facts: Facts) -> None:
    (shortfall,) = link_shortfalls(
        load_profile("dgx-h100").links, replace(dgx_facts, rdma_devices=tuple(map(make_nic, range(7))))
    )
    assert shortfall.startswith("nic_gbit_per_s: 7 of 8 have 400; source: ")


def test_unknown_links_are_not_compared(tmp_path: Path) -> None:
    facts = probe(HostTree(tmp_path), query_apis=False)
    assert link_shortfalls(load_profile("dgx-h100").links, facts) == ()


@pytest.mark.parametrize(
    ("dmi", "profile_name"),
    [
        ({"sys_vendor": "Dell Inc.", "product_name": "PowerEdge XE9680"}, "hgx-h100"),
        ({"sys_vendor": "Amazon EC2", "product_name": "p5.48xlarge"}, "aws-p5"),
        ({"sys_vendor": "Microsoft Corporation", "product_name": "Virtual Machine"}, "azure-ndv5"),
        ({"chassis_asset_tag": "OracleCloud.com"}, "oci-h100"),
    ],
)
def test_profile_is_chosen_by_the_firmware_strings(dgx_facts: Facts, dmi: dict[str, str], profile_name: str) -> None:
    assert choose_profile(load_profiles(), replace(dgx_facts, dmi=dmi), HARDWARE_SUBSTRATE).name == profile_name


def test_firmware_strings_are_read_from_sysfs(tmp_path: Path) -> None:
    folder = tmp_path / "sys/class/dmi/id"
    folder.mkdir(parents=True)
    (folder / "product_name").write_text("DGXH100\n")
    assert dmi_strings(HostTree(tmp_path)) == {"product_name": "DGXH100"}
    assert probe(HostTree(tmp_path), query_apis=False).dmi == {"product_name": "DGXH100"}


@pytest.mark.parametrize("profile_name", PUBLIC_PROFILES)
def test_every_number_of_a_public_profile_has_a_url(profile_name: str) -> None:
    profile, inherited_numbers = load_profile(profile_name), load_profile("any").expected
    own_numbers = [number for number in profile.expected if number not in inherited_numbers]
    assert profile.links
    assert own_numbers
    sources = [*(link.source for link in profile.links), *(number.source for number in own_numbers)]
    assert [source for source in sources if not source.startswith("https://")] == []


@needs(host.captures)
def test_topology_of_oci_has_the_links_of_its_profile(captures_folder: Path) -> None:
    facts = captured_machine(read_capture(captures_folder / "oci-hpc" / "H100-topology.xml")).facts
    links = [link for link in load_profile("oci-h100").links if link.quantity.startswith("gpu_pcie")]
    assert len(facts.gpus) == GPU_COUNT
    assert len(links) == 2
    assert link_shortfalls(links, facts) == ()
    # If the machine has one GPU fewer, or the profile expects a faster link, the check reports shortfalls.
    assert len(link_shortfalls(links, replace(facts, gpus=facts.gpus[1:]))) == 2
    assert len(link_shortfalls([replace(links[0], at_least=6)], facts)) == 1


@needs(host.captures)
def test_infiniband_tree_has_the_ports_of_an_hgx(captures_folder: Path) -> None:
    facts = captured_machine(read_capture(captures_folder / "gpud" / "sys-class-infiniband-h100.0")).facts
    (port_link,) = (link for link in load_profile("dgx-h100").links if link.quantity == "nic_gbit_per_s")
    assert link_shortfalls([port_link], facts) == ()
    assert "8 of 9 have 400 (mlx5_bond_0 port 1 has 200)" in link_shortfalls([replace(port_link, count=9)], facts)[0]


PROFILE_START = "schema_version = 1\nabout = 'a machine'\n"
LINK_TEMPLATE = "[[links]]\nquantity = '{}'\nat_least = {}\ncount = {}\nsource = '{}'\n"


@pytest.mark.parametrize(
    ("profile_text", "error_pattern"),
    [
        (LINK_TEMPLATE.format("gpu_fans", 1, 1, "x"), "quantity must be one of gpu_nvlinks, .*, not 'gpu_fans'"),
        (LINK_TEMPLATE.format("gpu_nvlinks", 0, 1, "x"), "out of range"),
        (LINK_TEMPLATE.format("gpu_nvlinks", 1, 0, "x"), "out of range"),
        (LINK_TEMPLATE.format("gpu_nvlinks", 1, 1, ""), "no source"),
        ("[match.dmi]\nserial = '1'", "match.dmi must be one of sys_vendor, .*, not 'serial'"),
        ("extends = 'a'", "extends must not lead back to 'a'"),
        ("extends = 'b'", "extends must not lead back to 'a'"),
        ("extends = 'c'", "the profile must be one of a, b, not 'c'"),
    ],
)
def test_malformed_links_and_extends_are_refused(tmp_path: Path, profile_text: str, error_pattern: str) -> None:
    (tmp_path / "a.toml").write_text(PROFILE_START + profile_text)
    (tmp_path / "b.toml").write_text(PROFILE_START + "extends = 'a'")
    with pytest.raises(UsageError, match=error_pattern) as error_info:
        load_profile("a", folder=tmp_path)
    # A profile that does not exist is not malformed.
    assert error_info.value.reason is Reason.MALFORMED or "'c'" in error_pattern


def test_extended_profile_adds_to_the_entries_of_its_base(tmp_path: Path) -> None:
    base_link = ExpectedLink("gpu_nvlinks", 18, 8, "x")
    (tmp_path / "base.toml").write_text(
        PROFILE_START
        + "[match]\ngpu_count = 8\n[[routes]]\nenough = 'device'\n"
        + LINK_TEMPLATE.format("gpu_nvlinks", 18, 8, "x")
    )
    (tmp_path / "own.toml").write_text(
        PROFILE_START
        + "extends = 'base'\n[[foreseen]]\nneed = 'a'\nreason = 'b'\n"
        + LINK_TEMPLATE.format("nic_gbit_per_s", 9, 1, "y")
    )
    profile = load_profile("own", folder=tmp_path)
    assert profile.links == (base_link, ExpectedLink("nic_gbit_per_s", 9, 1, "y"))
    assert (len(profile.routes), len(profile.foreseen)) == (1, 1)
    # The conditions in [match] belong to one kind of machine, so they are not inherited.
    assert profile.match.gpu_count is None
