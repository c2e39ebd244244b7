"""The nox sessions: every command that a developer or the CI needs. `nox -l` lists them.

A session installs what it needs once, into `.nox/`, and again only when the requirements have changed. The package
`automation/` does that work. If a command has an exit code with a meaning (README.md lists them), nox ends with it.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from pathlib import Path

import nox

# nox loads this file by its path, from any folder.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from automation import builds, long_run, system_packages
from automation.bundle import fill_bundle
from automation.commands import (
    NOTHING_PROVEN,
    ROOT,
    WRONG_USAGE,
    call,
    exit_unless_zero,
    exit_with_pytest_code,
    fail_unless_zero,
    prepend_to_pythonpath,
    say,
)
from automation.environments import ensure_environment
from automation.gdrkit_commands import cases, on_twins, plan_sessions, pytest, run_suites, suite_folders
from automation.machine import find_hardware, find_interpreter, may_load_rxe, path_with_sbin

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["lint", "types", "native", "suites", "review", "meta"]
nox.options.default_venv_backend = "none"

# The cases about the project itself have a session of their own, `meta`.
ALL_CASES = ("suites", "--ignore=suites/meta")
# The formatting rules of ruff and clang-format differ between versions.
LINT = ("ruff==0.17.5", "clang-format==14.0.6")
TYPES = ("mypy==2.4.1",)
LAB = ("virtme-ng==1.42",)
# A seed gives other mutants with another version of the operators.
MUTANTS = ("mutmut==3.8.1",)
# It drives the Chromium of this machine; the version of the two need not match.
PLAYWRIGHT = ("playwright==1.65.2",)
# The records of the sample report. A facts.json, as `gdrkit facts --json` prints it, may lie beside them.
SAMPLE_RECORDS = Path("reports", "baselines", "h200-1")


@nox.session(default=False)
def qualify(session: nox.Session) -> None:
    """Qualify this machine and write the report; without hardware, qualify the code on the software twins."""
    run = builds.prepare_run(twins=True)
    arguments = list(session.posargs)
    found = find_hardware()
    if any(found.values()):
        say("hardware: " + ", ".join(itertools.chain(*found.values())))
    elif "--software" not in arguments:
        say("no RDMA device and no GPU here: adding --software, which proves the code and not this machine")
        arguments.append("--software")
    exit_unless_zero(call([str(run / "gdrkit"), "qualify", *arguments]))


@nox.session
def suites(session: nox.Session) -> None:
    """Run the suites on the twins, or a part of them: nox -s suites -- suites/rdma -k write."""
    run = builds.prepare_run(twins=True)
    system_packages.install_fuse()
    system_packages.install_mpi()
    system_packages.install_filesystem_tools()
    system_packages.install_strace()
    # The throughput cases run once and with small sizes on the twins, so that they still work on hardware.
    if not session.posargs:
        run_suites(session, run, suite_folders(), *on_twins(run))
    else:
        arguments = cases(session.posargs, *ALL_CASES, "hardware/throughput")
        exit_with_pytest_code(session, call([*on_twins(run), *pytest(run), *arguments]))


@nox.session
def meta(session: nox.Session) -> None:
    """Check the project itself: levels, seams, banned words, what `import gdrkit` opens, exit codes, the wheel."""
    run = builds.prepare_run(twins=True)
    builds.build_wheel()
    ensure_environment("mutants", python=find_interpreter()[0], requirements=MUTANTS)
    if not session.posargs:
        run_suites(session, run, sorted((ROOT / "suites" / "meta").glob("test_*.py")))
    else:
        exit_with_pytest_code(session, call([*pytest(run), "suites/meta", *session.posargs]))


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format with ruff and clang-format; `-- --fix` corrects what they can correct."""
    tools = ensure_environment("lint", python=find_interpreter()[0], requirements=LINT)
    folders, suffixes = (builds.NATIVE, ROOT / "suites"), ("cpp", "hpp", "h")
    sources = sorted(str(path) for folder in folders for suffix in suffixes for path in folder.rglob(f"*.{suffix}"))
    fix = "--fix" in session.posargs
    clang_format = ["-i"] if fix else ["--dry-run", "--Werror", "--ferror-limit=1"]
    codes = [
        call([str(tools / "ruff"), "check", "--output-format=concise", *(["--fix"] if fix else [])]),
        call([str(tools / "ruff"), "format", *([] if fix else ["--check"])]),
        call([str(tools / "clang-format"), *clang_format, *sources], shown_words=5),
    ]
    scripts = [ROOT / ".ci" / "run", *ROOT.glob("suites/support/*.sh"), *ROOT.glob("hardware/lab/*.sh")]
    codes += [call(["bash", "-n", str(path)]) for path in scripts]
    fail_unless_zero(session, codes)


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of all Python here with mypy --strict."""
    run = builds.prepare_run(twins=False, native_parts=False)
    tools = ensure_environment("types", python=find_interpreter()[0], requirements=TYPES)
    command = [str(tools / "mypy"), "--python-executable", str(run / "python"), *session.posargs]
    fail_unless_zero(session, [call(command)])


@nox.session
def native(session: nox.Session) -> None:
    """Build the native code and run its tests, as users get it and under the address and undefined-behaviour
    sanitizers.
    """
    system_packages.install(system_packages.missing_build_packages(find_interpreter()[0]))
    # The twins first: the product's tests run on the twins of the same preset.
    pairs = itertools.product((builds.TWINS, builds.NATIVE), ("release", "asan-ubsan"))
    fail_unless_zero(session, [builds.check_native(tree, preset) for tree, preset in pairs])


@nox.session(default=False)
def long(session: nox.Session) -> None:
    """Run what takes long: the native tests under the thread sanitizer, the suites with ten seeds, the state
    machines, fuzzers and kill campaigns with large numbers, and a build of the wheel that reuses nothing.
    """
    run = builds.prepare_run(twins=True)
    system_packages.install_fuse()
    system_packages.install_filesystem_tools()
    codes = [builds.check_native(tree, "tsan") for tree in (builds.TWINS, builds.NATIVE)]
    # Without the precompiled header, so that a file which does not include what it uses is found.
    wheel = [str(run / "pip"), "wheel", "--quiet", "--no-deps", "-C", "cmake.define.GDRKIT_PRECOMPILE=OFF"]
    codes += [call([*wheel, "-w", str(ROOT / "build" / "alone"), str(tree)]) for tree in (ROOT, builds.TWINS)]
    for seed in long_run.SEEDS:
        command = [*pytest(run), *ALL_CASES, "-q", *session.posargs]
        codes.append(call([*on_twins(run, "--seed", str(seed)), *command]))
    # These cases take minutes, so that faulthandler must not take them for a hang.
    command = [*pytest(run), *long_run.CASES, "-q", "-o", "faulthandler_timeout=1800", *session.posargs]
    codes.append(call([*on_twins(run), *command], environ=long_run.NUMBERS))
    fail_unless_zero(session, codes)


@nox.session
def review(session: nox.Session) -> None:
    """Show that the cases of the GDR review can fail: put each defect back, see it caught, write docs/findings.md."""
    run = builds.prepare_run(twins=True)
    libraries = builds.build_defects()
    program = [str(run / "python"), "-m", "meta.defects.run", "--libraries", str(libraries)]
    command = [*on_twins(run), *program, *session.posargs]
    # No package carries the defects: the review finds them by this path, and so do its child processes.
    fail_unless_zero(session, [call(command, environ=prepend_to_pythonpath(ROOT / "suites"))])


@nox.session(default=False)
def mutants(session: nox.Session) -> None:
    """Change the product in one place at a time, in a copy, and run the cases against each change; ends with 0 if they
    notice nine of ten: -- [--module wire] [--count 20] [--jobs 2] [--records FILE].
    """
    run = builds.prepare_run(twins=True)
    system_packages.install_filesystem_tools()
    operators = ensure_environment("mutants", python=find_interpreter()[0], requirements=MUTANTS) / "python"
    tools = builds.ensure_build_tools()
    program = [str(run / "python"), "-m", "meta.mutants.run", "--operators", str(operators), "--tools", str(tools)]
    exit_unless_zero(call([*program, *session.posargs], environ=prepend_to_pythonpath(ROOT / "suites")))


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Measure what gdrkit itself costs, each beside its peer of the same run; -- --records FILE keeps the numbers."""
    run = builds.prepare_run(twins=True)
    programs = builds.build_bench_programs()
    # The 4 GiB that a GPU reads take more than nine minutes on the twins and show nothing more.
    os.environ.setdefault("GDRKIT_BENCH_STORAGE_MIB", "64")
    command = [*on_twins(run), *pytest(run), "--benchmark-enable", *cases(session.posargs, "suites/bench")]
    exit_with_pytest_code(session, call(command, environ={"GDRKIT_BENCH_PROGRAMS": str(programs)}))


