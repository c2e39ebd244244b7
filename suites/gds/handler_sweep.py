"""A program that runs signal handlers at every point of one call of gdrkit.gds, for test_signal_handlers.py.

``python -m gds.handler_sweep CALL PATH [DIRECT]`` runs each of :data:`HANDLERS` at each point of a call of
:data:`CALLS`, and prints ``POINTS points`` if every call and every handler has ended. The engines are created anew in
each call. After the call, the file is closed or can be read, no transfer is in progress, and the memory can be freed.
With DIRECT, the memory is memory of a device, and the argument is the ``direct`` of the file. Direct transfers take
longer, so that only the first two handlers run, at every fifth point.
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

# A call that does not end in this time has stopped for ever.
_TIMEOUT_S = 30.0
# The errors that a call or a handler may raise, because the other one has closed what it uses.
_ALLOWED = frozenset({Reason.CLOSED, Reason.BUSY, Reason.CANCELLED})


class _Round:
    """The objects of one call: an open file, memory for the call, and memory for the handler."""

    def __init__(self, path: Path, memories: list[Any], direct: str) -> None:
        self.path = path
        self.memory, self.handler_memory = memories
        self.file = gds.File(path, direct=direct)  # type: ignore[arg-type]
        self.transfer: gds.Transfer | None = None
        self.error: GdrkitError | None = None

    def start(self) -> gds.Transfer:
        self.transfer = self.file.start_read_into(self.memory)
        return self.transfer

    def cancel(self) -> None:
        if self.transfer is not None:
            self.transfer.cancel()

    def handle(self, handler: Callable[[_Round], object]) -> None:
        try:
            handler(self)
        except GdrkitError as error:
            self.error = error


def _use(one: _Round) -> None:
    with one.file.in_use():
        one.file.cached_share()


def _close_engines(one: _Round) -> None:
    one.start()
    gds.close_engines()


CALLS: dict[str, Callable[[_Round], object]] = {
    "read_into": lambda one: one.file.read_into(one.memory),
    "result": lambda one: one.start().result(),
    "use": _use,
    "close": lambda one: one.file.close(),
    "close_engines": _close_engines,
}
HANDLERS: dict[str, Callable[[_Round], object]] = {
    "read": lambda one: one.file.start_read_into(one.handler_memory).result(),
    "cancel": _Round.cancel,
    "close": lambda one: one.file.close(),
    "close_engines": lambda _one: gds.close_engines(),
}


def _run(one: _Round, call: Callable[[_Round], object], handler: Callable[[_Round], object], point: int) -> str:
    """Run the handler at one point of the call. Return where that was."""
    interrupter = Interrupter(point, str(Path(gdrkit.__file__).parent), handler=lambda: one.handle(handler))
    try:
        interrupter.call(lambda: call(one))
    except GdrkitError as error:
        if error.reason not in _ALLOWED:
            raise
    if one.error is not None and one.error.reason not in _ALLOWED:
        raise one.error
    if not one.file.closed:
        assert one.file.read_into(one.memory).bytes == LENGTH_BYTES, interrupter.where
    one.transfer = None
    one.file.close()
    assert not native.in_progress, interrupter.where
    return interrupter.where


def _sweep(call: Callable[[_Round], object], handler: Callable[[_Round], object], path: Path, direct: str) -> int:
    """Run the handler at each point of the call. Return the number of points."""
    with cuda.Device(0) if direct else contextlib.nullcontext() as device:
        for point in itertools.count(1, 5 if direct == "required" else 1):
            gds.close_engines()
            memories = [bytearray(LENGTH_BYTES) if device is None else device.allocate(LENGTH_BYTES) for _ in range(2)]
            faulthandler.dump_traceback_later(_TIMEOUT_S, exit=True)
            where = _run(_Round(path, memories, direct or "never"), call, handler, point)
            faulthandler.cancel_dump_traceback_later()
            for memory in memories:  # This raises an error if a transfer still uses the memory.
                memory.clear() if isinstance(memory, bytearray) else memory.close()
            if not where:
                return point - 1
    raise AssertionError


def main() -> None:
    """Run the sweeps of the arguments."""
    call, path, direct = CALLS[sys.argv[1]], Path(sys.argv[2]), "".join(sys.argv[3:])
    warnings.simplefilter("error")  # An object that a handler makes superfluous is closed, too.
    handlers = tuple(HANDLERS.values())[: 2 if direct == "required" else None]
    points_count = sum(_sweep(call, handler, path, direct) for handler in handlers)
    sys.stdout.write(f"{points_count} points\n")


if __name__ == "__main__":
    main()
