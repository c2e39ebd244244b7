"""Each verbs call of a registration fails with each errno: documented exception and state, and a working next attempt.

docs/registration.md shows the table below.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest
from support.faults import faults
from support.reach import DMABUF

from gdrkit import handles
from gdrkit.errors import Api, ApiError, Reason, RegistrationFailed, SetupMissing, Unsupported, errno_name
from gdrkit.harness.needs import needs, software, verbs
from gdrkit.host import HostMemory
from gdrkit.registration import RegionCache, RegistrationRoute, register
from gdrkit.units import KIB
from gdrkit.verbs import Nic

if TYPE_CHECKING:
    from gdrkit.cuda import Device

pytestmark = [DMABUF, needs(software(Api.VERBS), verbs.nic(count_min=2), verbs.peer_memory)]

ENOTSUPP = 524
ERRNOS = (
    errno.EOPNOTSUPP,
    errno.EPROTONOSUPPORT,
    ENOTSUPP,
    errno.EINVAL,
    errno.EFAULT,
    errno.ENOMEM,
    errno.EBADF,
    errno.EPERM,
)

# The meaning of each errno for each call. Unsupported means that the route does not exist.
_GENERAL = {
    errno.EOPNOTSUPP: (Unsupported, Reason.NOT_SUPPORTED),
    errno.EPROTONOSUPPORT: (Unsupported, Reason.NOT_SUPPORTED),
    ENOTSUPP: (ApiError, Reason.OTHER),
    errno.EINVAL: (ApiError, Reason.BAD_ARGUMENT),
    errno.EFAULT: (ApiError, Reason.OTHER),
    errno.ENOMEM: (ApiError, Reason.OUT_OF_MEMORY),
    errno.EBADF: (ApiError, Reason.BAD_DESCRIPTOR),
    errno.EPERM: (ApiError, Reason.NO_PERMISSION),
}
_NO_DMABUF = (Unsupported, Reason.DMABUF_REGION_UNSUPPORTED)
MEANINGS = {
    "ibv_reg_dmabuf_mr": _GENERAL
    | {errno.EOPNOTSUPP: _NO_DMABUF, errno.EPROTONOSUPPORT: _NO_DMABUF, ENOTSUPP: _NO_DMABUF},
    "ibv_reg_mr": _GENERAL | {errno.EFAULT: (Unsupported, Reason.PEER_MEMORY_UNSUPPORTED)},
    "ibv_dereg_mr": _GENERAL,
    "ibv_alloc_pd": _GENERAL,
    "ibv_open_device": _GENERAL | {errno.EPERM: (SetupMissing, Reason.NO_PERMISSION)},
}
ROUTES = {"ibv_reg_dmabuf_mr": RegistrationRoute.DMABUF, "ibv_reg_mr": RegistrationRoute.PEER_MEMORY}

numbers = pytest.mark.parametrize("number", ERRNOS, ids=errno_name)


def check(error: BaseException, operation: str, number: int) -> None:
    kind, reason = MEANINGS[operation][number]
    assert type(error) is kind
    assert isinstance(error, ApiError)
    assert (error.operation, error.errno, error.reason) == (operation, number, reason)
    assert error.status_name == errno_name(number)


@numbers
@pytest.mark.parametrize("call", [1, 2], ids=["first-nic", "second-nic"])
@pytest.mark.parametrize("operation", ROUTES)
def test_failed_registration_leaves_nothing(
    device: Device, nics: tuple[Nic, ...], operation: str, call: int, number: int
) -> None:
    assert all(nic.supports_dmabuf() for nic in nics)
    route = ROUTES[operation]
    with device.allocate(64 * KIB) as memory, RegionCache(nics, route=route) as cache:
        before = handles.live()
        with (
            faults(Api.VERBS, f"{operation} call={call} errno={number}"),
            pytest.raises((ApiError, RegistrationFailed)) as raised,
        ):
            cache.lease(memory)
        error: BaseException = raised.value
        if isinstance(error, RegistrationFailed):
            # The only allowed route does not exist.
            assert error.reason is Reason.NO_ROUTE
            (error,) = error.causes
            assert isinstance(error, Unsupported)
        check(error, operation, number)
        assert handles.live() == before
        statistics = cache.statistics()
        assert (statistics.regions, statistics.registered_bytes, statistics.in_flight, statistics.leases) == (
            0,
            0,
            0,
            0,
        )
        cache.lease(memory).close()


@numbers
@pytest.mark.parametrize("call", [1, 2], ids=["first-nic", "second-nic"])
def test_failed_host_registration_leaves_nothing(nics: tuple[Nic, ...], call: int, number: int) -> None:
    with HostMemory(64 * KIB) as memory, RegionCache(nics) as cache:
        before = handles.live()
        with (
            faults(Api.VERBS, f"ibv_reg_mr call={call} errno={number}"),
            pytest.raises((ApiError, RegistrationFailed)) as raised,
        ):
            cache.lease(memory)
        error: BaseException = raised.value
        kind, reason = _GENERAL[number]
        if kind is Unsupported:
            # Host memory has no other route.
            assert isinstance(error, RegistrationFailed)
            (error,) = error.causes
        assert isinstance(error, kind)
        assert isinstance(error, ApiError)
        assert (error.operation, error.errno, error.reason) == ("ibv_reg_mr", number, reason)
        assert handles.live() == before
        assert (cache.statistics().regions, cache.statistics().registered_bytes) == (0, 0)
        cache.lease(memory).close()


@pytest.mark.qualify
@numbers
def test_only_unsupported_dmabuf_leads_to_peer_memory(device: Device, nics: tuple[Nic, ...], number: int) -> None:
    assert all(nic.supports_dmabuf() for nic in nics)
    with device.allocate(64 * KIB) as memory, faults(Api.VERBS, f"ibv_reg_dmabuf_mr call=1 errno={number}"):
        if MEANINGS["ibv_reg_dmabuf_mr"][number] == _NO_DMABUF:
            with register(memory, nics) as registration:
                assert registration.route is RegistrationRoute.PEER_MEMORY
                check(registration.refusals[0], "ibv_reg_dmabuf_mr", number)
        else:
            with pytest.raises(ApiError) as raised:
                register(memory, nics)
            check(raised.value, "ibv_reg_dmabuf_mr", number)


@numbers
@pytest.mark.parametrize("call", [1, 2], ids=["first", "second"])
def test_failed_deregistration_keeps_the_memory(device: Device, nics: tuple[Nic, ...], call: int, number: int) -> None:
    with device.allocate(64 * KIB) as memory, RegionCache(nics) as cache:
        cache.lease(memory).close()
        with faults(Api.VERBS, f"ibv_dereg_mr call={call} errno={number}"), pytest.raises(ApiError) as raised:
            memory.close()
        check(raised.value, "ibv_dereg_mr", number)
        assert not memory.closed
        statistics = cache.statistics()
        assert (statistics.regions, statistics.not_deregistered, statistics.registered_bytes) == (0, 1, 64 * KIB)
        memory.close()
        assert cache.statistics().registered_bytes == 0


@numbers
@pytest.mark.parametrize("operation", ["ibv_alloc_pd", "ibv_open_device"])
def test_failed_open_of_a_nic_leaves_nothing(nic: Nic, operation: str, number: int) -> None:
    before = handles.live()
    with faults(Api.VERBS, f"{operation} call=* errno={number}"), pytest.raises(ApiError) as raised:
        Nic.open(nic.name)
    check(raised.value, operation, number)
    assert handles.live() == before
    Nic.open(nic.name).close()


@needs(software(Api.CUDA))
@pytest.mark.parametrize("status", [1, 2, 201, 801, 999])
def test_failed_export_differs_from_unsupported_export(device: Device, nics: tuple[Nic, ...], status: int) -> None:
    with device.allocate(64 * KIB) as memory, RegionCache(nics) as cache:
        with faults(Api.CUDA, f"cuMemGetHandleForAddressRange call=1 status={status}"):
            if status == 801:
                with cache.lease(memory) as lease:
                    assert lease.route is RegistrationRoute.PEER_MEMORY
            else:
                with pytest.raises(ApiError) as raised:
                    cache.lease(memory)
                assert (raised.value.operation, raised.value.status) == ("cuMemGetHandleForAddressRange", status)
                assert raised.value.errno is None
                assert raised.value.__cause__ is not raised.value
        cache.lease(memory).close()
