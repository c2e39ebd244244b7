"""One machine of a TCP fabric of twins: a program in its own network namespace that reads and writes JSON lines.

The program writes its endpoint and the range of its memory. It reads the endpoint and the memory range of the peer from
the first line of its input, and connects to the peer. Each further line is a command with a seed: ``write`` writes the
pattern of the seed to the memory of the peer, and the reply is the status of the completion. ``check`` compares the
memory of this machine with the pattern, and the reply is ``same`` or ``different``. Twins are libraries that emulate
the hardware below an API.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from gdrkit import pattern
from gdrkit.verbs import Endpoint, Nic, RemoteRange

MEMORY_BYTES = 3 * 2**20 + 5


def main() -> None:
    """Connect to the peer, and carry out the commands from standard input."""
    buffer = bytearray(MEMORY_BYTES)
    with (
        Nic.open("twin0") as nic,
        nic.register_host(buffer) as region,
        nic.completion_queue() as completion_queue,
        nic.queue_pair(completion_queue) as queue_pair,
    ):
        memory_range = RemoteRange(region.address, region.rkey, MEMORY_BYTES)
        _write_line({"endpoint": asdict(queue_pair.endpoint()), "memory": asdict(memory_range)})
        peer_message = json.loads(sys.stdin.readline())
        queue_pair.connect(Endpoint(**peer_message["endpoint"]))
        for line in sys.stdin:
            command = json.loads(line)
            if "write" in command:
                memoryview(buffer)[:] = pattern.payload(MEMORY_BYTES, seed=command["write"])
                queue_pair.post_write(region, RemoteRange(**peer_message["memory"]), work_id=1)
                _write_line(queue_pair.wait(30_000).status.name)
            else:
                is_same = buffer == pattern.payload(MEMORY_BYTES, seed=command["check"])
                _write_line("same" if is_same else "different")


def _write_line(message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
