"""What is open before and after a case.

Level 7. Three witnesses: descriptors of the process, live objects of gdrkit, and the ledgers of twins where such are
loaded. What grew is a leak; what a library opens once and keeps is opened before the first look (:func:`start_apis`).
"""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit import handles, launch, witness
from gdrkit.errors import LeakDetected
from gdrkit.report.substrate import is_twin
from gdrkit.units import HOST_PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

__all__ = ["Snapshot", "check", "grown", "ledger_handles", "moved", "start_apis", "take"]

_STANDARD_ERROR = 2
_API_FILES = {
    "libibverbs.so": "verbs",
    "libcuda.so": "cuda",
    "libcufile.so": "cufile",
    "libhl-thunk.so": "hlthunk",
}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is open at one moment."""

    descriptors: dict[int, str]
    handles: dict[str, int]
    ledgers: dict[str, int]


def take(*, own: Collection[int] = ()) -> Snapshot:
    """Look now; the descriptors `own` are the harness' and are left out."""
    # The ledgers first: a twin that is asked lets go of freed memory that only a dma-buf kept, and of its descriptor.
    ledgers = ledger_handles()
    return Snapshot(
        descriptors={
            number: target
            for number, target in witness.descriptors().items()
            # Standard input, output and error are switched by pytest itself while it captures.
            if number > _STANDARD_ERROR and number not in own
        },
        handles=handles.live(),
        ledgers=ledgers,
    )


def ledger_handles() -> dict[str, int]:
    """Live handles by kind in all twins of this process, e.g. ``{"verbs twin: ibv_mr": 1}``; nothing on hardware."""
    found: dict[str, int] = {}
    for api in sorted({_api(library.path) for library in witness.libraries() if is_twin(library)} - {""}):
        state = launch.control().ledger(api) or {}
        counted = state.get("handles")
        if isinstance(counted, dict):
            found |= {f"{api} twin: {kind}": int(count) for kind, count in counted.items()}
    return found


def grown(before: Snapshot, after: Snapshot) -> dict[str, int]:
    """What is open after and was not before, counted by kind."""
    # Also a number that now names something else is new: the old one was closed and something was opened.
    new = [target for number, target in after.descriptors.items() if before.descriptors.get(number) != target]
    gone = [target for number, target in before.descriptors.items() if after.descriptors.get(number) != target]
    kinds = Counter(_kind(target) for target in new)
    kinds.subtract(_kind(target) for target in gone)
    found = {f"descriptor of {kind}": count for kind, count in kinds.items() if count > 0}
    for old, now in ((before.handles, after.handles), (before.ledgers, after.ledgers)):
        found |= {kind: count - old.get(kind, 0) for kind, count in now.items() if count > old.get(kind, 0)}
    return found


def check(before: Snapshot, *, own: Callable[[], Collection[int]]) -> None:
    """Compare with now.

    Raises
    ------
    LeakDetected
        Something grew, also after a garbage collection.
    """
    if grown(before, take(own=own())):
        # Cycles of Python objects may keep a descriptor for a while; that is no leak of the case.
        gc.collect()
        leaked = grown(before, take(own=own()))
        if leaked:
            raise LeakDetected(leaked)


def start_apis(apis: Collection[str]) -> None:
    """Have each API do once what it does once: load, start threads, open what it keeps until the process ends."""
    if "cuda" in apis:
        from gdrkit import cuda

        for index in range(cuda.device_count()):
            with cuda.Device(index) as device, device.allocate(HOST_PAGE_BYTES) as memory:
                # The first export and the first IPC handle may start what serves them.
                if device.attribute(cuda.DeviceAttribute.DMA_BUF_SUPPORTED):
                    memory.export_dmabuf().close()
                if device.attribute(cuda.DeviceAttribute.UNIFIED_ADDRESSING):
                    cuda.export_handle(memory)
    if "gaudi" in apis:
        from gdrkit import gaudi

        with gaudi.Device(0) as accelerator, accelerator.allocate(HOST_PAGE_BYTES) as exported:
            exported.export_dmabuf().close()
    if "verbs" in apis:
        from gdrkit import verbs

        for info in verbs.list_nics():
            if info.active:
                with verbs.Nic.open(info.name, port=next(port.number for port in info.ports if port.active)) as nic:
                    nic.queue_pair(nic.completion_queue(depth=1))


def _api(path: str) -> str:
    name = path.rpartition("/")[2]
    return next((api for stem, api in _API_FILES.items() if name.startswith(stem)), "")


def _kind(target: str) -> str:
    # "socket:[4711]" and "/memfd:gdrkit-gpu:0123 (deleted)" name one thing each; the kind is what a reader can use.
    head = target.partition(":[")[0]
    return ":".join(head.split(":")[:2]) if head.startswith("/memfd:") else head


def moved(baseline: Snapshot, before: Snapshot, after: Snapshot) -> Snapshot:
    """The baseline with what was opened between two looks added: it belongs to somebody who lives longer."""
    return Snapshot(
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
    kinds = baseline.keys() | after.keys()
    return {kind: baseline.get(kind, 0) + max(0, after.get(kind, 0) - before.get(kind, 0)) for kind in kinds}
