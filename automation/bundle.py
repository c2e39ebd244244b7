"""Creation of the bundle: a folder with all files that a GPU machine needs to run the test cases of gdrkit.

The machine needs no package registry. `nox -s bundle` creates the folder. On the GPU machine, the folder's `gpu.py`,
a copy of hardware/gpu/run.py, installs the wheels and runs the cases that its table PARTS lists.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from automation.builds import (
    BENCH_PROGRAMS,
    BUILD_REQUIREMENTS,
    KVIKIO_REQUIREMENTS,
    PYVERBS_REQUIREMENT,
    build_bench_programs,
    ensure_pyverbs_wheel,
)
from automation.commands import ROOT, call, exit_setup_missing, get_output, prepend_to_path, print_line, run_or_exit
from automation.environments import ensure_environment, lock_environments
from automation.machine import python_version
from automation.system_packages import find_missing_build_packages, find_missing_pyverbs_packages, install_packages
from gdrkit.remedies import system_install

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["fill_bundle"]

# The largest bundle that can be copied to the GPU machine.
BUNDLE_BYTES_MAX = 64 << 20
# Loaders of model files, with which gdrkit is compared. Their wheels are small enough for the bundle.
MODEL_LOADERS = ("safetensors", "fastsafetensors", "runai-model-streamer", "instanttensor")
# The copy of the sources, and the builds, which the next bundle reuses.
BUNDLE_CACHE = ROOT / "build" / "bundle-parts"


def fill_bundle(*, python: str, output: Path, extras: Path | None) -> None:
    """Fill the folder `output` for one Python version.

    The folder gets the wheels of gdrkit, of the software twins (libraries that emulate the hardware), of pyverbs and of
    their dependencies. It also gets `gpu.py` and the benchmark programs. The wheels of kvikio, numpy and the loaders of
    model files come from the package registry or from the folder `extras`, and are left out if neither has them.
    """
    python_program = shutil.which(python if "/" in python else f"python{python}")
    if python_program is None or python_version(python_program) < (3, 11):
        exit_setup_missing(f"--python must name an installed Python, 3.11 or newer, not {python}")
    # A program on the PATH may be a shim that chooses the interpreter by the current folder. So the interpreter itself
    # is asked for its path.
    interpreter_path = get_output([python_program, "-c", "import sys; print(sys.executable)"])
    install_packages([*find_missing_build_packages(interpreter_path), *find_missing_pyverbs_packages()])
    tools = ensure_environment("bundle", python=interpreter_path, requirements=BUILD_REQUIREMENTS)
    tag = "cp" + "".join(map(str, python_version(interpreter_path)))
    with lock_environments():
        shutil.rmtree(output, ignore_errors=True)
        # The commit is read now, when the sources are copied. During the build, the tree may get another commit.
        commit = get_output(["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--dirty"]) or "unknown"
        _copy_sources()
        _collect_wheels(tools, tag=tag, output=output)
        _collect_extras(tools, output=output, extras=extras)
    _collect_programs(output)
    (output / "bundle.json").write_text(json.dumps({"commit": commit, "python": tag}) + "\n")
    size_bytes = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    version = ".".join(map(str, python_version(interpreter_path)))
    print_line(
        f"{output}: {size_bytes / (1 << 20):.1f} MiB for Python {version}; copy it to the GPU machine, and run gpu.py"
    )
    if size_bytes > BUNDLE_BYTES_MAX:
        exit_setup_missing(f"The bundle is larger than {BUNDLE_BYTES_MAX >> 20} MiB.")


def _copy_sources() -> None:
    """Copy the sources without built modules, because the modules in this tree may be for another Python."""
    sources, ignore = BUNDLE_CACHE / "tree", shutil.ignore_patterns(".*", "build", "runs", "*.so", "__pycache__")
    shutil.rmtree(sources, ignore_errors=True)
    shutil.copytree(ROOT, sources, ignore=ignore)


def _collect_wheels(tools: Path, *, tag: str, output: Path) -> None:
    """Build the wheels of gdrkit, of the twins and of pyverbs, and download the wheels of their dependencies."""
    wheels, cache = output / "wheels", BUNDLE_CACHE
    pip_wheel = [str(tools / "pip"), "wheel", "--quiet", "--no-deps"]
    pyverbs_wheel = ensure_pyverbs_wheel(tools, tag=tag)
    sources = BUNDLE_CACHE / "tree"
    for source, build_folder in ((sources / "native" / "twins", "twins"), (sources, f"native-{tag}")):
        options = ["--no-build-isolation", "--wheel-dir", str(wheels), "-C", f"build-dir={cache / build_folder}"]
        # Debug symbols are removed, because the bundle would exceed its size limit with them. Build ids remain, because
        # they are in a section that is loaded with the library. The records name each library by its build id.
        run_or_exit([*pip_wheel, *options, "-C", "install.strip=true", str(source)], environ=prepend_to_path(tools))
    link_options = ["--find-links", str(wheels), "--find-links", str(pyverbs_wheel.parent)]
    _download(tools, "--dest", str(wheels), *link_options, "gdrkit[qualify]", "gdrkit-twins", PYVERBS_REQUIREMENT)


def _collect_extras(tools: Path, *, output: Path, extras: Path | None) -> None:
    # The wheel of packaging has already been downloaded as a dependency of gdrkit.
    packages = [*(requirement for requirement in KVIKIO_REQUIREMENTS if requirement != "packaging"), "numpy"]
    link_options = ["--find-links", str(extras)] if extras else []
    command = _make_download_command(tools, "--no-deps", "--dest", str(output / "extras"), *link_options, *packages)
    if call(command) != 0:
        print_line(f"Continuing without {KVIKIO_REQUIREMENTS[0]}: its cases will not run on the GPU machine.")
    for package in MODEL_LOADERS:
        if (
            call(_make_download_command(tools, "--no-deps", "--dest", str(output / "extras"), *link_options, package))
            != 0
        ):
            print_line(f"Continuing without {package}: the benchmark of model files will run without it.")


def _collect_programs(output: Path) -> None:
    programs_folder = build_bench_programs()
    (output / "bench").mkdir()
    for program in BENCH_PROGRAMS:
        shutil.copy(programs_folder / program, output / "bench" / program)
        run_or_exit(["strip", str(output / "bench" / program)])
    (output / "lib").mkdir()
    library = next(iter(re.findall(r"librdmacm\.so\.1 .*=> (\S+)", get_output(["/sbin/ldconfig", "-p"]))), None)
    if library is None:
        exit_setup_missing(
            f"librdmacm.so.1 is not installed, and pyverbs does not load without it: {system_install('librdmacm1')}"
        )
    shutil.copy(os.path.realpath(library), output / "lib" / "librdmacm.so.1")
    shutil.copy(ROOT / "hardware" / "gpu" / "run.py", output / "gpu.py")


def _download(tools: Path, *arguments: str) -> None:
    run_or_exit(_make_download_command(tools, *arguments))


def _make_download_command(tools: Path, *arguments: str) -> Sequence[str]:
    return [str(tools / "pip"), "download", "--quiet", "--only-binary", ":all:", *arguments]
