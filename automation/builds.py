"""Builds of the native parts, the software twins, the wheels and the benchmark programs, for the nox sessions.

A software twin is a drop-in library that emulates hardware. Every build uses the folder of its CMake preset below
`build/`. A session therefore reuses what another session has compiled.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from automation.commands import ROOT, call, prepend_to_path, prepend_to_pythonpath, require, say, stop
from automation.environments import BUILD_CONSTRAINTS, ENVIRONMENTS, digest, ensure_environment, lock_environments
from automation.machine import find_interpreter, has_pyverbs, python_version
from automation.system_packages import LAB_PROGRAMS, find_missing_build_packages, find_missing_pyverbs_packages, install
from gdrkit.remedies import system_install

__all__ = [
    "BENCH_PROGRAMS",
    "BUILD_REQUIREMENTS",
    "KVIKIO_REQUIREMENTS",
    "NATIVE",
    "PYVERBS_REQUIREMENT",
    "TWINS",
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

NATIVE = ROOT / "native"
TWINS = NATIVE / "twins"
BUILD_REQUIREMENTS = ("cmake>=3.25,<4", "ninja>=1.11", "scikit-build-core>=1.0,<2", "nanobind>=2.4,<4")
LAB_REQUIREMENTS = ("virtme-ng==1.42",)
PYVERBS_REQUIREMENT = "pyverbs==59.0"
RUN_REQUIREMENTS = (
    "nox>=2024.4.15",
    # The cases validate records and reports with jsonschema.
    "jsonschema>=4.20",
    "coverage>=7.6",
    # atheris guides the fuzzing of parsers. PyPI has wheels of it only for the Pythons and machines of this marker.
    "atheris>=2.3; python_version < '3.14' and platform_machine == 'x86_64'",
)
# These packages are installed without their dependencies, which are two gigabytes of CUDA libraries. The suites do not
# use them.
KVIKIO_REQUIREMENTS = ("kvikio-cu13==26.10.*", "libkvikio-cu13==26.10.*", "rapids-logger==0.3.*", "packaging")
# The accessibility rules differ between versions.
AXE_PACKAGE = "axe-core@4.14.1"
# Playwright controls the Chromium of this machine. Their versions need not match.
PLAYWRIGHT_REQUIREMENTS = ("playwright==1.65.2",)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BENCH_PROGRAMS = ("usrbio_path_bench", "usrbio_ring_bench")


def prepare_run(*, twins: bool, native_parts: bool = True) -> Path:
    """Create the environment that runs the suites, and return its bin folder.

    It has gdrkit as an editable installation of this tree, and the dependencies of gdrkit. With `twins` it also has the
    software twins, and with `native_parts` the native parts of the product.
    """
    python, build_pyverbs = find_interpreter()
    packages = find_missing_build_packages(python) if twins or native_parts or build_pyverbs else []
    if build_pyverbs:
        packages += find_missing_pyverbs_packages()
    elif not has_pyverbs():
        packages.append("python3-pyverbs")
    install(packages)
    requirements = (
        *RUN_REQUIREMENTS,
        *((PYVERBS_REQUIREMENT,) if build_pyverbs else ()),
        "-e",
        f"{ROOT}[qualify,cuda13,cufile,fuse,monitor,mpi]",
    )
    run = ensure_environment(
        "run",
        python=python,
        requirements=requirements,
        input_files=[ROOT / "pyproject.toml"],
        optional_requirements=KVIKIO_REQUIREMENTS,
    )
    if twins:
        _install_twins(run)
    if native_parts:
        _install_native()
    return run


def ensure_build_tools() -> Path:
    """Create the environment with the build tools, and return its bin folder."""
    return ensure_environment("build", python=find_interpreter()[0], requirements=BUILD_REQUIREMENTS)


def ensure_lab_tools() -> Path:
    """Install the programs that start the virtual machine of the lab, and return the folder of vng."""
    missing = [package for name, package in LAB_PROGRAMS.items() if not shutil.which(name)]
    install(missing)
    return ensure_environment("lab", python=find_interpreter()[0], requirements=LAB_REQUIREMENTS)


def ensure_playwright() -> dict[str, str]:
    """Install a browser and Playwright if they are missing, and return variables with which Python can import it."""
    if not any(map(shutil.which, BROWSERS)):
        install(["chromium"])
    environment = ensure_environment("playwright", python=find_interpreter()[0], requirements=PLAYWRIGHT_REQUIREMENTS)
    return prepend_to_pythonpath(next(environment.parent.glob("lib/python*/site-packages")))


def ensure_axe() -> Path:
    """Install axe-core if it is missing, and return the path of axe.min.js."""
    tools = ENVIRONMENTS / "pages"
    axe = tools / "node_modules" / "axe-core"
    with lock_environments():
        installed_version = json.loads((axe / "package.json").read_text())["version"] if axe.exists() else None
        if installed_version != AXE_PACKAGE.rpartition("@")[2]:
            if not shutil.which("npm"):
                stop(f"npm is needed to install axe-core: {system_install('npm')}")
            require(["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(tools), AXE_PACKAGE])
    return axe / "axe.min.js"


def ensure_pyverbs_wheel(tools: Path, *, tag: str) -> Path:
    """Build the wheel of pyverbs for the Python of `tools`, and return its path.

    It is built only once for each `tag` of Python, because the build takes minutes and does not depend on this tree.
    """
    folder = ROOT / "build" / "pyverbs" / tag
    if not list(folder.glob("pyverbs-*.whl")):
        pip_wheel = [str(tools / "pip"), "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder)]
        # The variables limit the versions of the build tools that pip installs.
        require([*pip_wheel, PYVERBS_REQUIREMENT], environ=BUILD_CONSTRAINTS)
    (wheel,) = folder.glob("pyverbs-*.whl")
    return wheel


def build_bench_programs() -> Path:
    """Build the native benchmark programs, and return their folder."""
    tools = ensure_build_tools()
    configure, build = _read_preset_steps(tools, "release", testing=True)
    with lock_environments():
        for step in (configure, [*build, "--target", *BENCH_PROGRAMS]):
            require([str(tools / step[0]), *step[1:]], environ=prepend_to_path(tools), folder=NATIVE)
    return ROOT / "build" / "native" / "release" / "usrbio" / "tests"


def build_wheel() -> None:
    """Build the wheel of the product into build/wheels."""
    tools = ensure_build_tools()
    wheels = ROOT / "build" / "wheels"
    pip_wheel = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(ROOT)]
    with lock_environments():
        for old_wheel in wheels.glob("gdrkit-*.whl"):
            old_wheel.unlink()
        build_folder_option = f"build-dir={ROOT / 'build' / 'native' / 'release'}"
        require([str(tools / "pip"), *pip_wheel, "-C", build_folder_option], environ=prepend_to_path(tools))


def build_defects(run_bin: Path) -> Path:
    """Build client libraries with one deliberate defect each, for the session `review`, and return their folder.

    `run_bin` is the bin folder of the environment that runs the suites.
    """
    defect_sources, build_folder = ROOT / "suites" / "meta" / "defects" / "native", ROOT / "build" / "defects"
    tools = ensure_build_tools()
    options = ["-DCMAKE_BUILD_TYPE=RelWithDebInfo", f"-DGDRKIT_PATCHED={build_folder / 'patched'}"]
    steps = (
        ["cmake", "-G", "Ninja", "-S", str(defect_sources), "-B", str(build_folder), *options],
        ["cmake", "--build", str(build_folder)],
    )
    with lock_environments():
        patch = [str(run_bin / "python"), "-m", "meta.defects.native", str(build_folder / "patched")]
        require(patch, environ=prepend_to_pythonpath(ROOT / "suites"))
        for step in steps:
            require([str(tools / step[0]), *step[1:]], environ=prepend_to_path(tools))
    return build_folder


def check_native(tree: Path, preset: str) -> int:
    """Configure, build and test one CMake preset of a native project. Return 0, or the exit code of the failed step."""
    tools = ensure_build_tools()
    configure, build = _read_preset_steps(tools, preset, testing=True)
    if tree == NATIVE:
        # The product's native tests load the twins that were built with the same preset.
        twins = ROOT / "build" / "twins" / preset / "lib"
        configure += [f"-DGDRKIT_CUDA={twins / 'cuda'}", f"-DGDRKIT_VERBS={twins / 'ibverbs'}"]
    for step in (configure, build, ["ctest", "--preset", preset]):
        code = call([str(tools / step[0]), *step[1:]], environ=prepend_to_path(tools), folder=tree)
        if code:
            return code
    return 0


def _install_twins(run: Path) -> None:
    """Build the wheel of the twins and install it, if their sources have changed."""
    sources = [path for path in _list_source_files(TWINS) if "tests" not in path.relative_to(TWINS).parts]
    sources += _list_source_files(NATIVE / "common")
    stamp = run.parent / "twins-made-from"
    expected_digest = digest([], sources)
    tools = ensure_build_tools()
    with lock_environments():
        if stamp.exists() and stamp.read_text() == expected_digest:
            return
        say("building the twins")
        wheels = ROOT / "build" / "wheels"
        shutil.rmtree(wheels, ignore_errors=True)
        pip_wheel = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(TWINS)]
        build_folder_option = f"build-dir={ROOT / 'build' / 'twins' / 'release'}"
        require([str(tools / "pip"), *pip_wheel, "-C", build_folder_option], environ=prepend_to_path(tools))
        wheel = next(wheels.glob("*.whl"))
        require([str(run / "pip"), "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel)])
        stamp.write_text(expected_digest)


def _install_native() -> None:
    """Build the native parts of the product and install them into this tree, if their sources have changed."""
    python = find_interpreter()[0]
    sources = [
        path
        for path in _list_source_files(NATIVE)
        if TWINS not in path.parents and "tests" not in path.relative_to(NATIVE).parts
    ]
    expected_digest = digest([python, str(python_version(python)), *BUILD_REQUIREMENTS], sources)
    tools = ensure_build_tools()
    # The modules are installed into this tree. A new environment does not need them again, so the stamp is in the build
    # folder and not in the environment.
    stamp = ROOT / "build" / "native" / "installed-from"
    with lock_environments():
        if stamp.exists() and stamp.read_text() == expected_digest:
            return
        say("building the native parts")
        stamp.unlink(missing_ok=True)
        install_step = ["cmake", "--install", "../build/native/release", "--prefix", str(ROOT), "--component", "python"]
        for step in (*_read_preset_steps(tools, "release", testing=False), install_step):
            require([str(tools / step[0]), *step[1:]], environ=prepend_to_path(tools), folder=NATIVE)
        stamp.write_text(expected_digest)


def _list_source_files(tree: Path) -> list[Path]:
    """Return the files of a native project that a build reads, including the files of its tests."""
    files = (path for path in sorted(tree.rglob("*")) if path.is_file() and path.suffix != ".md")
    return [path for path in files if "__pycache__" not in path.parts]


def _read_preset_steps(tools: Path, preset: str, *, testing: bool) -> list[list[str]]:
    """Return the commands that configure and build one CMake preset."""
    options = [f"-DBUILD_TESTING={'ON' if testing else 'OFF'}", f"-DPython_EXECUTABLE={tools / 'python'}"]
    # --no-warn-unused-cli: the twins have no Python modules, so CMake would warn about the unused Python_EXECUTABLE.
    configure = ["cmake", "--preset", preset, *options, "--no-warn-unused-cli"]
    return [configure, ["cmake", "--build", "--preset", preset]]
