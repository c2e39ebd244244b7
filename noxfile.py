"""The nox sessions: every command that a developer or the CI needs. `nox -l` lists them.

A session installs the packages that it needs into `.nox/`, and installs them again only if its requirements have
changed. The package `automation/` has the code of these steps. README.md lists the exit codes with which nox ends.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from pathlib import Path

import nox

# nox loads this file by its path, from any folder, so the folder of the package `automation` must be added.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from automation import builds, long_run, release, system_packages
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
    print_line,
)
from automation.docs import build_site, take_pictures
from automation.environments import ensure_environment
from automation.gdrkit_commands import (
    add_default_cases,
    list_meta_parts,
    list_suite_parts,
    make_pytest_command,
    make_twin_command,
    read_session_plans,
    run_suites,
)
from automation.lint import LINT_REQUIREMENTS, check_cpp, check_style
from automation.machine import find_hardware, find_interpreter, make_path_with_sbin, may_load_rxe
from automation.peers import prepare_cuda_peers, prepare_peers

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["lint", "types", "native", "suites", "review", "meta"]
nox.options.default_venv_backend = "none"

# The cases about the project itself have a session of their own, `meta`.
ALL_CASES = ("suites", "--ignore=suites/meta")
TYPES_REQUIREMENTS = ("mypy==2.4.1",)
# Another version of mutmut has other operators, and would create other mutants from the same seed.
MUTANTS_REQUIREMENTS = ("mutmut==3.8.1",)
# The folder with the records of the sample report. It may also have a facts.json (the output of `gdrkit facts --json`).
SAMPLE_RECORDS = Path("reports", "baselines", "h200-1")


@nox.session(default=False)
def qualify(session: nox.Session) -> None:
    """Qualify this machine and write the report. Without hardware, run the cases on the software twins."""
    run_bin = builds.prepare_run(with_twins=True)
    arguments = list(session.posargs)
    hardware_by_api = find_hardware()
    if any(hardware_by_api.values()):
        print_line("hardware: " + ", ".join(itertools.chain(*hardware_by_api.values())))
    elif "--software" not in arguments:
        print_line("no RDMA device and no GPU here: adding --software, which proves the code and not this machine")
        arguments.append("--software")
    exit_unless_zero(call([str(run_bin / "gdrkit"), "qualify", *arguments]))


@nox.session
def suites(session: nox.Session) -> None:
    """Run the suites on the software twins. Arguments select cases: nox -s suites -- suites/rdma -k write."""
    run_bin = builds.prepare_run(with_twins=True)
    system_packages.install_fuse()
    system_packages.install_mpi()
    system_packages.install_filesystem_tools()
    system_packages.install_strace()
    # The throughput cases also run, with small sizes. Their results mean nothing on twins, but the runs find errors
    # early.
    if not session.posargs:
        run_suites(session, run_bin, list_suite_parts(), *make_twin_command(run_bin), measures_coverage=True)
    else:
        arguments = add_default_cases(session.posargs, *ALL_CASES, "hardware/throughput")
        exit_with_pytest_code(session, call([*make_twin_command(run_bin), *make_pytest_command(run_bin), *arguments]))


@nox.session
def meta(session: nox.Session) -> None:
    """Check the rules of the project: levels of imports, seams (docs/layout.md), banned words, the libraries that
    `import gdrkit` opens, exit codes, the wheel.
    """
    run_bin = builds.prepare_run(with_twins=True)
    builds.build_wheel()
    ensure_environment("mutants", python=find_interpreter()[0], requirements=MUTANTS_REQUIREMENTS)
    if not session.posargs:
        run_suites(session, run_bin, list_meta_parts())
    else:
        exit_with_pytest_code(session, call([*make_pytest_command(run_bin), "suites/meta", *session.posargs]))


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format with ruff and clang-format, and the C++ code of the product with clang-tidy. With
    `-- --fix`, ruff and clang-format correct what they can.
    """
    tools_bin = ensure_environment("lint", python=find_interpreter()[0], requirements=LINT_REQUIREMENTS)
    system_packages.install_packages(system_packages.find_missing_build_packages(find_interpreter()[0]))
    fail_unless_zero(session, [*check_style(tools_bin, fix="--fix" in session.posargs), *check_cpp(tools_bin)])


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of all Python code of the project with mypy --strict."""
    run_bin = builds.prepare_run(with_twins=False, with_native_parts=False)
    tools_bin = ensure_environment("types", python=find_interpreter()[0], requirements=TYPES_REQUIREMENTS)
    options = ["--num-workers=auto", "--python-executable", str(run_bin / "python")]
    fail_unless_zero(session, [call([str(tools_bin / "mypy"), *options, *session.posargs])])


@nox.session
def native(session: nox.Session) -> None:
    """Build the native code with the address and undefined-behaviour sanitizers, and run its tests. Also build the
    release, and run the tests that examine its libraries.
    """
    system_packages.install_packages(system_packages.find_missing_build_packages(find_interpreter()[0]))
    fail_unless_zero(session, builds.check_native({"asan-ubsan": True, "release": False}))


@nox.session(default=False)
def long(session: nox.Session) -> None:
    """Run the slow checks: the native tests of the release build and with the thread sanitizer, the suites with ten
    seeds, the state machines, fuzzers and kill campaigns with more repetitions, all cases of the review with each
    defect, and a build of the wheels that finds missing includes.
    """
    run_bin = builds.prepare_run(with_twins=True)
    system_packages.install_fuse()
    system_packages.install_filesystem_tools()
    exit_codes = builds.check_native({"tsan": True, "release": True})
    # These wheels are built without the precompiled header and without unity builds, so that a file that lacks an
    # include fails to compile.
    pip_wheel = [str(run_bin / "pip"), "wheel", "--quiet", "--no-deps", "-C", "cmake.define.GDRKIT_PRECOMPILE=OFF"]
    pip_wheel += ["-C", "cmake.define.CMAKE_UNITY_BUILD=OFF"]
    exit_codes += [
        call([*pip_wheel, "-w", str(ROOT / "build" / "alone"), str(folder)]) for folder in (ROOT, builds.TWINS_FOLDER)
    ]
    exit_codes.append(_run_review(run_bin, "--all-files"))
    for seed in long_run.SEEDS:
        command = [*make_pytest_command(run_bin), *ALL_CASES, "-q", *session.posargs]
        exit_codes.append(call([*make_twin_command(run_bin, "--seed", str(seed)), *command]))
    # These cases take minutes, so faulthandler must report a hang only after a longer time.
    command = [
        *make_pytest_command(run_bin),
        *long_run.CASES,
        "-q",
        "-o",
        "faulthandler_timeout=1800",
        *session.posargs,
    ]
    exit_codes.append(call([*make_twin_command(run_bin), *command], environ=long_run.VARIABLES))
    fail_unless_zero(session, exit_codes)


@nox.session
def review(session: nox.Session) -> None:
    """Show that the cases of the GDR review (docs/findings.md) can fail: insert each known defect, check that a case
    fails, and write the results into docs/findings.md.
    """
    run_bin = builds.prepare_run(with_twins=True)
    fail_unless_zero(session, [_run_review(run_bin, *session.posargs)])


def _run_review(run_bin: Path, *options: str) -> int:
    """Run the review with these options of `meta.defects.run`, and return its exit code."""
    libraries = builds.build_defects(run_bin)
    program = [str(run_bin / "python"), "-m", "meta.defects.run", "--libraries", str(libraries)]
    command = [*make_twin_command(run_bin), *program, *options]
    # The defects are in no installed package. The review and its child processes import them by this PYTHONPATH.
    return call(command, environ=prepend_to_pythonpath(ROOT / "suites"))


@nox.session(default=False)
def mutants(session: nox.Session) -> None:
    """Change a copy of the product in one place at a time, and run the cases on each change. The exit code is 0 only if
    cases fail for at least nine of ten changes. Options: -- [--module wire] [--count 20] [--jobs 2] [--records FILE].
    """
    run_bin = builds.prepare_run(with_twins=True)
    system_packages.install_filesystem_tools()
    mutmut_python = (
        ensure_environment("mutants", python=find_interpreter()[0], requirements=MUTANTS_REQUIREMENTS) / "python"
    )
    tools_bin = builds.ensure_build_tools()
    program = [
        str(run_bin / "python"),
        "-m",
        "meta.mutants.run",
        "--operators",
        str(mutmut_python),
        "--tools",
        str(tools_bin),
    ]
    exit_unless_zero(call([*program, *session.posargs], environ=prepend_to_pythonpath(ROOT / "suites")))


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Measure the overhead of gdrkit, next to other software in the same run. -- --records FILE stores the numbers."""
    run_bin = builds.prepare_run(with_twins=True)
    programs = builds.build_bench_programs()
    # With the default file size of 4 GiB, the storage benchmarks would take more than nine minutes on the twins, and
    # would prove nothing more.
    os.environ.setdefault("GDRKIT_BENCH_STORAGE_MIB", "64")
    command = [
        *make_twin_command(run_bin),
        *make_pytest_command(run_bin),
        "--benchmark-enable",
        *add_default_cases(session.posargs, "suites/bench"),
    ]
    exit_with_pytest_code(session, call(command, environ={"GDRKIT_BENCH_PROGRAMS": str(programs)}))


