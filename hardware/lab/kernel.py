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
_NEWEST = ("linux-image-amd64", "linux-image-generic")
_VERSIONED = re.compile(r"^linux-(?:image|modules-extra)-(\d\S*)$")

# The virtual machine needs these of 400 MB: its root over 9p, the network, RDMA. Names are relative to kernel/.
_PARTS = ("arch", "crypto", "drivers/infiniband", "drivers/net/dummy", "drivers/virtio", "fs", "lib", "net")
_OTHERS = ("drivers/block/virtio_blk", "drivers/char", "drivers/scsi")


def kernel_image(cache: Path) -> Path:
    """Return the image of a kernel whose modules are in the same tree. apt downloads it if the cache has none.

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
        _run(["depmod", "-b", str(cache), version], "the modules of the kernel cannot be listed")
        if not any(cache.glob(f"lib/modules/{version}/kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko*")):
            message = f"kernel {version} of this distribution has no module rdma_rxe: use a machine with an RDMA device"
            raise LabError(message)
        stamp.write_text(version)
    return _image(cache)


def _image(cache: Path) -> Path:
    found = sorted(cache.glob("boot/vmlinuz-*"))
    if not found:
        message = f"the kernel package has no boot/vmlinuz-*; remove {cache} and try again"
        raise LabError(message)
    return found[-1]


def _download(cache: Path) -> list[Path]:
    if not shutil.which("apt-get") or not shutil.which("apt-cache"):
        message = "there is no apt here to download a kernel package with: put one's boot/ and lib/ into " + str(cache)
        raise LabError(message)
    names = _names() or (_updated() and _names())
    if not names:
        message = f"apt knows no kernel package ({' or '.join(_NEWEST)}): run apt-get update, then try again"
        raise LabError(message)
    print("downloading " + " ".join(names), flush=True)  # noqa: T201 - the output of a command.
    _run(["apt-get", "download", "-q", *names], "the kernel package cannot be downloaded", folder=cache)
    found = sorted(cache.glob("*.deb"))
    if not found:
        message = "apt-get download gave no kernel package: run apt-get update, then try again"
        raise LabError(message)
    return found


def _names() -> list[str]:
    for newest in _NEWEST:
        listed = subprocess.run(["apt-cache", "depends", newest], capture_output=True, text=True, check=False).stdout
        wanted = [line.split()[-1] for line in listed.splitlines() if line.strip().startswith("Depends:")]
        found = [name for name in wanted if _VERSIONED.match(name)]
        if found and newest == "linux-image-generic":
            # Ubuntu has the modules in a separate package that the image depends on.
            version = found[0].removeprefix("linux-modules-extra-").removeprefix("linux-image-")
            found.append(f"linux-modules-{version}")
        if found:
            return found
    return []


def _updated() -> bool:
    return subprocess.run(["apt-get", "update", "-q"], capture_output=True, check=False).returncode == 0


def _unpack(package: Path, cache: Path) -> None:
    pack = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE, check=False)
    if pack.returncode:
        message = f"{package.name} is no package: remove {cache} and try again"
        raise LabError(message)
    parts = [f"*/kernel/{part}*" for part in (*_PARTS, *_OTHERS)]
    keep = ["./boot/vmlinuz-*", "*/modules.*", *parts]
    unpack = subprocess.run(
        ["tar", "-x", "-C", str(cache), "--wildcards", "--no-same-owner", *keep],
        input=pack.stdout,
        stderr=subprocess.PIPE,
        check=False,
    )
    # tar ends with 2 if a pattern matches nothing in this package, which is expected.
    if unpack.returncode not in {0, 2}:
        message = f"{package.name} cannot be unpacked: {unpack.stderr.decode(errors='replace').strip()[-200:]}"
        raise LabError(message)


def _run(command: Sequence[str], what: str, *, folder: Path | None = None) -> None:
    try:
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError as error:
        message = f"{what}: {command[0]}: {error.strerror}"
        raise LabError(message) from error
    if ended.returncode:
        said = (ended.stderr or ended.stdout).strip().splitlines() or [f"it ended with {ended.returncode}"]
        message = f"{what}: {said[-1]}"
        raise LabError(message)
