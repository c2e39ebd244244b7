"""Importers of NCCL topologies, of lspci output and of copied sysfs trees, with small inputs and with real captures.

The environment variable GDRKIT_CAPTURES has the path of the folder with the real captures.
"""

from __future__ import annotations

import itertools
import os
import shutil
from typing import TYPE_CHECKING

import pytest
from support.fuzz import run_fuzzer

from gdrkit.errors import Reason, UsageError
from gdrkit.harness.needs import host, needs
from gdrkit.host import HostTree, config_space, pci_devices, pci_path
from gdrkit.inventory import CapturedFiles, captured_machine, diagnose, parse_capture, read_capture, rule_of, topology
from gdrkit.verdict import Verdict

if TYPE_CHECKING:
    from pathlib import Path

NEEDS_CAPTURES = needs(host.captures)
FUZZ_DURATION_S = float(os.environ.get("GDRKIT_FUZZ_S", "1"))

# Below the first CPU, switch 1a has a GPU and a NIC, and switch 1b has a GPU. Below the second CPU, a GPU is below two
# switches.
TOPOLOGY_XML = b"""
<system version="1">
  <cpu numaid="0">
    <pci busid="0000:1a:00.0" class="0x060400" vendor="0x1000" link_speed="32.0 GT/s PCIe" link_width="16">
      <pci busid="0000:1c:00.0" class="0x060400">
        <pci busid="0000:20:00.0" class="0x030200" vendor="0x10de" device="0x2330"><gpu dev="0" sm="90"/></pci>
      </pci>
      <pci busid="0000:1d:00.0" class="0x060400">
        <pci busid="0000:21:00.0" class="0x020700" vendor="0x15b3"><nic><net name="mlx5_0" port="1"/></nic></pci>
      </pci>
    </pci>
    <pci busid="0000:1b:00.0" class="0x060400">
      <pci busid="0000:22:00.0" class="0x030200" vendor="0x10de"/>
    </pci>
  </cpu>
  <cpu numaid="1">
    <pci busid="0000:2a:00.0" class="0x060400"><pci busid="0000:2b:00.0" class="0x060400">
      <pci busid="0000:30:00.0" class="0x030200" vendor="0x10de"/>
    </pci></pci>
  </cpu>
</system>
"""
LSPCI_OUTPUT = """\
00:01.0 PCI bridge: Intel Corporation Device 352a (rev 30) (prog-if 00 [Normal decode])
\tNUMA node: 0
\tIOMMU group: 4
\tBus: primary=00, secondary=01, subordinate=03, sec-latency=0
\tCapabilities: [40] Express (v2) Root Port (Slot+), MSI 00
\t\t\tMaxPayload 512 bytes, MaxReadReq 512 bytes
\t\tLnkCap:\tPort #1, Speed 32GT/s, Width x16, ASPM not supported
\t\tLnkSta:\tSpeed 32GT/s (ok), Width x8 (downgraded)
\tCapabilities: [110 v1] Access Control Services
\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-
\tKernel driver in use: pcieport

01:00.0 3D controller [0302]: NVIDIA Corporation GH100 [H100 SXM5 80GB] [10de:2330] (rev a1)
\tNUMA node: 0
\tCapabilities: [110 v1] Address Translation Service (ATS)
\t\tATSCtl:\tEnable-, Smallest Translation Unit: 00

02:00.0 Infiniband controller: Mellanox Technologies MT2910 Family [ConnectX-7]
\tCapabilities: <access denied>
"""


def test_nccl_topology_has_its_distances() -> None:
    pci_topology = topology(captured_machine(parse_capture(TOPOLOGY_XML)))
    assert [(device.name, device.numa_node) for device in pci_topology.places] == [
        ("GPU0", 0),
        ("GPU1", 0),
        ("GPU2", 1),
        ("mlx5_0", 0),
    ]
    expected_distances = {
        ("GPU0", "mlx5_0"): "PIX",
        ("GPU1", "mlx5_0"): "PHB",
        ("GPU2", "mlx5_0"): "SYS",
        ("GPU0", "GPU1"): "PHB",
    }
    assert {pair: pci_topology.distance(*pair).name for pair in expected_distances} == expected_distances


