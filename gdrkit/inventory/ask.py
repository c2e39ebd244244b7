"""Ask the APIs of this process what they can do.

Level 4. Runs as ``python -m gdrkit.inventory.ask API`` in a child of ``probe``: it initialises CUDA, opens NICs and
allocates a little memory, none of which shall happen in a process that only wants to know. Answers are what an API said
to a call with real arguments, never what its version or name suggests.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from gdrkit import host, plain, witness
from gdrkit.buffers import MemoryKind
from gdrkit.errors import Api, ApiError, GdrkitError, Reason, RegistrationFailed, UsageError
from gdrkit.inventory.facts import ApiFailure, CudaDeviceFacts, CudaFacts, NicFacts, RouteFacts, VerbsFacts, notable
from gdrkit.inventory.gaudi import ask_gaudi

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gdrkit.cuda import Device
    from gdrkit.verbs import Nic, NicInfo

__all__ = ["ask_cuda", "ask_registration", "ask_verbs", "main"]

_ATTRIBUTES = (
    "COMPUTE_CAPABILITY_MAJOR",
    "COMPUTE_CAPABILITY_MINOR",
    "DMA_BUF_SUPPORTED",
    "GPU_DIRECT_RDMA_SUPPORTED",
    "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED",
    "GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS",
    "GPU_DIRECT_RDMA_WRITES_ORDERING",
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
    "HOST_REGISTER_SUPPORTED",
    "INTEGRATED",
    "UNIFIED_ADDRESSING",
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
)
_TRIED_BYTES = 64 << 10


def ask_cuda() -> CudaFacts:
    """What the CUDA driver says about itself and its devices.

    Raises
    ------
    GdrkitError
        There is no driver that answers.
    """
    from gdrkit import cuda

    major, minor = cuda.driver_version()
    devices = tuple(_device(cuda.Device(index)) for index in range(cuda.device_count()))
    return CudaFacts(
        driver_version=f"{major}.{minor}",
        devices=devices,
        libraries=notable(witness.libraries()),
        nodes=witness.device_nodes(),
    )


def ask_verbs() -> VerbsFacts:
    """What verbs says about its devices; each is opened once.

    Raises
    ------
    GdrkitError
        There is no libibverbs or no pyverbs that answers.
    """
    from gdrkit import verbs

    nodes: dict[witness.DeviceNode, None] = {}
    nics = tuple(_nic(info, nodes) for info in verbs.list_nics())
    return VerbsFacts(nics=nics, libraries=notable(witness.libraries()), nodes=tuple(nodes))


def ask_registration() -> tuple[RouteFacts, ...]:
    """Try each way of registration for each device and NIC, with 64 KiB of memory that is freed again.

    Raises
    ------
    GdrkitError
        Devices, NICs or memory could not even be opened.
    """
    from gdrkit import cuda, verbs

    found: list[RouteFacts] = []
    ports = {info.name: [port.number for port in info.ports if port.active] for info in verbs.list_nics()}
    for index in range(cuda.device_count()):
        with cuda.Device(index) as device, device.allocate(_TRIED_BYTES) as memory:
            for name, active in ports.items():
                with verbs.Nic.open(name, port=active[0] if active else 1) as nic:
                    found += _tried(device, memory, nic, name)
    return tuple(found)


def main(arguments: list[str] | None = None) -> int:
    """Write the answer of one API, or its failure, as one JSON object on a descriptor: ``ask API DESCRIPTOR``."""
    name, descriptor = sys.argv[1:] if arguments is None else arguments
    questions: dict[str, Callable[[], object]] = {
        "cuda": ask_cuda,
        "verbs": ask_verbs,
        "registration": ask_registration,
        "nvml": host.nvml_facts,
        "hlthunk": lambda: ask_gaudi(lambda: notable(witness.libraries())),
    }
    if name not in questions:
        message = f"no API {name!r}"
        raise UsageError(message)
    answer: dict[str, plain.Json]
    try:
        answer = {"facts": plain.to_plain(questions[name]())}
    except GdrkitError as error:
        answer = {"failure": plain.to_plain(ApiFailure.of(error, api=name, operation="ask"))}
    with os.fdopen(int(descriptor), "w", encoding="utf-8") as file:
        json.dump(answer, file)
    return 0


def _device(device: Device) -> CudaDeviceFacts:
    from gdrkit.cuda import DeviceAttribute

    with device:
        return CudaDeviceFacts(
            index=device.index,
            name=device.name,
            uuid=device.uuid,
            pci_bus_id=device.pci_bus_id,
            attributes=dict(_attributes(device, DeviceAttribute)),
        )


def _attributes(device: Device, known: type) -> Iterator[tuple[str, int]]:
    for name in _ATTRIBUTES:
        try:
            yield name, device.attribute(getattr(known, name))
        except ApiError as error:
            # An older driver does not know a newer attribute: then there is none. Anything else is a failure of the
            # API.
            if error.api is not Api.CUDA or error.reason not in (Reason.BAD_ARGUMENT, Reason.NOT_SUPPORTED):
                raise


def _nic(info: NicInfo, nodes: dict[witness.DeviceNode, None]) -> NicFacts:
    """Open one device and ask it; the character devices that are open meanwhile are added to `nodes`."""
    from gdrkit import verbs

    dmabuf: bool | None = None
    failure: ApiFailure | None = None
    active = [port.number for port in info.ports if port.active]
    try:
        if info.error is not None:
            raise info.error
        with verbs.Nic.open(info.name, port=active[0] if active else 1) as nic:
            dmabuf = nic.supports_dmabuf()
            nodes |= dict.fromkeys(witness.device_nodes())
    except GdrkitError as error:
        failure = ApiFailure.of(error, api="verbs", operation="open")
    return NicFacts(
        name=info.name,
        driver=info.driver,
        node_guid=info.node_guid,
        active_ports=tuple(active),
        dmabuf=dmabuf,
        failure=failure,
    )


def _tried(device: Device, memory: object, nic: Nic, name: str) -> Iterator[RouteFacts]:
    from gdrkit import registration

    for route in registration.RegistrationRoute.ways_of(MemoryKind.CUDA):
        failure: ApiFailure | None = None
        try:
            registration.register(memory, [nic], route=route).close()  # type: ignore[arg-type]
        except GdrkitError as error:
            failure = _refusal(error, f"register by {route.value}")
        yield RouteFacts(
            device_index=device.index, nic=name, way=route.value, possible=failure is None, failure=failure
        )


def _refusal(error: GdrkitError, operation: str) -> ApiFailure:
    # One way was tried, so the cause is its own. The arguments (an address, a descriptor) differ from run to run and
    # say nothing here.
    cause = error.causes[-1] if isinstance(error, RegistrationFailed) and error.causes else error
    failure = ApiFailure.of(cause, api="registration", operation=operation)
    if isinstance(cause, ApiError):
        number = "" if cause.status is None else f" ({cause.status})"
        failure = replace(failure, message=f"{cause.operation} gave {cause.status_name}{number}")
    return failure


if __name__ == "__main__":
    sys.exit(main())
