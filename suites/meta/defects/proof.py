# ruff: noqa: ANN401, SLF001 - this file replaces private functions of gdrkit, which have no types here.
"""Defects of the findings p to t: gdrkit reports a path or data as good, although no transfer has proven that.

Each defect is one function or one patch. The hook site/sitecustomize.py passes the module that a defect changes to the
function. docs/findings.md shows the docstrings of the functions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from meta.defects.defect import NativeDefect
from meta.mutants.patches import Patch

__all__ = [
    "NATIVE_PROOF_DEFECTS",
    "NIC_NOT_CHECKED",
    "READ_NOT_FLUSHED",
    "accept_registered_gpu",
    "ignore_counters",
    "leave_out_flush",
    "report_loopback_as_wire",
    "use_every_nic",
]

READ_NOT_FLUSHED = NativeDefect(
    Patch("read_not_flushed", "native/usrbio/client/io.cpp", "count > 0 && has_context_to_flush()", "false"),
    "`hf3fs_wait_for_ios` does not flush the writes of NICs",
)
NIC_NOT_CHECKED = NativeDefect(
    Patch(
        "nic_not_checked",
        "native/usrbio/client/gpu_api.cpp",
        " == cuda::success && is_reached_by_nic(uuid)",
        " == cuda::success",
    ),
    "`hf3fs_gdr_available` does not check that a NIC reaches the GPU",
)
NATIVE_PROOF_DEFECTS = (READ_NOT_FLUSHED, NIC_NOT_CHECKED)


def ignore_counters(routes_module: Any) -> None:
    """a route is proven if the process loaded the hardware's libraries; the port counters are ignored"""
    routes_module._explain_missing_proof = lambda record, _route, apis: routes_module._explain_substrate_of_record(
        record, apis
    )


def report_loopback_as_wire(reach_module: Any) -> None:
    """each measurement is reported as a transfer over the wire, even if one NIC is at both ends"""
    original_function = reach_module._Measurement.run

    def run(self: Any, route: Any) -> Any:
        return dataclasses.replace(original_function(self, route), path=reach_module.TransferPath.WIRE)

    reach_module._Measurement.run = run


def leave_out_flush(client_module: Any) -> None:
    """the storage client does not flush the writes of NICs after a read"""
    client_module.StorageClient._make_visible = lambda _self, _requests: None


def accept_registered_gpu(manager_module: Any) -> None:
    """`GdrManager` is available if memory can be registered, even if no bytes move"""

    def _probe(self: Any, device: Any, *, should_test: bool) -> Any:
        route = obstacle = None
        if should_test:
            try:
                with device.allocate(65536) as memory, manager_module.register(memory, self._nics) as registration:
                    route = registration.route
                self._devices[device.index] = device
            except (manager_module.ApiError, manager_module.RegistrationFailed) as error:
                obstacle = manager_module.GdrObstacle.of(error)
                self._failure_by_gpu[device.index] = error.clone()
        return manager_module.GpuState(device.index, device.uuid, device.pci_bus_id, route, obstacle)

    manager_module.GdrManager._probe = _probe


def use_every_nic(placement_module: Any) -> None:
    """if a NIC reaches a GPU, all NICs are used for it"""
    original_function = placement_module.Placement.usable_nics

    def usable_nics(self: Any, device: Any, nics: Any) -> Any:
        original_function(self, device, nics)
        return tuple(nics)

    placement_module.Placement.usable_nics = usable_nics
