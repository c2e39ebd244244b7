"""The facts, substrate and profile that gdrkit finds on a machine with Gaudis, and the needs that the machine meets."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from gdrkit.errors import Reason
from gdrkit.gaudi import Generation, list_devices
from gdrkit.harness.needs import gaudi, needs, software
from gdrkit.host import HostTree
from gdrkit.inventory import Facts, choose_profile, load_profiles, probe
from gdrkit.report import Substrate
from gdrkit.report.substrate import substrates_of_facts

if TYPE_CHECKING:
    from pathlib import Path

PCI_DEVICE_FOLDER = "sys/bus/pci/devices/0000:33:00.0"
DEVICE_COUNT_PROGRAM = "from gdrkit import gaudi; print(gaudi.device_count())"


def create_host_with_gaudi2(root: Path, driver: str | None) -> HostTree:
    """Create the sysfs files of a host with a Gaudi 2 that is bound to `driver` or to no driver. Return the host."""
    device_folder = root / PCI_DEVICE_FOLDER
    device_folder.mkdir(parents=True)
    # 0x1da3 is Habana Labs, 0x1020 is Gaudi 2, and 0x120000 is the class of processing accelerators.
    for name, value in (("vendor", "0x1da3"), ("device", "0x1020"), ("class", "0x120000")):
        (device_folder / name).write_text(f"{value}\n")
    if driver is not None:
        (root / "drivers" / driver).mkdir(parents=True)
        (device_folder / "driver").symlink_to(root / "drivers" / driver)
    return HostTree(root)


@needs(gaudi.device())
def test_facts_match_the_library(facts: Facts) -> None:
    assert facts.gaudi is not None
    assert [device.pci_bus_id for device in facts.gaudi.devices] == [info.pci_bus_id for info in list_devices()]
    assert Facts.from_json(facts.to_json()) == facts


@needs(software("hlthunk"))
def test_facts_name_the_twin(facts: Facts) -> None:
    assert substrates_of_facts(facts)["hlthunk"] is Substrate.TWIN


@needs(software("hlthunk"))
def test_child_program_loads_the_twin() -> None:
    command = [sys.executable, "-m", "gdrkit", "run", "--software", "--apis", "hlthunk", "--"]
    completed = subprocess.run(
        [*command, sys.executable, "-c", DEVICE_COUNT_PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )
    assert completed.stdout == "2\n"


def test_facts_without_hardware_open_no_library(tmp_path: Path) -> None:
    file_facts = probe(HostTree(tmp_path), environment={"LD_LIBRARY_PATH": ""}, query_apis=False)
    assert (file_facts.gaudi, file_facts.gaudi_failure, file_facts.accelerators) == (None, None, ())
    assert gaudi.device().check(file_facts) == "hlthunk was not queried"
    assert gaudi.mapped_memory.check(file_facts) == gaudi.physical_memory.check(file_facts) == "hlthunk was not queried"


def test_gaudi_without_hl_thunk_is_a_failure_with_advice(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in {"LD_LIBRARY_PATH", "LD_AUDIT"}}
    # Unlike the other cases, this case queries the libraries. Without LD_LIBRARY_PATH and LD_AUDIT, the loader finds no
    # hl-thunk.
    file_facts = probe(create_host_with_gaudi2(tmp_path, None), environment=environment)
    assert len(file_facts.accelerators) == 1
    assert file_facts.gaudi_failure is not None
    assert file_facts.gaudi_failure.reason is Reason.LIBRARY_MISSING
    assert "habanalabs" in file_facts.gaudi_failure.what_to_do
    assert "dlopen libhl-thunk.so" in str(gaudi.device().check(file_facts))


@pytest.mark.parametrize("driver", ["habanalabs", None])
@needs(gaudi.device())
def test_gaudi_seen_only_in_files_is_unknown(facts: Facts, tmp_path: Path, driver: str | None) -> None:
    """The substrate is unknown: the sysfs files may be a copy, and gdrkit cannot check any evidence of a real Gaudi."""
    file_facts = probe(create_host_with_gaudi2(tmp_path, driver), query_apis=False)
    assert facts.gaudi is not None
    # Without the ELF notes of the twin (a library that emulates hl-thunk), this record looks like the record of a real
    # library.
    real_library = dataclasses.replace(facts.gaudi.libraries[0], soname="libhl-thunk.so", notes=(), error=None)
    facts_with_library = dataclasses.replace(
        file_facts, gaudi=dataclasses.replace(facts.gaudi, libraries=(real_library,))
    )
    assert substrates_of_facts(facts_with_library)["hlthunk"] is Substrate.UNKNOWN


@pytest.mark.parametrize("generation", ["gaudi2", "gaudi3"])
@needs(gaudi.device())
def test_machine_with_gaudis_has_a_profile(facts: Facts, tmp_path: Path, generation: str) -> None:
    file_facts = probe(create_host_with_gaudi2(tmp_path, "habanalabs"), query_apis=False)
    assert facts.gaudi is not None
    devices = tuple(dataclasses.replace(device, generation=generation) for device in facts.gaudi.devices)
    facts_with_devices = dataclasses.replace(file_facts, gaudi=dataclasses.replace(facts.gaudi, devices=devices))
    assert choose_profile(load_profiles(), facts_with_devices, {"hlthunk": "hardware"}).name == generation
    assert choose_profile(load_profiles(), file_facts, {"hlthunk": "hardware"}).name == "any"


@pytest.mark.parametrize(
    ("pci_device_id", "generation"),
    [
        (0x1000, Generation.GAUDI),
        (0x1011, Generation.GAUDI),
        (0x1020, Generation.GAUDI2),
        (0x1021, Generation.GAUDI2),
        (0x1060, Generation.GAUDI3),
        (0x1063, Generation.GAUDI3),
        (0x2000, Generation.LATER),
    ],
)
def test_pci_device_id_has_a_generation(pci_device_id: int, generation: Generation) -> None:
    assert Generation.of(pci_device_id) is generation
    assert generation.maps_memory is (generation is not Generation.GAUDI)
