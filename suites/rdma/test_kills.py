"""A kill of any process of a `gdrkit run`, at any time, leaves no process, socket or file behind.

The case kills processes for GDRKIT_TWIN_KILLS_S seconds: 4 by default, and 600 in ``nox -s long``.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.processes import wait_until
from support.python_child import module_command, suites_environ

from gdrkit.errors import Api
from gdrkit.harness.needs import needs, software

if TYPE_CHECKING:
    from gdrkit.harness.evidence import Evidence

pytestmark = needs(software(Api.VERBS))

KILL_DURATION_S = float(os.environ.get("GDRKIT_TWIN_KILLS_S", "4"))
# A pair has three processes: `gdrkit run`, and two programs on a software twin (a library that emulates hardware).
PAIR_COUNT = 4
# Limit for the end of a pair after a kill. It covers the start of an interpreter, and the retries after which a queue
# pair notices the loss of its peer.
END_TIMEOUT_S = 60.0
RUN_COMMAND = (sys.executable, "-m", "gdrkit", "run", "--software", "--apis", "verbs", "--quiet", "--")


class ProcessPair:
    """A `gdrkit run` of :mod:`rdma.kill_pair`. An environment variable marks its processes."""

    def __init__(self, environ: dict[str, str]) -> None:
        self._environ_entry = f"GDRKIT_TEST_PAIR={secrets.token_hex(8)}"
        name, _, value = self._environ_entry.partition("=")
        self._process = subprocess.Popen(
            [*RUN_COMMAND, *module_command("rdma.kill_pair", "first")],
            env={**environ, name: value},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def list_process_ids(self) -> list[int]:
        """Return the process IDs of all processes of the pair that have not ended."""
        self._process.poll()
        return find_process_ids(self._environ_entry)

    def is_complete(self) -> bool:
        """Return whether exactly three processes of the pair run: `gdrkit run` and the two programs."""
        command_lines = [read_process_file(process_id, "cmdline") for process_id in self.list_process_ids()]
        return len(command_lines) == 3 and any(line.endswith(b"\0second\0") for line in command_lines)

    def kill_until_ended(self, rng: random.Random) -> None:
        """Kill a process of the pair, and require that the others end by themselves and without an error.

        `gdrkit run` starts a short-lived helper that writes the emulated sysfs. If the helper was killed, the pair
        goes on, and another process is killed.
        """
        while running_ids := self.list_process_ids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(running_ids), signal.SIGKILL)
            wait_until(
                lambda: not self.list_process_ids() or self.is_complete(),
                "the end of a pair whose process was killed",
                timeout_s=END_TIMEOUT_S,
            )
        assert self._process.wait() in {0, -signal.SIGKILL}

    def close(self) -> None:
        """End all processes of the pair."""
        for process_id in self.list_process_ids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        self._process.wait()


def find_process_ids(environ_entry: str) -> list[int]:
    """Return the IDs of the processes whose environment contains this entry, ``NAME=VALUE``."""
    process_ids = []
    for folder in Path("/proc").glob("[0-9]*"):
        process_id = int(folder.name)
        if environ_entry.encode() in read_process_file(process_id, "environ").split(b"\0"):
            process_ids.append(process_id)
    return process_ids


def read_process_file(process_id: int, file_name: str) -> bytes:
    """Return the content of a file of /proc/PID, or no bytes if the process has ended."""
    try:
        return Path("/proc", str(process_id), file_name).read_bytes()
    except OSError:
        return b""


def list_leftovers(domain: str, temporary_folder: Path) -> list[str]:
    """Return the state folders, sockets and temporary files that the processes of a twin domain have left behind.

    The environment variable GDRKIT_TWINS_DOMAIN of a process names its domain.
    """
    state_folder = Path(f"/dev/shm/gdrkit-twins-{os.getuid()}")  # noqa: S108 - gdrkit run uses this folder.
    leftovers = [str(path) for path in state_folder.glob(f"{domain}*")] if state_folder.exists() else []
    leftovers += [line for line in Path("/proc/net/unix").read_text().splitlines() if f"/{domain}/" in line]
    return leftovers + [str(path) for path in temporary_folder.iterdir()]


@pytest.mark.timeout(120 + 4 * KILL_DURATION_S)
def test_kills_of_processes_leave_nothing_behind(tmp_path: Path, seed: int, evidence: Evidence) -> None:
    rng = random.Random(seed)
    domain = f"kills-{secrets.token_hex(6)}"
    environ = {**suites_environ(), "GDRKIT_TWINS_DOMAIN": domain, "TMPDIR": str(tmp_path)}
    kills_count = 0
    with contextlib.ExitStack() as cleanup:

        def start_pair() -> ProcessPair:
            return cleanup.enter_context(contextlib.closing(ProcessPair(environ)))

        pairs = [start_pair() for _ in range(PAIR_COUNT)]
        end_s = time.monotonic() + KILL_DURATION_S
        while time.monotonic() < end_s:
            # After a random time, the kill meets a pair that is starting or transferring.
            threading.Event().wait(rng.uniform(0, 2))
            pair_index = rng.randrange(PAIR_COUNT)
            pairs[pair_index].kill_until_ended(rng)
            pairs[pair_index] = start_pair()
            kills_count += 1
        for pair in pairs:
            pair.kill_until_ended(rng)
    # The next gdrkit run removes the folder of a gdrkit run that was killed.
    subprocess.run([*RUN_COMMAND, "true"], env=environ, check=True)
    assert find_process_ids(f"GDRKIT_TWINS_DOMAIN={domain}") == []
    assert list_leftovers(domain, tmp_path) == []
    evidence["kills"] = kills_count + PAIR_COUNT
    assert kills_count > 0
