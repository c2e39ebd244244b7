"""Attempts to fake hardware evidence: twins without their ELF note, and mounted files that describe devices.

gdrkit must not take an attempt for hardware. Each attempt runs in a new user and mount namespace, where every user may
mount files over /proc, /sys and /dev. Twins are libraries that emulate the hardware below an API.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from gdrkit import launch
from gdrkit.errors import Api
from gdrkit.harness.needs import cuda, host, needs, software, verbs

if TYPE_CHECKING:
    from pathlib import Path

NEEDS_NAMESPACES = needs(
    *(software(Api.VERBS), software(Api.CUDA), verbs.nic(), cuda.device()),
    host.program("unshare", "--user", "--map-root-user", "--mount", "echo", "allowed"),
    host.program("mount", "--version"),
)
SONAME_OF_API = {Api.VERBS: "libibverbs.so.1", Api.CUDA: "libcuda.so.1"}
DRIVER_VERSION_LINE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Wed Nov 12 07:33:02 UTC 2026"
CASE_WITH_ROUTES = """
import pytest
from gdrkit import cuda, registration, verbs
@pytest.mark.qualify
def test_every_route(evidence):
    for index in range(cuda.device_count()):
        with cuda.Device(index) as device, device.allocate(65536) as memory:
            for nic_info in verbs.list_nics():
                with verbs.Nic.open(nic_info.name) as nic:
                    registration.register(memory, [nic]).close()
                evidence.route(device=index, nic=nic_info.name, method="dmabuf")
"""
PRINT_EVIDENCE_PROGRAM = """
import json
from gdrkit import serialization, evidence
print(json.dumps(serialization.to_json_data(evidence.kernel_evidence())))
"""


def run_in_namespaces(mount_script: str, command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script that mounts files, and then a command, as root of a new user and mount namespace."""
    shell_script = f"set -e\n{mount_script}\nexec {shlex.join(command)}\n"
    return subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", shell_script],
        # The environment has no twins, because the loader would load them instead of the copies.
        env={**launch.environment(launch.Launch()), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def copy_twins_without_notes(folder: Path) -> str:
    """Copy the twins, remove the ELF notes that identify them, and return the library path of the copies."""
    environment = launch.environment(launch.Launch(twin_apis=frozenset(SONAME_OF_API)), base={})
    twin_folders = environment["LD_LIBRARY_PATH"].split(os.pathsep)
    copied_folders: list[str] = []
    for twin_folder in twin_folders:
        copied_folder = folder / f"lib{len(copied_folders)}"
        shutil.copytree(twin_folder, copied_folder)
        for library_path in (path for path in copied_folder.rglob("*.so*") if path.is_file() and not path.is_symlink()):
            # The note of a twin has the owner GDRKIT.
            library_path.write_bytes(library_path.read_bytes().replace(b"GDRKIT\0", b"NVIDIA\0"))
        copied_folders.append(str(copied_folder))
    return os.pathsep.join(copied_folders)


def make_mount_commands(folder: Path) -> str:
    """Return shell commands that mount files of an NVIDIA driver and of two NICs over the files of the kernel.

    The links in the mounted files lead to folders in `folder`, which imitate the PCI functions of the NICs.
    """
    shell_lines = ["mount -t tmpfs none /proc/driver", "mkdir -p /proc/driver/nvidia"]
    shell_lines += [f"echo {shlex.quote(DRIVER_VERSION_LINE)} > /proc/driver/nvidia/version"]
    pci_folder = folder / "pci"
    (pci_folder / "driver" / "mlx5_core").mkdir(parents=True)
    shell_lines += ["mount -t tmpfs none /sys/class"]
    for index in range(2):
        pci_function_folder = pci_folder / f"0000:1{index}:00.0"
        pci_function_folder.mkdir()
        (pci_function_folder / "driver").symlink_to(pci_folder / "driver" / "mlx5_core")
        (pci_function_folder / "vendor").write_text("0x15b3\n")  # The vendor ID of Mellanox.
        nic_folder = f"/sys/class/infiniband/twin{index}"
        shell_lines += [f"mkdir -p {nic_folder}/ports/1", f"ln -s {pci_function_folder} {nic_folder}/device"]
        shell_lines += [f"echo b83f:d203:00a1:7c5{index} > {nic_folder}/node_guid"]
    return "\n".join(shell_lines)


@NEEDS_NAMESPACES
def test_twins_without_notes_prove_nothing(tmp_path: Path) -> None:
    """With such twins, gdrkit 0.1.0 exited with 0 and the verdict "Every required route is proven on hardware"."""
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "test_routes.py").write_text(CASE_WITH_ROUTES)
    report_folder = tmp_path / "report"
    command = [sys.executable, "-m", "gdrkit", "qualify", "--suites", str(tmp_path / "suites")]
    command += ["--profile", "any", "--output", str(report_folder)]
    process = run_in_namespaces(
        make_mount_commands(tmp_path), command, LD_LIBRARY_PATH=copy_twins_without_notes(tmp_path)
    )
    run_data = json.loads((report_folder / "run.json").read_text())
    # The copied libraries were loaded, and the case passed.
    (record,) = (json.loads(line) for line in (report_folder / "records.jsonl").read_text().splitlines())
    assert (record["verdict"], len(record["routes"]) > 0) == ("pass", True), process.stdout + process.stderr
    assert not [note for library in record["libraries"] for note in library["notes"] if note["owner"] == "GDRKIT"]
    assert record["substrate"] == {"cuda": "unknown", "verbs": "unknown"}
    assert (process.returncode, run_data["verdict"]) == (4, "Nothing was proven on hardware")
    assert run_data["substrate"]["cuda"] == run_data["substrate"]["verbs"] == "unknown"


