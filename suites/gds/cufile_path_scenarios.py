"""A program that makes many small and some large direct transfers with `gdrkit.gds`, for test_cufile_path.py.

The program runs in a separate process. :mod:`support.cufile_child` describes the JSON objects that the program reads
and writes.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdrkit import cuda, cufile, evidence, gds, pattern, serialization
from gdrkit.errors import ApiError, GdrkitError
from gdrkit.gds._native import native
from gdrkit.gds.cufile_driver import shared_driver
from gdrkit.inventory.facts import select_substrate_libraries
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

__all__ = ["FILE_BYTES", "RANGE_BYTES", "SCENARIOS", "main"]

# Size of the file, size of each small range that a transfer reads or writes, and number of these ranges.
FILE_BYTES = 8 * MIB
RANGE_BYTES = 4 * KIB
_RANGE_COUNT = 256


class _Setup:
    """An open file of known bytes, whose transfers must be direct, and device memory of the same size."""

    def __init__(self, arguments: dict[str, Any], device: cuda.Device, memory: cuda.DeviceMemory) -> None:
        self.path, self.seed = Path(arguments["path"]), int(arguments["seed"])
        self.device, self.memory = device, memory
        self.file_data = pattern.payload(FILE_BYTES, seed=self.seed)
        self.file = gds.File(self.path, "r+", direct="required")

    def make_shuffled_ranges(self) -> list[tuple[int, int]]:
        """Return ranges of the file in random order. Gaps between the ranges prevent gdrkit from joining them."""
        offsets = random.Random(self.seed).sample(range(0, FILE_BYTES, 2 * RANGE_BYTES), _RANGE_COUNT)
        return [(offset, RANGE_BYTES) for offset in offsets]

    def find_wrong_ranges(self, ranges: list[tuple[int, int]], range_bytes: tuple[int, ...]) -> list[int]:
        """Return the indexes of the ranges with wrong bytes.

        `range_bytes` has the number of bytes of each range that have arrived in memory.
        """
        memory_bytes = self.memory.read()
        return [
            index
            for index, ((offset, _), arrived_bytes) in enumerate(zip(ranges, range_bytes, strict=True))
            if memory_bytes[index * RANGE_BYTES :][:arrived_bytes] != self.file_data[offset : offset + arrived_bytes]
        ]


@contextlib.contextmanager
def _open_setup(arguments: dict[str, Any]) -> Iterator[_Setup]:
    with cuda.Device(0) as device, device.allocate(FILE_BYTES) as memory:
        setup = _Setup(arguments, device, memory)
        with setup.file:
            yield setup


class _ForeignArray:
    """Device memory as another library passes it to gdrkit."""

    def __init__(self, memory: cuda.DeviceMemory) -> None:
        self.__cuda_array_interface__ = memory.__cuda_array_interface__


def _describe_outcome(call: Callable[[], gds.TransferResult]) -> dict[str, Any]:
    """Return the fields of the result of a transfer. If the transfer fails, add the fields of its error."""
    fields: dict[str, Any] = {}
    try:
        result = call()
    except GdrkitError as error:
        fields = {"error_class": type(error).__name__, "reason": error.reason.value, "message": str(error)}
        if not isinstance(error, gds.TransferFailed):
            return fields
        result = error.partial_result
        fields |= {"errno": error.errno, "status": error.status, "operation": error.operation}
        fields["arguments"] = dict(error.arguments)
    return fields | {
        "bytes": result.bytes,
        "route": result.route.value,
        "range_bytes": result.range_bytes,
        "counters": dict(result.counters),
    }


def _wait_until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds. The parent process ends this process after a time limit."""
    unset_event = threading.Event()
    while not condition():
        unset_event.wait(0.01)


def _wait_until_registered() -> None:
    """Wait until the memory of a transfer is registered. Then the transfer runs, and later transfers wait for it."""
    _wait_until(lambda: shared_driver().buffer_cache.registered_bytes > 0)


