"""The virtual machine of the lab. virtme-ng boots a kernel in QEMU, with the files of this machine, and runs a script.

The boot and the script have time limits.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from hardware.lab.errors import BootTimeoutError, LabError

__all__ = ["Limits", "Machine", "can_virtualize", "check_programs"]

_PROGRAMS = ("qemu-system-x86_64", "busybox", "modprobe", "ip", "rdma")
# The Debian packages that contain these programs.
_PACKAGES = "qemu-system-x86 busybox-static kmod iproute2"
_LAB_FOLDER = Path(__file__).resolve().parent
_KVM_GET_API_VERSION = 0xAE00
_KVM_API_VERSION = 12
# These options of QEMU export the files of the host a second time, with the tag `lab`, by which guest.sh mounts them.
_SECOND_EXPORT_OPTIONS = (
    "-fsdev local,id=lab,path=/,security_model=none,readonly=on,multidevs=remap "
    "-device virtio-9p-pci,fsdev=lab,mount_tag=lab"
)
_POLL_PERIOD_S = 0.25
_TERMINATION_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Limits:
    """The time limits, in seconds, for the boot of the machine and for the script."""

    boot_s: float
    run_s: float


@dataclass(frozen=True)
class Machine:
    """The configuration of a virtual machine.

    Attributes
    ----------
    kernel_image : Path
        The kernel image, FOLDER/boot/vmlinuz-VERSION. Its modules are in FOLDER/lib/modules.
    tools_folder : Path
        The folder with vng, the command of virtme-ng.
    use_kvm : bool
        Whether KVM is used. Without it, QEMU emulates the processor (TCG).
    cached_folders : tuple of str
        Folders that are read often and do not change during the run. The guest reads them through a cache.
    """

    kernel_image: Path
    tools_folder: Path
    use_kvm: bool
    cached_folders: tuple[str, ...] = ()

    def run(self, script_file: Path, *, output_folder: Path, limits: Limits) -> int:
        """Boot the machine, run the script with two rxe devices, shut down, and return the exit code of the script.

        If the machine does not boot in time, it is started a second time, because the boot of an emulated machine
        sometimes hangs, for an unknown reason.

        Parameters
        ----------
        script_file : Path
            The script. bash runs it as root.
        output_folder : Path
            The only folder into which the guest may write.

        Raises
        ------
        LabError
            The machine failed to boot in time twice, did not end in time, or ended without the exit code of the script.
        """
        try:
            return self._run_once(script_file, output_folder=output_folder, limits=limits)
        except BootTimeoutError:
            text = f"the virtual machine did not boot within {limits.boot_s:g} s, and was killed; it is started again"
            print(f"lab: {text}", flush=True)  # noqa: T201 - users read it.
        return self._run_once(script_file, output_folder=output_folder, limits=limits)

    def _run_once(self, script_file: Path, *, output_folder: Path, limits: Limits) -> int:
        # guest.sh creates `booted` when the kernel has booted, and writes the exit code of the script to `code`.
        for file_name in ("booted", "code"):
            (output_folder / file_name).unlink(missing_ok=True)
        process = self._start(script_file, output_folder)
        printer_thread = threading.Thread(target=_print_output, args=(process,))
        printer_thread.start()
        try:
            if not self._wait(process, output_folder / "booted", limits.boot_s):
                raise BootTimeoutError(_describe_timeout(f"did not boot within {limits.boot_s:g} s"))
            if not self._wait(process, None, limits.run_s):
                raise LabError(_describe_timeout(f"booted, but did not end within {limits.run_s:g} s"))
        finally:
            _kill(process)
            printer_thread.join()
        exit_code_file = output_folder / "code"
        exit_code_text = exit_code_file.read_text().strip() if exit_code_file.exists() else ""
        if not exit_code_text.isdecimal():
            message = f"the virtual machine ended without a result (exit code of vng: {process.returncode}): "
            message += "see its output above"
            raise LabError(message)
        return int(exit_code_text)

    def _start(self, script_file: Path, output_folder: Path) -> subprocess.Popen[bytes]:
        search_path = f"{self.tools_folder}{os.pathsep}{os.environ['PATH']}"
        guest_command = shlex.join(
            ["bash", str(_LAB_FOLDER / "guest.sh"), str(output_folder), str(script_file), *self.cached_folders]
        )
        command = [
            str(self.tools_folder / "vng"),
            "--run",
            str(self.kernel_image),
            *([] if self.use_kvm else ["--disable-kvm"]),
        ]
        # 9p is used, because virtiofs needs a daemon that some distributions do not have.
        command += [
            "--force-9p",
            "--cpus",
            "2",
            "--memory",
            "2G",
            "--rwdir",
            str(output_folder),
            "--exec",
            guest_command,
        ]
        # guest.sh mounts the second export of the host's files with a cache. The export needs a PCI device, which the
        # machine type microvm does not support.
        command += ["--disable-microvm", f"--qemu-opts={_SECOND_EXPORT_OPTIONS}"]
        # vng runs in a new session, so that vng, QEMU and all other child processes can be killed together.
        return subprocess.Popen(
            command,
            cwd=output_folder,
            env={**os.environ, "PATH": search_path},
            stdin=subprocess.DEVNULL,
            # virtme-ng opens its standard output a second time. If standard output were a file, virtme-ng would
            # truncate it.
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @staticmethod
    def _wait(process: subprocess.Popen[bytes], awaited_file: Path | None, limit_s: float) -> bool:
        """Wait until `awaited_file` exists or the process ends. Return False if neither happened within `limit_s`."""
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            if awaited_file is not None and awaited_file.exists():
                return True
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_PERIOD_S)
                return True
        return False


def _describe_timeout(event_text: str) -> str:
    return f"the virtual machine {event_text}, and was killed: try again on a machine with less load"


def check_programs(tools_folder: Path) -> None:
    """Raise :class:`LabError` if a program that the lab needs is missing."""
    if not (tools_folder / "vng").exists():
        message = f"vng is not in {tools_folder}: pip install virtme-ng"
        raise LabError(message)
    missing_programs = [name for name in _PROGRAMS if not shutil.which(name)]
    if missing_programs:
        message = f"not found: {', '.join(missing_programs)}; install them (Debian: apt-get install {_PACKAGES})"
        raise LabError(message)


def can_virtualize(*, cpuinfo: Path = Path("/proc/cpuinfo"), device: Path = Path("/dev/kvm")) -> bool:
    """Return whether KVM can be used: the processor supports it, and this user may open the device.

    The device alone is not sufficient. If this machine is a virtual machine without nested virtualization, it may have
    the device, too, but a guest that uses the device hangs.

    Raises
    ------
    LabError
        The processor supports KVM and the device exists, but KVM_GET_API_VERSION fails or does not return 12.
    """
    if not re.search(r"^flags\s*:.*\b(vmx|svm)\b", cpuinfo.read_text(), re.MULTILINE) or not device.exists():
        return False
    try:
        with device.open("rb", buffering=0) as device_file:
            version = fcntl.ioctl(device_file, _KVM_GET_API_VERSION)
    except PermissionError:
        return False
    except OSError as error:
        message = f"ioctl({device}, KVM_GET_API_VERSION) failed: {error.strerror}: repair KVM, or add --tcg"
        raise LabError(message) from error
    if version != _KVM_API_VERSION:
        message = f"the API version of {device} must be {_KVM_API_VERSION}, not {version}: add --tcg"
        raise LabError(message)
    return True


def _print_output(process: subprocess.Popen[bytes]) -> None:
    """Print the output of the process as it arrives."""
    assert process.stdout is not None  # noqa: S101 - the process was started with a pipe.
    with process.stdout as output_pipe:
        while output_bytes := output_pipe.read1():  # type: ignore[attr-defined]
            sys.stdout.write(output_bytes.decode("utf-8", "replace"))
            sys.stdout.flush()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Terminate the process group of vng and QEMU, wait for vng, and kill the processes that are left of the group."""
    # The group is signalled even if vng has ended, because QEMU may still run.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_TERMINATION_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
