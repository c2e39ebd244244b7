"""Tests of the readers of sysfs, procfs and the cache of the dynamic loader, and of the functions that use them.

Most cases write a small tree of files and read it. The last two cases read the files of this host.
"""

from __future__ import annotations

import errno
import os
import struct
from typing import TYPE_CHECKING

import pytest
from support.other_user import folder_for_all_users, run_program

from gdrkit import host, launch
from gdrkit.errors import Api
from gdrkit.harness.needs import host as needs_host
from gdrkit.harness.needs import needs

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LIMITS_TEMPLATE = """\
Limit                     Soft Limit           Hard Limit           Units
Max open files            1024                 524288               files
Max locked memory         {memlock:20} unlimited            bytes
Max address space         unlimited            unlimited            bytes
"""


def write_tree(root: Path, files: Mapping[str, str], links: Mapping[str, str] | None = None) -> host.HostTree:
    """Write files (contents by path) and links (targets by path) below `root`, and return a tree that reads them."""
    for relative_path, content in files.items():
        path = root / relative_path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    for relative_path, target in (links or {}).items():
        path = root / relative_path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)
    return host.HostTree(root)


def make_pci_files(address: str, vendor_id: str, device_id: str, class_code: str) -> dict[str, str]:
    """Return the files of sysfs that describe a PCI function."""
    folder = f"sys/bus/pci/devices/{address}"
    return {
        f"{folder}/vendor": f"{vendor_id}\n",
        f"{folder}/device": f"{device_id}\n",
        f"{folder}/class": f"{class_code}\n",
    }


def test_gpus_are_found_without_a_driver(tmp_path: Path) -> None:
    tree = write_tree(
        tmp_path,
        make_pci_files("0000:00:02.0", "0x8086", "0x1234", "0x030000")
        | make_pci_files("0000:1b:00.0", "0x10de", "0x2335", "0x030200")
        | make_pci_files("0000:1b:00.1", "0x10de", "0x22ba", "0x040300")
        | {"sys/bus/pci/devices/0000:1b:00.0/numa_node": "-1\n"},
    )
    (gpu,) = host.nvidia_gpus(tree)
    assert (gpu.address, gpu.device_id, gpu.driver, gpu.numa_node) == ("0000:1b:00.0", 0x2335, None, None)
    # libcufile uses the GPUs, so their presence counts for cuFile too.
    assert launch.present_hardware(tree) == dict.fromkeys((Api.CUDA, Api.CUFILE), "NVIDIA GPUs 0000:1b:00.0")


def test_device_without_a_readable_class_is_left_out(tmp_path: Path) -> None:
    files = make_pci_files("0000:1b:00.0", "0x10de", "0x2335", "not a number")
    assert host.pci_devices(write_tree(tmp_path, files)) == ()


def test_rdma_device_has_driver_ports_and_pci_address(tmp_path: Path) -> None:
    folder = "sys/class/infiniband/mlx5_0"
    tree = write_tree(
        tmp_path,
        {
            f"{folder}/node_guid": "b83f:d203:00a1:7c52\n",
            f"{folder}/fw_ver": "28.41.1000\n",
            f"{folder}/ports/1/state": "4: ACTIVE\n",
            f"{folder}/ports/1/phys_state": "5: LinkUp\n",
            f"{folder}/ports/1/rate": "400 Gb/sec (4X NDR)\n",
            f"{folder}/ports/1/link_layer": "InfiniBand\n",
            f"{folder}/ports/1/counters/port_xmit_data": "25\n",
            "sys/devices/pci/0000:1c:00.0/numa_node": "1\n",
        },
        {
            f"{folder}/device": "../../../devices/pci/0000:1c:00.0",
            "sys/devices/pci/0000:1c:00.0/driver": "../../../bus/pci/drivers/mlx5_core",
        },
    )
    (device,) = host.rdma_devices(tree)
    assert (device.driver, device.pci_address, device.numa_node) == ("mlx5_core", "0000:1c:00.0", 1)
    assert device.has_device
    assert device.ports == (host.PortFacts(1, "ACTIVE", "LinkUp", "400 Gb/sec (4X NDR)", "InfiniBand"),)
    (port,) = host.port_counters(tree)
    # port_xmit_data counts words of four bytes.
    assert (port.sent_bytes, port.received_bytes) == (100, None)
    assert tree.unreadable == ()


