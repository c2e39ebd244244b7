"""A NIC reaches a GPU only if a measurement moves bytes between them.

The counters of both ports decide whether the bytes are proven. A file stores the result.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

import pytest
from support.faults import inject_faults
from support.ledger import read_call_counts
from support.memory_kinds import NEEDS_DMABUF

from gdrkit.errors import Api, ApiError, RegistrationFailed
from gdrkit.harness.needs import needs, software, verbs
from gdrkit.host import HostTree
from gdrkit.registration import GdrManager, Placement, Reach, ReachTable, TransferPath, measure_reach
from gdrkit.units import KIB
from gdrkit.verdict import RouteOutcome

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.cuda import Device
    from gdrkit.verbs import Nic

pytestmark = [NEEDS_DMABUF, needs(software(Api.VERBS), software(Api.CUDA), verbs.nic(count_min=2))]

# Fault rules: the NIC twin1 registers memory, but its writes or its reads complete with RETRY_EXC_ERR (12).
FAILED_WRITES = "wc.rdma_write call=* status=12 nic=twin1"
FAILED_READS = "wc.rdma_read call=* status=12 nic=twin1"
# With status 0, the writes or reads complete with success, and move no bytes.
SILENTLY_LOST_WRITES = "wc.rdma_write call=* status=0 nic=twin1"
SILENTLY_LOST_READS = "wc.rdma_read call=* status=0 nic=twin1"


def create_counter_files(root: Path, nics: tuple[Nic, ...], **counters: int) -> HostTree:
    """Return a new sysfs tree in `root` in which the port counters of the NICs have these constant values."""
    for nic in nics:
        folder = root / f"sys/class/infiniband/{nic.name}/ports/{nic.port.number}/counters"
        folder.mkdir(parents=True)
        for counter_name, count in counters.items():
            (folder / counter_name).write_text(f"{count}\n")
    return HostTree(root)


def test_counters_of_both_ports_prove_the_bytes(device: Device, nics: tuple[Nic, ...]) -> None:
    first_nic, second_nic = nics[:2]
    loopback_reach, wire_reach = measure_reach(
        device, [(first_nic, first_nic), (first_nic, second_nic)], tree=HostTree()
    )
    assert (loopback_reach.path, wire_reach.path) == (TransferPath.LOOPBACK, TransferPath.WIRE)
    assert (wire_reach.nic, wire_reach.peer_nic) == (first_nic.name, second_nic.name)
    for reach in (loopback_reach, wire_reach):
        assert (reach.moved, reach.state, reach.reason) == (True, RouteOutcome.PROVEN, ""), reach
    assert loopback_reach.nic_growth is not None
    assert loopback_reach.nic_growth.sent_bytes is not None
    # A port sends the bytes of both directions in loopback.
    assert loopback_reach.nic_growth.sent_bytes >= 2 * loopback_reach.transfer_bytes


@pytest.mark.parametrize(
    ("counters", "loopback_reason", "wire_reason"),
    [
        ({}, "counters_missing", "counters_missing"),
        ({"port_xmit_data": 7}, "counters_missing", "counters_missing"),
        ({"port_xmit_data": 7, "port_rcv_data": 7}, "loopback_not_counted", "counters_did_not_grow"),
    ],
)
def test_bytes_that_no_port_counts_are_unproven(
    tmp_path: Path,
    device: Device,
    nics: tuple[Nic, ...],
    counters: dict[str, int],
    loopback_reason: str,
    wire_reason: str,
) -> None:
    first_nic, second_nic = nics[:2]
    tree = create_counter_files(tmp_path, (first_nic, second_nic), **counters)
    loopback_reach, wire_reach = measure_reach(device, [(first_nic, first_nic), (first_nic, second_nic)], tree=tree)
    assert [reach.moved for reach in (loopback_reach, wire_reach)] == [True, True]
    assert [reach.state for reach in (loopback_reach, wire_reach)] == [RouteOutcome.UNPROVEN, RouteOutcome.UNPROVEN]
    assert [reach.reason for reach in (loopback_reach, wire_reach)] == [loopback_reason, wire_reason]


@pytest.mark.parametrize(
    "rule",
    [
        FAILED_WRITES,
        FAILED_READS,
        SILENTLY_LOST_WRITES,
        SILENTLY_LOST_READS,
        "ibv_reg_mr call=* errno=EFAULT nic=twin1",
    ],
)
def test_nic_that_moves_nothing_is_left_out_and_named(
    device: Device, nics: tuple[Nic, ...], rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    # A registration fails only if the NIC refuses dma-bufs too.
    rules = [rule, *(["ibv_reg_dmabuf_mr call=* errno=EOPNOTSUPP nic=twin1"] if rule.startswith("ibv_") else [])]
    placement = Placement(reach=ReachTable(retry_after_s=0))
    with inject_faults(Api.VERBS, *rules), caplog.at_level(logging.WARNING):
        assert placement.usable_nics(device, nics) == tuple(nic for nic in nics if nic.name != "twin1")
    reach_by_nic_name = {reach.nic: reach for reach in placement.reach.get_results(device, nics)}
    assert f"NIC twin1 is left out for GPU {device.pci_bus_id}" in caplog.text
    # The measurement after the fault shows that twin1 works, so twin1 is used again.
    assert reach_by_nic_name["twin1"].moved
    assert placement.usable_nics(device, nics) == nics
    assert f"NIC twin1 reaches GPU {device.pci_bus_id} again" in caplog.text


def test_failed_nic_is_measured_again_only_later(device: Device, nics: tuple[Nic, ...]) -> None:
    placement = Placement(reach=ReachTable(retry_after_s=3600))
    with inject_faults(Api.VERBS, FAILED_WRITES):
        placement.usable_nics(device, nics)
    assert "twin1" not in {nic.name for nic in placement.usable_nics(device, nics)}
    placement.reach.forget(device.uuid, nics)
    assert placement.usable_nics(device, nics) == nics


def test_gpu_without_a_working_nic_has_every_cause(device: Device, nics: tuple[Nic, ...]) -> None:
    # Status 10 is REM_ACCESS_ERR.
    with inject_faults(Api.VERBS, "wc.rdma_read call=* status=10"), pytest.raises(RegistrationFailed) as error_info:
        Placement().usable_nics(device, nics)
    assert len(error_info.value.causes) == len(nics)
    for cause in error_info.value.causes:
        assert isinstance(cause, RegistrationFailed)
        (error,) = cause.causes
        assert isinstance(error, ApiError)
        assert error.operation == "wc rdma_read"


def count_registrations() -> int:
    return read_call_counts(Api.VERBS).get("ibv_reg_dmabuf_mr", 0)


def test_other_table_reads_the_file_and_measures_nothing(
    device: Device, nics: tuple[Nic, ...], state_folder: Path
) -> None:
    with inject_faults(Api.VERBS, FAILED_WRITES):
        first_results = ReachTable().get_results(device, nics)
    assert (state_folder / "reach").stat().st_mode & 0o777 == 0o600
    registration_count_before = count_registrations()
    second_results = ReachTable().get_results(device, nics)
    assert count_registrations() == registration_count_before
    assert [(reach.nic, reach.state, reach.measured_s) for reach in second_results] == [
        (reach.nic, reach.state, reach.measured_s) for reach in first_results
    ]
    assert [reach.moved for reach in second_results] == [nic.name != "twin1" for nic in nics]
    assert "12" in next(reach.cause for reach in second_results if not reach.moved)
    # The NIC that failed is due for another measurement, and only this NIC is measured.
    third_results = ReachTable(retry_after_s=0).get_results(device, nics)
    assert all(reach.moved for reach in third_results)


@pytest.mark.parametrize(
    "file_text", ["", "gdrkit-reach 2\n", "gdrkit-reach 1\nrubbish\ngpu=GPU-0 nic=twin0 moved=yes\n"]
)
def test_malformed_file_is_ignored(device: Device, nics: tuple[Nic, ...], state_folder: Path, file_text: str) -> None:
    ReachTable().get_results(device, nics)
    (state_folder / "reach").write_text(file_text)
    registration_count_before = count_registrations()
    results = ReachTable().get_results(device, nics)
    assert all(reach.moved for reach in results)
    # Each NIC was measured again, with one registration.
    assert count_registrations() == registration_count_before + len(nics)


def test_full_file_keeps_the_newest_results(device: Device, nics: tuple[Nic, ...], state_folder: Path) -> None:
    # The table keeps at most 64 KiB in the file, which is less than 1000 results need.
    (newest_result,) = measure_reach(device, [(nics[0], nics[0])], tree=HostTree())
    older_results = [
        dataclasses.replace(newest_result, gpu_uuid=f"GPU-{age_s}", measured_s=newest_result.measured_s - age_s)
        for age_s in range(1, 1000)
    ]
    ReachTable().store([*older_results, newest_result])
    file_text = (state_folder / "reach").read_text()
    assert 60 * KIB < len(file_text) <= 64 * KIB
    assert f"gpu={newest_result.gpu_uuid} " in file_text
    assert " gpu=GPU-999 " not in file_text.replace("\n", " ")


def test_file_that_others_may_have_written_is_ignored(
    device: Device, nics: tuple[Nic, ...], state_folder: Path
) -> None:
    ReachTable().get_results(device, nics)
    (state_folder / "reach").chmod(0o666)
    registration_count_before = count_registrations()
    ReachTable().get_results(device, nics)
    assert count_registrations() == registration_count_before + len(nics)


def test_manager_uses_only_nics_that_moved_bytes(nics: tuple[Nic, ...]) -> None:
    placement = Placement(reach=ReachTable(retry_after_s=0))
    with inject_faults(Api.VERBS, FAILED_WRITES), GdrManager(gpu_indices=[0], placement=placement) as manager:
        (gpu,) = manager.state.gpus
        assert manager.state.available
        assert gpu.nics == tuple(nic.name for nic in nics if nic.name != "twin1")
        assert [reach.nic for reach in gpu.reach if not reach.moved] == ["twin1"]
        with manager.device(0).allocate(64 * KIB) as memory:
            with manager.lease(memory) as lease:
                assert [nic.name for nic in lease.nics] == list(gpu.nics)
                assert all(manager.remote(lease, gpu_index=0)[0].name != "twin1" for _ in nics)
            # Without fault rules, twin1 works again.
            with inject_faults(Api.VERBS), manager.lease(memory) as lease:
                assert [nic.name for nic in lease.nics] == [nic.name for nic in nics]


def test_manager_without_moved_bytes_is_unavailable() -> None:
    with inject_faults(Api.VERBS, "wc.rdma_write call=* status=12"), GdrManager() as manager:
        assert not manager.state.available
        assert all(gpu.route is None and gpu.nics == () for gpu in manager.state.gpus)
        (obstacle,) = manager.state.obstacles
        assert "no NIC reaches the memory of a GPU" in obstacle.message


def test_stale_result_of_another_reach_is_a_new_measurement(
    device: Device, nics: tuple[Nic, ...], state_folder: Path
) -> None:
    ReachTable().get_results(device, nics)
    # The file says that the NIC had another GID when it was measured.
    reach_file = state_folder / "reach"
    reach_file.write_text(reach_file.read_text().replace(nics[0].gid, "fe80:0000:0000:0000:0000:0000:0000:0001"))
    registration_count_before = count_registrations()
    results: tuple[Reach, ...] = ReachTable().get_results(device, nics)
    assert count_registrations() == registration_count_before + 1
    assert all(reach.moved for reach in results)
