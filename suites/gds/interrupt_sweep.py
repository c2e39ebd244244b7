"""A program that interrupts one call of gdrkit.gds at every point, for test_interrupts.py.

``python -m gds.interrupt_sweep SCENARIO PATH [MOUNT]`` prints ``POINTS points`` if every check after every interrupt
succeeded, or else the failed check. While the exception of the interrupt is still alive, the program checks that the
file can be closed, that no transfer stays in progress, and that no byte is written to memory that was released. Then it
checks that the memory can be used, and that as many descriptors are open as before. With a MOUNT, reads of the file
block (``gds.faulty_file``) until the call was interrupted. A point is a place at which CPython may run a signal
handler; see :mod:`support.interrupts`.
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


class _CallObjects:
    """The objects of one interrupted call: the memory, and the files that were opened before or by the call."""

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
        # One range: index of the file, offset in the file, address in memory, and length.
        extents = array("Q", [0, 0, buffer.address, LENGTH_BYTES])
        return gds.transfer_ranges(self.files, extents, buffer)


async def _await_read(objects: _CallObjects) -> None:
    await objects.files[0].start_read_into(objects.memory)


def _copy_file(objects: _CallObjects) -> None:
    gds.copy_file(objects.path, f"{objects.path}.copy", device_index=gds.HOST, direct="never")


# The call of each scenario, and whether the sweep opens a file before the call.
SCENARIOS: dict[str, tuple[Callable[[_CallObjects], object], bool]] = {
    "open": (_CallObjects.open, False),
    "read_into": (lambda objects: objects.files[0].read_into(objects.memory), True),
    "start_read_into": (lambda objects: objects.files[0].start_read_into(objects.memory), True),
    "start_readv": (lambda objects: objects.files[0].start_readv(objects.memory, [(0, 10), (20, 10)]), True),
    "transfer_ranges": (_CallObjects.transfer_ranges, True),
    "read_files": (lambda objects: gds.read_files([objects.path], objects.memory, [LENGTH_BYTES]), False),
    "result": (lambda objects: objects.files[0].start_read_into(objects.memory).result(), True),
    "result_with_progress": (
        lambda objects: objects.files[0].start_read_into(objects.memory).result(on_progress=lambda _done, _total: None),
        True,
    ),
    "dropped_futures": (
        lambda objects: [objects.files[0].start_read_into(objects.memory, length_bytes=9) for _ in range(3)],
        True,
    ),
    "write_from": (lambda objects: objects.files[0].write_from(objects.memory, durable=True), True),
    "await": (lambda objects: asyncio.run(_await_read(objects)), True),
    "close": (lambda objects: objects.files[0].close(), True),
    "copy_file": (_copy_file, False),
    "direct": (lambda objects: objects.files[0].start_read_into(objects.device_memory), True),
    "direct_close": (lambda objects: objects.files[0].close(), True),
    "direct_first": (lambda objects: objects.open().start_read_into(objects.device_memory).result(), False),
    "direct_result": (lambda objects: objects.files[0].start_read_into(objects.device_memory).result(), True),
}
# In these scenarios, the sweep also interrupts code of Python's standard library.
_STANDARD_LIBRARY_SCENARIOS = ("direct_result",)


def _close_in_time(file: gds.File) -> bool:
    """Close the file on another thread. Return whether the close ended in time."""
    thread = threading.Thread(target=file.close, daemon=True)
    thread.start()
    thread.join(_CLOSE_TIMEOUT_S)
    return not thread.is_alive()


def _is_in_use(memory: bytearray) -> bool:
    """Return whether a transfer still uses the memory."""
    try:
        memory.append(0)
    except BufferError:
        return True
    memory.pop()
    return False


def _count_open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _interrupt_at(scenario: str, objects: _CallObjects, point: int, open_gate: Callable[[], None]) -> tuple[str, str]:
    """Interrupt the call of a scenario at one point. Return the line of the point, and the failed check or ""."""
    call, needs_file = SCENARIOS[scenario]
    if needs_file:
        file = objects.open()
        if objects.device_memory is not None:
            file.start_read_into(objects.device_memory).result()  # The probe of the direct path is not interrupted.
    standard_library_folders = [str(Path(os.__file__).parent)] if scenario in _STANDARD_LIBRARY_SCENARIOS else []
    interrupter = Interrupter(point, str(Path(gdrkit.__file__).parent), *standard_library_folders)
    error = interrupter.call(lambda: call(objects))
    was_memory_in_use = _is_in_use(objects.memory)
    bytes_at_interrupt = bytes(objects.memory)
    open_gate()
    for file in objects.files:
        if not _close_in_time(file):
            return interrupter.interrupted_at, "close() does not return"
    for transfer in list(native.in_progress.values()):  # close() does not wait for read_files().
        transfer.exception()
    if native.in_progress:
        return interrupter.interrupted_at, f"still in progress: {native.in_progress}"
    gds.close_engines()  # This waits for every job of the engine.
    if not was_memory_in_use and bytes(objects.memory) != bytes_at_interrupt:
        return interrupter.interrupted_at, "bytes arrived in memory that was released"
    del error  # The traceback of the interrupt kept the frames of the call alive, and so their memory.
    gc.collect()
    if _is_in_use(objects.memory):
        return interrupter.interrupted_at, "the memory is still in use"
    return interrupter.interrupted_at, ""


def _interrupt_each_point(scenario: str, path: Path, faulty_file: FaultyFile | None, device_memory: object) -> str:
    """Return the line that the program prints: the number of points, or the first failed check and its point."""
    descriptor_count = -1
    # The probe of a direct path has hundreds of points and takes long. Therefore only every fifth point is interrupted.
    for point in itertools.count(1, 5 if scenario == "direct_first" else 1):
        objects = _CallObjects(path, direct="required" if scenario.startswith("direct") else "never")
        objects.device_memory = device_memory
        if faulty_file is not None:
            faulty_file.send(f"gate 0 {LENGTH_BYTES}")
        source_line, failed_check = _interrupt_at(
            scenario, objects, point, lambda: None if faulty_file is None else faulty_file.send("open")
        )
        del objects
        gc.collect()
        descriptor_count_before, descriptor_count = descriptor_count, _count_open_descriptors()
        # A file stays open as long as it is registered with cuFile, even if an interrupt came during its probe.
        may_keep_files = scenario == "direct_first"
        if not failed_check and point > 1 and descriptor_count > descriptor_count_before and not may_keep_files:
            failed_check = f"{descriptor_count} descriptors are open, not {descriptor_count_before}"
        if failed_check:
            return f"point {point}, {source_line}: {failed_check}"
        if not source_line:
            return f"{point - 1} points"
    raise AssertionError  # itertools.count() does not end.


def _block_first_read(faulty_file: FaultyFile) -> None:
    """Block a read before the sweep.

    The process of the file prints ``waiting`` only for the first read that blocks. If that read were part of the sweep,
    this line could come between any two replies to commands.
    """
    faulty_file.send(f"gate 0 {LENGTH_BYTES}")
    with gds.File(faulty_file.path, direct="never") as file:
        transfer = file.start_read_into(bytearray(LENGTH_BYTES))
        faulty_file.expect_line("waiting")
        faulty_file.send("open")
        transfer.result()


def main() -> None:
    """Sweep the scenario that the arguments name."""
    scenario, path = sys.argv[1], Path(sys.argv[2])
    warnings.simplefilter("ignore")  # Objects that an interrupt dropped cause warnings, because nothing closed them.
    sys.unraisablehook = lambda _: None  # Python prints an interrupt in a finalizer, and continues.
    with contextlib.ExitStack() as stack:
        faulty_file = None
        if len(sys.argv) > 3:
            faulty_file = stack.enter_context(FaultyFile(Path(sys.argv[3]), length_bytes=LENGTH_BYTES, seed=1))
            path = faulty_file.path
            _block_first_read(faulty_file)
        device_memory = None
        if scenario.startswith("direct"):
            device_memory = stack.enter_context(stack.enter_context(cuda.Device(0)).allocate(LENGTH_BYTES))
            shared_driver()  # The first open of the driver starts a child process, which must not be interrupted.
        sys.stdout.write(f"{_interrupt_each_point(scenario, path, faulty_file, device_memory)}\n")
        sys.stdout.flush()
    os._exit(0)  # A thread that waits for ever in close() must not keep the program alive.


if __name__ == "__main__":
    main()