@pytest.mark.parametrize(
    ("node_description", "driver"), [("rxe", "rxe"), ("Software iWARP stack", "siw"), ("host1", None)]
)
def test_rdma_device_without_a_bus_is_kernel_software(
    tmp_path: Path, node_description: str, driver: str | None
) -> None:
    tree = write_tree(tmp_path, {"sys/class/infiniband/dev0/node_desc": f"{node_description}\n"})
    (device,) = host.rdma_devices(tree)
    assert not device.has_device
    assert device.driver == driver


def test_rxe_on_a_real_interface_is_kernel_software(tmp_path: Path) -> None:
    # The kernel reports the PCI function of the network interface as the device of rxe.
    tree = write_tree(
        tmp_path,
        {
            "sys/class/infiniband/rxe0/node_desc": "rxe\n",
            "sys/class/infiniband/rxe0/parent": "eth0\n",
            "sys/devices/pci0000:00/0000:00:05.0/vendor": "0x15b3\n",
            "sys/bus/pci/drivers/mlx5_core/uevent": "",
        },
    )
    pci_function = tmp_path / "sys/devices/pci0000:00/0000:00:05.0"
    (pci_function / "driver").symlink_to(tmp_path / "sys/bus/pci/drivers/mlx5_core")
    (tmp_path / "sys/class/infiniband/rxe0/device").symlink_to(pci_function)
    (device,) = host.rdma_devices(tree)
    assert (device.has_device, device.driver) == (True, "rxe")


def test_kernel_facts_have_release_iommu_and_modules(tmp_path: Path) -> None:
    tree = write_tree(
        tmp_path,
        {
            "proc/sys/kernel/osrelease": "6.1.0-31-amd64\n",
            "proc/cmdline": "BOOT_IMAGE=/vmlinuz root=/dev/sda1 intel_iommu=on iommu=pt quiet\n",
            "etc/os-release": 'NAME="Debian"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n',
            "sys/module/nvidia_peermem/refcnt": "0\n",
            "sys/module/ext4/refcnt": "0\n",
            "sys/kernel/iommu_groups/0/type": "DMA\n",
            "proc/driver/nvidia/version": (
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
                "GCC version:  gcc version 12.2.0\n"
            ),
        },
    )
    facts = host.kernel_facts(tree)
    assert (facts.release, facts.distribution) == ("6.1.0-31-amd64", "Debian GNU/Linux 12 (bookworm)")
    assert facts.iommu_arguments == ("intel_iommu=on", "iommu=pt")
    assert (facts.iommu_group_count, facts.modules) == (1, ("nvidia_peermem",))
    assert host.nvidia_driver_version(tree) == "580.159.04"


@pytest.mark.parametrize(
    ("memlock", "is_known", "limit_bytes"), [("65536", True, 65536), ("unlimited", True, None), ("?", False, None)]
)
def test_limit_of_locked_memory_is_read(
    tmp_path: Path, memlock: str, *, is_known: bool, limit_bytes: int | None
) -> None:
    status_text = "Name:\tpython\nCapEff:\t0000000000004000\n"
    tree = write_tree(
        tmp_path, {"proc/self/limits": LIMITS_TEMPLATE.format(memlock=memlock), "proc/self/status": status_text}
    )
    limits = host.process_limits(tree)
    assert (limits.memlock_known, limits.memlock_bytes, limits.open_files) == (is_known, limit_bytes, 1024)
    assert limits.capabilities == ("CAP_IPC_LOCK",)


def test_container_hints_name_their_source(tmp_path: Path) -> None:
    assert host.container_hints(host.HostTree(tmp_path)) == ()
    tree = write_tree(tmp_path, {".dockerenv": "", "proc/1/cgroup": "0::/kubepods/burstable/pod1\n"})
    assert host.container_hints(tree) == ("docker (/.dockerenv)", "kubepods (/proc/1/cgroup)")


def test_unreadable_file_differs_from_an_absent_one(tmp_path: Path) -> None:
    (tmp_path / "proc" / "cmdline").mkdir(parents=True)
    tree = host.HostTree(tmp_path)
    assert tree.text("/proc/cmdline") is None
    assert tree.text("/proc/nothing") is None
    assert tree.unreadable == (host.Unreadable("/proc/cmdline", errno.EISDIR, "EISDIR"),)


def test_empty_tree_has_no_devices_and_no_errors(tmp_path: Path) -> None:
    tree = host.HostTree(tmp_path)
    assert (host.nvidia_gpus(tree), host.rdma_devices(tree), launch.present_hardware(tree)) == ((), (), {})
    assert host.nvidia_driver_version(tree) is None
    assert tree.unreadable == ()


