"""The policy of registration: dma-buf, else peer memory, else one error with both causes.

Memory is registered with all NICs or with none, and a failure leaves nothing registered.
"""

from __future__ import annotations

import errno
import gc
import uuid
import weakref
from typing import TYPE_CHECKING, Any

import pytest
from support.faults import inject_faults
from support.memory_kinds import NEEDS_DMABUF, connect_peer_queue_pair, find_registration_function, register_by_route

from gdrkit import handles
from gdrkit.cuda import VmmMemory
from gdrkit.errors import Api, ApiError, Reason, RegistrationFailed, UsageError
from gdrkit.harness.needs import cuda, needs, software, verbs
from gdrkit.host import HostAllocator
from gdrkit.registration import BufferPool, RegionCache, RegistrationRoute, register
from gdrkit.units import KIB, MIB
from gdrkit.verbs import Nic, Status

if TYPE_CHECKING:
    from support.memory_kinds import AnyAllocator

    from gdrkit.cuda import Device
    from gdrkit.harness.peer import Peer

# Fault rules: no NIC can register memory by this route.
NO_DMABUF = "ibv_reg_dmabuf_mr call=* errno=EOPNOTSUPP"
NO_PEER_MEMORY = "ibv_reg_mr call=* errno=EFAULT"


@pytest.mark.qualify
@NEEDS_DMABUF
def test_dmabuf_is_used_if_every_nic_supports_it(device: Device, nics: tuple[Nic, ...]) -> None:
    with device.allocate(64 * KIB) as memory, register(memory, nics) as registration:
        assert registration.route is RegistrationRoute.DMABUF
        assert registration.nics == nics
        assert not registration.refusals


@NEEDS_DMABUF
@needs(software(Api.VERBS), verbs.peer_memory)
def test_peer_memory_is_used_without_dmabuf_and_keeps_the_error(
    device: Device, nics: tuple[Nic, ...], seed: int, peer: Peer
) -> None:
    with (
        device.allocate(64 * KIB) as memory,
        inject_faults(Api.VERBS, NO_DMABUF),
        register(memory, nics) as registration,
    ):
        assert registration.route is RegistrationRoute.PEER_MEMORY
        (refusal,) = registration.refusals
        assert isinstance(refusal, ApiError)
        assert (refusal.operation, refusal.errno) == ("ibv_reg_dmabuf_mr", errno.EOPNOTSUPP)
        with connect_peer_queue_pair(nics[0], peer) as peer_pair:
            peer_pair.write(registration.remote(nics[0]), seed=seed).expect(Status.SUCCESS)


@pytest.mark.qualify
@NEEDS_DMABUF
@needs(software(Api.VERBS))
def test_no_route_error_has_both_causes_and_leaves_nothing(device: Device, nics: tuple[Nic, ...]) -> None:
    with device.allocate(64 * KIB) as memory, inject_faults(Api.VERBS, NO_DMABUF, NO_PEER_MEMORY):
        handles_before = handles.live()
        with pytest.raises(RegistrationFailed) as error_info:
            register(memory, nics)
        assert handles.live() == handles_before
    assert error_info.value.reason is Reason.NO_ROUTE
    causes = [cause for cause in error_info.value.causes if isinstance(cause, ApiError)]
    assert [(cause.operation, cause.errno) for cause in causes] == [
        ("ibv_reg_dmabuf_mr", errno.EOPNOTSUPP),
        ("ibv_reg_mr", errno.EFAULT),
    ]
    assert all(cause.what_to_do for cause in causes)


@NEEDS_DMABUF
@needs(software(Api.VERBS))
def test_failed_registrations_keep_no_memory_alive(device: Device, nics: tuple[Nic, ...]) -> None:
    # Each registration must raise a new error object: the traceback of a reused object would refer to the memory of
    # all callers.
    memory_references: list[weakref.ref[object]] = []
    traceback_lengths = set()

    def register_and_fail() -> None:
        with device.allocate(64 * KIB) as memory:
            memory_references.append(weakref.ref(memory))
            with pytest.raises(RegistrationFailed) as error_info:
                register(memory, nics)
            traceback_lengths.add(len(error_info.traceback))

    with inject_faults(Api.VERBS, NO_DMABUF, NO_PEER_MEMORY):
        for _ in range(50):
            register_and_fail()
    gc.collect()
    assert [reference() for reference in memory_references] == [None] * 50
    assert len(traceback_lengths) == 1


@NEEDS_DMABUF
@needs(software(Api.VERBS))
def test_transient_probe_error_is_retried(nic: Nic) -> None:
    with Nic.open(nic.name) as new_nic:
        with inject_faults(Api.VERBS, "ibv_reg_dmabuf_mr call=* errno=ENOMEM"):
            refusal = new_nic.dmabuf_error()
            assert refusal is not None
            assert refusal.errno == errno.ENOMEM
        assert new_nic.dmabuf_error() is None


