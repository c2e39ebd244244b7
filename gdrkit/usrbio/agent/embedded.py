"""The storage server of an agent as a process: ``python -m gdrkit.usrbio.agent.embedded STORE SOCKET``.

Level 5. It is ``gdrkit serve`` that also ends when its standard input does, so that it never outlives the agent that
started it, however that ended.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from gdrkit.storage.command import serve

__all__ = ["main"]


def main(store: str, socket: str) -> int:
    """Serve until the other end of standard input is closed; the exit code."""
    # Before the thread, so that the signal that it sends waits for the one who serves.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    threading.Thread(target=_end_with_input, daemon=True).start()
    return serve(Path(store), listen=f"unix:{socket}", nic_names=(), chunk_bytes=None)


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
