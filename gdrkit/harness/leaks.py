"""Leak check: comparison of the objects that are open before and after a case.

The objects are the descriptors of the process, live objects of gdrkit, and the handles in the ledgers of the loaded
twins. Any growth is a leak. :func:`start_apis` runs first, because a library opens some objects once and keeps them.
"""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit import evidence, handles, launch
from gdrkit.errors import LeakDetected
from gdrkit.report.substrate import is_twin
from gdrkit.units import HOST_PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

__all__ = ["OpenObjects", "check", "count_new", "extend_baseline", "ledger_handles", "open_objects", "start_apis"]

_STANDARD_ERROR = 2
_API_FILES = {
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
        The targets of the descriptors, by number.
    handles : mapping
        Numbers of live objects of gdrkit, by type.
    ledgers : mapping
        Numbers of live handles in the twins, by type.
    """

    descriptors: dict[int, str]
    handles: dict[str, int]
    ledgers: dict[str, int]


def open_objects(*, own: Collection[int] = ()) -> OpenObjects:
    """Return the objects that are open now, without the descriptors `own`, which belong to the harness."""
    # The ledgers are read first: when its ledger is read, a twin frees memory that only a closed dma-buf still kept,
    # and closes its descriptor.
    ledgers = ledger_handles()
    return OpenObjects(
        descriptors={
            number: target
            for number, target in evidence.descriptors().items()
            # pytest replaces standard input, output and error while it captures output.
            if number > _STANDARD_ERROR and number not in own
        },
        handles=handles.live(),
        ledgers=ledgers,
    )


def ledger_handles() -> dict[str, int]:
    """Return the numbers of live handles in all loaded twins by type, e.g. ``{"verbs twin: ibv_mr": 1}``."""
    handle_counts: dict[str, int] = {}
    for api in sorted({_api(library.path) for library in evidence.libraries() if is_twin(library)} - {""}):
        state = launch.twin_control().ledger(api) or {}
        counts = state.get("handles")
        if isinstance(counts, dict):
            handle_counts |= {f"{api} twin: {type_name}": int(count) for type_name, count in counts.items()}
    return handle_counts


def count_new(before: OpenObjects, after: OpenObjects) -> dict[str, int]:
    """Count by type the objects that are open in `after` and not in `before`."""
    # A descriptor with another target is also new: the old one was closed, and its number was used again.
    new = [target for number, target in after.descriptors.items() if before.descriptors.get(number) != target]
    closed = [target for number, target in before.descriptors.items() if after.descriptors.get(number) != target]
    descriptors = Counter(_target_type(target) for target in new)
    descriptors.subtract(_target_type(target) for target in closed)
    growth = {f"descriptor of {type_name}": count for type_name, count in descriptors.items() if count > 0}
    for old, now in ((before.handles, after.handles), (before.ledgers, after.ledgers)):
        growth |= {name: count - old.get(name, 0) for name, count in now.items() if count > old.get(name, 0)}
    return growth


def check(before: OpenObjects, *, own: Callable[[], Collection[int]]) -> None:
    """Compare the objects that are open now with `before`.

    Raises
    ------
    LeakDetected
        More objects are open, also after a garbage collection.
    """
    if count_new(before, open_objects(own=own())):
        # A reference cycle can keep a descriptor open until the next garbage collection. That is not a leak.
        gc.collect()
        leaked = count_new(before, open_objects(own=own()))
        if leaked:
            raise LeakDetected(leaked)


def start_apis(apis: Collection[str]) -> None:
    """Use each API once, so that it loads its library, starts threads, and opens the objects that it keeps."""
    if "cuda" in apis:
        from gdrkit import cuda

        for index in range(cuda.device_count()):
            with cuda.Device(index) as device, device.allocate(HOST_PAGE_BYTES) as memory:
                # The first export and the first IPC handle may start helper threads or open descriptors.
                if device.attribute(cuda.DeviceAttribute.DMA_BUF_SUPPORTED):
                    memory.export_dmabuf().close()
                if device.attribute(cuda.DeviceAttribute.UNIFIED_ADDRESSING):
                    cuda.export_handle(memory)
    if "gaudi" in apis:
        from gdrkit import gaudi

        with gaudi.Device(0) as accelerator, accelerator.allocate(HOST_PAGE_BYTES) as device_memory:
            device_memory.export_dmabuf().close()
    if "verbs" in apis:
        from gdrkit import verbs

        for nic in verbs.open_active_nics():
            with nic:
                nic.queue_pair(nic.completion_queue(depth=1))


def _api(path: str) -> str:
    name = path.rpartition("/")[2]
    return next((api for stem, api in _API_FILES.items() if name.startswith(stem)), "")


def _target_type(target: str) -> str:
    # A target such as "socket:[4711]" or "/memfd:gdrkit-gpu:0123 (deleted)" contains the number of one object.
    head = target.partition(":[")[0]
    return ":".join(head.split(":")[:2]) if head.startswith("/memfd:") else head


def extend_baseline(baseline: OpenObjects, before: OpenObjects, after: OpenObjects) -> OpenObjects:
    """Return `baseline` with the objects that were opened between `before` and `after`, whose owner lives longer."""
    return OpenObjects(
        descriptors={
            **baseline.descriptors,
            **{
                number: target
                for number, target in after.descriptors.items()
                if before.descriptors.get(number) != target
            },
        },
        handles=_added(baseline.handles, before.handles, after.handles),
        ledgers=_added(baseline.ledgers, before.ledgers, after.ledgers),
    )


def _added(baseline: dict[str, int], before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    names = baseline.keys() | after.keys()
    return {name: baseline.get(name, 0) + max(0, after.get(name, 0) - before.get(name, 0)) for name in names}
