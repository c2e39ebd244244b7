"""Leak check of the harness: comparison of the objects that are open before and after a case.

The objects are the file descriptors of the process, the open objects of gdrkit, and the handles in the ledgers of the
loaded software twins. A software twin is a library that emulates a driver, and its ledger lists the driver objects that
exist, such as memory regions. If there are more objects after the case, the case has a leak.

A library may open some objects at its first use and keep them. :func:`start_apis` therefore uses each API once before
the first case.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit import evidence, handles, host, launch
from gdrkit.errors import ApiError, LeakDetected, SetupMissing
from gdrkit.report.substrate import is_twin
from gdrkit.units import HOST_PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

__all__ = ["OpenObjects", "check", "count_new", "count_twin_handles", "extend_baseline", "open_objects", "start_apis"]

_STANDARD_ERROR_FD = 2
# The API of a library, by the beginning of the name of its file.
_API_BY_FILE_PREFIX = {
    "libibverbs.so": "verbs",
    "libcuda.so": "cuda",
    "libcufile.so": "cufile",
    "libhl-thunk.so": "hlthunk",
}


@dataclass(frozen=True, slots=True)
class OpenObjects:
    """The objects that are open at one moment.

    Attributes
    ----------
    descriptors : mapping
        For each file descriptor: the file or socket to which it refers.
    object_counts : mapping
        For each type: the number of open objects of gdrkit.
    twin_handle_counts : mapping
        For each type: the number of open handles in the twins.
    """

    descriptors: dict[int, str]
    object_counts: dict[str, int]
    twin_handle_counts: dict[str, int]


def open_objects(*, harness_descriptors: Collection[int] = ()) -> OpenObjects:
    """Return the objects that are open now, without `harness_descriptors`."""
    # The ledgers are read before the descriptors. When the ledger of a twin is read, the twin also frees device memory
    # that is no longer used, and closes the descriptor of the memory.
    twin_handle_counts = count_twin_handles()
    return OpenObjects(
        descriptors={
            descriptor: target
            for descriptor, target in evidence.descriptor_targets().items()
            # pytest replaces standard input, output and error while it captures output.
            if descriptor > _STANDARD_ERROR_FD and descriptor not in harness_descriptors
        },
        object_counts=handles.live(),
        twin_handle_counts=twin_handle_counts,
    )


def count_twin_handles() -> dict[str, int]:
    """Count the open handles in all loaded twins by type, e.g. ``{"verbs twin: ibv_mr": 1}``."""
    counts_by_type: dict[str, int] = {}
    for api in sorted(
        {_find_api_of_library(library.path) for library in evidence.libraries() if is_twin(library)} - {""}
    ):
        ledger = launch.twin_control().ledger(api) or {}
        ledger_counts = ledger.get("handles")
        if isinstance(ledger_counts, dict):
            counts_by_type |= {f"{api} twin: {type_name}": int(count) for type_name, count in ledger_counts.items()}
    return counts_by_type


def count_new(before: OpenObjects, after: OpenObjects) -> dict[str, int]:
    """Return, for each type, how many more objects are open in `after` than in `before`."""
    # If the target of a descriptor number has changed, the old descriptor was closed and its number was reused. This
    # counts as one closed and one new object.
    new_targets = [
        target for descriptor, target in after.descriptors.items() if before.descriptors.get(descriptor) != target
    ]
    closed_targets = [
        target for descriptor, target in before.descriptors.items() if after.descriptors.get(descriptor) != target
    ]
    descriptor_growth = Counter(_classify_target(target) for target in new_targets)
    descriptor_growth.subtract(_classify_target(target) for target in closed_targets)
    growth_by_type = {
        f"descriptor of {type_name}": count for type_name, count in descriptor_growth.items() if count > 0
    }
    for old_counts, new_counts in (
        (before.object_counts, after.object_counts),
        (before.twin_handle_counts, after.twin_handle_counts),
    ):
        growth_by_type |= {
            type_name: count - old_counts.get(type_name, 0)
            for type_name, count in new_counts.items()
            if count > old_counts.get(type_name, 0)
        }
    return growth_by_type


def check(before: OpenObjects, *, harness_descriptors: Callable[[], Collection[int]]) -> None:
    """Compare the objects that are open now with `before`.

    Raises
    ------
    LeakDetected
        More objects are open than before, even after a garbage collection.
    """
    if count_new(before, open_objects(harness_descriptors=harness_descriptors())):
        # A reference cycle can keep a descriptor open until the next garbage collection. That is not a leak.
        gc.collect()
        leak_counts = count_new(before, open_objects(harness_descriptors=harness_descriptors()))
        if leak_counts:
            raise LeakDetected(leak_counts)


def start_apis(apis: Collection[str]) -> None:
    """Use each API once, so that its library starts its threads and opens the objects that it keeps open."""
    if "cuda" in apis:
        from gdrkit import cuda

        for device_index in range(cuda.device_count()):
            with cuda.Device(device_index) as device, device.allocate(HOST_PAGE_BYTES) as memory:
                # The first export and the first IPC handle may start helper threads or open descriptors.
                if device.attribute(cuda.DeviceAttribute.DMA_BUF_SUPPORTED):
                    memory.export_dmabuf().close()
                if device.attribute(cuda.DeviceAttribute.UNIFIED_ADDRESSING):
                    cuda.export_handle(memory)
        # NVML keeps an eventfd that its first nvmlInit opens.
        with contextlib.suppress(SetupMissing, ApiError):
            host.nvml_facts()
    if "gaudi" in apis:
        from gdrkit import gaudi

        with gaudi.Device(0) as accelerator, accelerator.allocate(HOST_PAGE_BYTES) as device_memory:
            device_memory.export_dmabuf().close()
    if "verbs" in apis:
        from gdrkit import verbs

        for nic in verbs.open_active_nics():
            with nic:
                nic.queue_pair(nic.completion_queue(depth=1))


def _find_api_of_library(path: str) -> str:
    name = path.rpartition("/")[2]
    return next((api for prefix, api in _API_BY_FILE_PREFIX.items() if name.startswith(prefix)), "")


def _classify_target(target: str) -> str:
    # A target such as "socket:[4711]" or "/memfd:gdrkit-gpu:0123 (deleted)" contains a number. The type of the target
    # is the text without the number, so that all such targets count as one type.
    target_name = target.partition(":[")[0]
    return ":".join(target_name.split(":")[:2]) if target_name.startswith("/memfd:") else target_name


def extend_baseline(baseline: OpenObjects, before: OpenObjects, after: OpenObjects) -> OpenObjects:
    """Return `baseline` plus the objects that were opened between `before` and `after`.

    A fixture of module or session scope, which outlives the case, has opened these objects.
    """
    return OpenObjects(
        descriptors={
            **baseline.descriptors,
            **{
                descriptor: target
                for descriptor, target in after.descriptors.items()
                if before.descriptors.get(descriptor) != target
            },
        },
        object_counts=_add_growth(baseline.object_counts, before.object_counts, after.object_counts),
        twin_handle_counts=_add_growth(
            baseline.twin_handle_counts, before.twin_handle_counts, after.twin_handle_counts
        ),
    )


def _add_growth(baseline: dict[str, int], before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    type_names = baseline.keys() | after.keys()
    return {name: baseline.get(name, 0) + max(0, after.get(name, 0) - before.get(name, 0)) for name in type_names}
