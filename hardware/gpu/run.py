"""Run the cases on the GPUs of this machine, from a folder that `nox -s bundle` made.

    python3 FOLDER/gpu.py [--out DIR] [--tar FILE] [PART ...]

This program uses only the standard library and pip. The folder contains everything else that is needed. Packages that
this Python lacks are installed into a temporary folder, which is removed at the end. Each part writes one records file,
OUT/PROFILE/PART.jsonl, and its output, OUT/logs/PART.log. It has its own time limit, after which it is ended and the
next part begins. The facts of the machine are beside the records in facts.json, for `gdrkit report OUT/PROFILE`. If
there is no RDMA device, verbs runs on its software twin, and every record says so.
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

BUNDLE = Path(__file__).resolve().parent
WANTED = ("gdrkit[qualify]", "gdrkit-twins", "pyverbs")


@dataclass(frozen=True)
class Part:
    """A part: its cases, its time limit in seconds, and whether it measures.

    Measuring cases have their own limits, and print numbers as soon as they have them.
    """

    cases: tuple[str, ...]
    limit_s: float = 120.0
    is_measuring: bool = False
    is_named: bool = False  # The part runs only if the command line names it.

    @property
    def root(self) -> str:
        """The folder of pytest's root, relative to that of the installed project."""
        return self.cases[0].partition("/")[0]

    def options(self) -> list[str]:
        """Return the options of pytest for this part."""
        measuring = ["--benchmark-enable", "-s", "-o", "faulthandler_timeout=0"]
        return measuring if self.is_measuring else []


COSTS = ("cache_cost", "import_cost", "path_speed", "ring_speed")
PARTS: dict[str, Part] = {
    "inventory": Part(("suites/inventory/test_this_machine.py",)),
    "first-light": Part(("suites/rdma/test_first_light.py", "suites/rdma/test_stale_keys.py")),
    "usrbio": Part(("suites/usrbio/test_end_to_end.py", "suites/usrbio/test_bare_links.py"), limit_s=240),
    "registration": Part(("suites/registration",), limit_s=180),
    "throughput": Part(
        tuple(f"hardware/throughput/test_{name}.py" for name in ("copies", "nccl", "rdma")),
        limit_s=480,
        is_measuring=True,
    ),
    "files": Part(("hardware/throughput/test_files.py",), limit_s=240, is_measuring=True),
    "cufile": Part(("suites/cufile",), limit_s=240),
    "cost": Part(tuple(f"suites/bench/test_{name}.py" for name in COSTS), limit_s=240, is_measuring=True),
    "gds": Part(("suites/gds",), limit_s=240),
    "contract": Part(("suites/contract",), limit_s=240),
    "share": Part(("suites/share",)),
    "sweep": Part(("suites/bench/test_storage_sweep.py",), limit_s=180, is_measuring=True),
    "storage": Part(("suites/bench/test_storage_speed.py",), limit_s=540, is_measuring=True),
    "nccl": Part(("hardware/throughput/test_nccl.py",), limit_s=300, is_measuring=True, is_named=True),
}
# A multicast object that its owner does not release can make the GPUs of a host unusable, also for other users.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
FAILED, SETUP_MISSING = 1, 3
# An aborted part has this time, in seconds, to print its stacks.
LAST_WORDS_S = 5.0
LINES_SHOWN, LINES_SHOWN_FAILED = 12, 60


class SetupError(Exception):
    """A program or a wheel is missing on this machine or in the folder."""


def main() -> int:
    """0: everything that ran passed; 1: something failed; 3: it could not start."""
    usual = [name for name, part in PARTS.items() if not part.is_named]
    parser = argparse.ArgumentParser(prog="gpu.py", description=main.__doc__)
    parser.add_argument("--bundle", type=Path, default=BUNDLE, help="the folder that `nox -s bundle` made")
    parser.add_argument("--extras", type=Path, help="a folder of more wheels; default: extras in the bundle")
    parser.add_argument("--out", type=Path, default=Path("reports", "baselines"), help="below it the records go")
    parser.add_argument("--tar", type=Path, help="everything in OUT, also as this file, written anew after each part")
    parser.add_argument("--limit-s", type=float, help="how long a part may take, instead of its own time")
    parser.add_argument("--disk", type=Path, help="where sweep and storage put their files: 16 GB, no tmpfs")
    parser.add_argument("--software", action="store_true", help="no hardware at all: every API on its software twin")
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"default: {' '.join(usual)}; also: {' '.join(PARTS.keys() - usual)}"
    )
    options = parser.parse_args()
    options.parts = options.parts or usual
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"no part {unknown[0]}; there are {', '.join(PARTS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(FAILED))
    # The stacks of an aborted process are sufficient. The core dump of a process with a device is as large as its
    # memory.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with tempfile.TemporaryDirectory(prefix="gdrkit-gpu-") as folder:
        # Cases that run as another user need access to the folder.
        Path(folder).chmod(0o755)
        try:
            site = _install(options.bundle.resolve(), Path(folder, "site"))
        except SetupError as error:
            _say(f"gpu: {error}")
            return SETUP_MISSING
        _install_extras(options.extras or options.bundle / "extras", site)
        return _run(options, site, Path(folder))


