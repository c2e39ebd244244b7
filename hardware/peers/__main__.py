"""`python -m hardware.peers`: run stock RDMA programs on the software twins, or on the RDMA device of this machine."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit.report import Record, Verdict, append_record
from hardware.lab.errors import LabError
from hardware.lab.options import add_machine_options
from hardware.peers.cuda_programs import list_cuda_programs
from hardware.peers.cuda_python import format_share_table, join_results, run_cuda_python
from hardware.peers.lab import Difference, compare, run_in_guest
from hardware.peers.programs import list_debian_programs
from hardware.peers.python_programs import list_python_programs
from hardware.peers.rdma_core import run_tests
from hardware.peers.records import (
    format_table,
    make_program_record,
    make_record,
    query_debian_version,
    query_pypi_version,
)
from hardware.peers.run import TIMEOUT_S, DeviceUnderTest, run_program
from hardware.peers.speed import ProgramFailedError, make_speed_numbers, make_speed_record, measure_speed

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_BUILD_FOLDER = Path(__file__).resolve().parents[2] / "build" / "peers"
EXIT_FAILED, EXIT_SETUP_MISSING = 1, 3


def main() -> int:
    """Run the programs.

    The exit code is 0 if every program passed, 1 if a program failed or passed only on the kernel (--lab), and 3 if
    the lab cannot run.
    """
    options = _parse_options()
    if options.records is None:
        options.records = _BUILD_FOLDER / "records.jsonl"
    options.records.parent.mkdir(parents=True, exist_ok=True)
    options.records.unlink(missing_ok=True)
    if options.speed:
        return _compare_speed(options)
    if options.gpu_results is not None:
        return _compare_with_gpu(options)
    failures_count = _run_programs(options)
    if options.lab:
        try:
            kernel_records = run_in_guest(options, _BUILD_FOLDER)
            differences = compare(options.records, kernel_records)
        except LabError as error:
            _print_line(f"peers: {error}")
            return EXIT_SETUP_MISSING
        failures_count += _report_differences(differences, kernel_records.stem)
    return EXIT_FAILED if failures_count else 0


def _compare_speed(options: argparse.Namespace) -> int:
    """Measure the speed of the twin, write one record, and return the exit code."""
    # getloadavg()[0] is the load average of the last minute.
    begin_s, load_before = time.monotonic(), os.getloadavg()[0]
    try:
        values_by_figure = measure_speed(_make_device_under_test(options), _print_line)
    except ProgramFailedError as error:
        _print_line(f"peers: {error}")
        return EXIT_FAILED
    load_averages = (load_before, os.getloadavg()[0])
    record = make_speed_record(values_by_figure, load=load_averages, duration_s=time.monotonic() - begin_s)
    append_record(options.records, record)
    for name, number in make_speed_numbers(values_by_figure).items():
        _print_line(f"{name} {number:.3f}")
    _print_line("".join(reason.text for reason in record.reasons) or "every goal is reached")
    return 0 if record.verdict is Verdict.PASS else EXIT_FAILED


def _compare_with_gpu(options: argparse.Namespace) -> int:
    """Run the tests of cuda-python on the twin, join the results, write one record, and return the exit code."""
    begin_s = time.monotonic()
    results_file = options.records.with_suffix(".cases")
    run_cuda_python(options.python, options.tests, _make_device_under_test(options), results_file)
    joined_results = join_results(options.gpu_results, results_file)
    numbers = {
        "counted_count": float(len(joined_results.counted_cases)),
        "passed_count": float(joined_results.passed_count),
    }
    numbers |= {
        "passed_percent": joined_results.share_percent,
        # Number of cases that pass on the twin but fail on the GPU, because the twin accepts more.
        "kinder_count": float(len(joined_results.cases_passing_only_on_twin)),
    }
    # A record must not contain paths of this machine, so words replace them.
    environment_folder = str(Path(options.python).parents[1])
    failure_text_by_case = {
        case: failure_text.replace(str(options.tests.resolve()), "TESTS").replace(environment_folder, "ENVIRONMENT")
        for case, failure_text in joined_results.failure_text_by_case.items()
    }
    evidence: dict[str, object] = {
        "gpu": dict(joined_results.gpu_machine),
        "twin": dict(joined_results.twin_machine),
        "not_passed": failure_text_by_case,
    }
    record = make_record(
        "cuda-python's tests",
        failure=joined_results.failure,
        evidence=evidence,
        numbers=numbers,
        substrate="twin",
        apis=("cuda", "cufile"),
        duration_s=time.monotonic() - begin_s,
    )
    append_record(options.records, record)
    _print_line(format_share_table(joined_results))
    _print_line(f"peers: {joined_results.failure or 'the twin passes'}")
    return EXIT_FAILED if joined_results.failure else 0


def _make_device_under_test(options: argparse.Namespace) -> DeviceUnderTest:
    launcher = () if options.here else (str(Path(sys.executable).with_name("gdrkit")), "run", "--software")
    return DeviceUnderTest(options.device, options.address, options.gid_index, launcher, options.timeout_s)


def _run_programs(options: argparse.Namespace) -> int:
    """Run the chosen programs, print the table, write the records, and return how many programs failed."""
    device_under_test = _make_device_under_test(options)
    substrate = "kernel_software" if options.here else "twin"
    programs = list_cuda_programs(options.python) if options.cuda else list_debian_programs()
    if options.python and not options.debian_only and not options.cuda:
        programs += list_python_programs(options.python)
    rows = []
    failures_count = 0
    for program in programs:
        if options.only not in program.name:
            continue
        version = query_debian_version(program.package) or query_pypi_version(options.python, program.package)
        outcome = run_program(program, device_under_test)
        record = make_program_record(program, outcome, version=version, substrate=substrate)
        append_record(options.records, record)
        failures_count += record.verdict is not Verdict.PASS
        rows.append(
            (
                program.name,
                version,
                _format_byte_count(outcome.moved_bytes),
                program.data_check,
                outcome.failure or "pass",
            )
        )
        _print_line("  ".join(rows[-1]))
    if options.tests is not None and options.only in "rdma-core's tests":
        record, row = _run_rdma_core(options, device_under_test, substrate)
        append_record(options.records, record)
        failures_count += record.verdict is not Verdict.PASS
        rows.append(row)
    _print_line("\n" + format_table(rows))
    _print_line(f"{len(rows) - failures_count} of {len(rows)} programs passed on {substrate}")
    return failures_count


def _report_differences(differences: Sequence[Difference], kernel_version: str) -> int:
    """Print the differences between the twin and a kernel, and return how many are defects of the twin."""
    defects = [difference for difference in differences if difference.is_defect_of_twin]
    for difference in differences:
        reason_suffix = f" ({difference.absence_reason})" if difference.absence_reason else ""
        outcomes_text = f"{difference.twin} on the twin, {difference.kernel} on Soft-RoCE of {kernel_version}"
        _print_line(f"peers: {difference.name}: {outcomes_text}{reason_suffix}")
    _print_line(
        f"peers: {len(differences)} differ from Soft-RoCE of {kernel_version}; {len(defects)} are defects of the twin"
    )
    return len(defects)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hardware.peers", description=main.__doc__)
    parser.add_argument("--python", default="", help="interpreter of an environment with nixl, mooncake and pyverbs")
    parser.add_argument(
        "--tests",
        type=Path,
        help="folder of rdma-core's tests, of the same version as pyverbs; with --gpu-results: of cuda-python's tests",
    )
    parser.add_argument("--cuda", action="store_true", help="run only the programs with GPU memory")
    parser.add_argument(
        "--gpu-results",
        type=Path,
        help="file of the results of cuda-python's tests on a GPU: run only these tests on the twin, and compare",
    )
    parser.add_argument("--only", default="", help="run only the programs whose name contains this text")
    parser.add_argument("--records", type=Path, help="write one record for each program to this file")
    parser.add_argument("--here", action="store_true", help="use the RDMA device of this machine, without twins")
    parser.add_argument("--device", default="twin0", help="name of the RDMA device (default: %(default)s)")
    parser.add_argument("--address", default="127.0.0.1", help="IP address of the device (default: %(default)s)")
    parser.add_argument(
        "--gid-index", type=int, default=1, help="index of the device's RoCE GID (default: %(default)s)"
    )
    parser.add_argument(
        "--timeout-s", type=float, default=TIMEOUT_S, help="time limit of each program (default: %(default)s)"
    )
    parser.add_argument("--debian-only", action="store_true", help="do not run the programs of PyPI")
    parser.add_argument(
        "--speed", action="store_true", help="only measure the speed of the twin, and compare it with TCP and memcpy"
    )
    parser.add_argument(
        "--lab", action="store_true", help="afterwards run the programs on Soft-RoCE of a kernel, and compare"
    )
    add_machine_options(parser)
    # All programs together have one hour, because a guest without KVM is emulated and slow. (The limit of a single
    # program there is _GUEST_TIMEOUT_S in lab.py.) The time in a guest with KVM was never measured.
    parser.set_defaults(limit_s=3600.0)
    return parser.parse_args()


def _run_rdma_core(
    options: argparse.Namespace, device_under_test: DeviceUnderTest, substrate: str
) -> tuple[Record, tuple[str, str, str, str, str]]:
    """Run rdma-core's tests. Return their record and their row of the table."""
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gdrkit-peers-") as folder:
        results = run_tests(options.python, options.tests, device_under_test, Path(folder))
    outcome_by_failed_test = {
        test: outcome for test, outcome in results.outcomes.items() if outcome.startswith(("fail", "error", "started"))
    }
    failure = (
        ""
        if results.outcomes and not outcome_by_failed_test
        else f"{len(outcome_by_failed_test)} of {len(results.outcomes)} tests failed"
    )
    numbers = {f"tests_{name}_count": float(results.count(name)) for name in ("pass", "skip", "fail", "error")}
    numbers["tests_run_count"] = float(len(results.outcomes))
    evidence: dict[str, object] = {"tests": dict(results.outcomes)} | ({"output": results.output} if failure else {})
    record = make_record(
        "rdma-core's tests",
        failure=failure,
        evidence=evidence,
        numbers=numbers,
        substrate=substrate,
        duration_s=time.monotonic() - begin_s,
    )
    result_text = f"{results.count('pass')} pass, {results.count('skip')} skipped, {len(outcome_by_failed_test)} fail"
    version = query_pypi_version(options.python, "pyverbs")
    return record, ("rdma-core's tests", version, _format_byte_count(results.moved_bytes), "by the tests", result_text)


def _format_byte_count(moved_bytes: int | None) -> str:
    return "not counted" if moved_bytes is None else f"{moved_bytes:,}"


def _print_line(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - the output of a command.


if __name__ == "__main__":
    sys.exit(main())