@nox.session(default=False)
def hardware(session: nox.Session) -> None:
    """Run the sessions that fit the hardware of this machine, and print why the others do not fit. The exit code is 4
    if the machine has no hardware.
    """
    hardware_by_api = find_hardware()
    missing_apis = [api for api, devices in hardware_by_api.items() if not devices]
    if len(missing_apis) == len(hardware_by_api):
        print_line(
            "no RDMA device in /sys/class/infiniband, no NVIDIA driver in /proc/driver, no NVIDIA GPU or Gaudi on PCI:"
        )
        print_line("nothing can be proven on this machine. `nox -s suites` runs the same cases on the software twins.")
        sys.exit(NOTHING_PROVEN)
    print_line("hardware: " + ", ".join(itertools.chain(*hardware_by_api.values())))
    run_bin = builds.prepare_run(with_twins=bool(missing_apis))
    for name, session_plan in read_session_plans(run_bin).items():
        print_line(f"nox -s {name}: {'runs' if session_plan['fits'] else 'does not run'}: {session_plan['why']}")
        if session_plan["fits"]:
            session.notify(name, posargs=[*session_plan["arguments"], *session.posargs])


@nox.session(default=False)
def direct(session: nox.Session) -> None:
    """Run the suites on the hardware of this machine, with software twins in place of the missing hardware."""
    missing_apis = [api for api, devices in find_hardware().items() if not devices]
    run_bin = builds.prepare_run(with_twins=bool(missing_apis))
    system_packages.install_fuse()
    system_packages.install_filesystem_tools()
    launcher = make_twin_command(run_bin, "--apis", ",".join(missing_apis)) if missing_apis else []
    exit_with_pytest_code(
        session, call([*launcher, *make_pytest_command(run_bin), *add_default_cases(session.posargs, *ALL_CASES)])
    )