@nox.session(default=False)
def hardware(session: nox.Session) -> None:
    """Run the sessions that fit the hardware of this machine, and say why the others do not; 4 if it has none."""
    found = find_hardware()
    lacking = [api for api, devices in found.items() if not devices]
    if len(lacking) == len(found):
        say("no RDMA device in /sys/class/infiniband, no NVIDIA driver in /proc/driver, no NVIDIA GPU or Gaudi on PCI:")
        say("nothing here can be proven on hardware. `nox -s suites` runs the same cases on the software twins.")
        sys.exit(NOTHING_PROVEN)
    say("hardware: " + ", ".join(itertools.chain(*found.values())))
    run = builds.prepare_run(twins=bool(lacking))
    for name, plan in plan_sessions(run).items():
        say(f"nox -s {name}: {'runs' if plan['fits'] else 'does not run'}: {plan['why']}")
        if plan["fits"]:
            session.notify(name, posargs=[*plan["arguments"], *session.posargs])


@nox.session(default=False)
def direct(session: nox.Session) -> None:
    """Run the suites on the hardware of this machine, and on twins of what it lacks."""
    lacking = [api for api, devices in find_hardware().items() if not devices]
    run = builds.prepare_run(twins=bool(lacking))
    system_packages.install_fuse()
    system_packages.install_filesystem_tools()
    launcher = on_twins(run, "--apis", ",".join(lacking)) if lacking else []
    exit_with_pytest_code(session, call([*launcher, *pytest(run), *cases(session.posargs, *ALL_CASES)]))


