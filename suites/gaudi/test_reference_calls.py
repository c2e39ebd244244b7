"""gdrkit calls hl-thunk and verbs like perftest: the same functions in the same order with the same arguments."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from gaudi.twin_calls import Call, calls_of, difference, parse

from gdrkit.gaudi import Device, list_devices
from gdrkit.harness.needs import gaudi, needs, software, verbs
from gdrkit.registration import register

if TYPE_CHECKING:
    from gdrkit.verbs import Nic

VECTOR = Path(__file__).parents[1] / "vectors" / "gaudi_calls.txt"


def reference() -> list[Call]:
    return [parse(line) for line in VECTOR.read_text().splitlines() if line and not line.startswith("#")]


@needs(gaudi.device(), gaudi.mapped_memory, verbs.nic(), verbs.dmabuf_region, software("hlthunk"), software("verbs"))
def test_call_order_and_arguments_match_perftest(nic: Nic) -> None:
    vector = reference()
    names = {call.name for call in vector}
    assert nic.supports_dmabuf()  # The probe runs before, because it is an additional call.
    with (
        Device(pci_bus_id=list_devices()[0].pci_bus_id) as device,
        device.allocate(1048000) as memory,
        register(memory, [nic]),
    ):
        pass
    calls = calls_of(*names)
    begin = max(at for at, call in enumerate(calls) if call.name == vector[0].name)
    assert difference(vector, calls[begin:]) is None


def test_missing_swapped_or_changed_call_is_detected() -> None:
    vector = reference()
    named = [
        dataclasses.replace(
            call,
            arguments={name: value.replace("$", "") for name, value in call.arguments.items()},
            result=call.result and call.result.replace("$", ""),
        )
        for call in vector
    ]
    assert difference(vector, named) is None
    assert difference(vector, named[:-1]) is not None
    assert difference(vector, [*named[1::-1], *named[2:]]) is not None
    # This is the documented call, with the handle in the place of the address.
    wrong = dataclasses.replace(named[3], arguments={**named[3].arguments, "addr": "handle"})
    assert difference(vector, [*named[:3], wrong, *named[4:]]) is not None
