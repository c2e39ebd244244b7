"""The ``ibv_pd *`` of a protection domain of pyverbs is either known for certain or reported as unknown.

Reading the pointer crashes pyverbs before 59, so gdrkit searches the domain object for it (gdrkit/verbs/_layout.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.memory_kinds import NEEDS_DMABUF

from gdrkit.harness.needs import needs, verbs
from gdrkit.registration import RegistrationRoute, register
from gdrkit.units import KIB
from gdrkit.verbs import _layout, _pyverbs

if TYPE_CHECKING:
    from gdrkit.cuda import Device
    from gdrkit.verbs import Nic

pytestmark = needs(verbs.nic())


def test_domain_pointer_is_known_and_registers_regions(nic: Nic) -> None:
    domain_pointer = _pyverbs.domain_pointer(nic.domain)
    assert domain_pointer
    # libibverbs gets the pointer as the protection domain. With a wrong pointer, the call would crash or return EINVAL.
    with nic.register_host(bytearray(KIB)) as region:
        assert region.rkey


@NEEDS_DMABUF
def test_dmabuf_region_has_the_device_address(device: Device, nic: Nic) -> None:
    with (
        device.allocate(64 * KIB) as memory,
        register(memory, [nic], route=RegistrationRoute.DMABUF) as registration,
    ):
        assert registration.remote(nic, offset_bytes=77).address == memory.address + 77


@needs(verbs.nic(count_min=2))
def test_domain_pointer_of_another_context_is_not_accepted(nics: tuple[Nic, ...]) -> None:
    nic, other_nic = nics[:2]
    assert _layout.find_domain_pointer(nic.domain, nic.context) == _pyverbs.domain_pointer(nic.domain)
    # The domain belongs to the context of the first NIC. With the context of another NIC, the search finds nothing.
    assert _layout.find_domain_pointer(nic.domain, other_nic.context) is None