@nox.session(default=False)
def lab(session: nox.Session) -> None:
    """Run the RDMA suites on a real kernel's RDMA stack and compare them with the twins: on the RDMA devices of this
    machine or on rxe where it has them, else in a virtual machine.
    """
    # depmod and the like are in /sbin, which Debian leaves out of the PATH of ordinary users.
    os.environ["PATH"] = path_with_sbin()
    here = bool(find_hardware()["verbs"]) or may_load_rxe()
    if not here:
        programs = system_packages.LAB_PROGRAMS
        system_packages.install([package for name, package in programs.items() if not shutil.which(name)])
    system_packages.install_perftest()
    run = builds.prepare_run(twins=True)
    tools = ensure_environment("lab", python=find_interpreter()[0], requirements=LAB)
    where = ["--here"] if here else [f"--tools={tools}"]
    exit_unless_zero(call([str(run / "python"), "-m", "hardware.lab", *where, *session.posargs]))


@nox.session(default=False)
def bundle(session: nox.Session) -> None:
    """Prepare one folder with which a machine with GPUs and no package registry runs its cases:
    -- --python 3.12 --output build/bundle; there `python3 build/bundle/gpu.py`, or `nox -s gpu`. With
    --extras FOLDER, wheels of kvikio and numpy are taken from that folder where no registry has them.
    """
    words = iter(session.posargs)
    options = {name.removeprefix("--"): next(words, "") for name in words}
    if not options.keys() <= {"python", "output", "extras"} or not all(options.values()):
        say("usage: nox -s bundle -- [--python VERSION_OR_PATH] [--output FOLDER] [--extras FOLDER]")
        sys.exit(WRONG_USAGE)
    extras = Path(options["extras"]).resolve() if "extras" in options else None
    output = Path(options.get("output", ROOT / "build" / "bundle"))
    fill_bundle(python=options.get("python", "3.12"), output=output, extras=extras)


@nox.session(default=False)
def gpu(session: nox.Session) -> None:
    """Run contract, share, registration, gds and throughput on the GPUs of this machine, from a bundle's folder."""
    command = [sys.executable, str(ROOT / "hardware" / "gpu" / "run.py"), *session.posargs]
    if "--bundle" not in session.posargs:
        command += ["--bundle", str(ROOT / "build" / "bundle")]
    exit_unless_zero(call(command))


@nox.session(default=False)
def pages(session: nox.Session) -> None:
    """Open the report in headless Chromium, at two widths, light and dark, with axe-core; the pictures stay in
    reports/runs/pages.
    """
    axe = builds.ensure_axe()
    run = builds.prepare_run(twins=False)
    playwright = ensure_environment("playwright", python=find_interpreter()[0], requirements=PLAYWRIGHT)
    environ = {"GDRKIT_AXE": str(axe), "GDRKIT_PICTURES": str(ROOT / "reports" / "runs" / "pages")}
    environ |= prepend_to_pythonpath(next(playwright.parent.glob("lib/python*/site-packages")))
    command = [*pytest(run), "suites/report/test_in_browser.py", *session.posargs]
    exit_with_pytest_code(session, call(command, environ=environ))


@nox.session(default=False)
def sample(session: nox.Session) -> None:
    """Make docs/sample-report/index.html again, from the records of a real machine below reports/baselines."""
    run = builds.prepare_run(twins=False)
    made, shown = ROOT / "build" / "sample-report", ROOT / "docs" / "sample-report" / "index.html"
    command = [str(run / "gdrkit"), "report", str(ROOT / SAMPLE_RECORDS), "--output", str(made), *session.posargs]
    exit_unless_zero(call(command))
    shown.parent.mkdir(exist_ok=True)
    shutil.copyfile(made / "index.html", shown)
    say(f"made {shown.relative_to(ROOT)}")


@nox.session(default=False)
def fresh(session: nox.Session) -> None:
    """Make a fresh Debian 12 in a folder (root, debootstrap), run the README's two commands in it and time them."""
    exit_unless_zero(call(["bash", str(ROOT / "suites" / "support" / "fresh_machine.sh"), *session.posargs]))
