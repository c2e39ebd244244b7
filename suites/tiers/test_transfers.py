"""Files in tiers to and from memory, by their names: every byte, and the route that it took."""

from __future__ import annotations

import contextlib
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
from support.tier_world import configuration_of, contents, place_file

from gdrkit import gds, pattern
from gdrkit.cufile import RouteState
from gdrkit.errors import Api, ApiError, Reason, UsageError
from gdrkit.harness.needs import cuda, cufile, needs, software
from gdrkit.harness.needs.cufile import DISK
from gdrkit.tiers import TierManager
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.cuda import Device
    from gdrkit.harness.evidence import Evidence
    from gdrkit.tiers import Configuration

STATES = {RouteState.PROVEN, RouteState.FELL_BACK, RouteState.UNPROVEN}


@pytest.fixture
def quiet() -> Iterator[None]:
    """What a file system has no direct way for is said by a warning; here it is looked at in the result."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gds.FallbackWarning)
        yield


def test_a_file_is_read_into_host_memory_wherever_it_is(manager: TierManager) -> None:
    data = place_file(manager, "file", MIB + 5, seed=1)
    for tier in ("hdd", "nvme", "ssd"):
        manager.move("file", tier)
        memory = bytearray(MIB + 5)
        assert manager.read_into("file", memory).bytes == MIB + 5
        assert memory == data
    part = bytearray(1000)
    assert manager.read_into("file", part, file_offset_bytes=MIB, length_bytes=5, buffer_offset_bytes=7).bytes == 5
    assert part[7:12] == data[MIB:]


def test_memory_is_written_into_a_new_file(manager: TierManager) -> None:
    data = pattern.payload(300 * KIB, seed=2)
    assert manager.write_from("folder/new", data).bytes == 300 * KIB
    assert manager.write_from("folder/new", b"end", file_offset_bytes=300 * KIB).bytes == 3
    assert contents(manager, "folder/new") == data + b"end"
    assert manager.find("folder/new").size_bytes == 300 * KIB + 3
    assert not manager.check()


def test_transfers_are_accesses(manager: TierManager) -> None:
    place_file(manager, "file", 1000, seed=1)
    for _ in range(99):
        manager.read_into("file", bytearray(1000))
    assert manager.migrate().moved == 1
    assert manager.find("file").tier == "nvme"


def test_a_file_that_moves_while_it_is_read_is_read_to_its_end(manager: TierManager) -> None:
    data = place_file(manager, "file", MIB, seed=1)
    memory = bytearray(MIB)
    with manager.open("file") as file:
        file.read_into(memory, length_bytes=1000)
        manager.move("file", "nvme")
        file.read_into(memory)
    assert memory == data


def test_what_is_open_to_read_cannot_be_written(manager: TierManager) -> None:
    place_file(manager, "file", 1000, seed=1)
    with manager.open("file") as file, pytest.raises(UsageError):
        file.write_from(b"x")


def test_a_file_that_is_not_there_is_said(manager: TierManager) -> None:
    with pytest.raises(ApiError) as raised:
        manager.read_into("nothing", bytearray(10))
    assert raised.value.errno == 2


def test_a_tier_of_which_nothing_was_seen_is_unproven(manager: TierManager) -> None:
    place_file(manager, "file", 1000, seed=1)
    manager.read_into("file", bytearray(1000))
    assert {tier.route.state for tier in manager.status()} == {RouteState.UNPROVEN}


@needs(cuda.device())
@pytest.mark.qualify
@pytest.mark.usefixtures("quiet")
def test_the_route_to_device_memory_is_shown(manager: TierManager, device: Device, evidence: Evidence) -> None:
    """A file of a tier reaches device memory and comes back, and the tier says which way its bytes took."""
    data = place_file(manager, "file", MIB, seed=1, tier="nvme")
    with device.allocate(MIB) as memory:
        moved = manager.read_into("file", memory)
        assert memory.read() == data
        memory.fill(7)
        manager.write_from("file", memory)
    assert contents(manager, "file") == bytes([7]) * MIB
    nvme, *others = manager.status()
    assert nvme.route.state in STATES
    assert nvme.route.route == moved.route.value
    evidence["route"] = nvme.route
    # No more than was observed: where the bytes went another way, the cause is there.
    assert (nvme.route.state is RouteState.PROVEN) == (moved.route.value in {"p2p", "nvfs", "rdma"})
    assert nvme.route.state is RouteState.PROVEN or nvme.route.why
    assert {tier.route.state for tier in others} == {RouteState.UNPROVEN}


@needs(cuda.device())
@pytest.mark.usefixtures("quiet")
def test_where_a_direct_route_is_required_it_is_that_or_an_error(manager: TierManager, device: Device) -> None:
    place_file(manager, "file", MIB, seed=1)
    with device.allocate(MIB) as memory, contextlib.ExitStack() as stack:
        refusal = stack.enter_context(_refusal())
        moved = manager.read_into("file", memory, direct="required")
        assert moved.route.value in {"p2p", "nvfs", "rdma"}
    assert refusal in ([], [Reason.NOT_DIRECT])


@needs(cuda.device())
@pytest.mark.usefixtures("quiet")
def test_a_file_outlives_its_manager_and_loses_no_result(configuration: Configuration, device: Device) -> None:
    with TierManager(configuration) as manager:
        data = place_file(manager, "file", MIB, seed=1)
        file = manager.open("file")
    with file, device.allocate(MIB) as memory:
        assert file.read_into(memory).bytes == MIB
        assert memory.read() == data


@contextlib.contextmanager
def _refusal() -> Iterator[list[Reason]]:
    """Why the block was refused, if it was."""
    reasons: list[Reason] = []
    try:
        yield reasons
    except ApiError as error:
        reasons.append(error.reason)


def tiers(configuration: Configuration, *arguments: str, **environ: str) -> list[dict[str, Any]]:
    said = " ".join(f"{tier.name}={tier.directory}" for tier in configuration.tiers)
    told = {"GDRKIT_TIERS": said, "GDRKIT_TIERS_CATALOGUE": str(configuration.catalogue), **environ}
    command = [sys.executable, "-m", "gdrkit", "tiers", *arguments, "--json"]
    done = subprocess.run(command, env={**os.environ, **told}, capture_output=True, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@needs(cuda.device())
def test_the_bench_shows_the_route_and_status_remembers_it(configuration: Configuration) -> None:
    measured = [each["route"] for each in tiers(configuration, "bench", "--size", "8MiB")]
    assert {each["state"] for each in measured} <= {state.value for state in STATES}
    assert [each["route"] for each in tiers(configuration, "status")] == measured


@pytest.fixture
def on_a_disk() -> Iterator[Configuration]:
    """Three tiers in folders of a disk that cuFile has no objection to."""
    with tempfile.TemporaryDirectory(prefix="gdrkit-tiers-", dir=DISK) as folder, udev.present(Path(folder)):
        yield configuration_of(Path(folder))


def planned(folder: Path, *rules: str) -> dict[str, str]:
    """The environment of a process whose cuFile follows these rules."""
    plan = folder / "plan"
    plan.write_text("\n".join(["gdrkit-faults 1", *rules]) + "\n")
    return {"GDRKIT_TWINS_FAULTS": str(plan), "CUFILE_LOGFILE_PATH": str(folder / "cufile.log")}


ON_TWIN = needs(cuda.device(), software(Api.CUFILE), cufile.udev_present)


@ON_TWIN
@pytest.mark.parametrize("route", ["p2p", "nvfs"])
def test_a_proven_route_is_shown_as_proven(tmp_path: Path, on_a_disk: Configuration, route: str) -> None:
    environ = planned(tmp_path, f"cufile.route call=* route={route}")
    shown = [each["route"] for each in tiers(on_a_disk, "bench", "--size", "8MiB", **environ)]
    assert shown == [{"state": "proven", "route": route, "why": ""}] * 3
    assert [each["route"] for each in tiers(on_a_disk, "status")] == shown


@ON_TWIN
@pytest.mark.parametrize("call", [3, 4], ids=["first", "second"])
def test_the_route_is_that_of_the_reads_that_were_timed(tmp_path: Path, on_a_disk: Configuration, call: int) -> None:
    """The first block and what is read before the clock go directly; of two reads behind them one does not."""
    environ = planned(tmp_path, f"cufile.route call=1-{call - 1} route=p2p", "cufile.route call=* route=posix")
    first, *_ = [each["route"] for each in tiers(on_a_disk, "bench", "--size", "16MiB", **environ)]
    assert (first["state"], first["route"]) == ("fell_back", "posix")
    assert first["why"]