def _install(bundle: Path, site: Path) -> Path:
    """Install the packages that this Python lacks, as listed by a dry run of pip."""
    wheels = bundle / "wheels"
    if not any(wheels.glob("gdrkit-*.whl")):
        message = f"no wheel of gdrkit in {wheels}: make the folder by nox -s bundle"
        raise SetupError(message)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--disable-pip-version-check"]
    report = site.with_suffix(".json")
    asked = [*pip, "--find-links", str(wheels), "--dry-run", "--report", str(report), *WANTED]
    if subprocess.call(asked) != 0:
        message = f"the wheels in {wheels} do not fit Python {sys.version.split()[0]} at {sys.executable}"
        raise SetupError(message)
    lacking = json.loads(report.read_text())["install"]
    chosen = [str(wheels / each["download_info"]["url"].rpartition("/")[2].replace("%2B", "+")) for each in lacking]
    _say(
        "gpu: installing " + ", ".join(f"{each['metadata']['name']} {each['metadata']['version']}" for each in lacking)
    )
    if subprocess.call([*pip, "--no-deps", "--no-compile", "--target", str(site), *chosen]) != 0:
        message = "pip could not install them"
        raise SetupError(message)
    return site


def _install_extras(extras: Path, site: Path) -> None:
    """Install every wheel in the folder without its dependencies. If the installation fails, continue without them."""
    wheels = sorted(map(str, extras.glob("*.whl")))
    if not wheels:
        _say(f"gpu: no wheels in {extras}: cases that need more than gdrkit does will not run")
        return
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--disable-pip-version-check"]
    if subprocess.call([*pip, "--no-deps", "--no-compile", "--target", str(site), *wheels]) != 0:
        _say("gpu: going on without the extras: their cases will not run")
    else:
        _say("gpu: with " + ", ".join(Path(each).name.partition("-")[0] for each in wheels))


def _environment(options: argparse.Namespace, site: Path, folder: Path) -> dict[str, str]:
    bundle = options.bundle.resolve()
    about = json.loads((bundle / "bundle.json").read_text())
    paths = {
        "PYTHONPATH": [str(site)],
        "LD_LIBRARY_PATH": [str(bundle / "lib"), str(site / "gdrkit" / "usrbio" / "lib")],
    }
    joined = {name: os.pathsep.join([*mine, *filter(None, [os.environ.get(name)])]) for name, mine in paths.items()}
    kept = {"GDRKIT_COMMIT": about["commit"], "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    kept["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder / "hypothesis")
    if (bundle / "bench").is_dir():
        kept["GDRKIT_BENCH_PROGRAMS"] = str(bundle / "bench")
    if options.disk:
        kept["GDRKIT_BENCH_STORAGE_FOLDER"] = str(options.disk.resolve())
    if options.software:
        # Four gigabytes take minutes on twins, and show nothing more.
        kept["GDRKIT_BENCH_STORAGE_MIB"] = os.environ.get("GDRKIT_BENCH_STORAGE_MIB", "64")
    return {**os.environ, **joined, **kept, **NO_MULTICAST}


def _run(options: argparse.Namespace, site: Path, folder: Path) -> int:
    environment = _environment(options, site, folder)
    data = site / "gdrkit" / "_data"
    launch, substrate = _launch(is_software=options.software)
    facts = _facts(launch, environment, folder, places={site: "{site}", options.bundle.resolve(): "{bundle}"})
    logs = options.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    codes = []
    for name in options.parts:
        part = PARTS[name]
        there = [str(data / case) for case in part.cases if (data / case).exists()]
        if not there:
            _say(f"gpu: {name}: this version has no such cases")
            continue
        records = folder / f"{name}.jsonl"
        command = [*launch, sys.executable, "-m", "pytest", "-c", str(data / "suites" / "pytest.ini")]
        command += [f"--rootdir={data / part.root}", "-q", "-rfE", "--tb=short", "--substrate", substrate]
        command += ["--records", str(records), "--command", f"gpu.py {name}", *part.options(), *there]
        begun = time.monotonic()
        _say(f"\ngpu: {name}")
        log = logs / f"{name}.log"
        codes.append(run_limited(command, environment, folder, log, options.limit_s or part.limit_s))
        _show(log, LINES_SHOWN_FAILED if codes[-1] else LINES_SHOWN)
        _say(f"gpu: {name}: exit {codes[-1]} after {time.monotonic() - begun:.0f} s")
        kept = _keep(records, options.out)
        if kept and facts:
            (kept / "facts.json").write_text(facts)
        if options.tar:
            pack(options.out, options.tar)
    return FAILED if any(codes) else 0


