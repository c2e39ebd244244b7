"""A program that runs signal handlers at every point of one call of gdrkit.gds, for test_signal_handlers.py.

``python -m gds.handler_sweep CALL PATH [DIRECT]`` runs each of :data:`HANDLERS` at each point of a call of
:data:`CALLS`, and prints ``POINTS points`` if every call and every handler has ended. A point is a place at which
CPython may run a signal handler; see :mod:`support.interrupts`. The engines are created anew for each call. After each
call, the program checks that the file is closed or can be read, that no transfer is in progress, and that the memory
can be freed.
With DIRECT, the memory is device memory, and DIRECT is the argument ``direct`` of the file. If DIRECT is ``required``,
transfers take longer. So only the first two handlers run, and only at every fifth point.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gds.interrupt_sweep import LENGTH_BYTES
from support.interrupts import Interrupter

import gdrkit
from gdrkit import cuda, gds
from gdrkit.errors import GdrkitError, Reason
from gdrkit.gds._native import native

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CALLS", "HANDLERS", "main"]

# A call that takes longer than this counts as a call that never ends.
_TIMEOUT_S = 30.0
# The call and the handler may fail for these reasons, because each can close an object that the other uses.
_ALLOWED_REASONS = frozenset({Reason.CLOSED, Reason.BUSY, Reason.CANCELLED})


class _CallObjects:
    """The objects of one call: an open file, memory for the call, memory for the handler, and the started transfer."""

    def __init__(self, path: Path, memories: list[Any], direct: str) -> None:
        self.path = path
        self.memory, self.handler_memory = memories
        self.file = gds.File(path, direct=direct)  # type: ignore[arg-type]
        self.transfer: gds.Transfer | None = None
        self.handler_error: GdrkitError | None = None

    def start_read(self) -> gds.Transfer:
        self.transfer = self.file.start_read_into(self.memory)
        return self.transfer

    def cancel(self) -> None:
        if self.transfer is not None:
            self.transfer.cancel()

    def run_handler(self, handler: Callable[[_CallObjects], object]) -> None:
        try:
            handler(self)
        except GdrkitError as error:
            self.handler_error = error


def _use_file(objects: _CallObjects) -> None:
    with objects.file.hold_open():
        objects.file.cached_share()


def _close_engines(objects: _CallObjects) -> None:
    objects.start_read()
    gds.close_engines()


CALLS: dict[str, Callable[[_CallObjects], object]] = {
    "read_into": lambda objects: objects.file.read_into(objects.memory),
    "result": lambda objects: objects.start_read().result(),
    "use": _use_file,
    "close": lambda objects: objects.file.close(),
    "close_engines": _close_engines,
}
HANDLERS: dict[str, Callable[[_CallObjects], object]] = {
    "read": lambda objects: objects.file.start_read_into(objects.handler_memory).result(),
    "cancel": _CallObjects.cancel,
    "close": lambda objects: objects.file.close(),
    "close_engines": lambda _objects: gds.close_engines(),
}


def _run_handler_at(
    objects: _CallObjects, call: Callable[[_CallObjects], object], handler: Callable[[_CallObjects], object], point: int
) -> str:
    """Run the handler at a point of the call. Return the line of the point, or "" if the call has fewer points."""
    interrupter = Interrupter(point, str(Path(gdrkit.__file__).parent), handler=lambda: objects.run_handler(handler))
    try:
        interrupter.call(lambda: call(objects))
    except GdrkitError as error:
        if error.reason not in _ALLOWED_REASONS:
            raise
    if objects.handler_error is not None and objects.handler_error.reason not in _ALLOWED_REASONS:
        raise objects.handler_error
    if not objects.file.closed:
        assert objects.file.read_into(objects.memory).bytes == LENGTH_BYTES, interrupter.interrupted_at
    objects.transfer = None
    objects.file.close()
    assert not native.in_progress, interrupter.interrupted_at
    return interrupter.interrupted_at


def _run_handler_at_each_point(
    call: Callable[[_CallObjects], object], handler: Callable[[_CallObjects], object], path: Path, direct: str
) -> int:
    """Run the handler at each point of the call. Return the number of points."""
    with cuda.Device(0) if direct else contextlib.nullcontext() as device:
        for point in itertools.count(1, 5 if direct == "required" else 1):
            gds.close_engines()
            memories = [bytearray(LENGTH_BYTES) if device is None else device.allocate(LENGTH_BYTES) for _ in range(2)]
            faulthandler.dump_traceback_later(_TIMEOUT_S, exit=True)
            source_line = _run_handler_at(_CallObjects(path, memories, direct or "never"), call, handler, point)
            faulthandler.cancel_dump_traceback_later()
            for memory in memories:  # This raises an error if a transfer still uses the memory.
                memory.clear() if isinstance(memory, bytearray) else memory.close()
            if not source_line:
                return point - 1
    raise AssertionError  # itertools.count() does not end.


def main() -> None:
    """Sweep the call that the arguments name, with each handler."""
    call, path, direct = CALLS[sys.argv[1]], Path(sys.argv[2]), "".join(sys.argv[3:])
    warnings.simplefilter("error")  # An object that is never closed causes a warning, which then is an error.
    handlers = tuple(HANDLERS.values())[: 2 if direct == "required" else None]
    point_count = sum(_run_handler_at_each_point(call, handler, path, direct) for handler in handlers)
    sys.stdout.write(f"{point_count} points\n")


if __name__ == "__main__":
    main()
