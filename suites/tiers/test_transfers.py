"""Tests of transfers between memory and files in storage tiers.

They check the bytes, and the route in the result of the transfer and in the status of the tier.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import udev
from support.tier_world import create_file, make_configuration, read_contents

from gdrkit import gds, pattern
from gdrkit.cufile import RouteState
from gdrkit.errors import Api, ApiError, Reason, UsageError
from gdrkit.harness.needs import cuda, cufile, needs, software
from gdrkit.harness.needs.cufile import DISK_FOLDER
from gdrkit.tiers import TierManager
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.cuda import Device
    from gdrkit.harness.evidence import Evidence
    from gdrkit.tiers import Configuration

# States of the route of a tier after a transfer between a file and device memory.
DEVICE_ROUTE_STATES = {RouteState.PROVEN, RouteState.FELL_BACK, RouteState.UNPROVEN}


@pytest.fixture
def ignore_fallback_warnings() -> Iterator[None]:
    """Ignore the warning of a fallback, because these cases check the route in the result."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gds.FallbackWarning)
        yield


def test_file_is_read_into_host_memory_from_any_tier(manager: TierManager) -> None:
    data = create_file(manager, "file", MIB + 5, seed=1)
    for tier in ("hdd", "nvme", "ssd"):
        manager.move("file", tier)
        memory = bytearray(MIB + 5)
        assert manager.read_into("file", memory).bytes == MIB + 5
        assert memory == data
    small_memory = bytearray(1000)
    assert (
        manager.read_into("file", small_memory, file_offset_bytes=MIB, length_bytes=5, buffer_offset_bytes=7).bytes == 5
    )
    assert small_memory[7:12] == data[MIB:]


def test_write_creates_a_file(manager: TierManager) -> None:
    data = pattern.payload(300 * KIB, seed=2)
    assert manager.write_from("folder/new", data).bytes == 300 * KIB
    assert manager.write_from("folder/new", b"end", file_offset_bytes=300 * KIB).bytes == 3
    assert read_contents(manager, "folder/new") == data + b"end"
    assert manager.find("folder/new").size_bytes == 300 * KIB + 3
    assert not manager.check()


def test_transfers_count_as_accesses(manager: TierManager) -> None:
    create_file(manager, "file", 1000, seed=1)
    for _ in range(99):
        manager.read_into("file", bytearray(1000))
    assert manager.migrate().moved == 1
    assert manager.find("file").tier == "nvme"


def test_file_that_moves_during_a_read_is_read_completely(manager: TierManager) -> None:
    data = create_file(manager, "file", MIB, seed=1)
    memory = bytearray(MIB)
    with manager.open("file") as file:
        file.read_into(memory, length_bytes=1000)
        manager.move("file", "nvme")
        file.read_into(memory)
    assert memory == data


def test_write_to_a_file_opened_for_reading_is_refused(manager: TierManager) -> None:
    create_file(manager, "file", 1000, seed=1)
    with manager.open("file") as file, pytest.raises(UsageError):
        file.write_from(b"x")


def test_read_of_a_missing_file_is_enoent(manager: TierManager) -> None:
    with pytest.raises(ApiError) as error_info:
        manager.read_into("nothing", bytearray(10))
    assert error_info.value.errno == errno.ENOENT


def test_tier_without_device_transfers_is_unproven(manager: TierManager) -> None:
    create_file(manager, "file", 1000, seed=1)
    manager.read_into("file", bytearray(1000))
    assert {tier.route.state for tier in manager.status()} == {RouteState.UNPROVEN}


@needs(cuda.device())
@pytest.mark.qualify
@pytest.mark.usefixtures("ignore_fallback_warnings")
def test_route_to_device_memory_is_reported(manager: TierManager, device: Device, evidence: Evidence) -> None:
    """A file of a tier is read into device memory and written back, and the tier reports the route of its bytes."""
    data = create_file(manager, "file", MIB, seed=1, tier="nvme")
    with device.allocate(MIB) as memory:
        result = manager.read_into("file", memory)
        assert memory.read() == data
        memory.fill(7)
        manager.write_from("file", memory)
    assert read_contents(manager, "file") == bytes([7]) * MIB
    nvme_tier, *other_tiers = manager.status()
    assert nvme_tier.route.state in DEVICE_ROUTE_STATES
    assert nvme_tier.route.route == result.route.value
    evidence["route"] = nvme_tier.route
    # Only an observed direct route is reported as proven. For any other route, the tier reports a cause.
    assert (nvme_tier.route.state is RouteState.PROVEN) == (result.route.value in {"p2p", "nvfs", "rdma"})
    assert nvme_tier.route.state is RouteState.PROVEN or nvme_tier.route.why
    assert {tier.route.state for tier in other_tiers} == {RouteState.UNPROVEN}