def test_unstated_hardware_is_not_reported_as_missing() -> None:
    diagnosis = diagnose(captured_machine(parse_capture(TOPOLOGY_XML)))
    assert diagnosis.missing == ()
    checked_codes = {finding.code for finding in diagnosis.findings if finding.verdict is not Verdict.NOT_RUN}
    assert checked_codes == {"far-apart"}


def test_lspci_output_has_functions_bridges_and_registers() -> None:
    tree = HostTree.of(CapturedFiles(parse_capture(LSPCI_OUTPUT.encode()).answers))
    bridge, gpu, nic = pci_devices(tree)
    assert (bridge.class_code, bridge.driver, bridge.numa_node, bridge.iommu_group) == (0x060400, "pcieport", 0, "4")
    assert (bridge.link_width, bridge.link_width_max, bridge.link_speed) == ("8", "16", "32 GT/s PCIe")
    assert (gpu.vendor_id, gpu.device_id, gpu.class_code) == (0x10DE, 0x2330, 0x030200)
    assert (nic.vendor_id, nic.class_code) == (0x15B3, 0x020700)
    assert pci_path(tree, "0000:01:00.0") == ("pci0000:00", "0000:00:01.0", "0000:01:00.0")
    bridge_space = config_space(tree, "0000:00:01.0")
    assert bridge_space is not None
    assert bridge_space.acs is not None
    assert (str(bridge_space.acs), bridge_space.acs.redirects) == ("SrcValid+ ReqRedir+ CmpltRedir+ UpstreamFwd+", True)
    assert bridge_space.max_read_request_bytes == 512
    space_with_ats = config_space(tree, "0000:01:00.0")
    assert space_with_ats is not None
    assert (space_with_ats.acs, space_with_ats.ats_enabled) == (None, False)
    space_without_access = config_space(tree, "0000:02:00.0")
    assert space_without_access is not None
    assert not space_without_access.is_whole


def test_copied_tree_has_ports_and_follows_no_outer_link(tmp_path: Path) -> None:
    port_folder = tmp_path / "copy" / "mlx5_0" / "ports" / "1"
    port_folder.mkdir(parents=True)
    (port_folder / "state").write_text("4: ACTIVE")
    (port_folder / "rate").write_text("400 Gb/sec (4X NDR)")
    (tmp_path / "secret").write_text("secret")
    (port_folder / "phys_state").symlink_to(tmp_path / "secret")
    (port_folder / "link_layer").symlink_to("../../../../secret")
    machine = captured_machine(read_capture(tmp_path / "copy"))
    (device,) = machine.facts.rdma_devices
    (port_facts,) = device.ports
    assert (port_facts.state, port_facts.rate, port_facts.physical_state, port_facts.link_layer) == (
        "ACTIVE",
        "400 Gb/sec (4X NDR)",
        None,
        None,
    )


def make_bridge_chain(bridge_count: int) -> bytes:
    bridge_elements = b"".join(b'<pci busid="0000:%02x:00.0">' % bus for bus in range(bridge_count))
    return b'<system><cpu numaid="0">' + bridge_elements + b"</pci>" * bridge_count + b"</cpu></system>"


ENTITY_BOMB = b"""<?xml version="1.0"?><!DOCTYPE system [<!ENTITY a "aaaaaaaaaa">
<!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">]><system><cpu numaid="0">&b;</cpu></system>"""
BAD_TOPOLOGIES = {
    "cut off": TOPOLOGY_XML[:200],
    "empty": b"<system></system>",
    "another root": b"<topology/>",
    "an entity bomb": ENTITY_BOMB,
    "an external entity": b'<!DOCTYPE system [<!ENTITY e SYSTEM "file:///etc/passwd">]><system>&e;</system>',
    "no address": b'<system><cpu numaid="0"><pci busid="../../etc"/></cpu></system>',
    "no node": b'<system><cpu numaid="x"><pci busid="0000:1a:00.0"/></cpu></system>',
    "twice": b'<system><cpu numaid="0"><pci busid="0000:1a:00.0"/><pci busid="0000:1a:00.0"/></cpu></system>',
    "no class": b'<system><cpu numaid="0"><pci busid="0000:1a:00.0" class="gpu"/></cpu></system>',
    "a name with a path": b'<system><cpu><pci busid="0000:1a:00.0"><nic><net name="../a"/></nic></pci></cpu></system>',
    "too deep": make_bridge_chain(100),
    "not UTF-8": b"<\xff\xfe\x00",
}
BUSES_THAT_LOOP = (
    "01:00.0 PCI bridge: a\n\tBus: primary=02, secondary=02,\n02:00.0 PCI bridge: b\n\tBus: primary=01, secondary=01,\n"
)
BAD_LSPCI_OUTPUTS = {
    "twice": "01:00.0 Bridge: a\n01:00.0 Bridge: b\n",
    "buses that loop": BUSES_THAT_LOOP,
    "its own bus": "01:00.0 PCI bridge: a\n\tBus: primary=01, secondary=01,\n",
}


