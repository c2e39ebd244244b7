"""Download of the distribution's kernel for the virtual machine. The kernel is unpacked, but never installed."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

from hardware.lab.errors import LabError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["MODULE_FOLDERS", "find_kernel_image"]

# These packages of Debian and Ubuntu depend on the package of the newest kernel, whose name contains the version.
_META_PACKAGES = ("linux-image-amd64", "linux-image-generic")
_VERSIONED_PACKAGE = re.compile(r"^linux-(?:image|modules-extra)-(\d\S*)$")

# The folders of modules, relative to kernel/, that the guest needs for its root file system over 9p, the network and
# RDMA, and for vgem, an exporter of dma-bufs. Only these folders are unpacked, because all modules of a kernel
# take 400 MB.
MODULE_FOLDERS = (
    *("arch", "crypto", "drivers/infiniband", "drivers/net/veth", "drivers/virtio", "fs", "lib", "net"),
    *("drivers/block/virtio_blk", "drivers/char", "drivers/scsi", "drivers/gpu/drm/drm", "drivers/gpu/drm/vgem"),
)


def find_kernel_image(cache_folder: Path, *, backports: bool = False) -> Path:
    """Return the path of a kernel image. If the image or its modules are missing in `cache_folder`, apt downloads them.

    The kernel belongs to this release of the distribution or, with `backports`, is the newest of its backports. The
    package lists of the backports are kept in `cache_folder`; the configuration of apt does not change.

    Raises
    ------
    LabError
        apt is missing, it has no kernel package, or the kernel has no module rdma_rxe.
    """
    stamp_file, module_list = cache_folder / "ready", "\n".join(MODULE_FOLDERS)
    # An earlier version of this program may have filled the folder with other modules. So the stamp file contains the
    # list of the module folders, and if the list differs, the kernel is downloaded again.
    if not stamp_file.exists() or stamp_file.read_text() != module_list:
        shutil.rmtree(cache_folder, ignore_errors=True)
        cache_folder.mkdir(parents=True)
        package_files = _download(cache_folder, _download_backports_lists(cache_folder) if backports else [])
        for package_file in package_files:
            _unpack(package_file, cache_folder)
            package_file.unlink()
        kernel_version = _find_image(cache_folder).name.partition("-")[2]
        _run_command(["depmod", "-b", str(cache_folder), kernel_version])
        if not any(cache_folder.glob(f"lib/modules/{kernel_version}/kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko*")):
            message = (
                f"kernel {kernel_version} of this distribution has no module rdma_rxe: "
                "use a machine with an RDMA device"
            )
            raise LabError(message)
        stamp_file.write_text(module_list)
    return _find_image(cache_folder)


def _find_image(cache_folder: Path) -> Path:
    images = sorted(cache_folder.glob("boot/vmlinuz-*"))
    if not images:
        message = f"the kernel package has no boot/vmlinuz-*: remove {cache_folder} and try again"
        raise LabError(message)
    return images[-1]


def _download_backports_lists(cache_folder: Path) -> list[str]:
    """Download the package lists of this release's backports. Return the options that make apt use only them."""
    release_codename = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME)", "Created-By: Packages"]
    url_and_codename_lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
    archive_urls = [
        line.partition(" ")[0] for line in url_and_codename_lines if line.partition(" ")[2] == release_codename
    ]
    if not archive_urls:
        message = f"apt has no archive of the release {release_codename!r}, so there are no backports: omit --backports"
        raise LabError(message)
    source_list, lists_folder = cache_folder / "backports.list", cache_folder / "lists"
    (lists_folder / "partial").mkdir(parents=True)
    source_list.write_text(f"deb {archive_urls[0]} {release_codename}-backports main\n")
    apt_options = [
        f"-oDir::Etc::sourcelist={source_list}",
        "-oDir::Etc::sourceparts=-",
        f"-oDir::State::lists={lists_folder}",
    ]
    _run_command(["apt-get", *apt_options, "update", "-q"])
    return apt_options


def _download(cache_folder: Path, apt_options: Sequence[str]) -> list[Path]:
    if not shutil.which("apt-get") or not shutil.which("apt-cache"):
        message = (
            "apt is missing, so no kernel package can be downloaded: fill the cache folder on a machine with apt, and "
            f"copy it to {cache_folder}"
        )
        raise LabError(message)
    package_names = _list_package_names(apt_options) or (_update_package_lists() and _list_package_names(apt_options))
    if not package_names:
        message = f"apt has no kernel package ({' or '.join(_META_PACKAGES)}): run apt-get update, then try again"
        raise LabError(message)
    print("downloading " + " ".join(package_names), flush=True)  # noqa: T201 - the output of a command.
    _run_command(["apt-get", *apt_options, "download", "-q", *package_names], folder=cache_folder)
    package_files = sorted(cache_folder.glob("*.deb"))
    if not package_files:
        message = "apt-get download wrote no kernel package: run apt-get update, then try again"
        raise LabError(message)
    return package_files


def _list_package_names(apt_options: Sequence[str]) -> list[str]:
    """Return the names of the packages of the newest kernel. The list is empty if apt does not know them."""
    for meta_package in _META_PACKAGES:
        command = ["apt-cache", *apt_options, "depends", meta_package]
        output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        dependencies = [line.split()[-1] for line in output.splitlines() if line.strip().startswith("Depends:")]
        package_names = [name for name in dependencies if _VERSIONED_PACKAGE.match(name)]
        if package_names and meta_package == "linux-image-generic":
            # Ubuntu has the modules in a separate package, on which the image depends.
            kernel_version = package_names[0].removeprefix("linux-modules-extra-").removeprefix("linux-image-")
            package_names.append(f"linux-modules-{kernel_version}")
        if package_names:
            return package_names
    return []


def _update_package_lists() -> bool:
    return subprocess.run(["apt-get", "update", "-q"], capture_output=True, check=False).returncode == 0


def _unpack(package_file: Path, cache_folder: Path) -> None:
    dpkg_result = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(package_file)], stdout=subprocess.PIPE, check=False)
    if dpkg_result.returncode:
        message = f"{package_file.name} is not a Debian package: remove {cache_folder} and try again"
        raise LabError(message)
    patterns = ["./boot/vmlinuz-*", "*/modules.*", *(f"*/kernel/{module_folder}*" for module_folder in MODULE_FOLDERS)]
    tar_result = subprocess.run(
        ["tar", "-x", "-C", str(cache_folder), "--wildcards", "--no-same-owner", *patterns],
        input=dpkg_result.stdout,
        stderr=subprocess.PIPE,
        check=False,
    )
    # tar exits with 2 if a pattern matches no file. This is expected if two packages share the files.
    if tar_result.returncode not in {0, 2}:
        message = f"{package_file.name} cannot be unpacked: {tar_result.stderr.decode(errors='replace').strip()[-200:]}"
        raise LabError(message)


def _run_command(command: Sequence[str], *, folder: Path | None = None) -> None:
    """Run a command, and raise :class:`LabError` with the last line of its output if it fails."""
    command_start = " ".join(command[:2])
    try:
        completed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError as error:
        message = f"{command_start} failed: {error.strerror}"
        raise LabError(message) from error
    if completed.returncode:
        output_lines = (completed.stderr or completed.stdout).strip().splitlines() or [
            f"exit code {completed.returncode}"
        ]
        message = f"{command_start} failed: {output_lines[-1]}"
        raise LabError(message)
