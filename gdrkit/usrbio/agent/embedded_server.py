"""The program that an agent starts as its storage server.

The command is ``python -m gdrkit.usrbio.agent.embedded_server STORE SOCKET GENERATION``. GENERATION is the descriptor
of memory that the agent shares with the store; see :class:`~gdrkit.storage.store.FileStore`.

The program does the same as ``gdrkit serve``, and also ends when its standard input is closed. The agent holds the
other end of that pipe, so the program ends with the agent, even if the agent is killed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from gdrkit.storage.command import serve

__all__ = ["main"]


def main(store: str, socket: str, generation: str) -> int:
    """Serve until the other end of standard input is closed, and return the exit code."""
    # The signals are blocked before the thread starts. So sigwait() in serve() receives the SIGTERM that the thread
    # sends.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    threading.Thread(target=_terminate_at_end_of_input, daemon=True).start()
    return serve(Path(store), listen=f"unix:{socket}", nic_names=(), chunk_bytes=None, sums_generation=int(generation))


def _terminate_at_end_of_input() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
