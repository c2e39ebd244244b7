"""Run the cases on the GPUs of this machine, from a folder that `nox -s bundle` created.

    python3 FOLDER/gpu.py [--out OUT] [--tar FILE] [PART ...]

FOLDER contains this file as gpu.py. The program uses only the standard library and pip; FOLDER contains all other
packages. Packages that this Python lacks are installed into a temporary folder, which is removed at the end.

A part is a group of cases. Its records are written to OUT/PROFILE/PART.jsonl, where PROFILE is the profile of this
machine, and its output to OUT/logs/PART.log. A part that exceeds its time limit is killed, and the next part begins.
The outputs of `gdrkit facts`, `gdrkit topology` and `gdrkit doctor` are written to facts.json, topology.json and
doctor.json next to the records, where `gdrkit report OUT/PROFILE` reads them. If there is no RDMA device, verbs runs on
its software twin (a drop-in library that emulates the hardware), and every record says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PARTS", "Part", "main", "pack", "run_limited"]

BUNDLE_FOLDER = Path(__file__).resolve().parent
# The requirements that pip installs, because the cases need them.
PACKAGES = ("gdrkit[qualify]", "gdrkit-twins", "pyverbs")


@dataclass(frozen=True)
class Part:
    """A group of cases that run in one process.

    Attributes
    ----------
    cases : tuple of str
        Files and folders of the cases.
    limit_s : float
        Time limit, in seconds.
    is_measuring : bool
        Whether the cases are measurements. pytest gets other options for them.
    is_optional : bool
        Whether the part runs only if the command line names it.
    """

    cases: tuple[str, ...]
    limit_s: float = 120.0
    is_measuring: bool = False
    is_optional: bool = False

    @property
    def root_folder(self) -> str:
        """Root folder for pytest, relative to the data folder of the installed gdrkit package."""
        return self.cases[0].partition("/")[0]

    def pytest_options(self) -> list[str]:
        """Return the options of pytest for this part."""
        # Measurements print their numbers at once (-s). They have time limits of their own, so pytest must not print
        # the stacks after the time limit of an ordinary case (faulthandler_timeout).
        measuring_options = ["--benchmark-enable", "-s", "-o", "faulthandler_timeout=0"]
        return measuring_options if self.is_measuring else []


COST_MODULE_NAMES = ("cache_cost", "gpu_pool_cost", "import_cost", "path_speed", "ring_speed", "transfer_cost")
PARTS: dict[str, Part] = {
    "inventory": Part(("suites/inventory/test_this_machine.py",)),
    "first-light": Part(
        ("suites/rdma/test_first_light.py", "suites/rdma/test_reach.py", "suites/rdma/test_stale_keys.py")
    ),
    "visibility": Part(("suites/rdma/test_visibility.py",)),
    "usrbio": Part(("suites/usrbio/test_end_to_end.py", "suites/usrbio/test_bare_links.py"), limit_s=240),
    "registration": Part(("suites/registration",), limit_s=180),
    "throughput": Part(
        tuple(f"hardware/throughput/test_{name}.py" for name in ("copies", "nccl", "rdma")),
        limit_s=480,
        is_measuring=True,
    ),
    "files": Part(("hardware/throughput/test_files.py",), limit_s=240, is_measuring=True),
    "cufile": Part(("suites/cufile",), limit_s=240),
    "cufile-speed": Part(("suites/bench/test_cufile_speed.py",), limit_s=480, is_measuring=True),
    "cost": Part(tuple(f"suites/bench/test_{name}.py" for name in COST_MODULE_NAMES), limit_s=240, is_measuring=True),
    "gds": Part(("suites/gds",), limit_s=240),
    "contract": Part(("suites/contract",), limit_s=240),
    "share": Part(("suites/share",)),
    "sweep": Part(("suites/bench/test_storage_sweep.py",), limit_s=180, is_measuring=True),
    "storage": Part(("suites/bench/test_storage_speed.py",), limit_s=540, is_measuring=True),
    "all-devices": Part(("hardware/throughput/test_all_devices.py",), limit_s=240, is_measuring=True),
    "nccl": Part(("hardware/throughput/test_nccl.py",), limit_s=300, is_measuring=True, is_optional=True),
    "observe": Part(("suites/observe/test_gpu_programs.py",), limit_s=300),
    "model-files": Part(("suites/models",), limit_s=240),
    "models": Part(("suites/bench/test_model_speed.py",), limit_s=590, is_measuring=True, is_optional=True),
}
# The arguments of the gdrkit commands that describe the machine, by the name of the file that gets the output.
DESCRIBING_COMMANDS = {
    "facts.json": ("facts", "--json"),
    "topology.json": ("topology", "--json"),
    "doctor.json": ("doctor", "--json", "--read-only", "--any"),
}
# These variables turn off multicast in NCCL, torch and NVSHMEM. A multicast object that its owner does not release can
# make the GPUs of a host unusable, also for other users.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
EXIT_FAILED, EXIT_SETUP_MISSING = 1, 3
# After SIGABRT, a part must print its stacks within this time, in seconds.
ABORT_TIMEOUT_S = 5.0
# Number of log lines that are printed after a part that passed, and after one that failed.
LOG_LINE_COUNT, FAILED_LOG_LINE_COUNT = 12, 60


class SetupError(Exception):
    """A program or a wheel is missing on this machine or in the folder."""


def main() -> int:
    """Run the cases.

    The exit code is 0 if every case that ran passed, 1 if a case failed or a part was killed, and 3 if the packages
    cannot be installed.
    """
    default_part_names = [name for name, part in PARTS.items() if not part.is_optional]
    parser = argparse.ArgumentParser(prog="gpu.py", description=main.__doc__)
    parser.add_argument("--bundle", type=Path, default=BUNDLE_FOLDER, help="the folder that `nox -s bundle` made")
    parser.add_argument(
        "--extras", type=Path, help="folder of additional wheels; default: the folder extras of the bundle"
    )
    parser.add_argument("--out", type=Path, default=Path("reports", "baselines"), help="folder for the records")
    parser.add_argument("--tar", type=Path, help="archive (tar.gz) of OUT, replaced after each part")
    parser.add_argument(
        "--limit-s", type=float, help="time limit of each part in seconds; default: a limit for each part"
    )
    parser.add_argument("--cases", metavar="EXPRESSION", help="run only the cases that match, as with pytest -k")
    parser.add_argument(
        "--disk",
        type=Path,
        help="folder for the files of the parts sweep and storage; it needs 16 GB and must not be a tmpfs",
    )
    parser.add_argument("--software", action="store_true", help="use no hardware: every API runs on its software twin")
    optional_parts_text = " ".join(name for name in PARTS if name not in default_part_names)
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help=f"default: {' '.join(default_part_names)}; not in the default: {optional_parts_text}",
    )
    options = parser.parse_args()
    options.parts = options.parts or default_part_names
    unknown_part_names = [part for part in options.parts if part not in PARTS]
    if unknown_part_names:
        parser.error(f"PART must be one of {', '.join(PARTS)}, not {unknown_part_names[0]}")
    # SIGTERM raises SystemExit, so that the running part is killed and the temporary folder is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_FAILED))
    # No core dumps are written, because they can be as large as the memory of a GPU. The printed stacks are sufficient.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with tempfile.TemporaryDirectory(prefix="gdrkit-gpu-") as temporary_folder:
        # Cases that run as another user need access to the folder.
        Path(temporary_folder).chmod(0o755)
        try:
            site_folder = _install(options.bundle.resolve(), Path(temporary_folder, "site"))
        except SetupError as error:
            _print_line(f"gpu: {error}")
            return EXIT_SETUP_MISSING
        _install_extras(options.extras or options.bundle / "extras", site_folder)
        return _run_parts(options, site_folder, Path(temporary_folder))


def _install(bundle: Path, site_folder: Path) -> Path:
    """Install the packages that this Python lacks, and return their folder. A dry run of pip lists these packages."""
    wheels_folder = bundle / "wheels"
    if not any(wheels_folder.glob("gdrkit-*.whl")):
        message = f"{wheels_folder} has no wheel of gdrkit: run nox -s bundle to create the folder"
        raise SetupError(message)
    pip_command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--disable-pip-version-check"]
    pip_report_file = site_folder.with_suffix(".json")
    dry_run_command = [
        *pip_command,
        "--find-links",
        str(wheels_folder),
        "--dry-run",
        "--report",
        str(pip_report_file),
        *PACKAGES,
    ]
    if subprocess.call(dry_run_command) != 0:
        message = (
            f"the wheels in {wheels_folder} cannot be installed for Python {sys.version.split()[0]} at {sys.executable}"
        )
        raise SetupError(message)
    missing_packages = json.loads(pip_report_file.read_text())["install"]
    urls = [package["download_info"]["url"] for package in missing_packages]
    # In a URL, pip writes the plus sign of a local version as %2B.
    wheel_files = [str(wheels_folder / url.rpartition("/")[2].replace("%2B", "+")) for url in urls]
    versions_text = ", ".join(
        f"{package['metadata']['name']} {package['metadata']['version']}" for package in missing_packages
    )
    _print_line(f"gpu: installing {versions_text}")
    if subprocess.call([*pip_command, "--no-deps", "--no-compile", "--target", str(site_folder), *wheel_files]) != 0:
        message = "pip could not install the packages"
        raise SetupError(message)
    return site_folder


def _install_extras(extras_folder: Path, site_folder: Path) -> None:
    """Install every wheel in a folder without its dependencies. If this fails, continue without the wheels."""
    wheel_files = sorted(map(str, extras_folder.glob("*.whl")))
    if not wheel_files:
        _print_line(f"gpu: no wheels in {extras_folder}: cases that need additional packages will not run")
        return
    pip_command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--disable-pip-version-check"]
    if subprocess.call([*pip_command, "--no-deps", "--no-compile", "--target", str(site_folder), *wheel_files]) != 0:
        _print_line("gpu: pip could not install the additional packages: cases that need them will not run")
    else:
        _print_line(
            "gpu: additional packages: " + ", ".join(Path(wheel).name.partition("-")[0] for wheel in wheel_files)
        )


def _make_environment(options: argparse.Namespace, site_folder: Path, temporary_folder: Path) -> dict[str, str]:
    bundle = options.bundle.resolve()
    bundle_metadata = json.loads((bundle / "bundle.json").read_text())
    folders_by_variable = {
        "PYTHONPATH": [str(site_folder)],
        "LD_LIBRARY_PATH": [str(bundle / "lib"), str(site_folder / "gdrkit" / "usrbio" / "lib")],
    }
    path_variables = {
        name: os.pathsep.join([*folders, *filter(None, [os.environ.get(name)])])
        for name, folders in folders_by_variable.items()
    }
    settings = {"GDRKIT_COMMIT": bundle_metadata["commit"], "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    settings["HYPOTHESIS_STORAGE_DIRECTORY"] = str(temporary_folder / "hypothesis")
    if (bundle / "bench").is_dir():
        settings["GDRKIT_BENCH_PROGRAMS"] = str(bundle / "bench")
    if options.disk:
        settings["GDRKIT_BENCH_STORAGE_FOLDER"] = str(options.disk.resolve())
    if options.software:
        # The default size of 4 GiB would take minutes on the twins, and prove no more than 64 MiB.
        settings["GDRKIT_BENCH_STORAGE_MIB"] = os.environ.get("GDRKIT_BENCH_STORAGE_MIB", "64")
    return {**os.environ, **path_variables, **settings, **NO_MULTICAST}


def _run_parts(options: argparse.Namespace, site_folder: Path, temporary_folder: Path) -> int:
    environment = _make_environment(options, site_folder, temporary_folder)
    data_folder = site_folder / "gdrkit" / "_data"
    launcher, substrate_option = _choose_launcher(uses_only_twins=options.software)
    placeholder_by_path = {site_folder: "{site}", options.bundle.resolve(): "{bundle}"}
    json_by_file_name = {
        file_name: _describe_machine(arguments, launcher, environment, temporary_folder, placeholder_by_path)
        for file_name, arguments in DESCRIBING_COMMANDS.items()
    }
    log_folder = options.out / "logs"
    log_folder.mkdir(parents=True, exist_ok=True)
    exit_codes = []
    for part_name in options.parts:
        part = PARTS[part_name]
        existing_cases = [str(data_folder / case) for case in part.cases if (data_folder / case).exists()]
        if not existing_cases:
            _print_line(f"gpu: {part_name}: the installed gdrkit has none of these cases")
            continue
        records_file = temporary_folder / f"{part_name}.jsonl"
        command = [*launcher, sys.executable, "-m", "pytest", "-c", str(data_folder / "suites" / "pytest.ini")]
        command += [
            f"--rootdir={data_folder / part.root_folder}",
            "-q",
            "-rfE",
            "--tb=short",
            "--substrate",
            substrate_option,
        ]
        command += [
            "--records",
            str(records_file),
            "--command",
            f"gpu.py {part_name}",
            *part.pytest_options(),
            *existing_cases,
        ]
        if options.cases:
            command += ["-k", options.cases]
        start_s = time.monotonic()
        _print_line(f"\ngpu: {part_name}")
        log_file = log_folder / f"{part_name}.log"
        exit_codes.append(
            run_limited(command, environment, temporary_folder, log_file, options.limit_s or part.limit_s)
        )
        _print_log_end(log_file, FAILED_LOG_LINE_COUNT if exit_codes[-1] else LOG_LINE_COUNT)
        _print_line(f"gpu: {part_name}: exit {exit_codes[-1]} after {time.monotonic() - start_s:.0f} s")
        profile_folder = _move_records(records_file, options.out)
        if profile_folder:
            for file_name, json_text in json_by_file_name.items():
                if json_text:
                    (profile_folder / file_name).write_text(json_text)
        if options.tar:
            pack(options.out, options.tar)
    return EXIT_FAILED if any(exit_codes) else 0


def _choose_launcher(*, uses_only_twins: bool) -> tuple[list[str], str]:
    """Return the first words of each command (empty without a twin), and the value of the option --substrate."""
    run_command = [sys.executable, "-m", "gdrkit", "run", "--software", "--isolated"]
    if uses_only_twins:
        _print_line("gpu: every API runs on its software twin")
        return [*run_command, "--"], "software"
    if any(Path("/sys/class/infiniband").glob("*")):
        _print_line("gpu: verbs runs on the RDMA devices of this machine")
        return [], "cuda=hardware"
    _print_line("gpu: no RDMA device: verbs runs on its software twin")
    return [*run_command, "--apis", "verbs", "--"], "verbs=twin,cuda=hardware"


def _describe_machine(
    arguments: tuple[str, ...],
    launcher: list[str],
    environment: dict[str, str],
    folder: Path,
    placeholder_by_path: dict[Path, str],
) -> str:
    """Return the JSON that a command of gdrkit prints, with each path in `placeholder_by_path` replaced.

    Return an empty text if the command failed.
    """
    command = [*launcher, sys.executable, "-m", "gdrkit", *arguments]
    completed = subprocess.run(command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    if completed.returncode:
        _print_line(f"gpu: gdrkit {' '.join(arguments)} ended with exit code {completed.returncode}")
        return ""
    json_text = completed.stdout
    for path, placeholder in placeholder_by_path.items():
        json_text = json_text.replace(f"{path}/", f"{placeholder}/")
    return json_text


def run_limited(command: list[str], environment: dict[str, str], folder: Path, log_file: Path, limit_s: float) -> int:
    """Run a command in `folder`, write its output to the log, and return its exit code.

    A command that exceeds `limit_s` seconds is killed. The exit code is then the negative number of the signal.
    """
    with log_file.open("wb") as output:
        # Python imports first from the current folder. If that folder were a checkout of gdrkit, its native modules
        # would be missing, so the command runs in `folder`.
        process = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            _print_line(f"gpu: killed after {limit_s:g} s; the log has the stacks")
            # SIGABRT makes the processes of the group print their stacks.
            os.killpg(process.pid, signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ABORT_TIMEOUT_S)
            return process.poll() or -signal.SIGKILL
        finally:
            # These lines also run when SIGTERM ends this program.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _print_log_end(log_file: Path, line_count: int) -> None:
    """Print the last `line_count` lines of the output of a part."""
    lines = log_file.read_text(errors="replace").splitlines()
    for line in lines[-line_count:]:
        _print_line(f"  | {line}")


def pack(output_folder: Path, archive: Path) -> None:
    """Write the folder `output_folder` into an archive. A complete new archive replaces an existing one."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    new_archive = archive.with_name(archive.name + ".new")
    with tarfile.open(new_archive, "w:gz") as tar:
        tar.add(output_folder, arcname="records")
    new_archive.replace(archive)