def query_evidence_after_mounts(mount_script: str) -> dict[str, Any]:
    """Run a shell script that mounts files in new namespaces. Return the kernel evidence that gdrkit finds there."""
    process = run_in_namespaces(mount_script, [sys.executable, "-c", PRINT_EVIDENCE_PROGRAM])
    assert process.returncode == 0, process.stderr
    kernel_evidence: dict[str, Any] = json.loads(process.stdout)
    return kernel_evidence


@NEEDS_NAMESPACES
def test_device_file_of_another_type_is_not_a_gpu() -> None:
    for device_commands, expected_error in (
        ("touch /dev/nvidiactl", "/dev/nvidiactl is not a character device"),
        (
            "touch /dev/nvidiactl; mount --bind /mnt/old/null /dev/nvidiactl",
            "/dev/nvidiactl has major number 1, which /proc/devices does not list for nvidia",
        ),
    ):
        # The script replaces /dev by an empty folder, and keeps the device /dev/null as /mnt/old/null.
        mount_script = "mount -t tmpfs none /mnt; mkdir /mnt/old; touch /mnt/old/null\n"
        mount_script += "mount --bind /dev/null /mnt/old/null; mount -t tmpfs none /dev\n"
        kernel_evidence = query_evidence_after_mounts(mount_script + device_commands)
        assert (kernel_evidence["gpus"], kernel_evidence["nvidia_version"]) == ([], None)
        assert expected_error in kernel_evidence["nvidia_missing"][0]


@NEEDS_NAMESPACES
def test_device_list_outside_procfs_is_not_evidence(tmp_path: Path) -> None:
    (tmp_path / "devices").write_text("Character devices:\n  1 nvidia\n  1 infiniband_verbs\n\nBlock devices:\n")
    kernel_evidence = query_evidence_after_mounts(f"mount --bind {tmp_path / 'devices'} /proc/devices")
    for missing_reasons in (kernel_evidence["nvidia_missing"], kernel_evidence["rdma_missing"]):
        assert "/proc/devices is not on procfs: something is mounted there" in missing_reasons[0]
    assert (kernel_evidence["gpus"], kernel_evidence["rdma"]) == ([], [])
