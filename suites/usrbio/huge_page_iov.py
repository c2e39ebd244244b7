"""A program that creates an iov on a ``/dev/shm`` with huge pages: ``python -m usrbio.huge_page_iov MOUNT LENGTH``.

Start it in a mount namespace of its own (unshare --mount), because it mounts over /dev/shm. It prints, as JSON,
how many bytes of the iov the client and the agent have mapped with huge pages.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support.raw_usrbio import AgentProcess

from gdrkit import usrbio


def read_huge_page_bytes(process_id: int | str) -> int:
    """Return how many bytes of shared memory a process has mapped with huge pages."""
    smaps_lines = Path(f"/proc/{process_id}/smaps").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in smaps_lines if line.startswith("ShmemPmdMapped:"))


def main() -> None:
    """Mount a tmpfs with huge pages on /dev/shm, start an agent, create an iov, and print the mapped bytes."""
    mount_point, iov_bytes = Path(sys.argv[1]), int(sys.argv[2])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "huge=within_size", "tmpfs", "/dev/shm"], check=True)  # noqa: S108 - the folder of shm_open(3).
    with AgentProcess(mount_point) as agent:
        iov = usrbio.create_iovec(str(mount_point), length_bytes=iov_bytes)
        memoryview(iov)[:] = bytes(iov_bytes)
        huge_page_bytes_by_process = {
            "client": read_huge_page_bytes("self"),
            "agent": read_huge_page_bytes(agent.process.pid),
        }
        iov.close()
        assert agent.terminate() == 0, agent.error_output
    sys.stdout.write(json.dumps(huge_page_bytes_by_process))


if __name__ == "__main__":
    main()
