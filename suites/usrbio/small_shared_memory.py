"""A program with idle memory of iovs on a small ``/dev/shm``, in a mount namespace of its own.

While the memory is idle, a second process creates an iov that needs half of the file system.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.raw_usrbio import AgentProcess

from gdrkit import usrbio
from gdrkit.units import MIB

FILE_SYSTEM_MIB = 128


def main() -> None:
    """Mount the file system, start an agent, leave idle memory, and start the second process."""
    mount = sys.argv[1]
    if len(sys.argv) > 2:
        usrbio.create_iovec(mount, length_bytes=FILE_SYSTEM_MIB // 2 * MIB).close()
        return
    options = f"size={FILE_SYSTEM_MIB}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", "/dev/shm"], check=True)  # noqa: S108 - the folder of shm_open(3).
    with AgentProcess(Path(mount)) as agent:
        iovs = [usrbio.create_iovec(mount, length_bytes=FILE_SYSTEM_MIB // 4 * MIB) for _ in range(3)]
        for iov in iovs:
            iov.close()
        subprocess.run([sys.executable, *sys.orig_argv[1:], "second"], check=True)
        usrbio.trim_host_pool()
        assert agent.terminate() == 0, agent.error_output


if __name__ == "__main__":
    main()
