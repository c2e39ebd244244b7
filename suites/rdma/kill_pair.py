"""Two processes that write to each other without end: ``kill_pair.py first|second``. The first process starts the
second.

If one process is killed, a write of the other process fails. The other process ends with exit code 0 if the status of
this write is RETRY_EXC_ERR, and with exit code 1 otherwise.
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


def write_without_end(own: IO[str], peer: IO[str]) -> int:
    """Exchange the endpoints as lines on `own` and `peer`, and write until the peer is lost. Return the exit code."""
    with (
        Nic.open("twin0") as nic,
        nic.register_host(bytearray(_LENGTH_BYTES)) as region,
        nic.completion_queue() as queue,
        nic.queue_pair(queue) as pair,
    ):
        memory = RemoteRange(region.address, region.rkey, _LENGTH_BYTES)
        own.write(json.dumps({"endpoint": asdict(pair.endpoint()), "memory": asdict(memory)}) + "\n")
        own.flush()
        line = peer.readline()
        if not line:
            return 0
        values = json.loads(line)
        pair.connect(Endpoint(**values["endpoint"]))
        target = RemoteRange(**values["memory"])
        while True:
            pair.post_write(region, target, work_id=1)
            status = pair.wait(30_000).status.name
            if status != "SUCCESS":
                return 0 if status == "RETRY_EXC_ERR" else 1


def main() -> int:
    """Run one of the two processes."""
    if sys.argv[1] == "second":
        return write_without_end(sys.stdout, sys.stdin)
    command = module_command("rdma.kill_pair", "second")
    try:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as second:
            assert second.stdin is not None
            assert second.stdout is not None
            return write_without_end(second.stdin, second.stdout)
    except BrokenPipeError:
        # The second process was killed before it had read the endpoint.
        return 0


if __name__ == "__main__":
    sys.exit(main())