def make_loader_cache(entries: list[tuple[str, str]]) -> bytes:
    """Return an /etc/ld.so.cache with these names and paths (glibc, sysdeps/generic/dl-cache.h)."""
    strings_offset = 48 + 24 * len(entries)
    # An entry has flags (0x303: a library for x86-64), the offsets of name and path, osversion and hwcap.
    strings, table = b"", b""
    for name, path in entries:
        name_offset = strings_offset + len(strings)
        strings += name.encode() + b"\0"
        table += struct.pack("<iIIIQ", 0x303, name_offset, strings_offset + len(strings), 0, 0)
        strings += path.encode() + b"\0"
    # The header has the magic, the number of entries, the size of the strings, flags (2: little endian) and unused
    # fields.
    header = struct.pack("<20sIIB3xI3I", b"glibc-ld.so.cache1.1", len(entries), len(strings), 2, 0, 0, 0, 0)
    return header + table + strings


def test_cache_of_the_loader_is_read_in_order(tmp_path: Path) -> None:
    paths = ["/opt/mlnx/libibverbs.so.1", "/usr/lib/libibverbs.so.1"]
    tree = write_tree(tmp_path, {path.lstrip("/"): "" for path in paths} | {"home/me/libibverbs.so.1": ""})
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "ld.so.cache").write_bytes(make_loader_cache([("libibverbs.so.1", path) for path in paths]))
    assert host.cached_libraries(tree) == {"libibverbs.so.1": tuple(paths)}
    assert host.find_library(tree, "libibverbs.so.1") == paths[0]
    assert host.find_library(tree, "libibverbs.so.1", search_path=["", "/home/me"]) == "/home/me/libibverbs.so.1"
    assert host.find_library(tree, "libcuda.so.1") is None


def test_truncated_loader_cache_gives_only_complete_entries(tmp_path: Path) -> None:
    complete_cache = make_loader_cache([("liba.so", "/a"), ("libb.so", "/b")])
    (tmp_path / "etc").mkdir()
    for size_bytes in range(len(complete_cache)):
        (tmp_path / "etc" / "ld.so.cache").write_bytes(complete_cache[:size_bytes])
        libraries = host.cached_libraries(host.HostTree(tmp_path))
        assert libraries.items() <= {"liba.so": ("/a",), "libb.so": ("/b",)}.items()


def test_overridden_hardware_is_named(tmp_path: Path) -> None:
    tree = write_tree(tmp_path, {"dev/nvidiactl": "", "sys/class/infiniband/mlx5_0/node_guid": "1\n"})
    description = launch.describe_hardware_replaced_by_twins(launch.Launch(twin_apis=launch.APIS_WITH_TWINS), tree)
    assert description is not None
    assert "verbs" in description
    assert "mlx5_0" in description
    assert "an NVIDIA driver" in description
    cuda_only_description = launch.describe_hardware_replaced_by_twins(
        launch.Launch(twin_apis=frozenset({Api.CUDA})), tree
    )
    assert cuda_only_description is not None
    assert "mlx5_0" not in cuda_only_description
    assert launch.describe_hardware_replaced_by_twins(launch.Launch(), tree) is None


def test_habana_accelerators_are_hardware_of_hl_thunk(tmp_path: Path) -> None:
    folder = "sys/bus/pci/devices/0000:33:00.0"
    tree = write_tree(
        tmp_path, {f"{folder}/vendor": "0x1da3\n", f"{folder}/device": "0x1020\n", f"{folder}/class": "0x120000\n"}
    )
    (accelerator,) = host.habana_accelerators(tree)
    assert (accelerator.address, accelerator.device_id) == ("0000:33:00.0", 0x1020)
    assert launch.present_hardware(tree) == {Api.HLTHUNK: "accelerators 0000:33:00.0"}


def test_files_of_this_host_are_readable() -> None:
    tree = host.HostTree()
    assert host.kernel_facts(tree).release == os.uname().release
    assert host.process_limits(tree).memlock_known


@needs(needs_host.capability("CAP_SETUID"))
def test_library_is_found_after_a_change_of_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search must not need /proc/self/environ, which a process cannot read after a change of its user."""
    program = """
from gdrkit import loader
from support.other_user import become_unprivileged
become_unprivileged()
print(loader.find_library("libgdrkit-example.so.1"))
"""
    with folder_for_all_users() as folder:
        (folder / "libgdrkit-example.so.1").touch()
        monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
        completed = run_program(program)
    assert (completed.stdout.strip(), completed.stderr) == (f"{folder}/libgdrkit-example.so.1", "")
