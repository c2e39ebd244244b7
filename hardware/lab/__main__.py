"""`python -m hardware.lab`: run the cases on the twins, run them on a kernel's RDMA stack, and compare the results."""

from __future__ import annotations

import argparse
import compileall
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit.handles import Closeable
from gdrkit.install_paths import install_paths
from gdrkit.inventory import load_profile
from gdrkit.report import read_records
from gdrkit.text import format_count
from hardware.lab.errors import LabError
from hardware.lab.machine import Limits, Machine
from hardware.lab.options import add_machine_options, configure_machine
from hardware.lab.pairs import compare, find_missing_refusals, find_wrong_substrates, format_table

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

PROJECT_ROOT = Path(__file__).resolve().parents[2]
DEFAULT_CASES = (
    *("suites/contract/rdma", "suites/rdma", "suites/registration", "suites/property/test_cache_machine.py"),
    "suites/observe/test_perftest.py",
)
# If the guest is emulated, both runs of the default cases leave out these cases, because the transfer of their bytes
# would take 20 s. `nox -s suites` also runs these cases.
LARGE_CASES = (
    "rdma/test_first_light.py::test_remote_write_arrives_in_memory[64MiB",
    "rdma/test_first_light.py::test_remote_read_returns_memory[64MiB",
)
# Number of examples that each Hypothesis state machine runs. The number is small, because an example takes at least
# 0.5 s in the emulated guest.
EXAMPLE_COUNT = "2"
# The lab requires that at least this many cases pass both on the twins and on the kernel's RDMA stack.
AGREEING_CASES_MIN = 60

EXIT_FAILED, EXIT_SETUP_MISSING = 1, 3


def main() -> int:
    """Run the lab. The exit code is 0 if both runs passed with matching results, 3 if the lab cannot run, else 1."""
    options = _parse_options()
    os.environ.setdefault("GDRKIT_EXAMPLES", EXAMPLE_COUNT)
    options.output.mkdir(parents=True, exist_ok=True)
    records_file_by_run = {name: options.output / f"{name}.jsonl" for name in ("twin", "kernel")}
    for path in records_file_by_run.values():
        path.unlink(missing_ok=True)
    pytest_arguments = options.cases
    # If no argument names a file or folder of this project, all arguments are options for the default cases.
    names_cases = any((PROJECT_ROOT / argument.partition("::")[0]).exists() for argument in pytest_arguments)
    if not names_cases:
        pytest_arguments = [*pytest_arguments, *DEFAULT_CASES]
    try:
        # The machine is configured first, so that missing programs are reported before the slow steps.
        machine = None if options.here else configure_machine(options)
        if machine is not None and not machine.use_kvm and not names_cases:
            pytest_arguments = [*pytest_arguments, *(f"--deselect={case}" for case in LARGE_CASES)]
        twin_command = _make_pytest_command(
            records_file_by_run["twin"], pytest_arguments, ["--software", "--isolated"], []
        )
        if machine is None or machine.use_kvm:
            # The runs measure transfer rates, so neither may slow down the other.
            twin_exit_code = subprocess.call(twin_command, cwd=PROJECT_ROOT)
            if machine is None:
                kernel_exit_code = _run_here(records_file_by_run["kernel"], pytest_arguments, options)
            else:
                kernel_exit_code = _run_in_guest(machine, records_file_by_run["kernel"], pytest_arguments, options)
        else:
            # The rates of an emulated guest mean nothing, and the guest leaves most of one processor idle. So the cases
            # run on the twins at the same time. The guest reads the bytecode files through a cache, so they must not
            # change while it runs.
            for name in ("gdrkit", "suites", "hardware"):
                compileall.compile_dir(PROJECT_ROOT / name, quiet=1)
            with _BackgroundRun(twin_command) as twin_run:
                kernel_exit_code = _run_in_guest(machine, records_file_by_run["kernel"], pytest_arguments, options)
                _print_line("lab: the same cases on the twins")
                twin_exit_code = twin_run.finish()
    except LabError as error:
        _print_line(f"lab: {error}")
        return EXIT_SETUP_MISSING
    return _evaluate(records_file_by_run, [twin_exit_code, kernel_exit_code], options)


