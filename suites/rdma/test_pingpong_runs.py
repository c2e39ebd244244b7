"""rdma-core's ibv_rc_pingpong runs many times without a failure, also beside busy processes.

GDRKIT_PINGPONG_RUNS is the number of runs: 3 by default, and 1,000 in ``nox -s long``.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

import pytest
from rdma import perftest
from support.processes import wait_until

from gdrkit.errors import Api
from gdrkit.harness.needs import host, needs, software

if TYPE_CHECKING:
    from gdrkit.harness.evidence import Evidence

pytestmark = needs(software(Api.VERBS), host.program("ibv_rc_pingpong"))

RUN_COUNT = int(os.environ.get("GDRKIT_PINGPONG_RUNS", "3"))
RUN_LIMIT_S = 60.0
# A program that keeps a processor busy until its parent, this process, has ended.
BUSY_PROGRAM = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"


@pytest.mark.parametrize("busy_processes_per_core", [0, 2])
@pytest.mark.timeout(60 + RUN_LIMIT_S * RUN_COUNT)
def test_pingpong_never_fails(busy_processes_per_core: int, evidence: Evidence) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(busy_processes_per_core * (os.cpu_count() or 1)):
            stack.enter_context(perftest.start_program([sys.executable, "-c", BUSY_PROGRAM, str(os.getpid())]))
        for _ in range(RUN_COUNT):
            run_pingpong()
    evidence["runs"] = RUN_COUNT


def run_pingpong() -> None:
    """Run a server and a client with 100 iterations and a check of the data. Require that both succeed."""
    port = perftest.find_free_port()
    # With -c, both programs check the bytes that they receive.
    command = ["ibv_rc_pingpong", "-d", "twin0", "-g", "1", "-c", "-n", "100", "-p", str(port)]
    with perftest.start_program(command) as server:
        wait_until(lambda: server.poll() is not None or perftest.is_listening(server.pid, port), "a listening server")
        with perftest.start_program([*command, "127.0.0.1"]) as client:
            output, _ = client.communicate(timeout=RUN_LIMIT_S)
        server_output, _ = server.communicate(timeout=RUN_LIMIT_S)
    assert (client.returncode, server.returncode) == (0, 0), f"{output}\n{server_output}"
    assert "100 iters in" in output
