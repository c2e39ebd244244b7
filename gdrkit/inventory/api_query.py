"""Functions that query one API each (CUDA, verbs, NVML, hl-thunk, registration) for the facts about a machine.

The module runs as ``python -m gdrkit.inventory.api_query API DESCRIPTOR`` in a child process of ``probe``. It
initialises CUDA, opens NICs and allocates a little memory, which must not happen in a process that only collects facts.
A fact is the result of an actual call of the API. It is never derived from a version or a name.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from gdrkit import evidence, host, serialization
from gdrkit.buffers import MemoryKind
from gdrkit.errors import Api, ApiError, GdrkitError, Reason, RegistrationFailed, UsageError
from gdrkit.inventory.facts import (
    ApiFailure,
    CudaDeviceFacts,
    CudaFacts,
    NicFacts,
    RouteFacts,
    VerbsFacts,
    select_substrate_libraries,
)
from gdrkit.inventory.gaudi import query_gaudi

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gdrkit.cuda import Device
    from gdrkit.verbs import Nic, NicInfo

__all__ = ["main", "query_cuda", "query_registration", "query_verbs"]

# The CUDA device attributes in the facts, without the prefix CU_DEVICE_ATTRIBUTE_.
_CUDA_ATTRIBUTE_NAMES = (
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
_PROBE_MEMORY_BYTES = 64 << 10


def query_cuda() -> CudaFacts:
    """Query the CUDA driver for its version and its devices.

    Raises
    ------
    GdrkitError
        The driver is missing, or its calls failed.
    """
    from gdrkit import cuda

    major, minor = cuda.driver_version()
    devices = tuple(_collect_device_facts(cuda.Device(device_index)) for device_index in range(cuda.device_count()))
    return CudaFacts(
        driver_version=f"{major}.{minor}",
        devices=devices,
        libraries=select_substrate_libraries(evidence.libraries()),
        nodes=evidence.device_nodes(),
    )


def query_verbs() -> VerbsFacts:
    """Query the RDMA devices of verbs, and open each of them once.

    Raises
    ------
    GdrkitError
        libibverbs or pyverbs is missing, or one of their calls failed.
    """
    from gdrkit import verbs

    # An ordered set (a dict of keys): the character devices that this process has open while a NIC is open.
    device_nodes: dict[evidence.DeviceNode, None] = {}
    nics = tuple(_collect_nic_facts(nic_info, device_nodes) for nic_info in verbs.list_nics())
    return VerbsFacts(nics=nics, libraries=select_substrate_libraries(evidence.libraries()), nodes=tuple(device_nodes))


def query_registration() -> tuple[RouteFacts, ...]:
    """Try each registration route for each device and NIC, with 64 KiB of memory that is freed again.

    Raises
    ------
    GdrkitError
        A device or a NIC could not be opened, or the memory could not be allocated.
    """
    from gdrkit import cuda, verbs

    route_facts: list[RouteFacts] = []
    # A NIC without an active port can also register memory; it is opened by its port 1.
    port_by_nic_name = {nic_info.name: nic_info.active_port or 1 for nic_info in verbs.list_nics()}
    for device_index in range(cuda.device_count()):
        with cuda.Device(device_index) as device, device.allocate(_PROBE_MEMORY_BYTES) as memory:
            for nic_name, port in port_by_nic_name.items():
                with verbs.Nic.open(nic_name, port=port) as nic:
                    route_facts += _try_routes(device, memory, nic, nic_name)
    return tuple(route_facts)


def main(arguments: list[str] | None = None) -> int:
    """Query an API and write the result or the failure as one JSON object.

    The arguments are ``API DESCRIPTOR``: the name of the API, and the descriptor to write to.

    Raises
    ------
    UsageError
        There is no API of that name.
    """
    api_name, descriptor = sys.argv[1:] if arguments is None else arguments
    query_by_api: dict[str, Callable[[], object]] = {
        "cuda": query_cuda,
        "verbs": query_verbs,
        "registration": query_registration,
        "nvml": host.nvml_facts,
        "hlthunk": lambda: query_gaudi(lambda: select_substrate_libraries(evidence.libraries())),
    }
    if api_name not in query_by_api:
        message = f"the API must be one of {', '.join(query_by_api)}, not {api_name!r}"
        raise UsageError(message)
    result: dict[str, serialization.Json]
    try:
        result = {"facts": serialization.to_json_data(query_by_api[api_name]())}
    except GdrkitError as error:
        result = {"failure": serialization.to_json_data(ApiFailure.of(error, api=api_name, operation="query"))}
    with os.fdopen(int(descriptor), "w", encoding="utf-8") as file:
        json.dump(result, file)
    return 0


def _collect_device_facts(device: Device) -> CudaDeviceFacts:
    from gdrkit.cuda import DeviceAttribute

    with device:
        return CudaDeviceFacts(
            index=device.index,
            name=device.name,
            uuid=device.uuid,
            pci_bus_id=device.pci_bus_id,
            attributes=dict(_query_supported_attributes(device, DeviceAttribute)),
        )


def _query_supported_attributes(device: Device, attribute_enum: type) -> Iterator[tuple[str, int]]:
    for attribute_name in _CUDA_ATTRIBUTE_NAMES:
        try:
            yield attribute_name, device.attribute(getattr(attribute_enum, attribute_name))
        except ApiError as error:
            # A driver may be older than the attribute and not know it. Such an attribute is left out of the facts. Any
            # other error is a failure of the API.
            if error.api is not Api.CUDA or error.reason not in (Reason.BAD_ARGUMENT, Reason.NOT_SUPPORTED):
                raise


def _collect_nic_facts(nic_info: NicInfo, device_nodes: dict[evidence.DeviceNode, None]) -> NicFacts:
    """Open one NIC and query it. Add to `device_nodes` the character devices that are open meanwhile."""
    from gdrkit import verbs

    supports_dmabuf: bool | None = None
    failure: ApiFailure | None = None
    try:
        if nic_info.error is not None:
            raise nic_info.error.clone()
        with verbs.Nic.open(nic_info.name, port=nic_info.active_port or 1) as nic:
            supports_dmabuf = nic.supports_dmabuf()
            device_nodes |= dict.fromkeys(evidence.device_nodes())
    except GdrkitError as error:
        failure = ApiFailure.of(error, api="verbs", operation="open")
    return NicFacts(
        name=nic_info.name,
        driver=nic_info.driver,
        node_guid=nic_info.node_guid,
        active_ports=tuple(port.number for port in nic_info.ports if port.active),
        dmabuf=supports_dmabuf,
        failure=failure,
    )


def _try_routes(device: Device, memory: object, nic: Nic, nic_name: str) -> Iterator[RouteFacts]:
    from gdrkit import registration

    for route in registration.RegistrationRoute.methods_for(MemoryKind.CUDA):
        failure: ApiFailure | None = None
        try:
            registration.register(memory, [nic], route=route).close()  # type: ignore[arg-type]
        except GdrkitError as error:
            failure = _make_registration_failure(error, f"register by {route.value}")
        yield RouteFacts(
            device_index=device.index, nic=nic_name, way=route.value, possible=failure is None, failure=failure
        )


def _make_registration_failure(error: GdrkitError, operation: str) -> ApiFailure:
    # Only one route was tried, so the last cause is the error of this route. The message does not contain the arguments
    # of the call (an address, a descriptor), because they differ from run to run.
    cause = error.causes[-1] if isinstance(error, RegistrationFailed) and error.causes else error
    failure = ApiFailure.of(cause, api="registration", operation=operation)
    if isinstance(cause, ApiError):
        status_suffix = "" if cause.status is None else f" ({cause.status})"
        failure = replace(failure, message=f"{cause.operation} failed: {cause.status_name}{status_suffix}")
    return failure


if __name__ == "__main__":
    sys.exit(main())
