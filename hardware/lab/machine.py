"""The virtual machine: a kernel booted by virtme-ng on the files of this machine, one script run in it, within a time
limit.
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

from hardware.lab.errors import LabError

__all__ = ["Limits", "Machine", "can_virtualize", "check_programs"]

_PROGRAMS = ("qemu-system-x86_64", "busybox", "modprobe", "ip", "rdma")
_PACKAGES = "qemu-system-x86 busybox-static kmod iproute2"
_HERE = Path(__file__).resolve().parent
_KVM_GET_API_VERSION = 0xAE00
_KVM_API_VERSION = 12
_FILES = (
    "-fsdev local,id=lab,path=/,security_model=none,readonly=on,multidevs=remap "
    "-device virtio-9p-pci,fsdev=lab,mount_tag=lab"
)
_LOOK_S = 0.25
_END_S = 5.0


@dataclass(frozen=True)
class Limits:
    """How long the machine may take to boot, and then to run the script, in seconds."""

    boot_s: float
    run_s: float


@dataclass(frozen=True)
class Machine:
    """How to boot.

    Attributes
    ----------
    image : Path
        The kernel; its modules are found in the tree around it.
    tools : Path
        The folder of vng.
    kvm : bool
        Whether the processor's own virtualization is used, or it is all translated.
    cached : tuple of str
        Folders that do not change meanwhile, from which much is read.
    """

    image: Path
    tools: Path
    kvm: bool
    cached: tuple[str, ...] = ()

    def run(self, script: Path, *, output: Path, limits: Limits) -> int:
        """Boot, run the script with two rxe devices, end; the exit code of the script.

        Parameters
        ----------
        script : Path
            What bash runs, as root.
        output : Path
            The one folder that the machine may write to.

        Raises
        ------
        LabError
            It did not come up, did not end in time, or ended without a result.
        """
        for stale in ("booted", "code"):
            (output / stale).unlink(missing_ok=True)
        process = self._start(script, output)
        shown = threading.Thread(target=_show, args=(process,))
        shown.start()
        try:
            self._wait(process, output / "booted", f"did not come up within {limits.boot_s:g} s", limits.boot_s)
            self._wait(process, None, f"came up, and did not end within {limits.run_s:g} s", limits.run_s)
        finally:
            _end(process)
            shown.join()
        code = output / "code"
        text = code.read_text().strip() if code.exists() else ""
        if not text.isdecimal():
            message = f"the virtual machine ended without a result (vng ended with {process.returncode}): "
            message += "what it printed above says why"
            raise LabError(message)
        return int(text)

    def _start(self, script: Path, output: Path) -> subprocess.Popen[bytes]:
        path = f"{self.tools}{os.pathsep}{os.environ['PATH']}"
        inside = shlex.join(["bash", str(_HERE / "guest.sh"), str(output), str(script), *self.cached])
        command = [str(self.tools / "vng"), "--run", str(self.image), *([] if self.kvm else ["--disable-kvm"])]
        # 9p, as virtiofs wants a daemon that distributions do not ship everywhere.
        command += ["--force-9p", "--cpus", "2", "--memory", "2G", "--rwdir", str(output), "--exec", inside]
        # The same files once more, for guest.sh to mount with a cache; the device wants a machine with PCI.
        command += ["--disable-microvm", f"--qemu-opts={_FILES}"]
        # In a session of its own, so that QEMU and whatever else it starts can be ended together.
        return subprocess.Popen(
            command,
            cwd=output,
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            # Not our own output: virtme-ng opens that anew, which empties it where it is a file.
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @staticmethod
    def _wait(process: subprocess.Popen[bytes], sign: Path | None, late: str, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            if sign is not None and sign.exists():
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_S)
                return
        message = f"the virtual machine {late}, and was ended: try again on a machine with less to do"
        raise LabError(message)


def check_programs(tools: Path) -> None:
    """Raise :class:`LabError` when a program that it takes is not there."""
    if not (tools / "vng").exists():
        message = f"vng is not in {tools}: pip install virtme-ng"
        raise LabError(message)
    missing = [name for name in _PROGRAMS if not shutil.which(name)]
    if missing:
        message = f"not found: {', '.join(missing)}; install them (Debian: apt-get install {_PACKAGES})"
        raise LabError(message)


def can_virtualize(*, cpuinfo: Path = Path("/proc/cpuinfo"), device: Path = Path("/dev/kvm")) -> bool:
    """Whether KVM can be used: the processor says so, and the kernel has it for this user.

    A device alone says nothing: on a virtual machine without nested virtualization it may be there, and a kernel
    started by it hangs.

    Raises
    ------
    LabError
        The processor says so, the device is there, and it does not answer.
    """
    if not re.search(r"^flags\s*:.*\b(vmx|svm)\b", cpuinfo.read_text(), re.MULTILINE) or not device.exists():
        return False
    try:
        with device.open("rb", buffering=0) as opened:
            version = fcntl.ioctl(opened, _KVM_GET_API_VERSION)
    except PermissionError:
        return False
    except OSError as error:
        message = f"{device} is there and broken ({error.strerror}): mend it, or add --tcg to do without"
        raise LabError(message) from error
    if version != _KVM_API_VERSION:
        message = f"{device} speaks version {version} instead of {_KVM_API_VERSION}: add --tcg to do without"
        raise LabError(message)
    return True


def _show(process: subprocess.Popen[bytes]) -> None:
    """Print what it prints, as it comes."""
    assert process.stdout is not None  # noqa: S101 - it was started with a pipe.
    with process.stdout as printed:
        while data := printed.read1():  # type: ignore[attr-defined]
            sys.stdout.write(data.decode("utf-8", "replace"))
            sys.stdout.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    # Also when vng itself has ended: QEMU may still be there.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
