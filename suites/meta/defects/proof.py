# ruff: noqa: ANN401, SLF001 - this file replaces private functions of gdrkit, which have no types here.
"""Defects with which gdrkit claims a path that no byte has proved, one function or patch each.

``meta.defects.run`` calls each function with the imported module of gdrkit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from meta.defects.defect import NativeDefect
from meta.mutants.patches import Patch

__all__ = [
    "NIC_NOT_ASKED",
    "PROOF_PATCHES",
    "READ_NOT_FLUSHED",
    "accept_registered_gpu",
    "call_loopback_wire",
    "ignore_counters",
    "leave_out_flush",
    "use_every_nic",
]

READ_NOT_FLUSHED = NativeDefect(
    Patch("read_not_flushed", "native/usrbio/client/io.cpp", "count > 0 && has_context_to_flush()", "false"),
    "`hf3fs_wait_for_ios` does not flush the writes of NICs",
)
NIC_NOT_ASKED = NativeDefect(
    Patch(
        "nic_not_asked",
        "native/usrbio/client/gpu_api.cpp",
        " == cuda::success && is_reached_by_nic(uuid)",
        " == cuda::success",
    ),
    "`hf3fs_gdr_available` does not ask for a NIC",
)
PROOF_PATCHES = (READ_NOT_FLUSHED, NIC_NOT_ASKED)


def ignore_counters(routes: Any) -> None:
    """a route is proven if the process loaded the hardware's libraries, without the port counters"""
    routes._explain_missing_proof = lambda record, _route, apis: routes._explain_substrate_of_record(record, apis)


def call_loopback_wire(reach: Any) -> None:
    """a measurement with one NIC at both ends is called wire"""
    original_function = reach._Measurement.run

    def run(self: Any, route: Any) -> Any:
        return dataclasses.replace(original_function(self, route), path=reach.TransferPath.WIRE)

    reach._Measurement.run = run


def leave_out_flush(client: Any) -> None:
    """the storage client does not flush the writes of NICs after a read"""
    client.StorageClient._make_visible = lambda _self, _requests: None


def accept_registered_gpu(manager: Any) -> None:
    """`GdrManager` is available if memory can be registered, whether bytes move or not"""

    def _probe(self: Any, device: Any, *, is_enabled: bool) -> Any:
        route = obstacle = None
        if is_enabled:
            try:
                with device.allocate(65536) as memory, manager.register(memory, self._nics) as registration:
                    route = registration.route
                self._devices[device.index] = device
            except (manager.ApiError, manager.RegistrationFailed) as error:
                obstacle = manager.GdrObstacle.of(error)
                self._failure_by_gpu[device.index] = error.clone()
        return manager.GpuState(device.index, device.uuid, device.pci_bus_id, route, obstacle)

    manager.GdrManager._probe = _probe


def use_every_nic(placement: Any) -> None:
    """if a NIC reaches a GPU, all NICs are used for it"""
    original_function = placement.Placement.usable

    def usable(self: Any, device: Any, nics: Any) -> Any:
        original_function(self, device, nics)
        return tuple(nics)

    placement.Placement.usable = usable
