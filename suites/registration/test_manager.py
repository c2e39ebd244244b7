"""A GdrManager registers memory of every GPU with every NIC, or its state lists the obstacles."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
from support.faults import inject_faults
from support.ledger import read_call_counts
from support.memory_kinds import NEEDS_DMABUF, connect_peer_queue_pair

from gdrkit import handles, pattern
from gdrkit.errors import Api, ApiError, ClosedResource, Reason, RegistrationFailed, UsageError
from gdrkit.harness.needs import cuda as cuda_needs
from gdrkit.harness.needs import needs, software
from gdrkit.registration import FlushOption, GdrManager, Ordering, RegistrationRoute, WriteVisibility
from gdrkit.units import KIB
from gdrkit.verbs import Status

if TYPE_CHECKING:
    from gdrkit.cuda import Device
    from gdrkit.harness.peer import Peer

NEEDS_TWINS = needs(software(Api.VERBS), software(Api.CUDA))


@NEEDS_DMABUF
def test_available_manager_reports_routes_that_work(peer: Peer, seed: int) -> None:
    with GdrManager() as manager:
        # If no GPU's memory can be registered, device() raises an error with every cause.
        assert manager.device(0).index == 0
        assert manager.state.available
        assert not manager.state.obstacles
        assert all(gpu.route is RegistrationRoute.DMABUF and gpu.obstacle is None for gpu in manager.state.gpus)
        with manager.device(0).allocate(64 * KIB) as memory:
            with manager.lease(memory) as lease:
                nic, remote_range = manager.remote(lease, gpu_index=0)
                with connect_peer_queue_pair(nic, peer) as peer_pair:
                    peer_pair.write(remote_range, seed=seed).expect(Status.SUCCESS)
            pattern.check(memory.read(), seed=seed)


@needs(cuda_needs.device(count_min=2))
@NEEDS_DMABUF
def test_gpus_have_separate_caches_and_current_device_is_kept(devices: tuple[Device, ...]) -> None:
    with devices[1].current(), GdrManager() as manager, contextlib.ExitStack() as stack:
        for gpu in manager.state.gpus[:2]:
            memory = stack.enter_context(manager.device(gpu.index).allocate(64 * KIB))
            manager.lease(memory).close()
            assert manager.cache(gpu.index).statistics().regions == 1
            assert get_current_device_index() == 1
        assert manager.cache(0) is not manager.cache(1)


def get_current_device_index() -> int:
    """Return the index of the device whose context is current on this thread."""
    from cuda.bindings import driver

    result, device_index = driver.cuCtxGetDevice()
    assert int(result) == 0
    return int(device_index)


@NEEDS_TWINS
@pytest.mark.parametrize(
    ("api", "rules", "reason"),
    [
        (Api.VERBS, ("ibv_open_device call=* errno=EACCES",), Reason.NO_DEVICE),
        (Api.VERBS, ("ibv_get_device_list call=* errno=ENOSYS",), Reason.NO_DEVICE),
        # Status 100 is CUDA_ERROR_NO_DEVICE, and status 2 is CUDA_ERROR_OUT_OF_MEMORY.
        (Api.CUDA, ("cuDeviceGetCount call=* status=100",), Reason.NO_DEVICE),
        (Api.CUDA, ("cuMemAlloc_v2 call=* status=2",), Reason.NO_ROUTE),
        (
            Api.VERBS,
            ("ibv_reg_dmabuf_mr call=* errno=EOPNOTSUPP", "ibv_reg_mr call=* errno=EFAULT"),
            Reason.NO_ROUTE,
        ),
    ],
)
@NEEDS_DMABUF
def test_missing_api_is_a_state_and_nothing_stays_open(api: Api, rules: tuple[str, ...], reason: Reason) -> None:
    handles_before = handles.live()
    with inject_faults(api, *rules), GdrManager(gpu_indices=None) as manager:
        assert not manager.state.available
        # Apart from the manager itself, no handle is open that was not open before.
        assert {**handles.live(), "registration.manager": 0} == {**handles_before, "registration.manager": 0}
        (obstacle,) = manager.state.obstacles
        assert obstacle.reason is reason
        for method_call in (lambda: manager.nics, lambda: manager.device(0), lambda: manager.nearest_nic(0)):
            with pytest.raises(RegistrationFailed) as error_info:
                method_call()
            assert error_info.value.causes
            assert error_info.value.reason is reason


@NEEDS_TWINS
@needs(cuda_needs.device(count_min=2))
@NEEDS_DMABUF
def test_unavailable_gpu_does_not_affect_other_gpus() -> None:
    with GdrManager() as manager:
        assert manager.state.gpus
        assert manager.state.nics
    with inject_faults(Api.CUDA, "cuMemAlloc_v2 call=1 status=2"), GdrManager() as manager:
        assert manager.state.available
        failed_gpu, working_gpu = manager.state.gpus[:2]
        assert failed_gpu.route is None
        assert failed_gpu.obstacle is not None
        assert failed_gpu.obstacle.reason is Reason.OUT_OF_MEMORY
        with pytest.raises(RegistrationFailed) as error_info:
            manager.cache(failed_gpu.index)
        (cause,) = error_info.value.causes
        assert isinstance(cause, ApiError)
        assert cause.operation == "cuMemAlloc"
        with manager.device(working_gpu.index).allocate(64 * KIB) as memory:
            manager.lease(memory).close()


@NEEDS_DMABUF
def test_gpu_that_was_not_requested_is_refused() -> None:
    with GdrManager(gpu_indices=[0]) as manager:
        with pytest.raises(UsageError) as error_info:
            manager.device(77)
        assert error_info.value.reason is Reason.NO_DEVICE
    handles_before = handles.live()
    with pytest.raises(UsageError) as error_info:
        GdrManager(nic_names=["no-such-nic"])
    assert error_info.value.reason is Reason.NO_DEVICE
    assert handles.live() == handles_before


@NEEDS_DMABUF
def test_close_is_refused_until_the_lease_ends() -> None:
    manager = GdrManager(gpu_indices=[0])
    with manager:
        memory = manager.device(0).allocate(64 * KIB)
        lease = manager.lease(memory)
        with pytest.raises(UsageError) as error_info:
            manager.close()
        assert error_info.value.reason is Reason.BUSY
        assert lease.remote(manager.nics[0]).length_bytes == 64 * KIB
        lease.close()
        manager.close()
    # The manager has closed its device, and the device has closed the memory.
    assert memory.closed
    for method_call in (lambda: manager.nics, lambda: manager.cache(0)):
        with pytest.raises(ClosedResource):
            method_call()


@NEEDS_TWINS
@NEEDS_DMABUF
def test_write_ordering_is_the_attribute_of_the_device(device: Device) -> None:
    ordering = Ordering.of(device)
    assert ordering.flush_options & FlushOption.HOST
    assert ordering.visibility in set(WriteVisibility)
    call_count_before = read_call_counts(Api.CUDA).get("cuFlushGPUDirectRDMAWrites", 0)
    assert ordering.make_visible(device) is ordering.needs_flush
    assert read_call_counts(Api.CUDA).get("cuFlushGPUDirectRDMAWrites", 0) == call_count_before + ordering.needs_flush


@needs(cuda_needs.device())
def test_device_that_needs_a_flush_is_flushed_or_refused(device: Device) -> None:
    ordering_with_flush = Ordering(device.index, FlushOption.HOST, WriteVisibility.NONE)
    assert ordering_with_flush.make_visible(device)
    ordering_without_flush = Ordering(device.index, FlushOption.NONE, WriteVisibility.NONE)
    with pytest.raises(ApiError) as error_info:
        ordering_without_flush.make_visible(device)
    assert error_info.value.reason is Reason.NOT_SUPPORTED
    assert Ordering(device.index, FlushOption.NONE, WriteVisibility.ALL_DEVICES).make_visible(device) is False
