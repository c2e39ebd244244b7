"""Builds of the native parts, the twins, the wheels and the benchmark programs.

Every build uses the folder of its CMake preset below `build/`, so that no session compiles what another one compiled.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from automation.commands import ROOT, call, prepend_to_path, require, say, stop
from automation.environments import ENVIRONMENTS, digest, ensure_environment, lock_environments
from automation.machine import find_interpreter, has_pyverbs, python_version
from automation.system_packages import install, missing_build_packages, missing_pyverbs_packages

__all__ = [
    "BENCH_PROGRAMS",
    "BUILD",
    "KVIKIO",
    "NATIVE",
    "PYVERBS",
    "TWINS",
    "build_bench_programs",
    "build_defects",
    "build_wheel",
    "check_native",
    "ensure_axe",
    "ensure_build_tools",
    "prepare_run",
]

NATIVE = ROOT / "native"
TWINS = NATIVE / "twins"
BUILD = ("cmake>=3.25,<4", "ninja>=1.11", "scikit-build-core>=1.0,<2", "nanobind>=2.4,<4")
PYVERBS = "pyverbs==59.0"
RUN = (
    "nox>=2024.4.15",
    # The cases validate records and reports with it.
    "jsonschema>=4.20",
    # It guides the fuzzing of parsers. PyPI has wheels for these Pythons and machines only.
    "atheris>=2.3; python_version < '3.14' and platform_machine == 'x86_64'",
)
# Installed without their dependencies: those are two gigabytes of CUDA libraries that the suites do not use.
KVIKIO = ("kvikio-cu13==26.10.*", "libkvikio-cu13==26.10.*", "rapids-logger==0.3.*", "packaging")
# The accessibility rules differ between versions.
AXE = "axe-core@4.14.1"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BENCH_PROGRAMS = ("usrbio_path_bench", "usrbio_ring_bench")


def prepare_run(*, twins: bool, native_parts: bool = True) -> Path:
    """Make the environment that runs the suites, and return its bin folder.

    It has gdrkit as an editable installation of this tree, its dependencies, and by argument the native parts of the
    product and the twins.
    """
    python, build_pyverbs = find_interpreter()
    packages = missing_build_packages(python) if twins or native_parts or build_pyverbs else []
    if build_pyverbs:
        packages += missing_pyverbs_packages()
    elif not has_pyverbs():
        packages.append("python3-pyverbs")
    install(packages)
    requirements = (*RUN, *((PYVERBS,) if build_pyverbs else ()), "-e", f"{ROOT}[qualify,cuda13,cufile,fuse,mpi]")
    run = ensure_environment(
        "run",
        python=python,
        requirements=requirements,
        made_from=[ROOT / "pyproject.toml"],
        without_dependencies=KVIKIO,
    )
    if twins:
        _install_twins(run)
    if native_parts:
        _install_native()
    return run


def ensure_build_tools() -> Path:
    """Make the environment that has the build tools, and return its bin folder."""
    return ensure_environment("build", python=find_interpreter()[0], requirements=BUILD)


def ensure_axe() -> Path:
    """Install a browser and axe-core if they are missing, and return the path of axe.min.js."""
    if not any(map(shutil.which, BROWSERS)):
        install(["chromium"])
    tools = ENVIRONMENTS / "pages"
    axe = tools / "node_modules" / "axe-core"
    with lock_environments():
        installed = json.loads((axe / "package.json").read_text())["version"] if axe.exists() else None
        if installed != AXE.rpartition("@")[2]:
            if not shutil.which("npm"):
                stop("npm is needed, which installs axe-core. Debian: apt-get install npm")
            require(["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(tools), AXE])
    return axe / "axe.min.js"


def build_bench_programs() -> Path:
    """Build the native benchmarks, and return the folder that has them."""
    tools = ensure_build_tools()
    configure, build = _preset_steps(tools, "release", testing=True)
    with lock_environments():
        for step in (configure, [*build, "--target", *BENCH_PROGRAMS]):
            require([str(tools / step[0]), *step[1:]], environ=prepend_to_path(tools), folder=NATIVE)
    return ROOT / "build" / "native" / "release" / "usrbio" / "tests"


def build_wheel() -> None:
    """Build the wheel of the product into build/wheels."""
    tools = ensure_build_tools()
    wheels = ROOT / "build" / "wheels"
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(ROOT)]
    with lock_environments():
        for old in wheels.glob("gdrkit-*.whl"):
            old.unlink()
        folder = f"build-dir={ROOT / 'build' / 'native' / 'release'}"
        require([str(tools / "pip"), *build, "-C", folder], environ=prepend_to_path(tools))


def build_defects() -> Path:
    """Build the client libraries that have one defect each, for the session `review`, and return their folder."""
    sources, build = ROOT / "suites" / "meta" / "defects" / "native", ROOT / "build" / "defects"
    tools = ensure_build_tools()
    steps = (
        ["cmake", "-G", "Ninja", "-S", str(sources), "-B", str(build), "-DCMAKE_BUILD_TYPE=RelWithDebInfo"],
        ["cmake", "--build", str(build)],
    )
    with lock_environments():
        for step in steps:
            require([str(tools / step[0]), *step[1:]], environ=prepend_to_path(tools))
    return build


def check_native(tree: Path, preset: str) -> int:
    """Configure, build and test one CMake preset of a native project, and return the first exit code that is not 0."""
    tools = ensure_build_tools()
    configure, build = _preset_steps(tools, preset, testing=True)
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
    sources = [path for path in _source_files(TWINS) if "tests" not in path.relative_to(TWINS).parts]
    stamp = run.parent / "twins-made-from"
    expected_digest = digest([], sources)
    tools = ensure_build_tools()
    with lock_environments():
        if stamp.exists() and stamp.read_text() == expected_digest:
            return
        say("building the twins")
        wheels = ROOT / "build" / "wheels"
        shutil.rmtree(wheels, ignore_errors=True)
        build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(TWINS)]
        folder = f"build-dir={ROOT / 'build' / 'twins' / 'release'}"
        require([str(tools / "pip"), *build, "-C", folder], environ=prepend_to_path(tools))
        wheel = next(wheels.glob("*.whl"))
        require([str(run / "pip"), "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel)])
        stamp.write_text(expected_digest)


def _install_native() -> None:
    """Build the native parts of the product and install them into this tree, if their sources have changed."""
    python = find_interpreter()[0]
    sources = [
        path
        for path in _source_files(NATIVE)
        if TWINS not in path.parents and "tests" not in path.relative_to(NATIVE).parts
    ]
    expected_digest = digest([python, str(python_version(python)), *BUILD], sources)
    tools = ensure_build_tools()
    # The stamp lies with the build, because a new environment does not make the installed modules stale.
    stamp = ROOT / "build" / "native" / "installed-from"
    with lock_environments():
        if stamp.exists() and stamp.read_text() == expected_digest:
            return
        say("building the native parts")
        stamp.unlink(missing_ok=True)
        copy = ["cmake", "--install", "../build/native/release", "--prefix", str(ROOT), "--component", "python"]
        for step in (*_preset_steps(tools, "release", testing=False), copy):
            require([str(tools / step[0]), *step[1:]], environ=prepend_to_path(tools), folder=NATIVE)
        stamp.write_text(expected_digest)


def _source_files(tree: Path) -> list[Path]:
    """Return the files of a native project that a build reads, tests included."""
    files = (path for path in sorted(tree.rglob("*")) if path.is_file() and path.suffix != ".md")
    return [path for path in files if "__pycache__" not in path.parts]


def _preset_steps(tools: Path, preset: str, *, testing: bool) -> list[list[str]]:
    """Return the commands that configure and build one CMake preset."""
    options = [f"-DBUILD_TESTING={'ON' if testing else 'OFF'}", f"-DPython_EXECUTABLE={tools / 'python'}"]
    # The twins have no Python modules, so that CMake would warn that it does not use Python_EXECUTABLE.
    configure = ["cmake", "--preset", preset, *options, "--no-warn-unused-cli"]
    return [configure, ["cmake", "--build", "--preset", preset]]
