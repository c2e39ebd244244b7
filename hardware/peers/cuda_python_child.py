"""Run cuda-python's own tests: ``cuda_python_child.py FOLDER RESULTS [--jobs N] [--only TEXT]``.

FOLDER has the folders ``cuda_core/tests``, ``cuda_bindings/tests``, ``cuda_bindings/cuda/bindings/_test_helpers`` and
``cuda_python_test_helpers`` of cuda-python. This file needs only pytest and its plugins beside the tested packages, so
it also runs on a GPU machine without this project. Each module of tests runs in a process of its own.

The first line of RESULTS describes the machine. Each further line is the JSON of a case: its outcome, and what it needs
according to its source. The compilers (nvrtc, nvvm, nvJitLink, nvFatbin) are hidden, so that a case that compiles fails
in the same way on each machine. A case that did not end has the outcome ``crash``.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import importlib
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import types
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

# Environment variables of a child process: the file to which it appends its results, and FOLDER.
_RESULTS_VARIABLE, _FOLDER_VARIABLE = "GDRKIT_CUDA_PYTHON_RESULTS", "GDRKIT_CUDA_PYTHON_FOLDER"
# _STARTS_MAX: the maximum number of processes for a module. After a crash, a new process runs the other cases.
_CASE_LIMIT_S, _MODULE_LIMIT_S, _STARTS_MAX = 30.0, 300.0, 12
# These folders need a compiler for C, packages that the samples use, or a device without a twin.
_EXCLUDED_FOLDERS = {"cython", "example_tests", "cudla", "legacy_api"}
_COMPILER_LIBRARIES = ("nvrtc", "nvvm", "nvJitLink", "nvfatbin")
# Two things that a case may need and a twin lacks.
_KERNELS_NEED, _STATIC_RUNTIME_NEED = "kernels", "static runtime"
# Names in the source of a case that needs kernels or a compiler.
_KERNEL_NAME_PATTERN = re.compile(
    r"cuLaunch|cuModule(Load|Get)|cuLibrary(Load|Get)|cuKernel|cuFunc|cuLink|cuOccupancy|AddKernelNode|LaunchKernel"
    r"|\blaunch\b|\bKernel\b|\bLaunchConfig\b|\bnvrtc\b|\bnvvm\b|\bnvjitlink\b|\bnvfatbin\b|\bProgram\b|\bLinker\b"
    r"|\bObjectCode\b|\bget_saxpy",
    re.IGNORECASE,
)
# Device.sync() of cuda.core calls the CUDA runtime. In the tests, the names of variables for devices contain "dev".
_DEVICE_SYNC_PATTERN = re.compile(r"dev\w*\.sync\(")


class _Recorder:
    """A plugin of pytest that appends the outcome of each case to the results file."""

    def __init__(self, results_file: Path) -> None:
        self._results_file = results_file
        self._started_tests = {entry["test"] for entry in _read_json_lines(results_file)}
        self._outcomes: dict[str, str] = {}

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:  # noqa: ANN401 - pytest's type.
        """Leave out the cases that an earlier process of this module has started."""
        started_items = [item for item in items if item.nodeid in self._started_tests]
        items[:] = [item for item in items if item.nodeid not in self._started_tests]
        config.hook.pytest_deselected(items=started_items)

    def pytest_runtest_protocol(self, item: Any) -> None:  # noqa: ANN401 - pytest's type.
        """Write what a case needs according to its source. The outcome is ``crash`` until the case has ended."""
        self._write({"test": item.nodeid, "outcome": "crash", "needs": _find_needs(item)})

    def pytest_runtest_logreport(self, report: Any) -> None:  # noqa: ANN401 - pytest's type.
        """Write the outcome of a case after its teardown."""
        if report.failed:
            failure_location = getattr(report.longrepr, "reprcrash", None)
            failure_text = failure_location.message if failure_location else str(report.longrepr)
            self._outcomes.setdefault(report.nodeid, f"fail: {report.when}: {failure_text[-600:]}")
        elif report.skipped:
            reason = getattr(report, "wasxfail", None) or report.longrepr[2]
            self._outcomes.setdefault(report.nodeid, f"skip: {reason}")
        if report.when == "teardown":
            self._write({"test": report.nodeid, "outcome": self._outcomes.pop(report.nodeid, "pass")})

    def _write(self, entry: dict[str, object]) -> None:
        with self._results_file.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def pytest_configure(config: Any) -> None:  # noqa: ANN401 - pytest's type.
    """Register the recorder. pytest loads this module with its option -p."""
    config.pluginmanager.register(_Recorder(Path(os.environ[_RESULTS_VARIABLE])))


def _hide_compilers() -> None:
    """Hide the compilers from this process. Later imports of cuda.bindings use the changed function of pathfinder."""
    pathfinder: Any = importlib.import_module("cuda.pathfinder")
    load_library = pathfinder.load_nvidia_dynamic_lib

    @functools.wraps(load_library)
    def load_unless_hidden(name: str) -> Any:  # noqa: ANN401 - the type of pathfinder.
        if name in _COMPILER_LIBRARIES:
            message = f"{name} is hidden, so that no case compiles"
            raise pathfinder.DynamicLibNotFoundError(message)
        return load_library(name)

    pathfinder.load_nvidia_dynamic_lib = load_unless_hidden


def _add_test_helpers() -> None:
    """Let the tests import cuda.bindings._test_helpers, which newer wheels do not contain."""
    bindings = importlib.import_module("cuda.bindings")
    bindings.__path__.append(str(Path(os.environ[_FOLDER_VARIABLE], "cuda_bindings", "cuda", "bindings")))


def _find_needs(item: Any) -> list[str]:  # noqa: ANN401 - pytest's type.
    """Return the needs of a case, from the source of the case, of its fixtures and of the functions that these call."""
    # The last definition of a fixture overrides the others.
    definitions_by_fixture = item._fixtureinfo.name2fixturedefs  # noqa: SLF001 - pytest has no public list of the fixtures.
    fixture_functions = [definitions[-1].func for definitions in definitions_by_fixture.values()]
    needs = set()
    for function in _find_called_functions([item.obj, *fixture_functions]):
        names = set(_list_names(function.__code__))
        named_objects = [function.__globals__.get(name) for name in names]
        module_names = {
            str(getattr(named_object, "__module__", getattr(named_object, "__name__", "")))
            for named_object in named_objects
        }
        module_names |= {
            named_object.__name__ for named_object in named_objects if isinstance(named_object, types.ModuleType)
        }
        if "cuda.bindings.runtime" in module_names:
            needs.add(_STATIC_RUNTIME_NEED)
        if _DEVICE_SYNC_PATTERN.search(inspect.getsource(function)):
            needs.add(_STATIC_RUNTIME_NEED)
        if _KERNEL_NAME_PATTERN.search(" ".join(names)):
            needs.add(_KERNELS_NEED)
    return sorted(needs)


def _find_called_functions(functions: list[Any]) -> Iterator[types.FunctionType]:
    """Yield the functions, and all functions and methods that they refer to, if the tests folder defines them."""
    seen_functions: set[types.FunctionType] = set()
    unvisited_objects = list(functions)
    while unvisited_objects:
        visited_object = unvisited_objects.pop()
        visited_object = inspect.unwrap(visited_object) if callable(visited_object) else visited_object
        visited_object = getattr(visited_object, "__func__", visited_object)
        if isinstance(visited_object, type):
            unvisited_objects += [
                member for member in vars(visited_object).values() if isinstance(member, types.FunctionType)
            ]
        elif (
            isinstance(visited_object, types.FunctionType)
            and visited_object not in seen_functions
            and _is_in_tests_folder(visited_object.__code__.co_filename)
        ):
            seen_functions.add(visited_object)
            yield visited_object
            named_objects = (visited_object.__globals__.get(name) for name in _list_names(visited_object.__code__))
            unvisited_objects += [
                named_object for named_object in named_objects if isinstance(named_object, types.FunctionType | type)
            ]


def _is_in_tests_folder(file_name: str) -> bool:
    return file_name.startswith(os.environ[_FOLDER_VARIABLE])


def _list_names(code: types.CodeType) -> Iterator[str]:
    """Yield the names that a function, and the functions inside it, refer to."""
    yield from (*code.co_names, *code.co_varnames, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _list_names(constant)


def _read_json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_module(folder: Path, module: Path, results_file: Path) -> list[dict[str, Any]]:
    """Run the cases of a module, and return their results.

    If a case ends the process, start another process for the remaining cases.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        str(folder / "pytest.ini"),
        f"--rootdir={folder}",
        "-o",
        "addopts=",
    ]
    command += ["-p", Path(__file__).stem, "-p", "no:randomly", "-p", "no:cacheprovider", "-q", "--tb=line"]
    command += ["--benchmark-disable", f"--timeout={_CASE_LIMIT_S}", "--timeout-method=thread", str(module)]
    environ = {**os.environ, _RESULTS_VARIABLE: str(results_file), _FOLDER_VARIABLE: str(folder)}
    environ["PYTHONPATH"] = str(Path(__file__).resolve().parent)
    output = ""
    for _ in range(_STARTS_MAX):
        line_count_before = len(_read_json_lines(results_file))
        with results_file.with_suffix(".log").open("w+") as log:
            process = subprocess.Popen(
                command,
                cwd=results_file.parent,
                env=environ,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_MODULE_LIMIT_S)
            # Some cases start processes that do not end with the cases.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            exit_code = process.wait()
            log.seek(0)
            output = log.read()
        # If a case exceeds its time limit, the exit code is 1, as after a failure. But then the last outcome in the
        # file is still "crash".
        results = _read_json_lines(results_file)
        has_run_all_cases = 0 <= exit_code <= 5 and not (results and results[-1]["outcome"] == "crash")  # noqa: PLR2004 - pytest's codes.
        if has_run_all_cases or len(results) == line_count_before:
            break
    # The process wrote two entries for each case that ended: its needs at the start, and its outcome at the end.
    result_by_test: dict[str, dict[str, Any]] = {}
    for entry in _read_json_lines(results_file):
        result_by_test.setdefault(entry["test"], {}).update(entry)
    module_name = str(module.relative_to(folder))
    not_collected_result = {"test": module_name, "outcome": f"not collected: {output[-600:]}", "needs": []}
    return list(result_by_test.values()) or [not_collected_result]


