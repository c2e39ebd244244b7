"""The program that an agent starts as its storage server.

The command is ``python -m gdrkit.usrbio.agent.embedded_server STORE SOCKET GENERATION``. GENERATION is a descriptor of
shared memory in which the server counts new checksum files, so that the agent notices them; see
:class:`~gdrkit.storage.store.FileStore`.

The program does the same as ``gdrkit serve``, and also ends at the end of its standard input. Standard input is a pipe
from the agent, so the program ends when the agent ends, even if the agent is killed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from gdrkit.storage.command import serve

__all__ = ["main"]


def main(store_path: str, socket_path: str, generation_fd: str) -> int:
    """Serve the store until standard input ends or SIGTERM arrives, and return the exit code."""
    # The signals are blocked before the thread starts, so that they are blocked in the thread too. So sigwait() in
    # serve() receives the SIGTERM that the thread sends.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    threading.Thread(target=_terminate_at_end_of_input, daemon=True).start()
    return serve(
        Path(store_path),
        listen=f"unix:{socket_path}",
        nic_names=(),
        chunk_bytes=None,
        sums_generation_fd=int(generation_fd),
    )


def _terminate_at_end_of_input() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