@needs(cuda.device())
@pytest.mark.usefixtures("ignore_fallback_warnings")
def test_required_direct_route_is_direct_or_an_error(manager: TierManager, device: Device) -> None:
    create_file(manager, "file", MIB, seed=1)
    with device.allocate(MIB) as memory, contextlib.ExitStack() as stack:
        reasons = stack.enter_context(_catch_error_reasons())
        result = manager.read_into("file", memory, direct="required")
        assert result.route.value in {"p2p", "nvfs", "rdma"}
    assert reasons in ([], [Reason.NOT_DIRECT])


@needs(cuda.device())
@pytest.mark.usefixtures("ignore_fallback_warnings")
def test_file_outlives_its_manager(configuration: Configuration, device: Device) -> None:
    with TierManager(configuration) as manager:
        data = create_file(manager, "file", MIB, seed=1)
        file = manager.open("file")
    with file, device.allocate(MIB) as memory:
        assert file.read_into(memory).bytes == MIB
        assert memory.read() == data


@contextlib.contextmanager
def _catch_error_reasons() -> Iterator[list[Reason]]:
    """Catch an ApiError of the block, and append its reason to the yielded list."""
    reasons: list[Reason] = []
    try:
        yield reasons
    except ApiError as error:
        reasons.append(error.reason)


def run_tiers_command(configuration: Configuration, *arguments: str, **environ: str) -> list[dict[str, Any]]:
    """Run a command of ``gdrkit tiers`` in a process, and return its JSON output."""
    tiers = " ".join(f"{tier.name}={tier.directory}" for tier in configuration.tiers)
    set_variables = {"GDRKIT_TIERS": tiers, "GDRKIT_TIERS_CATALOGUE": str(configuration.catalogue), **environ}
    command = [sys.executable, "-m", "gdrkit", "tiers", *arguments, "--json"]
    completed_process = subprocess.run(
        command, env={**os.environ, **set_variables}, capture_output=True, text=True, check=True
    )
    output: list[dict[str, Any]] = json.loads(completed_process.stdout)
    return output


@needs(cuda.device())
def test_bench_reports_the_route_and_status_repeats_it(configuration: Configuration) -> None:
    bench_routes = [tier["route"] for tier in run_tiers_command(configuration, "bench", "--size", "8MiB")]
    assert {route["state"] for route in bench_routes} <= {state.value for state in DEVICE_ROUTE_STATES}
    assert [tier["route"] for tier in run_tiers_command(configuration, "status")] == bench_routes


@pytest.fixture
def configuration_on_disk() -> Iterator[Configuration]:
    """Yield the configuration of three tiers in folders of a disk with a udev entry, which libcufile requires."""
    with (
        tempfile.TemporaryDirectory(prefix="gdrkit-tiers-", dir=DISK_FOLDER) as folder,
        udev.provide_entry(Path(folder)),
    ):
        yield make_configuration(Path(folder))


def make_fault_environ(folder: Path, *rules: str) -> dict[str, str]:
    """Return environment variables with which the software twin of libcufile follows these fault rules."""
    plan_path = folder / "plan"
    plan_path.write_text("\n".join(["gdrkit-faults 1", *rules]) + "\n")
    return {"GDRKIT_TWINS_FAULTS": str(plan_path), "CUFILE_LOGFILE_PATH": str(folder / "cufile.log")}


NEEDS_CUFILE_TWIN = needs(cuda.device(), software(Api.CUFILE), cufile.udev_present)


@NEEDS_CUFILE_TWIN
@pytest.mark.parametrize("route", ["p2p", "nvfs"])
def test_proven_route_is_reported_as_proven(tmp_path: Path, configuration_on_disk: Configuration, route: str) -> None:
    environ = make_fault_environ(tmp_path, f"cufile.route call=* route={route}")
    routes = [tier["route"] for tier in run_tiers_command(configuration_on_disk, "bench", "--size", "8MiB", **environ)]
    assert routes == [{"state": "proven", "route": route, "why": ""}] * 3
    assert [tier["route"] for tier in run_tiers_command(configuration_on_disk, "status")] == routes


@NEEDS_CUFILE_TWIN
# A read of 8 MiB makes 8 calls of cuFile. Call 1 is the probe, calls 2 to 9 are the untimed read, and calls 10 to 17
# and 18 to 25 are the two timed reads.
@pytest.mark.parametrize("first_posix_call", [1 + 8 + 1, 1 + 8 + 8 + 1], ids=["first", "second"])
def test_bench_route_is_the_worst_of_the_timed_reads(
    tmp_path: Path, configuration_on_disk: Configuration, first_posix_call: int
) -> None:
    """The probe and the untimed read are direct. Both timed reads, or only the second, take the POSIX route."""
    environ = make_fault_environ(
        tmp_path, f"cufile.route call=1-{first_posix_call - 1} route=p2p", "cufile.route call=* route=posix"
    )
    nvme_route, *_ = [
        tier["route"] for tier in run_tiers_command(configuration_on_disk, "bench", "--size", "16MiB", **environ)
    ]
    assert (nvme_route["state"], nvme_route["route"]) == ("fell_back", "posix")
    assert nvme_route["why"]
