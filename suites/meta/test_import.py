"""What `import gdrkit` opens and imports: nothing of the real APIs, nothing of ours that is native."""

from __future__ import annotations

import json
import subprocess
import sys

# The child looks before and after, since the interpreter itself maps libraries.
LOOK = """
import json, sys
def mapped():
    with open("/proc/self/maps") as maps:
        return {fields[5].strip() for line in maps if len(fields := line.split(maxsplit=5)) == 6}
before = mapped()
import gdrkit
print(json.dumps({"mapped": sorted(mapped() - before), "modules": sorted(sys.modules)}))
"""
FOREIGN_LIBRARIES = ("libcuda", "libibverbs", "librdmacm", "libcufile", "libhl-thunk", "libnvidia", "gdrkit")
FOREIGN_MODULES = {"ctypes", "cuda", "cupy", "kvikio", "numpy", "pyverbs"}


def look() -> dict[str, list[str]]:
    done = subprocess.run([sys.executable, "-c", LOOK], check=True, capture_output=True, text=True)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_import_opens_no_foreign_library_and_none_of_ours() -> None:
    names = [path.rpartition("/")[2] for path in look()["mapped"]]
    assert not [name for name in names if name.startswith(FOREIGN_LIBRARIES)]


def test_import_imports_no_foreign_module() -> None:
    assert not {name.partition(".")[0] for name in look()["modules"]} & FOREIGN_MODULES
