"""`python -m hardware.lab`: run the cases on the twins and on a kernel's RDMA stack, and compare the results."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

from gdrkit.install_paths import install_paths
from gdrkit.inventory import load_profile
from gdrkit.report import read_records
from hardware.lab.errors import LabError
from hardware.lab.kernel import kernel_image
from hardware.lab.machine import Limits, Machine, can_virtualize, check_programs
from hardware.lab.pairs import compared, strangers, table, unrefused

__all__ = ["main"]

PROJECT_ROOT = Path(__file__).resolve().parents[2]
CASES = ("suites/contract/rdma", "suites/rdma", "suites/registration", "suites/property/test_cache_machine.py")
# This is the number of examples of each state machine of Hypothesis. In the emulated guest, one takes half a second or
# more.
EXAMPLES = "5"
# The lab requires that at least this many cases pass on both.
AGREEING_MIN = 60

FAILED, SETUP_MISSING = 1, 3


def main() -> int:
    """0: all passed and agree; 1: a case failed, differs, or too few agree; 3: the lab cannot run here."""
    options = _parsed()
    os.environ.setdefault("GDRKIT_EXAMPLES", EXAMPLES)
    options.output.mkdir(parents=True, exist_ok=True)
    records = {name: options.output / f"{name}.jsonl" for name in ("twin", "kernel")}
    for path in records.values():
        path.unlink(missing_ok=True)
    cases = options.cases
    if not any((PROJECT_ROOT / case.partition("::")[0]).exists() for case in cases):
        cases = [*cases, *CASES]
    try:
        # Missing programs are reported before the first slow step.
        machine = None if options.here else _machine(options)
        codes = [subprocess.call(_pytest(records["twin"], cases, ["--software", "--isolated"], []), cwd=PROJECT_ROOT)]
        if machine is None:
            codes.append(_here(records["kernel"], cases, options))
        else:
            codes.append(_guest(machine, records["kernel"], cases, options))
    except LabError as error:
        _say(f"lab: {error}")
        return SETUP_MISSING
    return _judged(records, codes, options)


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hardware.lab", description=main.__doc__)
    parser.add_argument("--tools", type=Path, default=Path(sys.executable).parent, help="the folder of vng")
    parser.add_argument("--cache", type=Path, default=PROJECT_ROOT / "build" / "lab" / "kernel", help="for the kernel")
    parser.add_argument("--output", type=Path, default=PROJECT_ROOT / "build" / "lab" / "run", help="for the records")
    parser.add_argument("--boot-limit-s", type=float, default=150.0, help="how long the virtual machine may boot")
    parser.add_argument("--limit-s", type=float, default=900.0, help="how long the cases may run in it")
    parser.add_argument("--tcg", action="store_true", help="do without KVM")
    parser.add_argument("--cpuinfo", type=Path, default=Path("/proc/cpuinfo"), help=argparse.SUPPRESS)
    parser.add_argument("--kvm", type=Path, default=Path("/dev/kvm"), help=argparse.SUPPRESS)
    parser.add_argument("--here", action="store_true", help="no virtual machine: this kernel's RDMA devices")
    parser.add_argument("--agreeing-min", type=int, default=AGREEING_MIN, help="how many cases must agree")
    parser.add_argument("cases", nargs="*", help=f"cases or options of pytest; default: {' '.join(CASES)}")
    options, more = parser.parse_known_args()
    options.cases += more
    options.output, options.cache = options.output.resolve(), options.cache.resolve()
    return options


def _machine(options: argparse.Namespace) -> Machine:
    kvm = not options.tcg and can_virtualize(cpuinfo=options.cpuinfo, device=options.kvm)
    check_programs(options.tools)
    libraries = [Path("/usr/lib/python3"), *Path("/usr/lib").glob("*-linux-gnu")]
    folders = [PROJECT_ROOT, Path(sys.prefix), Path(sysconfig.get_path("stdlib")), *libraries]
    cached = tuple(str(folder) for folder in folders if folder.is_dir())
    return Machine(image=kernel_image(options.cache), tools=options.tools, kvm=kvm, cached=cached)


def _pytest(records: Path, cases: list[str], launch: list[str], options: list[str]) -> list[str]:
    run = [sys.executable, "-m", "gdrkit", "run", *launch, "--"] if launch else []
    return [*run, sys.executable, "-m", "pytest", "-q", f"--records={records}", *options, *cases]


def _guest(machine: Machine, records: Path, cases: list[str], options: argparse.Namespace) -> int:
    wanted = ["--profile=lab", "--substrate=verbs=kernel_software,cuda=twin"]
    command = _pytest(records, cases, ["--software", "--isolated", "--apis", "cuda"], wanted)
    kept = {
        name: os.environ[name] for name in ("PYTHONPATH", "GDRKIT_TWINS_LIB", "GDRKIT_EXAMPLES") if name in os.environ
    }
    # The root file system of the machine is read-only, and hypothesis needs a folder for its database.
    kept |= {"PYTHONDONTWRITEBYTECODE": "1", "HYPOTHESIS_STORAGE_DIRECTORY": str(options.output / "hypothesis")}
    # The commit is determined here: in the guest git is so slow that its time limit ends it, and the records would have
    # no commit.
    commit = install_paths().commit()
    kept |= {} if commit is None else {"GDRKIT_COMMIT": commit}
    exports = [f"export {name}={shlex.quote(value)}" for name, value in kept.items()]
    script = options.output / "cases.sh"
    script.write_text("\n".join([*exports, f"cd {shlex.quote(str(PROJECT_ROOT))}", f"exec {shlex.join(command)}", ""]))
    how = "KVM" if machine.kvm else "TCG (this processor has no virtualization for us: slower, and the same)"
    _say(f"lab: {machine.image.name} in a virtual machine by {how}")
    return machine.run(script, output=options.output, limits=Limits(boot_s=options.boot_limit_s, run_s=options.limit_s))


def _here(records: Path, cases: list[str], options: argparse.Namespace) -> int:
    present = any(Path("/sys/class/infiniband").glob("*"))
    has_cuda = Path("/proc/driver/nvidia/version").exists()
    launch = [] if has_cuda else ["--software", "--isolated", "--apis", "cuda"]
    profile = [] if present or has_cuda else ["--profile=lab"]
    command = _pytest(records, cases, launch, profile)
    prefix = [] if present else ["bash", str(Path(__file__).with_name("rxe.sh"))]
    _say("lab: the RDMA devices of this machine" if present else "lab: rxe devices of this machine's own kernel")
    try:
        return subprocess.run([*prefix, *command], cwd=PROJECT_ROOT, timeout=options.limit_s, check=False).returncode
    except subprocess.TimeoutExpired as error:
        message = f"the cases did not end within {options.limit_s:g} s, and were ended"
        raise LabError(message) from error


def _judged(records: dict[str, Path], codes: list[int], options: argparse.Namespace) -> int:
    missing = [name for name, path in records.items() if not path.exists() or not path.stat().st_size]
    if missing:
        _say(f"lab: no records of the run on {' and '.join(missing)}; what it printed says why")
        return FAILED
    pairs = compared(records["twin"], records["kernel"])
    _say(table(pairs))
    kernel = read_records(records["kernel"])
    agreeing = sum(pair.agrees for pair in pairs)
    differing = [pair for pair in pairs if pair.differs]
    wrong = [
        *strangers(read_records(records["twin"]), frozenset({"twin"})),
        *strangers(kernel, frozenset({"kernel_software", "hardware"})),
        *unrefused(kernel, load_profile(kernel[0].profile)),
    ]
    for record in kernel:
        for name, ratio in record.numbers.items():
            if name.endswith("_ratio"):
                _say(f"lab: {record.case}: {name} {ratio:.2f}, median of {record.numbers.get('rounds_count', 1):g}")
    uncounted = sum(not pair.counts for pair in pairs)
    _say(f"lab: {agreeing} cases pass on both")
    _say(f"lab: {sum(pair.refused for pair in pairs)} cases about device memory pass on the twin and are refused here")
    _say(f"lab: {len(differing)} have any other outcome; {uncounted} more did not run on both and count for nothing")
    problems = [*(f"{pair.case}: {pair.twin} on the twin, {pair.kernel} here" for pair in differing), *wrong]
    problems += [f"the run on {name} ended with {code}" for name, code in zip(records, codes, strict=True) if code]
    if agreeing < options.agreeing_min:
        problems.append(f"{agreeing} cases pass on both, and {options.agreeing_min} must")
    for problem in problems:
        _say(f"lab: {problem}")
    return FAILED if problems else 0


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - the output of a command.


if __name__ == "__main__":
    sys.exit(main())
