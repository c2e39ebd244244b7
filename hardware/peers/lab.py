"""Runs of unmodified RDMA programs on Soft-RoCE in a virtual machine, and comparison of the outcomes with the twins."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit.install_paths import install_paths
from gdrkit.report import Verdict, read_records
from hardware.lab.errors import LabError
from hardware.lab.machine import Limits
from hardware.lab.options import configure_machine

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from gdrkit.report import Record

__all__ = ["Difference", "compare", "run_in_guest"]

_PROJECT_ROOT = Path(__file__).resolve().parents[2]
# hardware/lab/rxe.sh makes this device and gives its network interface this address. GID 1 is made from the address.
_GUEST_DEVICE_OPTIONS = ("--device", "rxe0", "--address", "10.9.0.1", "--gid-index", "1")
# Without KVM, the guest is emulated and slow, so each program gets more time in the guest.
_GUEST_TIMEOUT_S = 180.0
_PASS = Verdict.PASS.value
# Reasons why the twin lacks some features of Soft-RoCE. Each key is a tuple of prefixes. Tests whose names begin with
# one of them need the feature.
_ABSENCE_REASON_BY_PREFIXES = {
    (
        "tests.test_qpex.QpExTestCase.test_qp_ex_rc_atomic_write",
        "tests.test_qpex.QpExTestCase.test_qp_ex_rc_flush",
    ): "no NIC has atomic writes and flushes: in rdma-core 59, only providers/rxe/rxe.c implements them",
    ("tests.test_odp.",): "native/twins/DESIGN.md, Extended verbs: no on-demand paging",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """A program, or a test of rdma-core, that passes on the twin but not on the kernel, or the reverse.

    Attributes
    ----------
    name : str
        The program or the test.
    twin, kernel : str
        The outcome on the twin and on the kernel: ``pass``, or the reason why it did not pass.
    """

    name: str
    twin: str
    kernel: str

    @property
    def absence_reason(self) -> str:
        """The reason why the twin lacks the feature that the test needs, or an empty string."""
        reasons = (reason for prefixes, reason in _ABSENCE_REASON_BY_PREFIXES.items() if self.name.startswith(prefixes))
        return next(reasons, "") if self.twin.startswith("skip") else ""

    @property
    def is_defect_of_twin(self) -> bool:
        """Whether the kernel passes, the twin does not, and `absence_reason` is empty."""
        return self.kernel == _PASS and not self.absence_reason


def run_in_guest(options: argparse.Namespace, output_folder: Path) -> Path:
    """Run the programs in the guest and return the file of their records.

    Raises
    ------
    LabError
        The virtual machine cannot run, or did not end in time.
    """
    machine = configure_machine(options)
    output_folder.mkdir(parents=True, exist_ok=True)
    records_file = output_folder / f"{machine.kernel_image.name.partition('-')[2]}.jsonl"
    records_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "hardware.peers", "--here", *_GUEST_DEVICE_OPTIONS, "--records", str(records_file)]
    command += ["--timeout-s", str(_GUEST_TIMEOUT_S), "--only", options.only, "--debian-only"]
    if options.tests is not None:
        command += ["--python", options.python, "--tests", str(options.tests)]
    environ = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    commit = install_paths().commit()
    environ |= {} if commit is None else {"GDRKIT_COMMIT": commit}
    export_lines = [f"export {name}={shlex.quote(value)}" for name, value in environ.items()]
    script_file = output_folder / "peers.sh"
    script_file.write_text(
        "\n".join([*export_lines, f"cd {shlex.quote(str(_PROJECT_ROOT))}", f"exec {shlex.join(command)}", ""])
    )
    machine.run(
        script_file, output_folder=output_folder, limits=Limits(boot_s=options.boot_limit_s, run_s=options.limit_s)
    )
    return records_file


def compare(twin_file: Path, kernel_file: Path) -> list[Difference]:
    """Return every program and every test of rdma-core that passes in only one of two records files.

    The twin's records determine the order. Programs and tests that are missing in a file are left out.

    Raises
    ------
    LabError
        Tests of rdma-core ran on the twin, but no test ran on the kernel.
    """
    twin_records, kernel_records = list(read_records(twin_file)), list(read_records(kernel_file))
    if any(map(_get_test_outcomes, twin_records)) and not any(map(_get_test_outcomes, kernel_records)):
        outputs = [str(record.evidence["output"]) for record in kernel_records if "output" in record.evidence]
        message = (
            f"rdma-core's tests did not run on the kernel of {kernel_file.name}: {''.join(outputs) or 'no record'}"
        )
        raise LabError(message)
    twin_outcomes, kernel_outcomes = _parse_outcomes(twin_records), _parse_outcomes(kernel_records)
    common_names = [name for name in twin_outcomes if name in kernel_outcomes]
    differences = [Difference(name, twin_outcomes[name], kernel_outcomes[name]) for name in common_names]
    return [difference for difference in differences if (difference.twin == _PASS) != (difference.kernel == _PASS)]


def _parse_outcomes(records: Iterable[Record]) -> dict[str, str]:
    outcomes: dict[str, str] = {}
    for record in records:
        if test_outcomes := _get_test_outcomes(record):
            outcomes |= test_outcomes
        else:
            reasons_text = "; ".join(reason.text for reason in record.reasons)
            outcomes[record.case.removeprefix("peers::")] = _PASS if record.verdict is Verdict.PASS else reasons_text
    return outcomes


def _get_test_outcomes(record: Record) -> dict[str, str]:
    """Return the outcome of each test of rdma-core in a record. The result is empty for any other program."""
    tests = record.evidence.get("tests")
    return {str(name): str(outcome) for name, outcome in tests.items()} if isinstance(tests, dict) else {}
