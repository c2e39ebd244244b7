"""Runs of rdma-core's own tests on the verbs twin or an RDMA device. The source distribution of pyverbs has the tests.

The tests must have the same version as the installed pyverbs. All tests run in one process.
The outcome of a test is pass, skip (with the reason that the test gives), fail or error.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit.host import die_with_parent
from hardware.peers.twin_report import read_moved_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hardware.peers.run import DeviceUnderTest

__all__ = ["RdmaCoreResults", "get_library_folder", "run_tests", "unpack_tests"]

TIMEOUT_S = 900.0
_CHILD_SCRIPT = Path(__file__).with_name("rdma_core_child.py")


@dataclass(frozen=True, slots=True)
class RdmaCoreResults:
    """The results of rdma-core's tests.

    Attributes
    ----------
    outcomes : mapping
        For each test, ``pass``, ``fail``, ``error`` or ``skip: `` and the reason.
    moved_bytes : int or None
        Number of bytes that the twin moved. None without a twin, because only the twin counts them.
    output : str
        The end of what the tests printed.
    """

    outcomes: Mapping[str, str]
    moved_bytes: int | None
    output: str

    def count(self, outcome: str) -> int:
        """Return the number of tests with this outcome: ``pass``, ``fail``, ``error`` or ``skip``."""
        return sum(test_outcome.partition(":")[0] == outcome for test_outcome in self.outcomes.values())


def unpack_tests(archive: Path, folder: Path) -> Path:
    """Unpack the tests in a source distribution of pyverbs into `folder`, and return the folder of their modules."""
    with tarfile.open(archive) as open_archive:
        members = [
            member for member in open_archive.getmembers() if "/rdma-core/tests/" in member.name and member.isfile()
        ]
        open_archive.extractall(folder, members=members, filter="data")
    return next(folder.glob("*/rdma-core/tests"))


def get_library_folder(tests: Path) -> Path:
    """Return the folder for rdma-core's libraries, which ``nox -s peers -- --lab`` builds in the version of the tests.

    pyverbs needs these libraries where no twin replaces them, because it cannot load an older libibverbs, such as the
    library of the distribution.
    """
    return tests.with_name("rdma-core") / "lib"


def run_tests(python: str, tests: Path, device_under_test: DeviceUnderTest, folder: Path) -> RdmaCoreResults:
    """Run the tests in the folder `tests` in a child process on `device_under_test`, and return their results.

    `python` is the interpreter of an environment that has pyverbs of the same version as the tests. The results are
    also kept in `folder`.
    """
    results_file, report_file = folder / "results.jsonl", folder / "rdma-core.json"
    environ = dict(os.environ)
    libraries_folder = get_library_folder(tests)
    if not device_under_test.launcher and libraries_folder.exists():
        environ["LD_LIBRARY_PATH"] = str(libraries_folder)
    if device_under_test.launcher:
        environ["PATH"] = f"{_write_rdma_program(folder, device_under_test.device)}{os.pathsep}{environ['PATH']}"
    launcher = (*device_under_test.launcher, f"--report={report_file}", "--") if device_under_test.launcher else ()
    command = [
        *launcher,
        python,
        str(_CHILD_SCRIPT),
        str(tests),
        str(results_file),
        device_under_test.device,
        str(device_under_test.gid_index),
    ]
    try:
        completed = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
            cwd=tests,
            env=environ,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )
        output = completed.stdout + completed.stderr
    except subprocess.TimeoutExpired:
        output = f"the tests did not end within {TIMEOUT_S:g} s"
    outcomes: dict[str, str] = {}
    for line in results_file.read_text().splitlines() if results_file.exists() else []:
        result = json.loads(line)
        outcomes[result["test"]] = result["outcome"]
    moved_bytes = read_moved_bytes(report_file) if device_under_test.counts_bytes else None
    return RdmaCoreResults(outcomes, moved_bytes, output[-2000:])


def _write_rdma_program(folder: Path, device: str) -> Path:
    """Write a program `rdma` that prints what ``rdma link show -j`` would print for the twin, and return its folder.

    The tests call the `rdma` of iproute2 to find the network interface of the device. iproute2 asks the kernel by
    netlink, and the kernel does not know the twins. A twin is reached by the addresses of this machine, so the written
    program prints the interface lo.
    """
    programs_folder = folder / "bin"
    programs_folder.mkdir()
    link_row = {"ifname": device, "port": 1, "state": "ACTIVE", "netdev": "lo"}
    program = programs_folder / "rdma"
    program.write_text(f"#!/bin/sh\necho '{json.dumps([link_row])}'\n")
    program.chmod(0o755)
    return programs_folder