def _move_records(records_file: Path, output_folder: Path) -> Path | None:
    """Move the records to the folder of their profile, print a summary, and return that folder.

    Return None if there is no records file.
    """
    if not records_file.exists():
        _print_line("gpu: no record was written")
        return None
    records = [json.loads(line) for line in records_file.read_text().splitlines()]
    moved_file = Path(output_folder, str(records[0]["profile"]), records_file.name)
    moved_file.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(records_file, moved_file)
    verdict_counts = Counter(record["verdict"] for record in records)
    _print_line(
        f"gpu: {moved_file}: " + ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdict_counts.items()))
    )
    unmet_needs = Counter(
        f"{reason['need']}: {reason['text']}"
        for record in records
        for reason in record["reasons"]
        if record["verdict"] == "not_run"
    )
    for need_text, count in unmet_needs.items():
        _print_line(f"  {count} x not run: {need_text}")
    cases_by_failure: dict[str, list[str]] = {}
    for record in records:
        if record["verdict"] == "fail":
            cases_by_failure.setdefault(record["reasons"][0]["text"], []).append(record["case"])
        _print_numbers(record)
    for failure_text, cases in cases_by_failure.items():
        more_text = f" and {len(cases) - 1} more" if len(cases) > 1 else ""
        _print_line(f"  fail: {cases[0]}{more_text}: {failure_text}")
    return moved_file.parent


def _print_numbers(record: dict[str, object]) -> None:
    """Print the medians, percentages and ratios of a record.

    If an API of the measurement ran on software, print only a line that says so.
    """
    numbers, substrate = record["numbers"], record["substrate"]
    if not isinstance(numbers, dict) or not isinstance(substrate, dict) or not numbers:
        return
    evidence = record["evidence"]
    apis = evidence.get("measured_apis", substrate) if isinstance(evidence, dict) else substrate
    if any(substrate.get(api) != "hardware" for api in apis):
        _print_line(f"  {record['case']}: measured on {substrate}, so the numbers do not describe this machine")
        return
    printed_numbers = {key: value for key, value in numbers.items() if key.endswith(("_median", "_percent", "_ratio"))}
    _print_line(f"  {record['case']}: " + ", ".join(f"{key} {value:.4g}" for key, value in printed_numbers.items()))


def _print_line(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
