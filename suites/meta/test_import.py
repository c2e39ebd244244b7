"""`import gdrkit` and short commands open no real API and import no module that they do not need."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from meta.levels import LEVELS

# The child compares its maps before and after the import, since the interpreter itself maps libraries.
LOOK = """
import json, sys
def mapped():
    with open("/proc/self/maps") as maps:
        return {fields[5].strip() for line in maps if len(fields := line.split(maxsplit=5)) == 6}
before = mapped()
import gdrkit
print(json.dumps({"mapped": sorted(mapped() - before), "modules": sorted(sys.modules)}))
"""
# The program prints the modules that a command has imported when it ends, after the output of the command.
RUN = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))
from gdrkit.cli import main
main(sys.argv[1:])
"""
FOREIGN_LIBRARIES = ("libcuda", "libibverbs", "librdmacm", "libcufile", "libhl-thunk", "libnvidia", "gdrkit")
FOREIGN_MODULES = {"ctypes", "cuda", "cupy", "kvikio", "numpy", "pyverbs"}
# A command may import these before it does anything: the command line itself, and the modules of the lowest levels.
LIGHT_ROOMS = {"cli", "cli_files", "cli_inventory", "cli_report", "cli_tiers"}.union(*LEVELS[:2])
LIGHT_PACKAGES = {"click", "gdrkit"}


def look() -> dict[str, list[str]]:
    done = subprocess.run([sys.executable, "-c", LOOK], check=True, capture_output=True, text=True)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_import_opens_no_foreign_library_and_none_of_ours() -> None:
    names = [path.rpartition("/")[2] for path in look()["mapped"]]
    assert not [name for name in names if name.startswith(FOREIGN_LIBRARIES)]


def test_import_imports_no_foreign_module() -> None:
    assert not {name.partition(".")[0] for name in look()["modules"]} & FOREIGN_MODULES


@pytest.mark.parametrize("word", ["--version", "--help", "version"])
def test_a_command_that_says_two_words_loads_no_room_that_works(word: str) -> None:
    done = subprocess.run([sys.executable, "-c", RUN, word], check=True, capture_output=True, text=True)
    assert "gdrkit" in done.stdout
    alone = subprocess.run(
        [sys.executable, "-c", "import json, sys; print(json.dumps(sorted(sys.modules)))"],
        check=True,
        capture_output=True,
        text=True,
    )
    modules = json.loads(done.stderr.splitlines()[-1])
    rooms = {name.split(".")[1] for name in modules if name.startswith("gdrkit.")}
    assert rooms <= LIGHT_ROOMS
    # Modules that the environment imports at every start of Python do not count for this command.
    new = {name.partition(".")[0] for name in set(modules) - set(json.loads(alone.stdout))}
    assert new - set(sys.stdlib_module_names) <= LIGHT_PACKAGES
