"""gdrkit calls the functions of hl-thunk and verbs in the same order and with the same arguments as perftest.

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
    function_names = {call.name for call in expected_calls}
    # The first call of supports_dmabuf() probes by a registration, which must not be among the compared calls.
    assert nic.supports_dmabuf()
    with (
        Device(pci_bus_id=list_devices()[0].pci_bus_id) as device,
        device.allocate(1048000) as memory,  # gaudi_calls.txt has this size.
        register(memory, [nic]),
    ):
        pass
    calls = read_calls(*function_names)
    # Earlier cases may have made the same calls. The compared calls begin with the last call of the first function.
    first_index = max(index for index, call in enumerate(calls) if call.name == expected_calls[0].name)
    assert find_difference(expected_calls, calls[first_index:]) is None


def test_missing_swapped_or_changed_call_is_detected() -> None:
    expected_calls = list_reference_calls()
    # In these calls, the name of each variable is also its value.
    calls_without_variables = [
        dataclasses.replace(
            call,
            arguments={name: value.replace("$", "") for name, value in call.arguments.items()},
            result=call.result and call.result.replace("$", ""),
        )
        for call in expected_calls
    ]
    assert find_difference(expected_calls, calls_without_variables) is None
    assert find_difference(expected_calls, calls_without_variables[:-1]) is not None
    # The slice [1::-1] swaps the first two calls.
    assert find_difference(expected_calls, [*calls_without_variables[1::-1], *calls_without_variables[2:]]) is not None
    # The call with the index 3 is the export. A document describes a wrong export, which passes the handle as the
    # address (see test_documents.py).
    wrong_call = dataclasses.replace(
        calls_without_variables[3], arguments={**calls_without_variables[3].arguments, "addr": "handle"}
    )
    assert (
        find_difference(expected_calls, [*calls_without_variables[:3], wrong_call, *calls_without_variables[4:]])
        is not None
    )