@pytest.mark.parametrize("example_name", BAD_TOPOLOGIES)
def test_bad_topology_is_one_clear_error(example_name: str) -> None:
    with pytest.raises(UsageError, match="NCCL topology: ") as error_info:
        parse_capture(BAD_TOPOLOGIES[example_name])
    assert error_info.value.reason is Reason.MALFORMED


@pytest.mark.parametrize("example_name", BAD_LSPCI_OUTPUTS)
def test_bad_lspci_output_is_one_clear_error(example_name: str) -> None:
    with pytest.raises(UsageError, match="lspci: ") as error_info:
        parse_capture(BAD_LSPCI_OUTPUTS[example_name].encode())
    assert error_info.value.reason is Reason.MALFORMED


def test_bad_copied_tree_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="contains neither sys nor proc"):
        read_capture(tmp_path)
    (tmp_path / "mlx5_0" / "ports").mkdir(parents=True)
    os.mkfifo(tmp_path / "mlx5_0" / "fw_ver")
    with pytest.raises(UsageError, match="neither a file nor a folder") as error_info:
        read_capture(tmp_path)
    assert error_info.value.reason is Reason.MALFORMED


@NEEDS_CAPTURES
def test_h100_topology_has_the_expected_distances(captures_folder: Path) -> None:
    pci_topology = topology(captured_machine(read_capture(captures_folder / "oci-hpc" / "H100-topology.xml")))
    # In this file each GPU shares a switch with one dual-port NIC, and each CPU has four such pairs.
    nic_index_pairs = ["0 1", "3 4", "5 6", "7 8", "9 10", "12 13", "14 15", "16 17"]
    nic_names_by_gpu = [[f"mlx5_{index}" for index in pair.split()] for pair in nic_index_pairs]
    gpu_names = [device.name for device in pci_topology.places if device.kind == "gpu"]
    assert gpu_names == [f"GPU{index}" for index in range(8)]
    assert {device.name for device in pci_topology.places if device.kind == "nic"} == set(
        itertools.chain(*nic_names_by_gpu)
    )
    for gpu_index, nic_index in itertools.product(range(8), range(8)):
        expected_distance = "PIX" if gpu_index == nic_index else "PHB" if gpu_index // 4 == nic_index // 4 else "SYS"
        assert {pci_topology.distance(f"GPU{gpu_index}", name).name for name in nic_names_by_gpu[nic_index]} == {
            expected_distance
        }


@NEEDS_CAPTURES
def test_virtual_machine_topology_pairs_gpus_and_nics(captures_folder: Path) -> None:
    pci_topology = topology(captured_machine(read_capture(captures_folder / "azhpc-images" / "ndv5-topo.xml")))
    gpus, nics = ([device for device in pci_topology.places if device.kind == kind] for kind in ("gpu", "nic"))
    assert (len(gpus), len(nics)) == (8, 8)
    for gpu in gpus:
        assert [pci_topology.distance(gpu.name, nic.name).name for nic in nics].count("PIX") == 1


@NEEDS_CAPTURES
def test_hgx_host_has_no_acs_redirect_between_gpu_and_nic(
    captures_folder: Path,
) -> None:
    machine = captured_machine(read_capture(captures_folder / "gpud" / "lspci-vvv-hgx-h100.txt.gz"))
    tree = HostTree.of(machine.files)
    spaces_by_address = {function.address: config_space(tree, function.address) for function in machine.pci_functions}
    acs_by_address = {address: space.acs for address, space in spaces_by_address.items() if space and space.acs}
    assert (len(machine.pci_functions), len(acs_by_address)) == (517, 55)
    redirecting_addresses = {address for address, acs in acs_by_address.items() if acs.redirects}
    assert redirecting_addresses == {f"0000:82:0{index}.0" for index in range(4)}
    addresses_below = {
        function.address
        for function in machine.pci_functions
        if redirecting_addresses & set(pci_path(tree, function.address)[:-1])
    }
    # These functions are bridges (class 0x0680), neither GPUs nor NICs.
    assert addresses_below == {f"0000:8{index}:00.0" for index in (3, 4, 5, 6)}
    assert {function.class_code >> 8 for function in machine.pci_functions if function.address in addresses_below} == {
        0x0680
    }
    finding = rule_of("acs-redirect").apply(machine)
    assert finding.verdict is Verdict.PASS, finding.text


