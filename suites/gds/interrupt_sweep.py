"""A program that interrupts one call of gdrkit.gds at every point, for test_interrupts.py.

``python -m gds.interrupt_sweep SCENARIO PATH [MOUNT]`` prints ``POINTS points`` if every check after every interrupt
succeeded, or else the failed check. While the exception of the interrupt is still alive, the program checks that the
file can be closed, that no transfer stays in progress, and that no byte is written to memory that was released. Then it
checks that the memory can be used, and that as many descriptors are open as before. With a MOUNT, reads of the file
block (``gds.faulty_file``) until the call was interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import sys
import threading
import warnings
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gds.faulty_file import FaultyFile
from support.interrupts import Interrupter

import gdrkit
from gdrkit import cuda, gds
from gdrkit.gds._native import native
from gdrkit.gds.cufile_driver import shared_driver
from gdrkit.units import KIB

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LENGTH_BYTES", "SCENARIOS", "main"]

LENGTH_BYTES = 4 * KIB
_CLOSE_TIMEOUT_S = 20.0


class _Round:
    """The objects of one interrupted call: its memory, its file, and what the call has opened itself."""

    def __init__(self, path: Path, *, direct: str = "never") -> None:
        self.path = path
        self.memory = bytearray(LENGTH_BYTES)
        self.device_memory: Any = None
        self.files: list[gds.File] = []
        self._direct = direct

    def open(self) -> gds.File:
        file = gds.File(self.path, "r+", direct=self._direct)  # type: ignore[arg-type]
        self.files.append(file)
        return file

    def transfer_ranges(self) -> gds.Transfer:
        buffer = gds.describe_buffer(self.memory, writable=True)
        return gds.transfer_ranges(self.files, array("Q", [0, 0, buffer.address, LENGTH_BYTES]), buffer)


async def _await_read(one: _Round) -> None:
    await one.files[0].start_read_into(one.memory)


def _copy(one: _Round) -> None:
    gds.copy_file(one.path, f"{one.path}.copy", device_index=gds.HOST, direct="never")


# The call of each scenario, and whether a file is open before it.
SCENARIOS: dict[str, tuple[Callable[[_Round], object], bool]] = {
    "open": (_Round.open, False),
    "read_into": (lambda one: one.files[0].read_into(one.memory), True),
    "start_read_into": (lambda one: one.files[0].start_read_into(one.memory), True),
    "start_readv": (lambda one: one.files[0].start_readv(one.memory, [(0, 10), (20, 10)]), True),
    "transfer_ranges": (_Round.transfer_ranges, True),
    "read_files": (lambda one: gds.read_files([one.path], one.memory, [LENGTH_BYTES]), False),
    "result": (lambda one: one.files[0].start_read_into(one.memory).result(), True),
    "result_with_progress": (
        lambda one: one.files[0].start_read_into(one.memory).result(on_progress=lambda _done, _total: None),
        True,
    ),
    "dropped_futures": (
        lambda one: [one.files[0].start_read_into(one.memory, length_bytes=9) for _ in range(3)],
        True,
    ),
    "write_from": (lambda one: one.files[0].write_from(one.memory, durable=True), True),
    "await": (lambda one: asyncio.run(_await_read(one)), True),
    "close": (lambda one: one.files[0].close(), True),
    "copy_file": (_copy, False),
    "direct": (lambda one: one.files[0].start_read_into(one.device_memory), True),
    "direct_close": (lambda one: one.files[0].close(), True),
    "direct_first": (lambda one: one.open().start_read_into(one.device_memory).result(), False),
    "direct_result": (lambda one: one.files[0].start_read_into(one.device_memory).result(), True),
}
# In these scenarios, the code of Python's library that the call runs is interrupted, too.
_LIBRARY_SCENARIOS = ("direct_result",)


def _close(file: gds.File) -> bool:
    """Close the file on another thread. Return whether that ended in time."""
    thread = threading.Thread(target=file.close, daemon=True)
    thread.start()
    thread.join(_CLOSE_TIMEOUT_S)
    return not thread.is_alive()


def _is_exported(memory: bytearray) -> bool:
    """Return whether a transfer still uses the memory."""
    try:
        memory.append(0)
    except BufferError:
        return True
    memory.pop()
    return False


def _open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _interrupt(scenario: str, one: _Round, point: int, open_gate: Callable[[], None]) -> tuple[str, str]:
    """Interrupt the call of a scenario at one point. Return where that was, and what it broke."""
    call, needs_file = SCENARIOS[scenario]
    if needs_file:
        file = one.open()
        if one.device_memory is not None:
            file.start_read_into(one.device_memory).result()  # The probe of the direct path is not interrupted.
    library = [str(Path(os.__file__).parent)] if scenario in _LIBRARY_SCENARIOS else []
    interrupter = Interrupter(point, str(Path(gdrkit.__file__).parent), *library)
    error = interrupter.call(lambda: call(one))
    was_exported = _is_exported(one.memory)
    before = bytes(one.memory)
    open_gate()
    for file in one.files:
        if not _close(file):
            return interrupter.where, "close() does not return"
    for transfer in list(native.in_progress.values()):  # No close waits for read_files().
        transfer.exception()
    if native.in_progress:
        return interrupter.where, f"still in progress: {native.in_progress}"
    gds.close_engines()  # Waits for every job of the engine.
    if not was_exported and bytes(one.memory) != before:
        return interrupter.where, "bytes arrived in memory that was released"
    del error
    gc.collect()
    if _is_exported(one.memory):
        return interrupter.where, "the memory is still in use"
    return interrupter.where, ""


def _sweep(scenario: str, path: Path, faulty_file: FaultyFile | None, device_memory: object) -> str:
    descriptors_count = -1
    # The probe of a direct path has hundreds of points and takes long, so that it is interrupted at every fifth one.
    for point in itertools.count(1, 5 if scenario == "direct_first" else 1):
        one = _Round(path, direct="required" if scenario.startswith("direct") else "never")
        one.device_memory = device_memory
        if faulty_file is not None:
            faulty_file.send(f"gate 0 {LENGTH_BYTES}")
        where, broken = _interrupt(
            scenario, one, point, lambda: None if faulty_file is None else faulty_file.send("open")
        )
        del one
        gc.collect()
        descriptors_before, descriptors_count = descriptors_count, _open_descriptors()
        # A file stays open as long as it is registered with cuFile, also if an interrupt came during its probe.
        may_keep_files = scenario == "direct_first"
        if not broken and point > 1 and descriptors_count > descriptors_before and not may_keep_files:
            broken = f"{descriptors_count} descriptors are open, not {descriptors_before}"
        if broken:
            return f"point {point}, {where}: {broken}"
        if not where:
            return f"{point - 1} points"
    raise AssertionError


def _block_first_read(faulty_file: FaultyFile) -> None:
    """Block a read once, because the file system reports its first blocked read, at any time between two commands."""
    faulty_file.send(f"gate 0 {LENGTH_BYTES}")
    with gds.File(faulty_file.path, direct="never") as file:
        transfer = file.start_read_into(bytearray(LENGTH_BYTES))
        faulty_file.expect_line("waiting")
        faulty_file.send("open")
        transfer.result()


def main() -> None:
    """Run the scenario of the arguments."""
    scenario, path = sys.argv[1], Path(sys.argv[2])
    warnings.simplefilter("ignore")  # Objects that an interrupt dropped report that they were never closed.
    sys.unraisablehook = lambda _: None  # An interrupt in a finalizer is lost, as any exception there.
    with contextlib.ExitStack() as stack:
        faulty_file = None
        if len(sys.argv) > 3:
            faulty_file = stack.enter_context(FaultyFile(Path(sys.argv[3]), length_bytes=LENGTH_BYTES, seed=1))
            path = faulty_file.path
            _block_first_read(faulty_file)
        device_memory = None
        if scenario.startswith("direct"):
            device_memory = stack.enter_context(stack.enter_context(cuda.Device(0)).allocate(LENGTH_BYTES))
            shared_driver()  # The child process that opens the driver first is not interrupted.
        sys.stdout.write(f"{_sweep(scenario, path, faulty_file, device_memory)}\n")
        sys.stdout.flush()
    os._exit(0)  # A thread that waits for ever in close() must not keep the program from its end.


if __name__ == "__main__":
    main()
