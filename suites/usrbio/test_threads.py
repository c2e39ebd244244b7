"""A ring between two threads: one prepares, the other waits."""

from __future__ import annotations

import errno
import os
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

from support.raw_usrbio import AgentProcess

from gdrkit import usrbio
from gdrkit.harness.needs import needs, verbs
from gdrkit.units import KIB

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs(verbs.nic())

ROUNDS = 3000


def test_ring_index_is_reused_before_its_completion_is_returned(tmp_path: Path) -> None:
    """A ring of one entry reuses its only index as soon as the library has received the completion."""
    (tmp_path / "file").write_bytes(bytes(4 * KIB))
    with AgentProcess(tmp_path) as agent:
        fd = os.open(tmp_path / "file", os.O_RDONLY)
        usrbio.register_fd(fd)
        memory = usrbio.create_iovec(str(tmp_path), length_bytes=4 * KIB)
        ring = usrbio.make_ioring(str(tmp_path), 1, for_read=True)
        completed: list[object] = []

        def reap() -> None:
            while len(completed) < ROUNDS:
                completed.extend(iov.userdata for iov in ring.wait(min_results=1, timeout=timedelta(seconds=30)))

        waiter = threading.Thread(target=reap)
        waiter.start()
        for number in range(ROUNDS):
            while True:
                try:
                    ring.prepare(memory[0:512], read=True, fd=fd, off=0, userdata=number)
                except usrbio.UsrbioError as error:
                    if error.errno != errno.EAGAIN:
                        raise
                else:
                    break
            ring.submit()
        waiter.join()
        assert completed == list(range(ROUNDS))
        ring.destroy()
        usrbio.deregister_fd(fd)
        os.close(fd)
        memory.close()
        assert agent.terminate() == 0, agent.errors
