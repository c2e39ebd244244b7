"""The software twins export the functions that the installed client libraries import.

native/twins/contracts/ lists the functions of each twin in NAME.symbols and NAME.conventions. A convention is the way
in which a function reports an error. A case fails if a new version of a client needs more functions. A software twin is
a library that emulates the hardware below an API.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
from pathlib import Path

CONTRACTS_FOLDER = Path(__file__).resolve().parents[2] / "native" / "twins" / "contracts"
# The Python packages of Debian and Ubuntu are in this folder.
SYSTEM_PACKAGES_FOLDER = Path("/usr/lib/python3/dist-packages")
# `readelf --dyn-syms` prints an imported symbol as: ... UND ibv_open_device@IBVERBS_1.1 (3)
IMPORTED_VERBS_SYMBOL = re.compile(r" UND (\w+@IBVERBS_\w+(?:\.\d+)*)")
# cuda-bindings passes these names to cuGetProcAddress_v2. They are C strings in its module.
CUDA_FUNCTION_NAME = re.compile(rb"(?<=\0)cu[A-Z]\w+(?=\0)")
CUFILE_FUNCTION_NAME = re.compile(rb"(?<=\0)cuFile[A-Z]\w+(?=\0)")
# The bindings find this function by dlsym(3). They call it to find the other functions.
FOUND_BY_DLSYM = {"cuGetProcAddress_v2"}


def read_contract_symbols(file_name: str) -> set[str]:
    """Return the functions that a file lists. A file has @@ before the default version; importers have one @."""
    lines = (CONTRACTS_FOLDER / file_name).read_text().splitlines()
    return {line.split()[0].replace("@@", "@") for line in lines if line and not line.startswith("#")}


def read_private_verbs_symbols() -> set[str]:
    """Return the private symbols of libibverbs, each with every version number of the row `numbers`.

    A # in a name stands for the number.
    """
    lines = (CONTRACTS_FOLDER / "ibverbs_private.conventions").read_text().splitlines()
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    version_numbers = next(row[1:] for row in rows if row[0] == "numbers")
    names = [row[0] for row in rows if row[0] != "numbers"]
    return {f"{name.replace('#', number)}@IBVERBS_PRIVATE_{number}" for name in names for number in version_numbers}


def find_verbs_clients() -> list[Path]:
    pyverbs_spec = importlib.util.find_spec("pyverbs")
    pyverbs_folder = (
        Path(pyverbs_spec.origin).parent if pyverbs_spec and pyverbs_spec.origin else SYSTEM_PACKAGES_FOLDER / "pyverbs"
    )
    ldconfig_output = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    librdmacm_match = re.search(r"librdmacm\.so\.1 .*=> (\S+)", ldconfig_output)
    return sorted(pyverbs_folder.rglob("*.so")) + ([Path(librdmacm_match[1])] if librdmacm_match else [])


def test_verbs_twin_exports_the_imports_of_its_clients() -> None:
    client_libraries = find_verbs_clients()
    assert client_libraries
    command = ["readelf", "--wide", "--dyn-syms", *map(str, client_libraries)]
    imported_names = set(
        IMPORTED_VERBS_SYMBOL.findall(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    )
    assert len(imported_names) > 50
    assert imported_names - read_contract_symbols("ibverbs.symbols") - read_private_verbs_symbols() == set()


def test_cuda_twin_has_the_functions_of_cuda_bindings() -> None:
    bindings_spec = importlib.util.find_spec("cuda.bindings")
    assert bindings_spec is not None
    assert bindings_spec.origin is not None
    (module_path,) = Path(bindings_spec.origin).parent.glob("_internal/driver.*.so")
    requested_names = {name.decode() for name in CUDA_FUNCTION_NAME.findall(module_path.read_bytes())}
    assert requested_names - FOUND_BY_DLSYM == read_contract_symbols("cuda.symbols")


# gdrkit/gaudi/_hlthunk.py, the only file that loads hl-thunk, has a table of the functions that it uses, by name.
HLTHUNK_FUNCTION_NAME = re.compile(r'^    "(hlthunk_\w+)": \(', re.MULTILINE)


def test_hlthunk_twin_exports_the_functions_of_the_seam() -> None:
    # _hlthunk.py has the names of the last two of these functions in constants, which HLTHUNK_FUNCTION_NAME does not
    # match.
    seam_source = (CONTRACTS_FOLDER.parents[2] / "gdrkit" / "gaudi" / "_hlthunk.py").read_text()
    requested_names = {
        *HLTHUNK_FUNCTION_NAME.findall(seam_source),
        "hlthunk_device_memory_alloc",
        "hlthunk_get_dev_memalloc_page_orders",
    }
    assert len(requested_names) > 12
    assert requested_names - read_contract_symbols("hlthunk.conventions") == set()


def test_cufile_twin_exports_the_functions_of_cuda_bindings() -> None:
    bindings_spec = importlib.util.find_spec("cuda.bindings")
    assert bindings_spec is not None
    assert bindings_spec.origin is not None
    (module_path,) = Path(bindings_spec.origin).parent.glob("_internal/cufile.*.so")
    requested_names = {name.decode() for name in CUFILE_FUNCTION_NAME.findall(module_path.read_bytes())}
    assert requested_names == read_contract_symbols("cufile.symbols")
    assert requested_names <= read_contract_symbols("cufile.conventions")


# nvidia-ml-py finds each function by its name, when it is first called.
NVML_FUNCTION_NAME = re.compile(r'_nvmlGetFunctionPointer\("(nvml\w+)"\)')


def test_nvml_twin_exports_the_functions_of_nvidia_ml_py() -> None:
    bindings_spec = importlib.util.find_spec("pynvml")
    assert bindings_spec is not None
    assert bindings_spec.origin is not None
    requested_names = set(NVML_FUNCTION_NAME.findall(Path(bindings_spec.origin).read_text()))
    assert requested_names == read_contract_symbols("nvml.symbols")
    assert requested_names <= read_contract_symbols("nvml.conventions")


def test_cuda_runtime_twin_has_the_functions_of_cuda_bindings() -> None:
    """cuda-bindings has one function for each function of the CUDA runtime that it wraps."""
    wrapped_names = {
        name
        for name in vars(importlib.import_module("cuda.bindings.cyruntime"))["__pyx_capi__"]
        if name.startswith("cuda")
    }
    assert len(wrapped_names) > 300
    assert wrapped_names - read_contract_symbols("cudart13.conventions") == set()


def test_every_symbol_has_a_convention() -> None:
    for twin in ("ibverbs", "rdmacm"):
        assert read_contract_symbols(f"{twin}.symbols") == read_contract_symbols(f"{twin}.conventions")