@NEEDS_CAPTURES
def test_infiniband_tree_has_ports_and_rates(captures_folder: Path) -> None:
    machine = captured_machine(read_capture(captures_folder / "gpud" / "sys-class-infiniband-h100.0"))
    ndr_port = ("400 Gb/sec (4X NDR)", "InfiniBand", "28.41.1000")
    expected_ports = {f"mlx5_{index}": ndr_port for index in (0, 1, 4, 5, 6, 7, 8, 9)}
    expected_ports["mlx5_bond_0"] = ("200 Gb/sec (2X NDR)", "Ethernet", "32.38.3056")
    ports = {}
    for device in machine.facts.rdma_devices:
        (port,) = device.ports
        assert (port.number, port.state, port.physical_state) == (1, "ACTIVE", "LinkUp")
        ports[device.name] = (port.rate, port.link_layer, device.firmware)
    assert ports == expected_ports
    finding = rule_of("port-down").apply(machine)
    assert finding.verdict is Verdict.PASS
    assert "mlx5_1 was down 255 times" in finding.text


@pytest.mark.timeout(FUZZ_DURATION_S + 120)
@pytest.mark.parametrize("importer", ["nccl", "lspci", "folder"])
def test_fuzzer_finds_no_defect(importer: str) -> None:
    run_fuzzer("inventory.fuzz_importers", importer, seconds=FUZZ_DURATION_S)


@NEEDS_CAPTURES
@pytest.mark.parametrize(
    "capture_name",
    [
        "gpud/sys-class-infiniband-h100.0",
        "gpud/lspci-vvv-hgx-h100.txt.gz",
        "oci-hpc/H100-topology.xml",
        "azhpc-images/ndv5-topo.xml",
    ],
)
def test_real_machine_has_no_cause_of_age_or_processes(captures_folder: Path, capture_name: str) -> None:
    machine = captured_machine(read_capture(captures_folder / capture_name))
    codes = ("peermem-refused", "gpu-too-old", "nic-too-old", "kaslr-p2pdma", "cufile-descriptor-0")
    verdicts = {rule_of(code).apply(machine).verdict for code in (*codes, "cuda-ipc-refused", "descriptors-low")}
    assert verdicts <= {Verdict.PASS, Verdict.NOT_RUN}


@NEEDS_CAPTURES
@pytest.mark.parametrize(
    ("path_pattern", "content", "verdict"),
    [
        ("mlx5_4/fw_ver", "28.41.1000", Verdict.PASS),
        ("*/hca_type", "MT4103", Verdict.FAIL),
        ("mlx5_4/hca_type", "MT4103", Verdict.UNPROVEN),
        ("mlx5_4/fw_ver", "28.34.1002", Verdict.UNPROVEN),
    ],
)
def test_old_nic_in_a_real_tree_is_found(
    captures_folder: Path, tmp_path: Path, path_pattern: str, content: str, verdict: Verdict
) -> None:
    devices_folder = tmp_path / "sys" / "class" / "infiniband"
    shutil.copytree(captures_folder / "gpud" / "sys-class-infiniband-h100.0", devices_folder)
    for path in devices_folder.glob(path_pattern):
        path.write_text(content)
    # The captured folder has no PCI functions, and the rule needs a GPU.
    gpu_folder = tmp_path / "sys" / "bus" / "pci" / "devices" / "0000:19:00.0"
    gpu_folder.mkdir(parents=True)
    for name, text in {"vendor": "0x10de\n", "device": "0x2330\n", "class": "0x030200\n"}.items():
        (gpu_folder / name).write_text(text)
    finding = rule_of("nic-too-old").apply(captured_machine(read_capture(tmp_path)))
    assert (finding.verdict, "mlx5_4" in finding.text) == (verdict, verdict is not Verdict.PASS)
