"""Download of a distribution's kernel, which is unpacked to a folder and never installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

from hardware.lab.errors import LabError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["kernel_image"]

# These packages depend on the newest kernel in Debian and in Ubuntu. The names of their dependencies have the version.
_META_PACKAGES = ("linux-image-amd64", "linux-image-generic")
_VERSIONED = re.compile(r"^linux-(?:image|modules-extra)-(\d\S*)$")

# The modules, of 400 MB in all, that the guest needs for its root over 9p, the network and RDMA. Names are relative to
# kernel/.
_MODULES = (
    *("arch", "crypto", "drivers/infiniband", "drivers/net/dummy", "drivers/virtio", "fs", "lib", "net"),
    *("drivers/block/virtio_blk", "drivers/char", "drivers/scsi"),
)


def kernel_image(cache: Path) -> Path:
    """Return the image of a kernel whose modules are in the same folder. apt downloads it if the cache is empty.

    Raises
    ------
    LabError
        apt is missing, it has no kernel package, or the kernel has no module rdma_rxe.
    """
    stamp = cache / "ready"
    if not stamp.exists():
        shutil.rmtree(cache, ignore_errors=True)
        cache.mkdir(parents=True)
        packages = _download(cache)
        for package in packages:
            _unpack(package, cache)
            package.unlink()
        version = _image(cache).name.partition("-")[2]
        _run(["depmod", "-b", str(cache), version])
        if not any(cache.glob(f"lib/modules/{version}/kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko*")):
            message = f"kernel {version} of this distribution has no module rdma_rxe: use a machine with an RDMA device"
            raise LabError(message)
        stamp.write_text(version)
    return _image(cache)


def _image(cache: Path) -> Path:
    images = sorted(cache.glob("boot/vmlinuz-*"))
    if not images:
        message = f"the kernel package has no boot/vmlinuz-*: remove {cache} and try again"
        raise LabError(message)
    return images[-1]


def _download(cache: Path) -> list[Path]:
    if not shutil.which("apt-get") or not shutil.which("apt-cache"):
        message = f"apt is missing, so no kernel package can be downloaded: copy boot/ and lib/ of one to {cache}"
        raise LabError(message)
    names = _package_names() or (_update_package_lists() and _package_names())
    if not names:
        message = f"apt has no kernel package ({' or '.join(_META_PACKAGES)}): run apt-get update, then try again"
        raise LabError(message)
    print("downloading " + " ".join(names), flush=True)  # noqa: T201 - the output of a command.
    _run(["apt-get", "download", "-q", *names], folder=cache)
    packages = sorted(cache.glob("*.deb"))
    if not packages:
        message = "apt-get download wrote no kernel package: run apt-get update, then try again"
        raise LabError(message)
    return packages


def _package_names() -> list[str]:
    """Return the packages of the newest kernel, or nothing if apt does not have it."""
    for package in _META_PACKAGES:
        listed = subprocess.run(["apt-cache", "depends", package], capture_output=True, text=True, check=False).stdout
        dependencies = [line.split()[-1] for line in listed.splitlines() if line.strip().startswith("Depends:")]
        names = [name for name in dependencies if _VERSIONED.match(name)]
        if names and package == "linux-image-generic":
            # Ubuntu has the modules in a separate package, on which the image depends.
            version = names[0].removeprefix("linux-modules-extra-").removeprefix("linux-image-")
            names.append(f"linux-modules-{version}")
        if names:
            return names
    return []


def _update_package_lists() -> bool:
    return subprocess.run(["apt-get", "update", "-q"], capture_output=True, check=False).returncode == 0


def _unpack(package: Path, cache: Path) -> None:
    archive = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE, check=False)
    if archive.returncode:
        message = f"{package.name} is not a Debian package: remove {cache} and try again"
        raise LabError(message)
    patterns = ["./boot/vmlinuz-*", "*/modules.*", *(f"*/kernel/{module}*" for module in _MODULES)]
    unpack = subprocess.run(
        ["tar", "-x", "-C", str(cache), "--wildcards", "--no-same-owner", *patterns],
        input=archive.stdout,
        stderr=subprocess.PIPE,
        check=False,
    )
    # The exit code of tar is 2 if a pattern matches nothing in this package, which is expected.
    if unpack.returncode not in {0, 2}:
        message = f"{package.name} cannot be unpacked: {unpack.stderr.decode(errors='replace').strip()[-200:]}"
        raise LabError(message)


def _run(command: Sequence[str], *, folder: Path | None = None) -> None:
    """Run a command, and raise :class:`LabError` with the last line of its output if it fails."""
    call = " ".join(command[:2])
    try:
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError as error:
        message = f"{call} failed: {error.strerror}"
        raise LabError(message) from error
    if ended.returncode:
        lines = (ended.stderr or ended.stdout).strip().splitlines() or [f"exit code {ended.returncode}"]
        message = f"{call} failed: {lines[-1]}"
        raise LabError(message)