def _launch(*, is_software: bool) -> tuple[list[str], str]:
    """Return the beginning of each command, and the substrate that the cases must find."""
    run = [sys.executable, "-m", "gdrkit", "run", "--software", "--isolated"]
    if is_software:
        _say("gpu: every API on its software twin")
        return [*run, "--"], "software"
    if any(Path("/sys/class/infiniband").glob("*")):
        _say("gpu: the RDMA devices of this machine")
        return [], "cuda=hardware"
    _say("gpu: no RDMA device: verbs on its software twin")
    return [*run, "--apis", "verbs", "--"], "verbs=twin,cuda=hardware"


def _facts(launch: list[str], environment: dict[str, str], folder: Path, places: dict[Path, str]) -> str:
    """Return the facts of this machine for the report of its records, without paths of temporary folders."""
    command = [*launch, sys.executable, "-m", "gdrkit", "facts", "--json"]
    asked = subprocess.run(command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    if asked.returncode:
        _say(f"gpu: no facts about this machine: gdrkit facts ended with {asked.returncode}")
        return ""
    text = asked.stdout
    for place, name in places.items():
        text = text.replace(f"{place}/", f"{name}/")
    return text


def run_limited(command: list[str], environment: dict[str, str], folder: Path, log: Path, limit_s: float) -> int:
    """Run a command, write its output to the log, and return its exit code.

    The code is minus a signal if the command was ended after `limit_s` seconds.
    """
    with log.open("wb") as file:
        # The command runs in another folder: Python looks for modules in the current one first, and would find a
        # checkout without native modules.
        process = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            _say(f"gpu: ended after {limit_s:g} s; the stacks are in the log")
            # The remaining processes of the group print their stacks.
            os.killpg(process.pid, signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WORDS_S)
            return process.poll() or -signal.SIGKILL
        finally:
            # This also runs if this program itself is ended.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _show(log: Path, lines_count: int) -> None:
    """Print the last lines of the output of a part."""
    lines = log.read_text(errors="replace").splitlines()
    for line in lines[-lines_count:]:
        _say(f"  | {line}")


def pack(out: Path, packed: Path) -> None:
    """Write everything below `out` into one archive, which replaces the old one atomically."""
    packed.parent.mkdir(parents=True, exist_ok=True)
    beside = packed.with_name(packed.name + ".new")
    with tarfile.open(beside, "w:gz") as file:
        file.add(out, arcname="records")
    beside.replace(packed)


def _keep(records: Path, out: Path) -> Path | None:
    """Move the records to the folder of their profile, print a summary, and return that folder."""
    if not records.exists():
        _say("gpu: no record was written")
        return None
    read = [json.loads(line) for line in records.read_text().splitlines()]
    target = Path(out, str(read[0]["profile"]), records.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(records, target)
    counted = Counter(record["verdict"] for record in read)
    _say(f"gpu: {target}: " + ", ".join(f"{count} {verdict}" for verdict, count in sorted(counted.items())))
    unmet = Counter(
        f"{reason['need']}: {reason['text']}"
        for record in read
        for reason in record["reasons"]
        if record["verdict"] == "not_run"
    )
    for text, count in unmet.items():
        _say(f"  {count} x not run: {text}")
    failed: dict[str, list[str]] = {}
    for record in read:
        if record["verdict"] == "fail":
            failed.setdefault(record["reasons"][0]["text"], []).append(record["case"])
        _numbers(record)
    for text, cases in failed.items():
        more = f" and {len(cases) - 1} more" if len(cases) > 1 else ""
        _say(f"  fail: {cases[0]}{more}: {text}")
    return target.parent


def _numbers(record: dict[str, object]) -> None:
    """Print the measurements of a record. Numbers that are not of hardware alone are stored and not shown."""
    numbers, substrate = record["numbers"], record["substrate"]
    if not isinstance(numbers, dict) or not isinstance(substrate, dict) or not numbers:
        return
    evidence = record["evidence"]
    apis = evidence.get("measured_apis", substrate) if isinstance(evidence, dict) else substrate
    if any(substrate.get(api) != "hardware" for api in apis):
        _say(f"  {record['case']}: measured on {substrate}, which is no performance of this machine")
        return
    shown = {key: value for key, value in numbers.items() if key.endswith(("_median", "_percent", "_ratio"))}
    _say(f"  {record['case']}: " + ", ".join(f"{key} {value:.4g}" for key, value in shown.items()))


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