def _describe_machine() -> dict[str, str]:
    """Return the versions of the packages and of the driver, and the name and number of the devices."""
    driver: Any = importlib.import_module("cuda.bindings.driver")
    # Each function returns a tuple, which begins with the status. A result follows.
    driver.cuInit(0)
    device_name = driver.cuDeviceGetName(64, driver.cuDeviceGet(0)[1])[1].partition(b"\0")[0].decode()
    versions = {package: metadata.version(package) for package in ("cuda-core", "cuda-bindings", "cuda-pathfinder")}
    device_count, driver_version = driver.cuDeviceGetCount()[1], driver.cuDriverGetVersion()[1]
    return {**versions, "device": device_name, "devices": str(device_count), "driver": str(driver_version)}


def main() -> int:
    """Run all modules and return 0, whatever the outcomes of the cases are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="number of modules that run at a time"
    )
    parser.add_argument("--only", default="", help="run only the modules whose path contains this text")
    options = parser.parse_args()
    folder, results_file = options.folder.resolve(), options.results.resolve()
    modules = [
        path
        for package in ("cuda_bindings", "cuda_core")
        for path in sorted((folder / package / "tests").rglob("test_*.py"))
        if not _EXCLUDED_FOLDERS & set(path.parts) and options.only in str(path)
    ]
    work_folder = results_file.with_suffix(".work")
    shutil.rmtree(work_folder, ignore_errors=True)
    work_folder.mkdir(parents=True)
    with results_file.open("w") as file, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        lock = threading.Lock()

        def run_and_write(module_index: int, module: Path) -> None:
            results = run_module(folder, module, work_folder / f"{module_index}.jsonl")
            outcomes = [result["outcome"].partition(":")[0] for result in results]
            counts_text = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes))
            with lock:
                file.writelines(json.dumps(result) + "\n" for result in results)
                file.flush()
                print(f"{module.relative_to(folder)}: {counts_text}", flush=True)  # noqa: T201 - the output of a program.

        file.write(json.dumps({"machine": _describe_machine()}) + "\n")
        for future in [pool.submit(run_and_write, module_index, module) for module_index, module in enumerate(modules)]:
            future.result()
    return 0


if _RESULTS_VARIABLE in os.environ:
    _hide_compilers()
    _add_test_helpers()
if __name__ == "__main__":
    sys.exit(main())