@NEEDS_DMABUF
@needs(software(Api.VERBS))
def test_refusal_of_a_nic_is_a_new_error_each_time(nic: Nic) -> None:
    with Nic.open(nic.name) as new_nic:
        with inject_faults(Api.VERBS, NO_DMABUF):
            first_error = new_nic.dmabuf_error()
        second_error = new_nic.dmabuf_error()
        assert first_error is not None
        assert second_error is not None
        assert first_error is not second_error
        assert str(first_error) == str(second_error)
        assert second_error.__traceback__ is None


@needs(software(Api.VERBS), verbs.nic(count_min=2))
def test_failure_of_the_second_nic_deregisters_the_first(allocator: AnyAllocator, nics: tuple[Nic, ...]) -> None:
    for nic in nics:
        # After this call, the result of the probe is cached. The fault plan below then counts only registrations.
        assert nic.supports_dmabuf()
    with (
        allocator.allocate(64 * KIB) as memory,
        inject_faults(Api.VERBS, f"{find_registration_function(allocator)} call=2 errno=ENOMEM"),
    ):
        handles_before = handles.live()
        with pytest.raises(ApiError) as error_info:
            register(memory, nics)
        assert handles.live() == handles_before
        # ENOMEM does not mean that the route is unsupported, so the policy does not try another route.
        assert (error_info.value.operation, error_info.value.errno) == (
            find_registration_function(allocator),
            errno.ENOMEM,
        )
        register(memory, nics).close()


@NEEDS_DMABUF
def test_requested_route_has_no_fallback(device: Device, nic: Nic) -> None:
    with (
        device.allocate(64 * KIB) as memory,
        register_by_route(memory, [nic], route=RegistrationRoute.DMABUF) as registration,
    ):
        assert registration.route is RegistrationRoute.DMABUF
    with device.allocate(64 * KIB) as memory, pytest.raises(UsageError):
        register(memory, [nic, nic])
    with device.allocate(64 * KIB) as memory, pytest.raises(UsageError):
        register(memory, [])


@needs(verbs.nic())
@pytest.mark.parametrize("memory", [bytearray(4096), 4096, None, "memory"], ids=lambda memory: type(memory).__name__)
def test_memory_of_a_wrong_type_is_named(nic: Nic, memory: Any) -> None:  # noqa: ANN401 - the cases pass wrong types.
    with pytest.raises(UsageError, match=f"DeviceBuffer.*not {type(memory).__name__}"):
        register(memory, [nic])
    with RegionCache([nic]) as cache, pytest.raises(UsageError, match=f"not {type(memory).__name__}"):
        cache.lease(memory)


@needs(verbs.nic())
def test_wrong_type_of_a_library_is_named_with_its_module(nic: Nic) -> None:
    wrong_value: Any = uuid.UUID(int=0)
    with pytest.raises(UsageError, match=r"DeviceBuffer.*not uuid\.UUID\b"):
        register(wrong_value, [nic])
    with pytest.raises(UsageError, match=r"nics must .*not uuid\.UUID\b"):
        RegionCache(wrong_value)
    with pytest.raises(UsageError, match=r"nics must .*contains uuid\.UUID\b"):
        RegionCache([nic, wrong_value])


@needs(verbs.nic())
def test_nics_of_a_wrong_type_are_named(nic: Nic) -> None:
    wrong_nics: list[tuple[Any, str]] = [
        (nic, "Nic"),
        (None, "NoneType"),
        (7, "int"),
        ([nic.name], "str"),
        ("", "at least"),
    ]
    allocator = HostAllocator()
    with allocator.allocate(64 * KIB) as memory:
        handles_before = handles.live()
        for nics, expected_text in wrong_nics:
            with pytest.raises(UsageError, match=f"nics must .*{expected_text}"):
                register(memory, nics)
            with pytest.raises(UsageError, match=f"nics must .*{expected_text}"):
                RegionCache(nics)
            with pytest.raises(UsageError, match=f"nics must .*{expected_text}"):
                BufferPool(allocator, nics, buffer_bytes=4096, count=1)
        assert handles.live() == handles_before


@NEEDS_DMABUF
@needs(cuda.vmm)
def test_vmm_memory_of_several_chunks_is_one_region(device: Device, nic: Nic, peer: Peer, seed: int) -> None:
    with (
        VmmMemory.create(device, 6 * MIB, chunk_bytes=2 * MIB) as memory,
        register(memory, [nic]) as registration,
        connect_peer_queue_pair(nic, peer) as peer_pair,
    ):
        assert len(memory.allocation_key()) == 3
        # The range begins in the first chunk and ends in the third.
        remote_range = registration.remote(nic, offset_bytes=2 * MIB - 7, length_bytes=2 * MIB + 99)
        peer_pair.write(remote_range, seed=seed).expect(Status.SUCCESS)
        peer_pair.read(remote_range, seed=seed).completion.expect(Status.SUCCESS)
