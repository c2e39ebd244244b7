"""A program that checks that the idle memory of closed iovs takes at most half of ``/dev/shm``.

It mounts a small tmpfs on /dev/shm, so start it in a mount namespace of its own (unshare --mount). It closes three
iovs, each with a quarter of the size of the tmpfs. A second process must then be able to create an iov of half the
size of the tmpfs.
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
    """Run the check. If the program has the additional argument "second", be its second process."""
    mount_point = sys.argv[1]
    if len(sys.argv) > 2:
        usrbio.create_iovec(mount_point, length_bytes=FILE_SYSTEM_MIB // 2 * MIB).close()
        return
    mount_options = f"size={FILE_SYSTEM_MIB}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", mount_options, "tmpfs", "/dev/shm"], check=True)  # noqa: S108 - the folder of shm_open(3).
    with AgentProcess(Path(mount_point)) as agent:
        iovs = [usrbio.create_iovec(mount_point, length_bytes=FILE_SYSTEM_MIB // 4 * MIB) for _ in range(3)]
        for iov in iovs:
            iov.close()
        subprocess.run([sys.executable, *sys.orig_argv[1:], "second"], check=True)
        usrbio.trim_host_pool()
        assert agent.terminate() == 0, agent.error_output


if __name__ == "__main__":
    main()
