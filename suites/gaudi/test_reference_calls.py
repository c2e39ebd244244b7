"""gdrkit calls hl-thunk and verbs like perftest: the same functions, in the same order, with the same arguments.

The calls of perftest are in suites/vectors/gaudi_calls.txt. A name such as ``$handle`` in that file is a variable.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from gaudi.twin_calls import Call, find_difference, parse_call, read_calls

from gdrkit.gaudi import Device, list_devices
from gdrkit.harness.needs import gaudi, needs, software, verbs
from gdrkit.registration import register

if TYPE_CHECKING:
    from gdrkit.verbs import Nic

REFERENCE_FILE = Path(__file__).parents[1] / "vectors" / "gaudi_calls.txt"


def list_reference_calls() -> list[Call]:
    return [parse_call(line) for line in REFERENCE_FILE.read_text().splitlines() if line and not line.startswith("#")]


@needs(gaudi.device(), gaudi.mapped_memory, verbs.nic(), verbs.dmabuf_region, software("hlthunk"), software("verbs"))
def test_call_order_and_arguments_match_perftest(nic: Nic) -> None:
    expected_calls = list_reference_calls()
    names = {call.name for call in expected_calls}
    assert nic.supports_dmabuf()  # This probe makes calls of its own, so it must run first.
    with (
        Device(pci_bus_id=list_devices()[0].pci_bus_id) as device,
        device.allocate(1048000) as memory,
        register(memory, [nic]),
    ):
        pass
    calls = read_calls(*names)
    first_index = max(index for index, call in enumerate(calls) if call.name == expected_calls[0].name)
    assert find_difference(expected_calls, calls[first_index:]) is None


def test_missing_swapped_or_changed_call_is_detected() -> None:
    expected_calls = list_reference_calls()
    calls_with_names = [
        dataclasses.replace(
            call,
            arguments={name: value.replace("$", "") for name, value in call.arguments.items()},
            result=call.result and call.result.replace("$", ""),
        )
        for call in expected_calls
    ]
    assert find_difference(expected_calls, calls_with_names) is None
    assert find_difference(expected_calls, calls_with_names[:-1]) is not None
    assert find_difference(expected_calls, [*calls_with_names[1::-1], *calls_with_names[2:]]) is not None
    # A document describes this wrong call, with the handle as the address.
    wrong_call = dataclasses.replace(calls_with_names[3], arguments={**calls_with_names[3].arguments, "addr": "handle"})
    assert find_difference(expected_calls, [*calls_with_names[:3], wrong_call, *calls_with_names[4:]]) is not None
