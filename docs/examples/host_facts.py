"""Read the facts about a host: PCI, NICs, kernel, limits, mounts, libraries, processes. The host is not changed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from gdrkit import host
from gdrkit.errors import SetupMissing

# A HostTree reads the files of this machine, or a copy of the files of another machine.
tree = host.HostTree()
print(host.host_identity(tree).name, host.kernel_facts(tree).release, host.nvidia_driver_version(tree))
print("DMI:", host.dmi_strings(tree))
print("virtual machine:", host.virtual_machine_hint(tree), "- container:", host.container_hints(tree))

devices = host.pci_devices(tree)
for device in devices:
    predicates = (host.is_gpu, host.is_nic, host.is_nvme, host.is_bridge)
    true_predicates = [predicate.__name__ for predicate in predicates if predicate(device)]
    config_space = host.config_space(tree, device.address)
    print(
        device.address,
        true_predicates,
        host.pci_path(tree, device.address),
        config_space.max_read_request_bytes if config_space else None,
    )
if len(devices) > 1:
    print("distance:", host.pci_distance(tree, devices[0].address, devices[1].address).name)
# Without root, the kernel shows only the header (64 bytes) of a configuration space.
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

# Find the mount that contains a path, the block device of this mount, and the file system of an open file.
mount_table = host.mounts(tree)
mount = host.mount_of(mount_table, "/")
assert mount is not None
print(mount.kind, host.block_device(tree, mount.device))
with tempfile.TemporaryFile() as file:
    print("file system of the temporary folder:", host.file_system_type(file.fileno()))

# These calls return the paths at which the dynamic loader would find the libraries.
print(host.find_library(tree, "libc.so.6"), host.find_libraries(tree, ["libcuda.so.1"]))
assert "libc.so.6" in host.cached_libraries(tree) or host.find_library(tree, "libc.so.6")

# A process identity has more than the pid, because the kernel reuses pids.
own_identity = host.this_process(tree)
assert host.process_identity(os.getpid(), tree) == own_identity
assert host.is_running(own_identity, tree)
print("waited for a processor:", host.processor_wait_s(os.getpid(), tree), "s")

# Create a folder that only this user can use. rename_without_replacing() fails if the new name exists.
with tempfile.TemporaryDirectory() as parent_folder:
    with host.PrivateFolder.below(Path(parent_folder) / "private") as private_folder:
        private_folder.write_text("token", "secret\n")
        assert private_folder.read_text("token") == "secret\n"
    (Path(parent_folder) / "old").write_text("")
    folder_fd = os.open(parent_folder, os.O_RDONLY | os.O_DIRECTORY)
    host.rename_without_replacing("old", "new", folder_fd=folder_fd, new_folder_fd=folder_fd)
    os.close(folder_fd)
    # This tree has the folder as its root, so "/new" is the renamed file.
    assert host.HostTree.of(host.DiskFiles(parent_folder)).exists("/new")
