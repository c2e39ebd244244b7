"""Builds of the native parts, the software twins, the wheels and the benchmark programs, for the nox sessions.

A software twin is a drop-in library that emulates hardware. All builds of a CMake preset use one folder below
`build/`. A session therefore reuses what another session has compiled.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from automation.commands import (
    ROOT,
    exit_with_setup_error,
    prepend_to_path,
    prepend_to_pythonpath,
    print_line,
    run_or_exit,
)
from automation.environments import (
    BUILD_CONSTRAINT_VARIABLES,
    ENVIRONMENTS,
    compute_digest,
    ensure_environment,
    lock_environments,
)
from automation.machine import find_interpreter, has_pyverbs, python_version
from automation.side_by_side import Part, call_side_by_side
from automation.system_packages import (
    LAB_PROGRAMS,
    find_missing_build_packages,
    find_missing_pyverbs_packages,
    install_packages,
)
from gdrkit.remedies import system_install

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "BENCH_PROGRAMS",
    "BUILD_REQUIREMENTS",
    "KVIKIO_REQUIREMENTS",
    "NATIVE_FOLDER",
    "PYVERBS_REQUIREMENT",
    "TWINS_FOLDER",
    "build_bench_programs",
    "build_defects",
    "build_wheel",
    "check_native",
    "ensure_axe",
    "ensure_build_tools",
    "ensure_lab_tools",
    "ensure_playwright",
    "ensure_pyverbs_wheel",
    "prepare_run",
]

NATIVE_FOLDER = ROOT / "native"
TWINS_FOLDER = NATIVE_FOLDER / "twins"
BUILD_REQUIREMENTS = ("cmake>=3.25,<4", "ninja>=1.11", "scikit-build-core>=1.0,<2", "nanobind>=2.4,<4")
# virtme-ng has the program vng, which boots a kernel in a virtual machine.
LAB_REQUIREMENTS = ("virtme-ng==1.42",)
PYVERBS_REQUIREMENT = "pyverbs==59.0"
RUN_REQUIREMENTS = (
    "nox>=2024.4.15",
    # The cases validate records and reports with jsonschema.
    "jsonschema>=4.20",
    "coverage>=7.6",
    # atheris guides the fuzzing of parsers. PyPI has its wheels only for these Pythons and machines.
    "atheris>=2.3; python_version < '3.14' and platform_machine == 'x86_64'",
)
# These packages are installed without the rest of their dependencies, two gigabytes of CUDA libraries that the suites
# do not use.
KVIKIO_REQUIREMENTS = ("kvikio-cu13==26.10.*", "libkvikio-cu13==26.10.*", "rapids-logger==0.3.*", "packaging")
# axe-core checks the accessibility of the report page. Its version is fixed, because the rules differ between versions.
AXE_PACKAGE = "axe-core@4.14.1"
# Playwright controls the Chromium of this machine. The versions of the two programs need not match.
PLAYWRIGHT_REQUIREMENTS = ("playwright==1.65.2",)
BROWSER_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
BENCH_PROGRAMS = ("usrbio_path_bench", "usrbio_ring_bench")


def prepare_run(*, with_twins: bool, with_native_parts: bool = True) -> Path:
    """Create the environment that runs the suites, and return its bin folder.

    The environment has gdrkit as an editable installation of this tree, and the dependencies of gdrkit. If
    `with_twins` is true, it also has the software twins. If `with_native_parts` is true, the native parts of the
    product are built into this tree.
    """
    python, needs_pyverbs_build = find_interpreter()
    missing_packages = (
        find_missing_build_packages(python) if with_twins or with_native_parts or needs_pyverbs_build else []
    )
    if needs_pyverbs_build:
        missing_packages += find_missing_pyverbs_packages()
    elif not has_pyverbs():
        missing_packages.append("python3-pyverbs")
    install_packages(missing_packages)
    requirements = (
        *RUN_REQUIREMENTS,
        *((PYVERBS_REQUIREMENT,) if needs_pyverbs_build else ()),
        "-e",
        f"{ROOT}[qualify,cuda13,cufile,fuse,monitor,mpi]",
    )
    run_bin = ensure_environment(
        "run",
        python=python,
        requirements=requirements,
        input_files=[ROOT / "pyproject.toml"],
        optional_requirements=KVIKIO_REQUIREMENTS,
    )
    if with_twins:
        _install_twins(run_bin)
    if with_native_parts:
        _install_native()
    return run_bin


def ensure_build_tools() -> Path:
    """Create the environment with the build tools, and return its bin folder."""
    return ensure_environment("build", python=find_interpreter()[0], requirements=BUILD_REQUIREMENTS)


def ensure_lab_tools() -> Path:
    """Install the programs that start the virtual machine of hardware/lab, and return the folder of vng."""
    missing_packages = [package for program, package in LAB_PROGRAMS.items() if not shutil.which(program)]
    install_packages(missing_packages)
    return ensure_environment("lab", python=find_interpreter()[0], requirements=LAB_REQUIREMENTS)


def ensure_playwright() -> dict[str, str]:
    """Install a browser and Playwright if they are missing.

    Return the environment variable with which Python finds Playwright.
    """
    if not any(map(shutil.which, BROWSER_PROGRAMS)):
        install_packages(["chromium"])
    bin_folder = ensure_environment("playwright", python=find_interpreter()[0], requirements=PLAYWRIGHT_REQUIREMENTS)
    return prepend_to_pythonpath(next(bin_folder.parent.glob("lib/python*/site-packages")))


def ensure_axe() -> Path:
    """Install axe-core if it is missing, and return the path of axe.min.js."""
    npm_folder = ENVIRONMENTS / "pages"
    axe_folder = npm_folder / "node_modules" / "axe-core"
    with lock_environments():
        installed_version = (
            json.loads((axe_folder / "package.json").read_text())["version"] if axe_folder.exists() else None
        )
        if installed_version != AXE_PACKAGE.rpartition("@")[2]:
            if not shutil.which("npm"):
                exit_with_setup_error(f"npm is needed to install axe-core: {system_install('npm')}")
            run_or_exit(
                ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(npm_folder), AXE_PACKAGE]
            )
    return axe_folder / "axe.min.js"


def ensure_pyverbs_wheel(tools_bin: Path, *, python_tag: str) -> Path:
    """Build the wheel of pyverbs for the Python in the folder `tools_bin`, and return the path of the wheel.

    The wheel is built only once for each `python_tag`, such as cp311, because the build takes minutes and does not
    depend on this tree.
    """
    folder = ROOT / "build" / "pyverbs" / python_tag
    if not list(folder.glob("pyverbs-*.whl")):
        pip_wheel = [str(tools_bin / "pip"), "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder)]
        # BUILD_CONSTRAINT_VARIABLES make pip limit the versions of the build tools that it installs.
        run_or_exit([*pip_wheel, PYVERBS_REQUIREMENT], environ=BUILD_CONSTRAINT_VARIABLES)
    (wheel,) = folder.glob("pyverbs-*.whl")
    return wheel


def build_bench_programs() -> Path:
    """Build the native benchmark programs, and return their folder."""
    tools_bin = ensure_build_tools()
    configure_command, build_command = _make_preset_commands(tools_bin, "release", with_tests=True)
    with lock_environments():
        for program, *arguments in (configure_command, [*build_command, "--target", *BENCH_PROGRAMS]):
            run_or_exit(
                [str(tools_bin / program), *arguments], environ=prepend_to_path(tools_bin), folder=NATIVE_FOLDER
            )
    return ROOT / "build" / "native" / "release" / "usrbio" / "tests"


def build_wheel() -> None:
    """Build the wheel of the product into build/wheels."""
    tools_bin = ensure_build_tools()
    wheels_folder = ROOT / "build" / "wheels"
    pip_wheel = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels_folder), str(ROOT)]
    with lock_environments():
        for old_wheel in wheels_folder.glob("gdrkit-*.whl"):
            old_wheel.unlink()
        build_folder_option = f"build-dir={ROOT / 'build' / 'native' / 'release'}"
        run_or_exit([str(tools_bin / "pip"), *pip_wheel, "-C", build_folder_option], environ=prepend_to_path(tools_bin))


def build_defects(run_bin: Path) -> Path:
    """Build usrbio client libraries with one deliberate defect each, for the session `review`. Return their folder.

    `run_bin` is the bin folder of the environment that runs the suites. Beside the patched source files, the libraries
    consist of objects of the release build, which :func:`prepare_run` has made.
    """
    defect_sources, build_folder = ROOT / "suites" / "meta" / "defects" / "native", ROOT / "build" / "defects"
    tools_bin = ensure_build_tools()
    release_folder = ROOT / "build" / "native" / "release"
    options = [
        "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
        f"-DGDRKIT_PATCHED={build_folder / 'patched'}",
        f"-DGDRKIT_RELEASE={release_folder}",
    ]
    steps = (
        ["cmake", "-G", "Ninja", "-S", str(defect_sources), "-B", str(build_folder), *options],
        ["cmake", "--build", str(build_folder)],
    )
    with lock_environments():
        patch_command = [str(run_bin / "python"), "-m", "meta.defects.native", str(build_folder / "patched")]
        run_or_exit(patch_command, environ=prepend_to_pythonpath(ROOT / "suites"))
        for program, *arguments in steps:
            run_or_exit([str(tools_bin / program), *arguments], environ=prepend_to_path(tools_bin))
    return build_folder


def check_native(with_unit_tests_by_preset: Mapping[str, bool]) -> list[int]:
    """Configure, build and test CMake presets of both native projects, all presets at the same time.

    The first preset should have the most work. The others run with a lower priority, and get only the processor time
    that the first one leaves. If `with_unit_tests_by_preset` is false for a preset, only the tests with the label
    ``release`` are built and run for it. They examine the built libraries. Return for each preset 0, or the exit code
    of its failed step.
    """
    tools_bin = ensure_build_tools()
    # The presets are built at the same time, so each gets one job less than Ninja's default for more than two
    # processors, which is the number of processors plus 2.
    job_count = (os.cpu_count() or 1) + 1
    variables = prepend_to_path(tools_bin) | {"CMAKE_BUILD_PARALLEL_LEVEL": str(job_count)}
    parts = []
    for index, (preset, with_unit_tests) in enumerate(with_unit_tests_by_preset.items()):
        steps = [
            f"cd {shlex.quote(str(project_folder))}; {shlex.join(step)}"
            # The twins are built first, because the product's tests load the twins of the same preset.
            for project_folder in (TWINS_FOLDER, NATIVE_FOLDER)
            for step in _make_check_steps(tools_bin, project_folder, preset, with_unit_tests=with_unit_tests)
        ]
        # With -e, bash ends with the exit code of the first step that fails. With -x, it prints each step.
        assignments = [f"{name}={value}" for name, value in variables.items()]
        launcher = ("env", *assignments, "nice", "-n", str(10 * bool(index)))
        parts.append(Part(preset, (*launcher, "bash", "-exc", "\n".join(steps))))
    return list(call_side_by_side(parts, jobs_max=len(parts)).values())


def _make_check_steps(tools_bin: Path, project_folder: Path, preset: str, *, with_unit_tests: bool) -> list[list[str]]:
    """Return the commands that configure, build and test one CMake preset of one native project."""
    configure_command, build_command = _make_preset_commands(tools_bin, preset, with_tests=True)
    configure_command.append(f"-DGDRKIT_TESTS_IN_ALL={'ON' if with_unit_tests else 'OFF'}")
    test_command = ["ctest", "--preset", preset]
    if not with_unit_tests:
        build_command += ["--target", "all", "release_tests"]
        test_command += ["--label-regex", "^release$"]
    if project_folder == NATIVE_FOLDER:
        twins_lib = ROOT / "build" / "twins" / preset / "lib"
        configure_command += [f"-DGDRKIT_CUDA={twins_lib / 'cuda'}", f"-DGDRKIT_VERBS={twins_lib / 'ibverbs'}"]
    return [configure_command, build_command, test_command]


def _install_twins(run_bin: Path) -> None:
    """Build the wheel of the twins and install it, if their sources have changed."""
    sources = [path for path in _list_source_files(TWINS_FOLDER) if "tests" not in path.relative_to(TWINS_FOLDER).parts]
    sources += _list_source_files(NATIVE_FOLDER / "common")
    digest_file = run_bin.parent / "twins-made-from"
    expected_digest = compute_digest([], sources)
    tools_bin = ensure_build_tools()
    with lock_environments():
        if digest_file.exists() and digest_file.read_text() == expected_digest:
            return
        print_line("building the twins")
        wheels_folder = ROOT / "build" / "wheels"
        shutil.rmtree(wheels_folder, ignore_errors=True)
        pip_wheel = [
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--wheel-dir",
            str(wheels_folder),
            str(TWINS_FOLDER),
        ]
        build_folder_option = f"build-dir={ROOT / 'build' / 'twins' / 'release'}"
        run_or_exit([str(tools_bin / "pip"), *pip_wheel, "-C", build_folder_option], environ=prepend_to_path(tools_bin))
        wheel = next(wheels_folder.glob("*.whl"))
        run_or_exit([str(run_bin / "pip"), "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel)])
        digest_file.write_text(expected_digest)


def _install_native() -> None:
    """Build the native parts of the product and install them into this tree, if their sources have changed."""
    python = find_interpreter()[0]
    sources = [
        path
        for path in _list_source_files(NATIVE_FOLDER)
        if TWINS_FOLDER not in path.parents and "tests" not in path.relative_to(NATIVE_FOLDER).parts
    ]
    expected_digest = compute_digest([python, str(python_version(python)), *BUILD_REQUIREMENTS], sources)
    tools_bin = ensure_build_tools()
    # The modules are installed into this tree, not into an environment. So the digest file is in the build folder, and
    # the modules are not built again for a new environment.
    digest_file = ROOT / "build" / "native" / "installed-from"
    with lock_environments():
        if digest_file.exists() and digest_file.read_text() == expected_digest:
            return
        print_line("building the native parts")
        digest_file.unlink(missing_ok=True)
        install_step = ["cmake", "--install", "../build/native/release", "--prefix", str(ROOT), "--component", "python"]
        for program, *arguments in (*_make_preset_commands(tools_bin, "release", with_tests=False), install_step):
            run_or_exit(
                [str(tools_bin / program), *arguments], environ=prepend_to_path(tools_bin), folder=NATIVE_FOLDER
            )
        digest_file.write_text(expected_digest)


def _list_source_files(tree: Path) -> list[Path]:
    """Return the files of a native project that a build reads, including the files of its tests."""
    files = (path for path in sorted(tree.rglob("*")) if path.is_file() and path.suffix != ".md")
    return [path for path in files if "__pycache__" not in path.parts]


def _make_preset_commands(tools_bin: Path, preset: str, *, with_tests: bool) -> list[list[str]]:
    """Return the commands that configure and build one CMake preset."""
    options = [f"-DBUILD_TESTING={'ON' if with_tests else 'OFF'}", f"-DPython_EXECUTABLE={tools_bin / 'python'}"]
    # The twins have no Python modules. Without --no-warn-unused-cli, CMake would warn about the unused
    # Python_EXECUTABLE.
    configure_command = ["cmake", "--preset", preset, *options, "--no-warn-unused-cli"]
    return [configure_command, ["cmake", "--build", "--preset", preset]]
