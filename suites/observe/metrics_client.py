"""Functions that start a gdrkit command with a metrics server, and read the samples that the server returns."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import urllib.request
from typing import IO, TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["GDRKIT_COMMAND", "REGION_HOLDER_COMMAND", "read_metrics_url", "scrape", "start_gdrkit"]

GDRKIT_COMMAND = [sys.executable, "-m", "gdrkit"]
# Arguments with which LineChildProcess starts twin_holder.py on the twins (libraries that emulate the hardware). The
# program holds memory regions and dma-bufs.
REGION_HOLDER_COMMAND = (
    *("gdrkit", "run", "--software", "--isolated", "--quiet", "--"),
    *(sys.executable, "-m", "observe.twin_holder"),
)


def scrape(url: str) -> dict[str, float]:
    """Return the value of each sample of a metrics server, by name with labels, such as `gdrkit_dmabufs{pid="7"}`."""
    with urllib.request.urlopen(url, timeout=10) as reply:  # noqa: S310 - an address of this test.
        lines = reply.read().decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


@contextlib.contextmanager
def start_gdrkit(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Run a gdrkit command during the block. Then end it by SIGTERM, and require exit code 0."""
    with subprocess.Popen(
        [*GDRKIT_COMMAND, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
    assert process.returncode == 0


def read_metrics_url(stream: IO[str] | None) -> str:
    """Return the first URL of a metrics server in the output of a command."""
    assert stream is not None
    for line in stream:
        match = re.search(r"http://\S+/metrics", line)
        if match:
            return match[0]
    pytest.fail("the command printed no URL of a metrics server")
