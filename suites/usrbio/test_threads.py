"""A usrbio ring that two threads use: one thread prepares operations, the other waits for their results."""

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

ROUND_COUNT = 3000


def test_ring_index_is_reused_before_its_completion_is_returned(tmp_path: Path) -> None:
    """The ring has one index. The library reuses it before wait() has returned the completion of the operation."""
    (tmp_path / "file").write_bytes(bytes(4 * KIB))
    with AgentProcess(tmp_path) as agent:
        fd = os.open(tmp_path / "file", os.O_RDONLY)
        usrbio.register_fd(fd)
        iov = usrbio.create_iovec(str(tmp_path), length_bytes=4 * KIB)
        ring = usrbio.make_ioring(str(tmp_path), 1, for_read=True)
        completed_rounds: list[object] = []

        def collect_completions() -> None:
            while len(completed_rounds) < ROUND_COUNT:
                completed_rounds.extend(
                    completed_slice.userdata
                    for completed_slice in ring.wait(min_results=1, timeout=timedelta(seconds=30))
                )

        waiting_thread = threading.Thread(target=collect_completions)
        waiting_thread.start()
        for round_index in range(ROUND_COUNT):
            while True:
                try:
                    ring.prepare(iov[0:512], read=True, fd=fd, off=0, userdata=round_index)
                except usrbio.UsrbioError as error:
                    if error.errno != errno.EAGAIN:
                        raise
                else:
                    break
            ring.submit()
        waiting_thread.join()
        assert completed_rounds == list(range(ROUND_COUNT))
        ring.destroy()
        usrbio.deregister_fd(fd)
        os.close(fd)
        iov.close()
        assert agent.terminate() == 0, agent.error_output
