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
from automation.commands import ROOT, call, exit_with_setup_error, get_output, prepend_to_path, print_line, run_or_exit
from automation.environments import ensure_environment, lock_environments
from automation.machine import python_version
from automation.system_packages import find_missing_build_packages, find_missing_pyverbs_packages, install_packages
from gdrkit.remedies import system_install

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["fill_bundle"]

# Size limit of a bundle, because a larger one cannot be copied to the GPU machine.
BUNDLE_BYTES_MAX = 64 << 20
# Loaders of model files, with which gdrkit is compared. Their wheels are small enough for the bundle.
MODEL_LOADERS = ("safetensors", "fastsafetensors", "runai-model-streamer", "instanttensor")
# The folder with the copy of the sources, and with the builds, which the next bundle reuses.
BUNDLE_CACHE = ROOT / "build" / "bundle-parts"


def fill_bundle(*, python: str, bundle_folder: Path, extra_wheels_folder: Path | None) -> None:
    """Fill `bundle_folder` for one Python version.

    The folder gets the wheels of gdrkit, of the software twins (libraries that emulate the hardware), of pyverbs and of
    their dependencies. It also gets `gpu.py` and the benchmark programs. The wheels of kvikio, numpy and the loaders of
    model files come from the package registry or from `extra_wheels_folder`, and are left out if neither has them.
    """
    python_program = shutil.which(python if "/" in python else f"python{python}")
    if python_program is None or python_version(python_program) < (3, 11):
        exit_with_setup_error(f"--python must name an installed Python, 3.11 or newer, not {python}")
    # A program on the PATH may be a shim that chooses the interpreter by the current folder. So the interpreter itself
    # is asked for its path.
    interpreter_path = get_output([python_program, "-c", "import sys; print(sys.executable)"])
    install_packages([*find_missing_build_packages(interpreter_path), *find_missing_pyverbs_packages()])
    tools_bin = ensure_environment("bundle", python=interpreter_path, requirements=BUILD_REQUIREMENTS)
    python_tag = "cp" + "".join(map(str, python_version(interpreter_path)))
    with lock_environments():
        shutil.rmtree(bundle_folder, ignore_errors=True)
        # The commit is read now, when the sources are copied. During the build, the tree may get another commit.
        commit = get_output(["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--dirty"]) or "unknown"
        _copy_sources()
        _collect_wheels(tools_bin, python_tag=python_tag, bundle_folder=bundle_folder)
        _collect_optional_wheels(tools_bin, bundle_folder=bundle_folder, extra_wheels_folder=extra_wheels_folder)
    _collect_programs(bundle_folder)
    (bundle_folder / "bundle.json").write_text(json.dumps({"commit": commit, "python": python_tag}) + "\n")
    size_bytes = sum(path.stat().st_size for path in bundle_folder.rglob("*") if path.is_file())
    version = ".".join(map(str, python_version(interpreter_path)))
    print_line(
        f"{bundle_folder}: {size_bytes / (1 << 20):.1f} MiB for Python {version}; "
        "copy it to the GPU machine, and run gpu.py"
    )
    if size_bytes > BUNDLE_BYTES_MAX:
        exit_with_setup_error(f"The bundle is larger than {BUNDLE_BYTES_MAX >> 20} MiB.")


def _copy_sources() -> None:
    """Copy the sources without built modules, because the modules in this tree may be for another Python."""
    sources_folder, ignore = BUNDLE_CACHE / "tree", shutil.ignore_patterns(".*", "build", "runs", "*.so", "__pycache__")
    shutil.rmtree(sources_folder, ignore_errors=True)
    shutil.copytree(ROOT, sources_folder, ignore=ignore)


def _collect_wheels(tools_bin: Path, *, python_tag: str, bundle_folder: Path) -> None:
    """Build the wheels of gdrkit, of the twins and of pyverbs, and download the wheels of their dependencies."""
    wheels_folder = bundle_folder / "wheels"
    pip_wheel = [str(tools_bin / "pip"), "wheel", "--quiet", "--no-deps"]
    pyverbs_wheel = ensure_pyverbs_wheel(tools_bin, python_tag=python_tag)
    sources_folder = BUNDLE_CACHE / "tree"
    for source, build_folder in (
        (sources_folder / "native" / "twins", "twins"),
        (sources_folder, f"native-{python_tag}"),
    ):
        options = [
            "--no-build-isolation",
            "--wheel-dir",
            str(wheels_folder),
            "-C",
            f"build-dir={BUNDLE_CACHE / build_folder}",
        ]
        # Debug symbols are removed, because the bundle would exceed its size limit with them. Build ids remain, because
        # they are in a section that is loaded with the library. The records name each library by its build id.
        run_or_exit([*pip_wheel, *options, "-C", "install.strip=true", str(source)], environ=prepend_to_path(tools_bin))
    link_options = ["--find-links", str(wheels_folder), "--find-links", str(pyverbs_wheel.parent)]
    _download(
        tools_bin, "--dest", str(wheels_folder), *link_options, "gdrkit[qualify]", "gdrkit-twins", PYVERBS_REQUIREMENT
    )


def _collect_optional_wheels(tools_bin: Path, *, bundle_folder: Path, extra_wheels_folder: Path | None) -> None:
    # The wheel of packaging has already been downloaded as a dependency of gdrkit.
    packages = [*(requirement for requirement in KVIKIO_REQUIREMENTS if requirement != "packaging"), "numpy"]
    link_options = ["--find-links", str(extra_wheels_folder)] if extra_wheels_folder else []
    command = _make_download_command(
        tools_bin, "--no-deps", "--dest", str(bundle_folder / "extras"), *link_options, *packages
    )
    if call(command) != 0:
        print_line(f"Continuing without {KVIKIO_REQUIREMENTS[0]}: its cases will not run on the GPU machine.")
    for package in MODEL_LOADERS:
        if (
            call(
                _make_download_command(
                    tools_bin, "--no-deps", "--dest", str(bundle_folder / "extras"), *link_options, package
                )
            )
            != 0
        ):
            print_line(f"Continuing without {package}: the benchmark of model files will run without it.")


def _collect_programs(bundle_folder: Path) -> None:
    """Build and copy the benchmark programs, and copy librdmacm and gpu.py."""
    programs_folder = build_bench_programs()
    (bundle_folder / "bench").mkdir()
    for program in BENCH_PROGRAMS:
        shutil.copy(programs_folder / program, bundle_folder / "bench" / program)
        run_or_exit(["strip", str(bundle_folder / "bench" / program)])
    (bundle_folder / "lib").mkdir()
    library = next(iter(re.findall(r"librdmacm\.so\.1 .*=> (\S+)", get_output(["/sbin/ldconfig", "-p"]))), None)
    if library is None:
        exit_with_setup_error(
            f"librdmacm.so.1 is not installed, and pyverbs does not load without it: {system_install('librdmacm1')}"
        )
    shutil.copy(os.path.realpath(library), bundle_folder / "lib" / "librdmacm.so.1")
    shutil.copy(ROOT / "hardware" / "gpu" / "run.py", bundle_folder / "gpu.py")


def _download(tools_bin: Path, *arguments: str) -> None:
    run_or_exit(_make_download_command(tools_bin, *arguments))


def _make_download_command(tools_bin: Path, *arguments: str) -> Sequence[str]:
    return [str(tools_bin / "pip"), "download", "--quiet", "--only-binary", ":all:", *arguments]
