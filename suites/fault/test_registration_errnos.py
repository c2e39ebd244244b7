"""If a verbs call of a registration fails, gdrkit raises the documented error for the errno and leaves nothing open.

Afterwards, the next attempt succeeds. docs/registration.md shows the table DOCUMENTED_ERRORS.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest
from support.faults import inject_faults
from support.memory_kinds import NEEDS_DMABUF

from gdrkit import handles
from gdrkit.errors import Api, ApiError, Reason, RegistrationFailed, SetupMissing, Unsupported, errno_name
from gdrkit.harness.needs import needs, software, verbs
from gdrkit.host import HostMemory
from gdrkit.registration import RegionCache, RegistrationRoute, register
from gdrkit.units import KIB
from gdrkit.verbs import Nic

if TYPE_CHECKING:
    from gdrkit.cuda import Device

pytestmark = [NEEDS_DMABUF, needs(software(Api.VERBS), verbs.nic(count_min=2), verbs.peer_memory)]

# The kernel returns this errno. The C library does not define it.
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

# Exception and reason that gdrkit raises for each errno. Unsupported means that the registration route does not exist.
_DEFAULT_ERRORS = {
    errno.EOPNOTSUPP: (Unsupported, Reason.NOT_SUPPORTED),
    errno.EPROTONOSUPPORT: (Unsupported, Reason.NOT_SUPPORTED),
    ENOTSUPP: (ApiError, Reason.OTHER),
    errno.EINVAL: (ApiError, Reason.BAD_ARGUMENT),
    errno.EFAULT: (ApiError, Reason.OTHER),
    errno.ENOMEM: (ApiError, Reason.OUT_OF_MEMORY),
    errno.EBADF: (ApiError, Reason.BAD_DESCRIPTOR),
    errno.EPERM: (ApiError, Reason.NO_PERMISSION),
}
_DMABUF_REFUSED = (Unsupported, Reason.DMABUF_REGION_UNSUPPORTED)
# Exception and reason that gdrkit raises for each verbs call and errno.
DOCUMENTED_ERRORS = {
    "ibv_reg_dmabuf_mr": _DEFAULT_ERRORS
    | {
        errno.EOPNOTSUPP: _DMABUF_REFUSED,
        errno.EPROTONOSUPPORT: _DMABUF_REFUSED,
        ENOTSUPP: _DMABUF_REFUSED,
    },
    "ibv_reg_mr": _DEFAULT_ERRORS | {errno.EFAULT: (Unsupported, Reason.PEER_MEMORY_UNSUPPORTED)},
    "ibv_dereg_mr": _DEFAULT_ERRORS,
    "ibv_alloc_pd": _DEFAULT_ERRORS,
    "ibv_open_device": _DEFAULT_ERRORS | {errno.EPERM: (SetupMissing, Reason.NO_PERMISSION)},
}
ROUTE_BY_CALL = {"ibv_reg_dmabuf_mr": RegistrationRoute.DMABUF, "ibv_reg_mr": RegistrationRoute.PEER_MEMORY}

each_errno = pytest.mark.parametrize("error_number", ERRNOS, ids=errno_name)


def check_error(error: BaseException, operation: str, error_number: int) -> None:
    """Require that the error is the documented one for this verbs call and errno."""
    error_type, reason = DOCUMENTED_ERRORS[operation][error_number]
    assert type(error) is error_type
    assert isinstance(error, ApiError)
    assert (error.operation, error.errno, error.reason) == (operation, error_number, reason)
    assert error.status_name == errno_name(error_number)


@each_errno
@pytest.mark.parametrize("call_number", [1, 2], ids=["first-nic", "second-nic"])
@pytest.mark.parametrize("operation", ROUTE_BY_CALL)
def test_failed_registration_leaves_nothing(
    device: Device, nics: tuple[Nic, ...], operation: str, call_number: int, error_number: int
) -> None:
    assert all(nic.supports_dmabuf() for nic in nics)
    route = ROUTE_BY_CALL[operation]
    with device.allocate(64 * KIB) as memory, RegionCache(nics, route=route) as cache:
        handles_before = handles.live()
        with (
            inject_faults(Api.VERBS, f"{operation} call={call_number} errno={error_number}"),
            pytest.raises((ApiError, RegistrationFailed)) as error_info,
        ):
            cache.lease(memory)
        error: BaseException = error_info.value
        if isinstance(error, RegistrationFailed):
            # The error says that the NIC does not support this route, and the cache may use no other.
            assert error.reason is Reason.NO_ROUTE
            (error,) = error.causes
            assert isinstance(error, Unsupported)
        check_error(error, operation, error_number)
        assert handles.live() == handles_before
        statistics = cache.statistics()
        assert (statistics.regions, statistics.registered_bytes, statistics.in_flight, statistics.leases) == (
            0,
            0,
            0,
            0,
        )
        cache.lease(memory).close()


@each_errno
@pytest.mark.parametrize("call_number", [1, 2], ids=["first-nic", "second-nic"])
def test_failed_host_registration_leaves_nothing(nics: tuple[Nic, ...], call_number: int, error_number: int) -> None:
    with HostMemory(64 * KIB) as memory, RegionCache(nics) as cache:
        handles_before = handles.live()
        with (
            inject_faults(Api.VERBS, f"ibv_reg_mr call={call_number} errno={error_number}"),
            pytest.raises((ApiError, RegistrationFailed)) as error_info,
        ):
            cache.lease(memory)
        error: BaseException = error_info.value
        error_type, reason = _DEFAULT_ERRORS[error_number]
        if error_type is Unsupported:
            # The cache has no other route for host memory, so RegistrationFailed wraps the error.
            assert isinstance(error, RegistrationFailed)
            (error,) = error.causes
        assert isinstance(error, error_type)
        assert isinstance(error, ApiError)
        assert (error.operation, error.errno, error.reason) == ("ibv_reg_mr", error_number, reason)
        assert handles.live() == handles_before
        assert (cache.statistics().regions, cache.statistics().registered_bytes) == (0, 0)
        cache.lease(memory).close()


@pytest.mark.qualify
@each_errno
def test_only_unsupported_dmabuf_leads_to_peer_memory(device: Device, nics: tuple[Nic, ...], error_number: int) -> None:
    assert all(nic.supports_dmabuf() for nic in nics)
    with (
        device.allocate(64 * KIB) as memory,
        inject_faults(Api.VERBS, f"ibv_reg_dmabuf_mr call=1 errno={error_number}"),
    ):
        if DOCUMENTED_ERRORS["ibv_reg_dmabuf_mr"][error_number] == _DMABUF_REFUSED:
            with register(memory, nics) as registration:
                assert registration.route is RegistrationRoute.PEER_MEMORY
                check_error(registration.refusals[0], "ibv_reg_dmabuf_mr", error_number)
        else:
            with pytest.raises(ApiError) as error_info:
                register(memory, nics)
            check_error(error_info.value, "ibv_reg_dmabuf_mr", error_number)


@each_errno
@pytest.mark.parametrize("call_number", [1, 2], ids=["first", "second"])
def test_failed_deregistration_keeps_the_memory(
    device: Device, nics: tuple[Nic, ...], call_number: int, error_number: int
) -> None:
    with device.allocate(64 * KIB) as memory, RegionCache(nics) as cache:
        cache.lease(memory).close()
        with (
            inject_faults(Api.VERBS, f"ibv_dereg_mr call={call_number} errno={error_number}"),
            pytest.raises(ApiError) as error_info,
        ):
            memory.close()
        check_error(error_info.value, "ibv_dereg_mr", error_number)
        assert not memory.closed
        statistics = cache.statistics()
        assert (statistics.regions, statistics.not_deregistered, statistics.registered_bytes) == (0, 1, 64 * KIB)
        memory.close()
        assert cache.statistics().registered_bytes == 0


@each_errno
@pytest.mark.parametrize("operation", ["ibv_alloc_pd", "ibv_open_device"])
def test_failed_open_of_a_nic_leaves_nothing(nic: Nic, operation: str, error_number: int) -> None:
    handles_before = handles.live()
    with inject_faults(Api.VERBS, f"{operation} call=* errno={error_number}"), pytest.raises(ApiError) as error_info:
        Nic.open(nic.name)
    check_error(error_info.value, operation, error_number)
    assert handles.live() == handles_before
    Nic.open(nic.name).close()


# CUDA_ERROR_INVALID_VALUE, _OUT_OF_MEMORY, _INVALID_CONTEXT, _NOT_SUPPORTED and _UNKNOWN have these values.
@needs(software(Api.CUDA))
@pytest.mark.parametrize("status", [1, 2, 201, 801, 999])
def test_failed_export_differs_from_unsupported_export(device: Device, nics: tuple[Nic, ...], status: int) -> None:
    with device.allocate(64 * KIB) as memory, RegionCache(nics) as cache:
        with inject_faults(Api.CUDA, f"cuMemGetHandleForAddressRange call=1 status={status}"):
            if status == 801:  # CUDA_ERROR_NOT_SUPPORTED
                with cache.lease(memory) as lease:
                    assert lease.route is RegistrationRoute.PEER_MEMORY
            else:
                with pytest.raises(ApiError) as error_info:
                    cache.lease(memory)
                assert (error_info.value.operation, error_info.value.status) == (
                    "cuMemGetHandleForAddressRange",
                    status,
                )
                assert error_info.value.errno is None
                assert error_info.value.__cause__ is not error_info.value
        cache.lease(memory).close()
