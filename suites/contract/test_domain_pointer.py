"""The ``ibv_pd *`` behind a protection domain of pyverbs is found, or said not to be; it is never guessed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.reach import DMABUF

from gdrkit.harness.needs import needs, verbs
from gdrkit.registration import RegistrationRoute, register
from gdrkit.units import KIB
from gdrkit.verbs import _layout, _pyverbs

if TYPE_CHECKING:
    from gdrkit.cuda import Device
    from gdrkit.verbs import Nic

pytestmark = needs(verbs.nic())


def test_this_pyverbs_gives_the_pointer_and_regions_are_made_by_it(nic: Nic) -> None:
    pointer = _pyverbs.domain_pointer(nic.domain)
    assert pointer
    # The library takes it for the domain: with another address it would crash, or say EINVAL.
    with nic.register_host(bytearray(KIB)) as region:
        assert region.rkey


@DMABUF
def test_a_region_begins_at_the_address_of_the_device(device: Device, nic: Nic) -> None:
    with (
        device.allocate(64 * KIB) as memory,
        register(memory, [nic], route=RegistrationRoute.DMABUF) as registration,
    ):
        assert registration.remote(nic, offset_bytes=77).address == memory.address + 77


@needs(verbs.nic(count_min=2))
def test_what_does_not_agree_is_not_believed(nics: tuple[Nic, ...]) -> None:
    one, other = nics[:2]
    assert _layout.find_domain(one.domain, one.context) == _pyverbs.domain_pointer(one.domain)
    # The domain was made from another context, so nothing proves the pointer that lies in it.
    assert _layout.find_domain(one.domain, other.context) is None
