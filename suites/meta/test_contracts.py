"""The contracts of the twins list what the installed clients import. A change of a client is detected here."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

CONTRACTS = Path(__file__).resolve().parents[2] / "native" / "twins" / "contracts"
# Debian and Ubuntu put the packages of their own Python here.
SYSTEM_PACKAGES = Path("/usr/lib/python3/dist-packages")
# An undefined symbol in `readelf --dyn-syms`: ... UND ibv_open_device@IBVERBS_1.1 (3)
IMPORTED = re.compile(r" UND (\w+@IBVERBS_\w+(?:\.\d+)*)")
# cuda-bindings passes these names to cuGetProcAddress_v2. They are C strings in its module.
REQUESTED = re.compile(rb"(?<=\0)cu[A-Z]\w+(?=\0)")
LOOKED_UP = re.compile(rb"(?<=\0)cuFile[A-Z]\w+(?=\0)")
ASKED_BY_DLSYM = {"cuGetProcAddress_v2"}


def contract(name: str) -> set[str]:
    lines = (CONTRACTS / name).read_text().splitlines()
    return {line.split()[0].replace("@@", "@") for line in lines if line and not line.startswith("#")}


def verbs_clients() -> list[Path]:
    found = importlib.util.find_spec("pyverbs")
    folder = Path(found.origin).parent if found and found.origin else SYSTEM_PACKAGES / "pyverbs"
    listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    manager = re.search(r"librdmacm\.so\.1 .*=> (\S+)", listed)
    return sorted(folder.rglob("*.so")) + ([Path(manager[1])] if manager else [])


def test_the_verbs_twin_exports_what_pyverbs_and_librdmacm_import() -> None:
    clients = verbs_clients()
    assert clients
    command = ["readelf", "--wide", "--dyn-syms", *map(str, clients)]
    imported = set(IMPORTED.findall(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    assert len(imported) > 50
    assert imported - contract("ibverbs.symbols") == set()


def test_the_cuda_twin_knows_what_cuda_bindings_asks_for() -> None:
    folder = importlib.util.find_spec("cuda.bindings")
    assert folder is not None
    assert folder.origin is not None
    (module,) = Path(folder.origin).parent.glob("_internal/driver.*.so")
    requested = {name.decode() for name in REQUESTED.findall(module.read_bytes())}
    assert requested - ASKED_BY_DLSYM == contract("cuda.symbols")


# The adapter of hl-thunk looks a function up by this name.
ASKED_OF_HLTHUNK = re.compile(r'^    "(hlthunk_\w+)": \(', re.MULTILINE)


def test_the_hl_thunk_twin_exports_what_the_seam_asks_for() -> None:
    seam = (CONTRACTS.parents[2] / "gdrkit" / "gaudi" / "_hlthunk.py").read_text()
    asked = {*ASKED_OF_HLTHUNK.findall(seam), "hlthunk_device_memory_alloc", "hlthunk_get_dev_memalloc_page_orders"}
    assert len(asked) > 12
    assert asked - contract("hlthunk.conventions") == set()


def test_the_cufile_twin_exports_what_cuda_bindings_looks_up() -> None:
    bindings = importlib.util.find_spec("cuda.bindings")
    assert bindings is not None
    assert bindings.origin is not None
    (module,) = Path(bindings.origin).parent.glob("_internal/cufile.*.so")
    looked_up = {name.decode() for name in LOOKED_UP.findall(module.read_bytes())}
    assert looked_up == contract("cufile.symbols")
    assert looked_up <= contract("cufile.conventions")


def test_every_symbol_has_a_convention() -> None:
    assert contract("ibverbs.symbols") == contract("ibverbs.conventions")