class _BackgroundRun(Closeable):
    """A command that runs in the background, at most until the end of its ``with`` block."""

    def __init__(self, command: Sequence[str]) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - close() closes it.
        self._process = subprocess.Popen(command, cwd=PROJECT_ROOT, stdout=self._output, stderr=subprocess.STDOUT)

    def finish(self) -> int:
        """Wait for the end of the command, print its output, and return its exit code."""
        exit_code = self._process.wait()
        self._output.seek(0)
        _print_line(self._output.read().decode(errors="replace").rstrip())
        return exit_code

    def close(self) -> None:
        """Terminate the command if it still runs."""
        self._process.terminate()
        self._process.wait()
        self._output.close()


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hardware.lab", description=main.__doc__)
    build_folder = PROJECT_ROOT / "build" / "lab"
    add_machine_options(parser)
    parser.add_argument("--output", type=Path, default=build_folder / "run", help="folder for the records")
    parser.add_argument(
        "--here", action="store_true", help="use the RDMA devices of this kernel, without a virtual machine"
    )
    parser.add_argument(
        "--agreeing-min",
        type=int,
        default=AGREEING_CASES_MIN,
        help="minimum number of cases that must pass in both runs",
    )
    parser.add_argument("cases", nargs="*", help=f"cases or options of pytest; default: {' '.join(DEFAULT_CASES)}")
    options, pytest_options = parser.parse_known_args()
    options.cases += pytest_options
    options.output = options.output.resolve()
    return options


def _make_pytest_command(
    records_file: Path, pytest_arguments: list[str], launch_options: list[str], pytest_options: list[str]
) -> list[str]:
    launcher = [sys.executable, "-m", "gdrkit", "run", *launch_options, "--"] if launch_options else []
    pytest_command = [sys.executable, "-m", "pytest", "-q", f"--records={records_file}"]
    return [*launcher, *pytest_command, *pytest_options, *pytest_arguments]


def _run_in_guest(
    machine: Machine, records_file: Path, pytest_arguments: list[str], options: argparse.Namespace
) -> int:
    """Run the cases in the virtual machine, and return the exit code of pytest."""
    pytest_options = ["--profile=lab", "--substrate=verbs=kernel_software,cuda=twin"]
    command = _make_pytest_command(
        records_file, pytest_arguments, ["--software", "--isolated", "--apis", "cuda"], pytest_options
    )
    inherited_variables = ("PYTHONPATH", "GDRKIT_TWINS_LIB", "GDRKIT_EXAMPLES")
    environ = {name: os.environ[name] for name in inherited_variables if name in os.environ}
    # The root file system of the guest is read-only, so Hypothesis gets another folder for its database.
    environ |= {"PYTHONDONTWRITEBYTECODE": "1", "HYPOTHESIS_STORAGE_DIRECTORY": str(options.output / "hypothesis")}
    # git takes seconds in the guest. So the guest gets the commit from the host, and the calls of git by
    # pytest-benchmark fail at once, because there is no repository for them.
    commit = install_paths().commit()
    environ |= {"GIT_DIR": os.devnull} | ({} if commit is None else {"GDRKIT_COMMIT": commit})
    export_lines = [f"export {name}={shlex.quote(value)}" for name, value in environ.items()]
    script_file = options.output / "cases.sh"
    script_file.write_text(
        "\n".join([*export_lines, f"cd {shlex.quote(str(PROJECT_ROOT))}", f"exec {shlex.join(command)}", ""])
    )
    accelerator = "KVM" if machine.use_kvm else "TCG (KVM is not usable here; TCG is slower, with the same results)"
    _print_line(f"lab: {machine.kernel_image.name} in a virtual machine by {accelerator}")
    return machine.run(
        script_file, output_folder=options.output, limits=Limits(boot_s=options.boot_limit_s, run_s=options.limit_s)
    )


