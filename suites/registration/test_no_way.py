"""A NIC without any route to device memory: a registration raises one error with both causes and leaves nothing open.

The devices of Soft-RoCE (rxe) register neither a dma-buf nor a device address, so there the errors come from the
kernel. Elsewhere, a fault plan makes the libibverbs twin (a library that emulates NICs) return the same errors.
"""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING

import pytest
from support.faults import inject_faults

from gdrkit import handles, launch
from gdrkit.cuda import VmmMemory
from gdrkit.errors import Api, ApiError, Reason, RegistrationFailed
from gdrkit.harness.needs import cuda, needs, verbs
from gdrkit.registration import RegistrationRoute, register
from gdrkit.units import KIB, MIB
from gdrkit.verbs import Access

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.cuda import CudaMemory, Device
    from gdrkit.verbs import Nic

pytestmark = needs(verbs.no_way_to_devices, verbs.nic(), cuda.device(), cuda.dmabuf_export)

# Function that fails, and its errno, for each route.
DMABUF_CAUSE = ("ibv_reg_dmabuf_mr", errno.EOPNOTSUPP)
ADDRESS_CAUSE = ("ibv_reg_mr", errno.EFAULT)


@contextlib.contextmanager
def refuse_both_routes() -> Iterator[None]:
    """Make the libibverbs twin refuse both routes, like a kernel that supports neither. Without a twin, do nothing."""
    with contextlib.ExitStack() as stack:
        if launch.twin_control().ledger("verbs") is not None:
            rules = [
                f"{function_name} call=* errno={error_number}"
                for function_name, error_number in (DMABUF_CAUSE, ADDRESS_CAUSE)
            ]
            stack.enter_context(inject_faults(Api.VERBS, *rules))
        yield


def register_and_get_causes(
    memory: CudaMemory, nics: tuple[Nic, ...], *, route: RegistrationRoute | None = None, access: Access | None = None
) -> list[tuple[str, int | None]]:
    """Register memory, which must fail. Return the function and the errno of each cause of the error."""
    access_option = {} if access is None else {"access": access}
    with refuse_both_routes():
        handles_before = handles.live()
        with pytest.raises(RegistrationFailed) as error_info:
            register(memory, nics, route=route, **access_option)
        assert handles.live() == handles_before
    assert error_info.value.reason is Reason.NO_ROUTE
    causes = [cause for cause in error_info.value.causes if isinstance(cause, ApiError)]
    assert all(cause.what_to_do for cause in causes)
    return [(cause.operation, cause.errno) for cause in causes]


@pytest.mark.parametrize("length_bytes", [1, 4 * KIB - 1, 64 * KIB, 2 * MIB + 3])
def test_device_memory_of_any_length_is_refused_with_both_causes(
    device: Device, nics: tuple[Nic, ...], length_bytes: int
) -> None:
    with device.allocate(length_bytes) as memory:
        assert register_and_get_causes(memory, nics) == [DMABUF_CAUSE, ADDRESS_CAUSE]


@pytest.mark.parametrize(
    "access",
    [
        Access(0),
        Access.LOCAL_WRITE,
        Access.REMOTE_READ,
        Access.LOCAL_WRITE | Access.REMOTE_WRITE,
    ],
    ids=["none", "local-write", "remote-read", "remote-write"],
)
def test_any_access_rights_are_refused_with_both_causes(device: Device, nics: tuple[Nic, ...], access: Access) -> None:
    with device.allocate(64 * KIB) as memory:
        assert register_and_get_causes(memory, nics, access=access) == [DMABUF_CAUSE, ADDRESS_CAUSE]


def test_single_nic_is_refused_like_all_nics(device: Device, nic: Nic) -> None:
    with device.allocate(64 * KIB) as memory:
        assert register_and_get_causes(memory, (nic,)) == [DMABUF_CAUSE, ADDRESS_CAUSE]


@needs(cuda.vmm)
def test_vmm_memory_is_refused_with_both_causes(device: Device, nics: tuple[Nic, ...]) -> None:
    with VmmMemory.create(device, 4 * MIB, chunk_bytes=2 * MIB) as memory:
        assert register_and_get_causes(memory, nics) == [DMABUF_CAUSE, ADDRESS_CAUSE]


@pytest.mark.parametrize(
    ("route", "cause"),
    [
        pytest.param(RegistrationRoute.DMABUF, DMABUF_CAUSE, id="dmabuf"),
        pytest.param(RegistrationRoute.PEER_MEMORY, ADDRESS_CAUSE, id="peer_memory"),
    ],
)
def test_requested_route_raises_only_its_own_cause(
    device: Device, nics: tuple[Nic, ...], route: RegistrationRoute, cause: tuple[str, int]
) -> None:
    with device.allocate(64 * KIB) as memory:
        assert register_and_get_causes(memory, nics, route=route) == [cause]


def test_memory_is_unchanged_after_the_refusal(device: Device, nics: tuple[Nic, ...], seed: int) -> None:
    with device.allocate(64 * KIB) as memory:
        memory.fill(0x5A)
        assert register_and_get_causes(memory, nics) == [DMABUF_CAUSE, ADDRESS_CAUSE]
        assert memory.read() == b"\x5a" * (64 * KIB)
