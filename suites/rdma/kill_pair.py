"""Two processes that write to each other by RDMA without end: ``kill_pair.py first|second``.

The first process starts the second. If one process is killed, a write of the other process fails. The other process
ends with exit code 0 if the status of this write is RETRY_EXC_ERR, and with exit code 1 otherwise.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from typing import IO

from support.python_child import module_command

from gdrkit.verbs import Endpoint, Nic, RemoteRange

_LENGTH_BYTES = 1 << 20


def write_without_end(output: IO[str], peer_output: IO[str]) -> int:
    """Exchange endpoints with the peer, write to the peer until the peer is lost, and return the exit code.

    The function writes its own endpoint to `output`, and reads the endpoint of the peer from `peer_output`.
    """
    with (
        Nic.open("twin0") as nic,
        nic.register_host(bytearray(_LENGTH_BYTES)) as region,
        nic.completion_queue() as completion_queue,
        nic.queue_pair(completion_queue) as queue_pair,
    ):
        own_range = RemoteRange(region.address, region.rkey, _LENGTH_BYTES)
        output.write(json.dumps({"endpoint": asdict(queue_pair.endpoint()), "memory": asdict(own_range)}) + "\n")
        output.flush()
        line = peer_output.readline()
        if not line:  # The peer was killed before it wrote its endpoint.
            return 0
        peer_message = json.loads(line)
        queue_pair.connect(Endpoint(**peer_message["endpoint"]))
        peer_range = RemoteRange(**peer_message["memory"])
        while True:
            queue_pair.post_write(region, peer_range, work_id=1)
            status_name = queue_pair.wait(30_000).status.name
            if status_name != "SUCCESS":
                return 0 if status_name == "RETRY_EXC_ERR" else 1


def main() -> int:
    """Run the first or the second process, and return its exit code."""
    if sys.argv[1] == "second":
        return write_without_end(sys.stdout, sys.stdin)
    command = module_command("rdma.kill_pair", "second")
    try:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as second_process:
            assert second_process.stdin is not None
            assert second_process.stdout is not None
            return write_without_end(second_process.stdin, second_process.stdout)
    except BrokenPipeError:
        # The second process was killed before it had read the endpoint.
        return 0


if __name__ == "__main__":
    sys.exit(main())
