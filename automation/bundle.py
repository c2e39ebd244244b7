"""One folder with everything that a GPU machine without a package registry needs to run the cases."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from automation.builds import BENCH_PROGRAMS, BUILD, KVIKIO, PYVERBS, build_bench_programs
from automation.commands import ROOT, call, output_of, prepend_to_path, require, say, stop
from automation.environments import BUILD_CONSTRAINTS, ensure_environment, lock_environments
from automation.machine import python_version
from automation.system_packages import install, missing_build_packages, missing_pyverbs_packages

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["fill_bundle"]

# The size limit of the transport to such a machine.
BUNDLE_BYTES_MAX = 64 << 20
CACHE = ROOT / "build" / "bundle-parts"


def fill_bundle(*, python: str, output: Path, extras: Path | None) -> None:
    """Fill the folder `output` for one Python version.

    It gets the wheels of gdrkit, of the twins, of pyverbs and of their dependencies, the script that runs them, the
    benchmark programs, and, if a registry or the folder `extras` has them, the wheels of kvikio and numpy.
    """
    interpreter = shutil.which(python if "/" in python else f"python{python}")
    if interpreter is None or python_version(interpreter) < (3, 11):
        stop(f"--python must name an installed Python, 3.11 or newer, not {python}")
    # A name on the PATH may be a shim that chooses the interpreter by the current folder.
    exact = output_of([interpreter, "-c", "import sys; print(sys.executable)"])
    install([*missing_build_packages(exact), *missing_pyverbs_packages()])
    tools = ensure_environment("bundle", python=exact, requirements=BUILD)
    tag = "cp" + "".join(map(str, python_version(exact)))
    with lock_environments():
        shutil.rmtree(output, ignore_errors=True)
        # Read beside the copy of the sources: a build takes minutes, in which the tree may get another commit.
        commit = output_of(["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--dirty"]) or "unknown"
        _copy_sources()
        _collect_wheels(tools, tag=tag, output=output)
        _collect_extras(tools, output=output, extras=extras)
    _collect_programs(output)
    (output / "bundle.json").write_text(json.dumps({"commit": commit, "python": tag}) + "\n")
    size_bytes = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    version = ".".join(map(str, python_version(exact)))
    say(f"{output}: {size_bytes / (1 << 20):.1f} MiB for Python {version}; run gpu.py there")
    if size_bytes > BUNDLE_BYTES_MAX:
        stop(f"The bundle is larger than {BUNDLE_BYTES_MAX >> 20} MiB.")


def _copy_sources() -> None:
    """Copy the sources alone, because the modules that were built into this tree are for another Python."""
    sources, ignored = CACHE / "tree", shutil.ignore_patterns(".*", "build", "runs", "*.so", "__pycache__")
    shutil.rmtree(sources, ignore_errors=True)
    shutil.copytree(ROOT, sources, ignore=ignored)


def _collect_wheels(tools: Path, *, tag: str, output: Path) -> None:
    """Build the wheels of this tree and of pyverbs, and download those that they depend on."""
    wheels, cache = output / "wheels", CACHE
    build = [str(tools / "pip"), "wheel", "--quiet", "--no-deps"]
    # pyverbs does not depend on this tree and takes minutes to build, so its wheel is kept.
    if not list((cache / tag).glob("pyverbs-*.whl")):
        require([*build, "--wheel-dir", str(cache / tag), PYVERBS], environ=BUILD_CONSTRAINTS)
    sources = CACHE / "tree"
    for source, part in ((sources / "native" / "twins", "twins"), (sources, f"native-{tag}")):
        options = ["--no-build-isolation", "--wheel-dir", str(wheels), "-C", f"build-dir={cache / part}"]
        # The symbols alone exceed the limit. The build ids, by which records name libraries, stay.
        require([*build, *options, "-C", "install.strip=true", str(source)], environ=prepend_to_path(tools))
    links = ["--find-links", str(wheels), "--find-links", str(cache / tag)]
    _download(tools, "--dest", str(wheels), *links, "gdrkit[qualify]", "gdrkit-twins", PYVERBS)


def _collect_extras(tools: Path, *, output: Path, extras: Path | None) -> None:
    # packaging is among the wheels already.
    packages = [*(each for each in KVIKIO if each != "packaging"), "numpy"]
    links = ["--find-links", str(extras)] if extras else []
    command = _download_command(tools, "--no-deps", "--dest", str(output / "extras"), *links, *packages)
    if call(command) != 0:
        say(f"Going on without {KVIKIO[0]}: its cases will not run there.")


def _collect_programs(output: Path) -> None:
    programs = build_bench_programs()
    (output / "bench").mkdir()
    for program in BENCH_PROGRAMS:
        shutil.copy(programs / program, output / "bench" / program)
        require(["strip", str(output / "bench" / program)])
    (output / "lib").mkdir()
    library = next(iter(re.findall(r"librdmacm\.so\.1 .*=> (\S+)", output_of(["/sbin/ldconfig", "-p"]))), None)
    if library is None:
        stop("librdmacm.so.1 is not installed, and pyverbs does not load without it: apt-get install librdmacm1")
    shutil.copy(os.path.realpath(library), output / "lib" / "librdmacm.so.1")
    shutil.copy(ROOT / "hardware" / "gpu" / "run.py", output / "gpu.py")


def _download(tools: Path, *arguments: str) -> None:
    require(_download_command(tools, *arguments))


def _download_command(tools: Path, *arguments: str) -> Sequence[str]:
    return [str(tools / "pip"), "download", "--quiet", "--only-binary", ":all:", *arguments]
