"""Options of the commands that start the virtual machine of the lab, and the configuration that follows from them."""

from __future__ import annotations

import argparse
import sys
import sysconfig
from pathlib import Path

from hardware.lab.kernel import find_kernel_image
from hardware.lab.machine import Machine, can_virtualize, check_programs

__all__ = ["add_machine_options", "configure_machine"]

_PROJECT_ROOT = Path(__file__).resolve().parents[2]
_BUILD_FOLDER = _PROJECT_ROOT / "build" / "lab"


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the virtual machine: programs, kernel, accelerator and time limits."""
    parser.add_argument(
        "--tools",
        type=Path,
        default=Path(sys.executable).parent,
        help="folder that contains vng, the command of virtme-ng",
    )
    parser.add_argument("--cache", type=Path, help="folder for the kernel (default: one below build/lab)")
    parser.add_argument("--backports", action="store_true", help="use the newest kernel of this release's backports")
    parser.add_argument("--boot-limit-s", type=float, default=150.0, help="time limit for the boot, in seconds")
    parser.add_argument("--limit-s", type=float, default=900.0, help="time limit for the run in the guest, in seconds")
    parser.add_argument("--tcg", action="store_true", help="do not use KVM, so that QEMU emulates the processor (TCG)")
    parser.add_argument("--cpuinfo", type=Path, default=Path("/proc/cpuinfo"), help=argparse.SUPPRESS)
    parser.add_argument("--kvm", type=Path, default=Path("/dev/kvm"), help=argparse.SUPPRESS)


def configure_machine(options: argparse.Namespace) -> Machine:
    """Return the virtual machine that the options describe. If its kernel is missing, download the kernel.

    Raises
    ------
    LabError
        A program or the kernel is missing, or KVM is broken.
    """
    use_kvm = not options.tcg and can_virtualize(cpuinfo=options.cpuinfo, device=options.kvm)
    check_programs(options.tools)
    library_folders = [Path("/usr/lib/python3"), *Path("/usr/lib").glob("*-linux-gnu")]
    folders = [_PROJECT_ROOT, Path(sys.prefix), Path(sysconfig.get_path("stdlib")), *library_folders]
    cached_folders = tuple(str(folder) for folder in folders if folder.is_dir())
    cache_folder = options.cache or _BUILD_FOLDER / ("kernel-backports" if options.backports else "kernel")
    return Machine(
        kernel_image=find_kernel_image(cache_folder.resolve(), backports=options.backports),
        tools_folder=options.tools,
        use_kvm=use_kvm,
        cached_folders=cached_folders,
    )
