"""Leak check: comparison of what is open before and after a case.

There are three sources: descriptors of the process, live objects of gdrkit, and the ledgers of the loaded twins. Any
growth is a leak. :func:`start_apis` runs before the first snapshot, so that objects that a library opens once and keeps
are not counted.
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
    """A snapshot of what is open at one moment: descriptors, handles by kind, twin handles by kind."""

    descriptors: dict[int, str]
    handles: dict[str, int]
    ledgers: dict[str, int]


def take(*, own: Collection[int] = ()) -> Snapshot:
    """Return a snapshot. The descriptors `own` belong to the harness and are left out."""
    # The ledgers are read first: a twin that is queried frees memory that only a dma-buf kept, and its descriptor.
    ledgers = ledger_handles()
    return Snapshot(
        descriptors={
            number: target
            for number, target in evidence.descriptors().items()
            # pytest itself replaces standard input, output and error while it captures.
            if number > _STANDARD_ERROR and number not in own
        },
        handles=handles.live(),
        ledgers=ledgers,
    )


def ledger_handles() -> dict[str, int]:
    """Return live handles by kind, e.g. ``{"verbs twin: ibv_mr": 1}``, over all loaded twins; empty on hardware."""
    found: dict[str, int] = {}
    for api in sorted({_api(library.path) for library in evidence.libraries() if is_twin(library)} - {""}):
        state = launch.twin_control().ledger(api) or {}
        counted = state.get("handles")
        if isinstance(counted, dict):
            found |= {f"{api} twin: {kind}": int(count) for kind, count in counted.items()}
    return found


def grown(before: Snapshot, after: Snapshot) -> dict[str, int]:
    """Count by kind what is open in `after` and was not in `before`."""
    # A number with another target is also new: the old descriptor was closed and another one was opened.
    new = [target for number, target in after.descriptors.items() if before.descriptors.get(number) != target]
    gone = [target for number, target in before.descriptors.items() if after.descriptors.get(number) != target]
    kinds = Counter(_kind(target) for target in new)
    kinds.subtract(_kind(target) for target in gone)
    found = {f"descriptor of {kind}": count for kind, count in kinds.items() if count > 0}
    for old, now in ((before.handles, after.handles), (before.ledgers, after.ledgers)):
        found |= {kind: count - old.get(kind, 0) for kind, count in now.items() if count > old.get(kind, 0)}
    return found


def check(before: Snapshot, *, own: Callable[[], Collection[int]]) -> None:
    """Compare `before` with the present state.

    Raises
    ------
    LeakDetected
        A count grew, and it is still larger after a garbage collection.
    """
    if grown(before, take(own=own())):
        # Cycles of Python objects may keep a descriptor for a while. That is not a leak of the case.
        gc.collect()
        leaked = grown(before, take(own=own()))
        if leaked:
            raise LeakDetected(leaked)


def start_apis(apis: Collection[str]) -> None:
    """Make each API do its one-time work: load, start threads, open what it keeps until the process ends."""
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

        with gaudi.Device(0) as accelerator, accelerator.allocate(HOST_PAGE_BYTES) as exported:
            exported.export_dmabuf().close()
    if "verbs" in apis:
        from gdrkit import verbs

        for nic in verbs.open_active_nics():
            with nic:
                nic.queue_pair(nic.completion_queue(depth=1))


def _api(path: str) -> str:
    name = path.rpartition("/")[2]
    return next((api for stem, api in _API_FILES.items() if name.startswith(stem)), "")


def _kind(target: str) -> str:
    # "socket:[4711]" and "/memfd:gdrkit-gpu:0123 (deleted)" name a single object each. The reader needs the kind.
    head = target.partition(":[")[0]
    return ":".join(head.split(":")[:2]) if head.startswith("/memfd:") else head


def moved(baseline: Snapshot, before: Snapshot, after: Snapshot) -> Snapshot:
    """Return `baseline` plus what was opened between `before` and `after`, which belongs to a longer-lived owner."""
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