def transfer_whole_file(arguments: dict[str, Any]) -> dict[str, Any]:
    """Read the whole file into memory of gdrkit and of another library, and write new bytes to the file."""
    with _open_setup(arguments) as setup:
        buffer_cache = shared_driver().buffer_cache
        started_s = time.monotonic()
        report: dict[str, Any] = {"read": _describe_outcome(lambda: setup.file.read_into(setup.memory))}
        report["read_s"] = time.monotonic() - started_s
        report["is_expected"] = setup.memory.read() == setup.file_data
        report["registered_bytes"] = buffer_cache.registered_bytes
        report["second_read"] = _describe_outcome(lambda: setup.file.read_into(setup.memory))
        with setup.device.allocate(FILE_BYTES) as other_memory:
            report["foreign_read"] = _describe_outcome(lambda: setup.file.read_into(_ForeignArray(other_memory)))
            report["foreign_read_is_expected"] = other_memory.read() == setup.file_data
            report["registered_bytes_after_foreign"] = buffer_cache.registered_bytes
        new_data = pattern.payload(FILE_BYTES, seed=setup.seed + 1)
        setup.memory.write(new_data)
        report["write"] = _describe_outcome(lambda: setup.file.write_from(setup.memory, durable=True))
        report["is_written"] = setup.path.read_bytes() == new_data
    report["registered_bytes_at_end"] = buffer_cache.registered_bytes
    counters = shared_driver().driver.statistics.snapshot().basic
    report["registrations"] = {name: count for name, count in counters.items() if "buf_" in name and count}
    return report


def transfer_many_ranges(arguments: dict[str, Any]) -> dict[str, Any]:
    """Read and write many small ranges as one transfer."""
    with _open_setup(arguments) as setup:
        ranges = setup.make_shuffled_ranges()
        report: dict[str, Any] = {"read": _describe_outcome(lambda: setup.file.readv(setup.memory, ranges))}
        report["wrong_indexes"] = setup.find_wrong_ranges(ranges, report["read"].get("range_bytes", ()))
        report["offsets"] = [offset for offset, _ in ranges]
        report["second_read"] = _describe_outcome(lambda: setup.file.readv(setup.memory, ranges))
        report["second_wrong_indexes"] = setup.find_wrong_ranges(ranges, report["second_read"].get("range_bytes", ()))
        setup.memory.write(pattern.payload(FILE_BYTES, seed=setup.seed + 1))
        report["write"] = _describe_outcome(lambda: setup.file.writev(setup.memory, ranges))
        new_data, file_bytes = pattern.payload(FILE_BYTES, seed=setup.seed + 1), setup.path.read_bytes()
        report["written_ranges"] = sum(
            file_bytes[offset : offset + RANGE_BYTES] == new_data[index * RANGE_BYTES :][:RANGE_BYTES]
            for index, (offset, _) in enumerate(ranges)
        )
    return report


def read_adjacent_ranges(arguments: dict[str, Any]) -> dict[str, Any]:
    """Read many small ranges that follow each other in the file and in memory."""
    with _open_setup(arguments) as setup:
        ranges = [(offset, RANGE_BYTES) for offset in range(0, _RANGE_COUNT * RANGE_BYTES, RANGE_BYTES)]
        report: dict[str, Any] = {"read": _describe_outcome(lambda: setup.file.readv(setup.memory, ranges))}
        report["wrong_indexes"] = setup.find_wrong_ranges(ranges, report["read"]["range_bytes"])
        return report


def start_many_reads(arguments: dict[str, Any]) -> dict[str, Any]:
    """Start many small reads while a read is delayed. After the delay, the small reads run together."""
    with _open_setup(arguments) as setup:
        ranges = setup.make_shuffled_ranges()[:32]
        delayed_transfer = setup.file.start_read_into(setup.memory, length_bytes=RANGE_BYTES)
        _wait_until_registered()
        transfers = [
            setup.file.start_read_into(
                setup.memory,
                file_offset_bytes=offset,
                length_bytes=range_length_bytes,
                buffer_offset_bytes=index * RANGE_BYTES,
            )
            for index, (offset, range_length_bytes) in enumerate(ranges)
        ]
        delayed_outcome = _describe_outcome(delayed_transfer.result)
        outcomes = [_describe_outcome(transfer.result) for transfer in transfers]
        range_bytes = tuple(outcome["bytes"] for outcome in outcomes)
        return {
            "delayed": delayed_outcome,
            "outcomes": outcomes,
            "wrong_indexes": setup.find_wrong_ranges(ranges, range_bytes),
            "offsets": [offset for offset, _ in ranges],
        }


def cancel_transfer(arguments: dict[str, Any]) -> dict[str, Any]:
    """Cancel a transfer that the fault plan delays, and use the file again."""
    with _open_setup(arguments) as setup:
        ranges = setup.make_shuffled_ranges() if arguments["uses_batches"] else [(0, FILE_BYTES)]
        transfer = setup.file.start_readv(setup.memory, ranges)
        _wait_until(lambda: transfer.bytes_moved > 0)
        started_s = time.monotonic()
        is_cancelled = transfer.cancel()
        outcome = _describe_outcome(transfer.result)
        cancel_duration_s = time.monotonic() - started_s
        range_bytes = outcome["range_bytes"] if arguments["uses_batches"] else ()
        wrong_indexes = setup.find_wrong_ranges(ranges, range_bytes) if arguments["uses_batches"] else []
        second_outcome = _describe_outcome(lambda: setup.file.read_into(setup.memory, length_bytes=RANGE_BYTES))
    return {
        "is_cancelled": is_cancelled,
        "outcome": outcome,
        "cancel_duration_s": cancel_duration_s,
        "wrong_indexes": wrong_indexes,
        "second_read": second_outcome,
        "ranges_count": len(ranges),
    }