@nox.session(default=False)
def lab(session: nox.Session) -> None:
    """Run the RDMA suites on the RDMA stack of a real kernel, and compare the results with the results on the twins.
    The suites use the RDMA devices of this machine or its module rdma_rxe or, without both, a virtual machine.
    """
    # depmod and other programs are in /sbin, which the PATH of ordinary users does not have on Debian.
    os.environ["PATH"] = make_path_with_sbin()
    has_rdma_here = bool(find_hardware()["verbs"]) or may_load_rxe()
    location_options = ["--here"] if has_rdma_here else [f"--tools={builds.ensure_lab_tools()}"]
    system_packages.install_perftest()
    run_bin = builds.prepare_run(with_twins=True)
    exit_unless_zero(call([str(run_bin / "python"), "-m", "hardware.lab", *location_options, *session.posargs]))


@nox.session(default=False)
def peers(session: nox.Session) -> None:
    """Run stock RDMA programs of Debian and PyPI on the software twins, as their users run them, and print which work.
    Options: -- [--only TEXT] [--records FILE]. With --lab, the programs also run on the Soft-RoCE of a real kernel.
    -- cuda runs programs with GPU memory, whose packages take six gigabytes.
    """
    os.environ["PATH"] = make_path_with_sbin()
    if session.posargs[:1] == ["cuda"]:
        python = prepare_cuda_peers()
        run_bin = builds.prepare_run(with_twins=True)
        program = [str(run_bin / "python"), "-m", "hardware.peers", "--cuda", "--python", str(python)]
        exit_unless_zero(call([*program, *session.posargs[1:]]))
        return
    python, tests_folder = prepare_peers(with_libraries="--lab" in session.posargs)
    lab_options = [f"--tools={builds.ensure_lab_tools()}"] if "--lab" in session.posargs else []
    run_bin = builds.prepare_run(with_twins=True)
    program = [str(run_bin / "python"), "-m", "hardware.peers", "--python", str(python), "--tests", str(tests_folder)]
    exit_unless_zero(call([*program, *lab_options, *session.posargs]))


