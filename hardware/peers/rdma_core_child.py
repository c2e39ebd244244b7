"""Run rdma-core's tests in this process: ``rdma_core_child.py TESTS RESULTS DEVICE GID_INDEX``.

The program writes one line of JSON to RESULTS as soon as a test has ended, so that a crash loses no result. A test
that did not end has the outcome ``started``. The tests get DEVICE, port 1 and GID_INDEX, as from the command line of
rdma-core's run_tests.py.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import types
import unittest
from pathlib import Path
from typing import Any, TextIO

# Modules of tests for the devices of one vendor have names with these prefixes. These tests are not run.
VENDOR_MODULE_PREFIXES = ("test_mlx5", "test_efa", "test_hns", "test_mana", "test_irdma")


class _Recorder(unittest.TestResult):
    """A result of unittest that writes the outcome of each test to a file."""

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self._file = file

    def _write(self, test: unittest.TestCase, outcome: str) -> None:
        self._file.write(json.dumps({"test": test.id(), "outcome": outcome}) + "\n")
        self._file.flush()

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802 - the name is unittest's.
        super().startTest(test)
        self._write(test, "started")

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802 - the name is unittest's.
        super().addSuccess(test)
        self._write(test, "pass")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802 - the name is unittest's.
        super().addSkip(test, reason)
        self._write(test, f"skip: {reason}")

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: ANN401, N802 - unittest's signature.
        super().addFailure(test, err)
        self._write(test, f"fail: {err[1]}")

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: ANN401, N802 - unittest's signature.
        super().addError(test, err)
        self._write(test, f"error: {err[0].__name__}: {err[1]}")


class _AbsentProviderModule(types.ModuleType):
    """An empty substitute for a module of ``pyverbs.providers``. Each name in it is a class without members."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the name may be a class or a number.
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _AbsentProviderFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder and loader of empty modules in place of the modules of ``pyverbs.providers``.

    The common code of the tests imports ``pyverbs.providers``, which is linked to the provider libraries of the same
    version of rdma-core. The distribution has another version of these libraries, so the import would fail.
    """

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:  # noqa: ARG002
        is_provider = fullname.startswith("pyverbs.providers")
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_provider else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _AbsentProviderModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the module is empty."""


def main() -> int:
    """Run all tests and return 0, whatever their outcomes are."""
    tests, results_file, device, gid_index = sys.argv[1:]
    sys.path.insert(0, tests)
    test_arguments: Any = importlib.import_module("args_parser").parser
    test_arguments.args = {
        "dev": device,
        "port": 1,
        "gid": int(gid_index),
        "gpu": 0,
        "gtt": False,
        "list_tests": False,
    }
    test_arguments.args |= {"pci_dev": None, "verbosity": None}
    sys.meta_path.insert(0, _AbsentProviderFinder())
    # The __init__ of the package `tests` imports every module. The modules for the devices of one vendor need the
    # provider library of the vendor, so an empty package replaces `tests`.
    empty_package = types.ModuleType("tests")
    empty_package.__path__ = [tests]
    sys.modules["tests"] = empty_package
    module_names = [
        path.stem for path in sorted(Path(tests).glob("test_*.py")) if not path.stem.startswith(VENDOR_MODULE_PREFIXES)
    ]
    suite = unittest.TestSuite()
    with Path(results_file).open("w", encoding="utf-8") as file:
        recorder = _Recorder(file)
        for module_name in module_names:
            module = importlib.import_module(f"tests.{module_name}")
            suite.addTests(unittest.defaultTestLoader.loadTestsFromModule(module))
        suite.run(recorder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
