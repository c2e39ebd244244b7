"""Read the facts about a host: PCI, NICs, kernel, limits, mounts, libraries, processes. The host is not changed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from gdrkit import host
from gdrkit.errors import SetupMissing

# The tree is this machine, or a folder with files of another machine.
tree = host.HostTree()
print(host.host_identity(tree).name, host.kernel_facts(tree).release, host.nvidia_driver_version(tree))
print("DMI:", host.dmi_strings(tree))
print("virtual machine:", host.virtual_machine(tree), "- container:", host.container_hints(tree))

devices = host.pci_devices(tree)
for device in devices:
    kinds = [test.__name__ for test in (host.is_gpu, host.is_nic, host.is_nvme, host.is_bridge) if test(device)]
    config_space = host.config_space(tree, device.address)
    print(
        device.address,
        kinds,
        host.pci_path(tree, device.address),
        config_space.max_read_request_bytes if config_space else None,
    )
if len(devices) > 1:
    print("distance:", host.pci_distance(tree, devices[0].address, devices[1].address).name)
header = host.parse_config_space(bytes(64))
assert not header.is_whole
print(len(host.nvidia_gpus(tree)), "NVIDIA GPUs,", len(host.habana_accelerators(tree)), "Gaudi,", end=" ")
print(len(host.nvme_controllers(tree)), "NVMe controllers,", [nic.name for nic in host.rdma_devices(tree)])
try:
    print("NVML:", host.nvml_facts().driver_version)
except SetupMissing as error:
    print("NVML:", error.reason.value)

limits = host.process_limits(tree)
print("locked memory:", limits.memlock_bytes, "- open files:", limits.open_files)
host.raise_open_files_limit()  # This call changes only this process.

# Find the mount of a path and its block device, and the file system of an open file.
mount_table = host.mounts(tree)
mount = host.mount_of(mount_table, "/")
assert mount is not None
print(mount.kind, host.block_device(tree, mount.device))
with tempfile.TemporaryFile() as file:
    print("file system of the temporary folder:", host.file_system_type(file.fileno()))

# The dynamic loader would find these libraries here.
print(host.find_library(tree, "libc.so.6"), host.find_libraries(tree, ["libcuda.so.1"]))
assert "libc.so.6" in host.cached_libraries(tree) or host.find_library(tree, "libc.so.6")

# A process is identified by more than its number, because the kernel reuses the numbers.
own_identity = host.this_process(tree)
assert host.process_identity(os.getpid(), tree) == own_identity
assert host.is_running(own_identity, tree)
print("waited for a processor:", host.starved_s(os.getpid(), tree), "s")

# Create a folder that only this user can use. Then rename a file, which fails if the new name exists.
with tempfile.TemporaryDirectory() as name:
    with host.PrivateFolder.below(Path(name) / "private") as private:
        private.write_text("token", "secret\n")
        assert private.read_text("token") == "secret\n"
    (Path(name) / "old").write_text("")
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
    host.rename_new("old", "new", folder=folder, new_folder=folder)
    os.close(folder)
    # Files of a copied tree instead of this machine.
    assert host.HostTree.of(host.DiskFiles(name)).exists("/new")