def free_memory_early(arguments: dict[str, Any]) -> dict[str, Any]:
    """Free memory during its use by a transfer that the fault plan delays, and free it again after the transfer."""
    with cuda.Device(0) as device, gds.File(arguments["path"], direct="required") as file:
        memory = device.allocate(FILE_BYTES)
        transfer = file.start_read_into(memory)
        _wait_until_registered()
        early_error: dict[str, Any] = {}
        try:
            memory.close()
        except GdrkitError as error:
            early_error = {"error_class": type(error).__name__, "reason": error.reason.value}
        read_outcome = _describe_outcome(transfer.result)
        is_expected = memory.read() == pattern.payload(FILE_BYTES, seed=int(arguments["seed"]))
        memory.close()
        return {
            "early_close_error": early_error,
            "read": read_outcome,
            "is_expected": is_expected,
            "registered_bytes": shared_driver().buffer_cache.registered_bytes,
        }


def drop_open_files(arguments: dict[str, Any]) -> dict[str, Any]:
    """Open the file several times, and drop it each time without a close. Each file gets the same descriptor."""
    with cuda.Device(0) as device, device.allocate(RANGE_BYTES) as memory:

        def read_and_drop() -> dict[str, Any]:
            file = gds.File(arguments["path"], direct="required")
            return _describe_outcome(lambda: file.read_into(memory))

        outcomes = []
        for _ in range(5):
            outcomes.append(read_and_drop())
            gc.collect()
        return {"outcomes": outcomes}


def read_without_new_threads(arguments: dict[str, Any]) -> dict[str, Any]:
    """Read a large range while no thread can be started. The worker pool has only the thread of an earlier read."""
    with _open_setup(arguments) as setup:
        setup.file.read_into(setup.memory, length_bytes=2 * MIB)
        threading.stack_size(1 << 46)  # No address space has room for such a stack.
        read_outcome = _describe_outcome(lambda: setup.file.read_into(setup.memory))
        return {"read": read_outcome, "is_expected": setup.memory.read() == setup.file_data}


def raise_in_worker(arguments: dict[str, Any]) -> dict[str, Any]:
    """Raise an exception in the first part of a read whose other parts are delayed. Then clear the memory.

    A trace function raises MemoryError in the worker thread that calls `FileHandle.read`, as if the process had no
    memory left. A delayed call that did not end before the transfer would write to the memory after it was cleared.
    """
    must_raise = False

    def raise_in_read(frame: FrameType, _event: str, _argument: object) -> None:
        is_read_call = frame.f_code is cufile.FileHandle.read.__code__
        if must_raise and is_read_call and threading.current_thread().name == "gdrkit-cufile":
            raise MemoryError

    threading.settrace(raise_in_read)  # This function traces the threads that start from now on.
    with _open_setup(arguments) as setup:
        setup.file.read_into(setup.memory, length_bytes=RANGE_BYTES)
        must_raise = True
        transfer = setup.file.start_read_into(setup.memory)
        error_class = ""
        try:
            transfer.result()
        except MemoryError as memory_error:
            error_class = type(memory_error).__name__
        setup.memory.fill(0)
        shared_driver().workers.shutdown()  # This waits for calls that still run.
        return {
            "error_class": error_class,
            "is_clear": not any(setup.memory.read()),
            "in_progress": len(native.in_progress),
        }


SCENARIOS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    function.__name__: function
    for function in (
        transfer_whole_file,
        transfer_many_ranges,
        read_adjacent_ranges,
        start_many_reads,
        cancel_transfer,
        free_memory_early,
        drop_open_files,
        read_without_new_threads,
        raise_in_worker,
    )
}


def main() -> None:
    """Run the scenario that the command line names, with the arguments from standard input, and write its report."""
    arguments = json.loads(sys.stdin.read())
    warnings.simplefilter("ignore", gds.FallbackWarning)
    try:
        report = SCENARIOS[sys.argv[1]](arguments)
    except ApiError as error:
        report = {"failure": str(error)}
    gds.close_engines()
    gds.close_driver()
    report["libraries"] = serialization.to_json_data(select_substrate_libraries(evidence.libraries()))
    with os.fdopen(arguments["result_fd"], "w", encoding="utf-8") as file:
        json.dump(report, file)


if __name__ == "__main__":
    main()
