"""`import gdrkit` and short commands load no library of a real API and import only the modules that they need."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from meta.levels import IMPORT_LEVELS

# This program prints the libraries that `import gdrkit` adds to the libraries of the interpreter, and all modules.
PRINT_IMPORTED_PROGRAM = """
import json, sys
def read_mapped_files():
    with open("/proc/self/maps") as maps:
        return {fields[5].strip() for line in maps if len(fields := line.split(maxsplit=5)) == 6}
files_before = read_mapped_files()
import gdrkit
print(json.dumps({"mapped": sorted(read_mapped_files() - files_before), "modules": sorted(sys.modules)}))
"""
# This program runs a command of gdrkit and then prints all imported modules.
RUN_COMMAND_PROGRAM = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))
from gdrkit.cli import main
main(sys.argv[1:])
"""
# Prefixes of the file names of libraries that `import gdrkit` must not load.
FORBIDDEN_LIBRARY_PREFIXES = ("libcuda", "libibverbs", "librdmacm", "libcufile", "libhl-thunk", "libnvidia", "gdrkit")
FORBIDDEN_MODULES = {"ctypes", "cuda", "cupy", "kvikio", "numpy", "pyverbs"}
# Every command may import these modules of gdrkit: the modules of the command line, and the modules of the two lowest
# levels.
ALLOWED_MODULES = {"cli", "cli_files", "cli_inventory", "cli_observe", "cli_report", "cli_serve", "cli_tiers"}.union(
    *IMPORT_LEVELS[:2]
)
ALLOWED_PACKAGES = {"click", "gdrkit"}


def import_in_child() -> dict[str, list[str]]:
    """Return the libraries and modules that a child process has after `import gdrkit`."""
    result = subprocess.run([sys.executable, "-c", PRINT_IMPORTED_PROGRAM], check=True, capture_output=True, text=True)
    imported: dict[str, list[str]] = json.loads(result.stdout)
    return imported


def test_import_maps_no_native_library() -> None:
    library_names = [path.rpartition("/")[2] for path in import_in_child()["mapped"]]
    assert not [name for name in library_names if name.startswith(FORBIDDEN_LIBRARY_PREFIXES)]


def test_import_loads_no_foreign_module() -> None:
    assert not {name.partition(".")[0] for name in import_in_child()["modules"]} & FORBIDDEN_MODULES


@pytest.mark.parametrize("command_name", ["--version", "--help", "version"])
def test_short_command_imports_only_light_packages(command_name: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", RUN_COMMAND_PROGRAM, command_name], check=True, capture_output=True, text=True
    )
    assert "gdrkit" in result.stdout
    bare_result = subprocess.run(
        [sys.executable, "-c", "import json, sys; print(json.dumps(sorted(sys.modules)))"],
        check=True,
        capture_output=True,
        text=True,
    )
    module_names = json.loads(result.stderr.splitlines()[-1])
    assert {name.split(".")[1] for name in module_names if name.startswith("gdrkit.")} <= ALLOWED_MODULES
    # Modules that the environment imports at every start of Python do not count for this command.
    added_modules = {name.partition(".")[0] for name in set(module_names) - set(json.loads(bare_result.stdout))}
    assert added_modules - set(sys.stdlib_module_names) <= ALLOWED_PACKAGES