def _run_here(records_file: Path, pytest_arguments: list[str], options: argparse.Namespace) -> int:
    """Run the cases on this kernel, and return the exit code of pytest."""
    has_nic = any(Path("/sys/class/infiniband").glob("*"))
    has_cuda = Path("/proc/driver/nvidia/version").exists()
    launch_options = [] if has_cuda else ["--software", "--isolated", "--apis", "cuda"]
    profile_options = [] if has_nic or has_cuda else ["--profile=lab"]
    command = _make_pytest_command(records_file, pytest_arguments, launch_options, profile_options)
    # rxe.sh creates two rxe devices, runs the command that follows, and removes the devices.
    setup_command = [] if has_nic else ["bash", str(Path(__file__).with_name("rxe.sh"))]
    _print_line("lab: the RDMA devices of this machine" if has_nic else "lab: rxe devices of this machine's kernel")
    try:
        return subprocess.run(
            [*setup_command, *command], cwd=PROJECT_ROOT, timeout=options.limit_s, check=False
        ).returncode
    except subprocess.TimeoutExpired as error:
        message = f"the cases did not end within {options.limit_s:g} s, and were killed"
        raise LabError(message) from error


def _evaluate(records_file_by_run: dict[str, Path], exit_codes: list[int], options: argparse.Namespace) -> int:
    """Print the comparison and all problems, and return the exit code."""
    runs_without_records = [
        name for name, path in records_file_by_run.items() if not path.exists() or not path.stat().st_size
    ]
    if runs_without_records:
        _print_line(f"lab: no records of the run on {' and '.join(runs_without_records)}; see its output above")
        return EXIT_FAILED
    pairs = compare(records_file_by_run["twin"], records_file_by_run["kernel"])
    _print_line(format_table(pairs))
    kernel_records = read_records(records_file_by_run["kernel"])
    agreeing_count = sum(pair.agrees for pair in pairs)
    differing_pairs = [pair for pair in pairs if pair.differs]
    problems = [f"{pair.case}: {pair.twin} on the twin, {pair.kernel} on this kernel" for pair in differing_pairs]
    problems += find_wrong_substrates(read_records(records_file_by_run["twin"]), frozenset({"twin"}))
    problems += find_wrong_substrates(kernel_records, frozenset({"kernel_software", "hardware"}))
    problems += find_missing_refusals(kernel_records, load_profile(kernel_records[0].profile))
    for record in kernel_records:
        for name, ratio in record.numbers.items():
            if name.endswith("_ratio"):
                _print_line(
                    f"lab: {record.case}: {name} {ratio:.2f}, median of {record.numbers.get('rounds_count', 1):g}"
                )
    refused_count, not_run_count = sum(pair.refused for pair in pairs), sum(not pair.ran_on_both for pair in pairs)
    _print_line(f"lab: {format_count(agreeing_count, 'case')} passed on both")
    _print_line(
        f"lab: {format_count(refused_count, 'case')} about device memory passed on the twin, "
        "and this kernel refused the memory"
    )
    _print_line(
        f"lab: {format_count(len(differing_pairs), 'case')} with different outcomes; "
        f"{not_run_count} did not run on both and are not counted"
    )
    runs_and_exit_codes = zip(records_file_by_run, exit_codes, strict=True)
    problems += [f"the run on {name} ended with exit code {code}" for name, code in runs_and_exit_codes if code]
    if agreeing_count < options.agreeing_min:
        problems.append(
            f"{format_count(agreeing_count, 'case')} passed on both, but at least {options.agreeing_min} must"
        )
    for problem in problems:
        _print_line(f"lab: {problem}")
    return EXIT_FAILED if problems else 0


def _print_line(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - the output of a command.


if __name__ == "__main__":
    sys.exit(main())
