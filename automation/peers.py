"""Preparation of the session `peers`: packages of Debian and PyPI, and the tests of rdma-core for pyverbs."""

from __future__ import annotations

import shutil
from pathlib import Path

from automation.builds import PYVERBS_REQUIREMENT, ensure_build_tools
from automation.commands import prepend_to_path, run_or_exit
from automation.environments import BUILD_CONSTRAINT_VARIABLES, ENVIRONMENTS, ensure_environment, lock_environments
from automation.machine import find_interpreter
from automation.system_packages import find_missing_build_packages, find_missing_pyverbs_packages, install_packages

__all__ = ["prepare_cuda_peers", "prepare_peers"]

# The Debian packages whose programs the session runs. Each key is a program that shows whether its package is
# installed.
_DEBIAN_PROGRAMS = {
    "ibv_rc_pingpong": "ibverbs-utils",
    "ib_write_bw": "perftest",
    "rping": "rdmacm-utils",
    "fi_pingpong": "libfabric-bin",
    "ucx_perftest": "ucx-utils",
}
_PYPI_REQUIREMENTS = ("mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy")
# NIXL depends on PyTorch with five gigabytes of CUDA libraries, but imports it only for memory of PyTorch.
_NIXL_REQUIREMENTS = ("nixl==1.5.1", "nixl-cu12==1.5.1")
# PyTorch depends on NVIDIA's packages of the CUDA runtime and of cuFile. All these packages take six gigabytes.
_CUDA_REQUIREMENTS = ("torch==2.9.1", "numpy", "packaging", "cuda-pathfinder")
# These packages are installed without their dependencies, which are other versions of NVIDIA's libraries than PyTorch
# needs.
_CUDA_REQUIREMENTS_WITHOUT_DEPENDENCIES = (
    "cuda-bindings==12.9.*",
    "cupy-cuda12x==14.2.*",
    "kvikio-cu12==26.10.*",
    "libkvikio-cu12==26.10.*",
    "rapids-logger==0.3.*",
    "libucx-cu12==1.22.*",
    *_NIXL_REQUIREMENTS,
)
# The folders of rdma-core and of its tests in the source distribution of pyverbs.
_RDMA_CORE = Path("rdma-core")
_RDMA_CORE_TESTS = _RDMA_CORE / "tests"
# The libraries that pyverbs needs on Soft-RoCE.
_RDMA_CORE_LIBRARIES = ("libibverbs.so", "librdmacm.so", "libmlx5.so", "libefa.so")
# The provider library of Soft-RoCE.
_PROVIDER_LIBRARY = f"librxe-rdmav{PYVERBS_REQUIREMENT.partition('==')[2].partition('.')[0]}.so"


def prepare_peers(*, with_libraries: bool) -> tuple[Path, Path]:
    """Install the programs of the session. Return the interpreter that has the packages of PyPI, and the tests' folder.

    With `with_libraries`, the libraries of the rdma-core that pyverbs contains are built beside the tests.
    get_library_folder in hardware/peers/rdma_core.py returns their folder.
    """
    python = find_interpreter()[0]
    missing_packages = [package for program, package in _DEBIAN_PROGRAMS.items() if not shutil.which(program)]
    install_packages([*missing_packages, *find_missing_build_packages(python), *find_missing_pyverbs_packages()])
    bin_folder = ensure_environment(
        "peers", python=python, requirements=_PYPI_REQUIREMENTS, optional_requirements=_NIXL_REQUIREMENTS
    )
    tests_folder = bin_folder.parent / "rdma-core-tests"
    libraries_folder = tests_folder.with_name("rdma-core") if with_libraries else None
    if not tests_folder.exists() or (libraries_folder and not (libraries_folder / "lib" / _PROVIDER_LIBRARY).exists()):
        _install_pyverbs(bin_folder, tests_folder, libraries_folder)
    return bin_folder / "python", tests_folder


def prepare_cuda_peers() -> Path:
    """Install the Python packages that use GPU memory. Return the interpreter that has them."""
    python = find_interpreter()[0]
    install_packages([*find_missing_build_packages(python), *find_missing_pyverbs_packages()])
    bin_folder = ensure_environment(
        "peers-cuda",
        python=python,
        requirements=(*_CUDA_REQUIREMENTS, PYVERBS_REQUIREMENT),
        optional_requirements=_CUDA_REQUIREMENTS_WITHOUT_DEPENDENCIES,
    )
    return bin_folder / "python"


def _install_pyverbs(bin_folder: Path, tests_folder: Path, libraries_folder: Path | None) -> None:
    """Build and install pyverbs, and copy the tests of its source distribution to `tests_folder`.

    If `libraries_folder` is given, build rdma-core's libraries in that folder.

    pip has no command that downloads a source distribution without building it, so the build folder is kept until the
    tests are copied.
    """
    build_folder = ENVIRONMENTS / "peers-build"
    tools_bin = ensure_build_tools()
    pip_install = [str(bin_folder / "pip"), "install", "--quiet", "--no-clean", "--no-cache-dir", "--force-reinstall"]
    with lock_environments():
        shutil.rmtree(build_folder, ignore_errors=True)
        build_folder.mkdir()
        environ = {**BUILD_CONSTRAINT_VARIABLES, "TMPDIR": str(build_folder)}
        run_or_exit([*pip_install, "--no-binary", "pyverbs", PYVERBS_REQUIREMENT], environ=environ)
        source_folder = next(path for path in build_folder.glob("pip-*/*") if (path / _RDMA_CORE_TESTS).is_dir())
        shutil.copytree(source_folder / _RDMA_CORE_TESTS, tests_folder, dirs_exist_ok=True)
        if libraries_folder is not None:
            _build_libraries(source_folder / _RDMA_CORE, libraries_folder, tools_bin)
        shutil.rmtree(build_folder)


def _build_libraries(source_folder: Path, build_folder: Path, tools_bin: Path) -> None:
    """Build rdma-core's libraries in `build_folder`/lib. With IN_PLACE, the libraries search for providers there."""
    environ = prepend_to_path(tools_bin)
    options = ("-GNinja", "-DCMAKE_BUILD_TYPE=Release", "-DIN_PLACE=1", "-DNO_PYVERBS=1", "-DNO_MAN_PAGES=1")
    run_or_exit(
        [str(tools_bin / "cmake"), *options, "-S", str(source_folder), "-B", str(build_folder)], environ=environ
    )
    targets = [f"lib/{name}" for name in (*_RDMA_CORE_LIBRARIES, _PROVIDER_LIBRARY)]
    run_or_exit([str(tools_bin / "ninja"), "-C", str(build_folder), *targets], environ=environ)