@nox.session(default=False)
def bundle(session: nox.Session) -> None:
    """Prepare a folder for a machine with GPUs and no package registry. Options: -- --python 3.12
    --output build/bundle. On that machine, `python3 build/bundle/gpu.py` or `nox -s gpu` runs the cases. With --extras
    FOLDER, pip also looks in that folder for the wheels of kvikio, numpy and the loaders of model files.
    """
    arguments = iter(session.posargs)
    options = {name.removeprefix("--"): next(arguments, "") for name in arguments}
    if not options.keys() <= {"python", "output", "extras"} or not all(options.values()):
        print_line("usage: nox -s bundle -- [--python VERSION_OR_PATH] [--output FOLDER] [--extras FOLDER]")
        sys.exit(WRONG_USAGE)
    extra_wheels_folder = Path(options["extras"]).resolve() if "extras" in options else None
    bundle_folder = Path(options.get("output", ROOT / "build" / "bundle"))
    fill_bundle(
        python=options.get("python", "3.12"), bundle_folder=bundle_folder, extra_wheels_folder=extra_wheels_folder
    )


@nox.session(default=False)
def wheels(session: nox.Session) -> None:
    """Build the release into build/dist: source distributions, and wheels of gdrkit, of the twins and of pyverbs with
    their debug symbols. Then run `gdrkit qualify --software` from these wheels in empty environments, and the native
    tests for aarch64 in QEMU. With -- --arch x86_64, build and test for one kind of processor only.
    """
    option, *architecture_names = session.posargs or ["--arch", *release.ARCHITECTURES]
    if option != "--arch" or not architecture_names or not set(architecture_names) <= release.ARCHITECTURES.keys():
        print_line(f"usage: nox -s wheels -- [--arch {'|'.join(release.ARCHITECTURES)}]")
        sys.exit(WRONG_USAGE)
    release_wheels = release.build_release(architecture_names)
    release.print_table(release_wheels)
    exit_codes = release.check_wheels() if "x86_64" in architecture_names else []
    exit_codes += release.check_native_in_emulator() if "aarch64" in architecture_names else []
    fail_unless_zero(session, exit_codes)


@nox.session(default=False)
def gpu(session: nox.Session) -> None:
    """Run the cases on the GPUs of this machine from the folder of a bundle (see the session `bundle`)."""
    command = [sys.executable, str(ROOT / "hardware" / "gpu" / "run.py"), *session.posargs]
    if "--bundle" not in session.posargs:
        command += ["--bundle", str(ROOT / "build" / "bundle")]
    exit_unless_zero(call(command))


@nox.session(default=False)
def pages(session: nox.Session) -> None:
    """Check the report page in headless Chromium at two widths, light and dark, with axe-core. The screenshots are in
    reports/runs/pages.
    """
    axe_path = builds.ensure_axe()
    run_bin = builds.prepare_run(with_twins=False)
    environ = {"GDRKIT_AXE": str(axe_path), "GDRKIT_PICTURES": str(ROOT / "reports" / "runs" / "pages")}
    environ |= builds.ensure_playwright()
    command = [*make_pytest_command(run_bin), "suites/report/test_in_browser.py", *session.posargs]
    exit_with_pytest_code(session, call(command, environ=environ))


@nox.session(default=False)
def sample(session: nox.Session) -> None:
    """Create docs/sample-report/index.html and the pictures of the README again, from the records of a real machine in
    reports/baselines.
    """
    run_bin = builds.prepare_run(with_twins=False)
    report_folder, page = ROOT / "build" / "sample-report", ROOT / "docs" / "sample-report" / "index.html"
    command = [str(run_bin / "gdrkit"), "report", str(ROOT / SAMPLE_RECORDS), "--output", str(report_folder)]
    exit_unless_zero(call([*command, *session.posargs]))
    page.parent.mkdir(exist_ok=True)
    shutil.copyfile(report_folder / "index.html", page)
    print_line(f"wrote {page.relative_to(ROOT)}")
    exit_unless_zero(take_pictures(run_bin, page))


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the documentation site into build/docs/html, where a warning is an error, and run the examples and the code
    of the documents on the software twins.
    """
    run_bin = builds.prepare_run(with_twins=True)
    builds.build_wheel()
    test_names = ("documents", "examples", "reference", "sharing_doc", "snippets", "wheel")
    cases_of_documents = [f"suites/meta/test_{name}.py" for name in test_names]
    exit_codes = [
        build_site(run_bin),
        call([*make_pytest_command(run_bin), "-rP", *cases_of_documents, *session.posargs]),
    ]
    fail_unless_zero(session, exit_codes)


@nox.session(default=False)
def fresh(session: nox.Session) -> None:
    """Install a fresh Debian 12 in a folder (needs root and debootstrap), and time the README's two commands in it."""
    exit_unless_zero(call(["bash", str(ROOT / "suites" / "support" / "fresh_machine.sh"), *session.posargs]))
