"""The setup of a scenario of :mod:`support.cufile_child`, cuFile calls by name, and their results as JSON data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdrkit import cuda, cufile, host, pattern, serialization
from gdrkit.cufile import parameters
from gdrkit.errors import ApiError, GdrkitError
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "CALLS",
    "FILE_BYTES",
    "HOST_TREE",
    "RANGE_BYTES",
    "ScenarioSetup",
    "call_to_json",
    "error_to_json",
    "make_batch_requests",
    "proof_to_json",
]

FILE_BYTES = 1 * MIB
RANGE_BYTES = 64 * KIB
HOST_TREE = host.HostTree()
# An asynchronous write is attempted up to 5 times, because libcufile 1.15 sometimes completes a write with 0 bytes.
_ASYNC_WRITES_MAX = 5


def proof_to_json(proof: cufile.Proof) -> dict[str, Any]:
    return {
        "route": proof.route.value,
        "state": proof.state.value,
        "evidence": proof.evidence,
        "counter_increases": dict(proof.counter_increases),
        "causes": [cause.cause.value for cause in proof.causes],
        "why": proof.why,
    }


def error_to_json(error: GdrkitError) -> dict[str, Any]:
    fields: dict[str, Any] = {"kind": type(error).__name__, "reason": error.reason.value, "message": str(error)}
    if isinstance(error, ApiError):
        fields |= {"api": error.api.value, "operation": error.operation, "status": error.status, "errno": error.errno}
    return fields


def call_to_json(call: Callable[[], object]) -> dict[str, Any]:
    """Return the value of a call, or its error, as JSON data.

    A value with a method `close` is closed, and the name of its type is returned instead.
    """
    try:
        value = call()
    except GdrkitError as error:
        return {"failure": error_to_json(error)}
    if hasattr(value, "close"):
        value.close()
        return {"value": type(value).__name__}
    return {"value": serialization.to_json_data(value)}


class ScenarioSetup:
    """The objects of a scenario: a device with memory, an open driver with statistics, and a file of known bytes.

    `arguments` is the JSON object from the case. It has the path and the seed of the file, and optionally ``flags`` of
    cuFile, ``direct`` (whether the file is opened with O_DIRECT), and the ``level`` of the statistics.

    Attributes
    ----------
    empty_write_count : int
        Number of asynchronous writes that completed with 0 bytes and were repeated.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        for flag_name, is_set in arguments.get("flags", {}).items():
            parameters.set_flag(parameters.Flag[flag_name], is_set)
        self.path = Path(arguments["path"])
        self.seed = int(arguments["seed"])
        open_flags = os.O_RDWR | (os.O_DIRECT if arguments.get("direct", True) else 0)
        self.fd = os.open(self.path, open_flags)
        self.device = cuda.Device(0)
        self.memory = self.device.allocate(FILE_BYTES)
        # Opening the driver needs no time limit here, because the parent process limits the time of this process.
        self.driver = cufile.Driver(timeout_s=None)
        if arguments.get("level", 3):
            self.driver.statistics.start(cufile.Level(arguments.get("level", 3)))
        self.monitor = cufile.RouteMonitor(self.driver, HOST_TREE)
        self.empty_write_count = 0

    def close(self) -> None:
        self.driver.close()
        self.memory.close()
        self.device.close()
        os.close(self.fd)

    def has_file_data(self, length_bytes: int, *, offset_bytes: int = 0, file_offset_bytes: int = 0) -> bool:
        """Return whether the memory holds the original contents of the file from `file_offset_bytes` on."""
        memory_data = self.memory.read(offset_bytes=offset_bytes, length_bytes=length_bytes)
        return memory_data == pattern.payload(length_bytes, seed=self.seed, offset_bytes=file_offset_bytes)

    def zero_memory(self) -> None:
        self.memory.fill(0)

    def is_file_written(self, length_bytes: int) -> bool:
        """Return whether the file begins with the data of :meth:`fill_memory_for_writing`."""
        return self.path.read_bytes()[:length_bytes] == pattern.payload(length_bytes, seed=self.seed + 1)

    def is_file_unchanged(self) -> bool:
        """Return whether the file has its original contents."""
        return self.path.read_bytes() == pattern.payload(FILE_BYTES, seed=self.seed)

    def fill_memory_for_writing(self) -> None:
        """Fill the memory with data that differs from the contents of the file."""
        self.memory.write(pattern.payload(FILE_BYTES, seed=self.seed + 1), offset_bytes=0)

    def restore_file(self) -> None:
        """Write the original contents to the file."""
        self.path.write_bytes(pattern.payload(FILE_BYTES, seed=self.seed))


# Each function in CALLS makes the cuFile call of its name, and returns the number of transferred bytes and whether the
# data is right.
def _read(setup: ScenarioSetup, handle: cufile.FileHandle) -> tuple[int, bool]:
    moved_bytes = handle.read(setup.memory)
    return moved_bytes, setup.has_file_data(FILE_BYTES)


def _read_registered(setup: ScenarioSetup, handle: cufile.FileHandle) -> tuple[int, bool]:
    with cufile.RegisteredBuffer(setup.driver, setup.memory):
        return _read(setup, handle)


def _write(setup: ScenarioSetup, handle: cufile.FileHandle) -> tuple[int, bool]:
    setup.fill_memory_for_writing()
    moved_bytes = handle.write(setup.memory)
    return moved_bytes, setup.is_file_written(FILE_BYTES)


def _readv(setup: ScenarioSetup, handle: cufile.FileHandle) -> tuple[int, bool]:
    ranges = [
        cufile.BufferRange(setup.memory, FILE_BYTES - RANGE_BYTES, RANGE_BYTES),
        cufile.BufferRange(setup.memory, 0, RANGE_BYTES),
    ]
    # The first bytes of the file go to the end of the memory, and the next bytes to its beginning.
    moved_bytes = handle.readv(ranges)
    has_first_range = setup.has_file_data(RANGE_BYTES, offset_bytes=FILE_BYTES - RANGE_BYTES)
    return moved_bytes, has_first_range and setup.has_file_data(RANGE_BYTES, file_offset_bytes=RANGE_BYTES)


def _writev(setup: ScenarioSetup, handle: cufile.FileHandle) -> tuple[int, bool]:
    setup.fill_memory_for_writing()
    moved_bytes = handle.writev(
        [
            cufile.BufferRange(setup.memory, 0, RANGE_BYTES),
            cufile.BufferRange(setup.memory, RANGE_BYTES, RANGE_BYTES),
        ]
    )
    return moved_bytes, setup.is_file_written(2 * RANGE_BYTES)


def _read_async(setup: ScenarioSetup, handle: cufile.FileHandle) -> tuple[int, bool]:
    with setup.device.stream() as stream:
        pending_read = handle.read_async(stream, setup.memory)
        stream.synchronize()
        return pending_read.bytes(), setup.has_file_data(FILE_BYTES)


def _read_async_registered(setup: ScenarioSetup, handle: cufile.FileHandle) -> tuple[int, bool]:
    with (
        setup.device.stream() as stream,
        cufile.RegisteredStream(setup.driver, stream.handle, flags=cufile.StreamFlags.ALL),
    ):
        pending_read = handle.read_async(stream, setup.memory)
        stream.synchronize()
        return pending_read.bytes(), setup.has_file_data(FILE_BYTES)


def _write_async(setup: ScenarioSetup, handle: cufile.FileHandle) -> tuple[int, bool]:
    """Write asynchronously, and repeat a write that completes with 0 bytes.

    ``setup.empty_write_count`` is the loop variable, which counts these writes.
    """
    setup.fill_memory_for_writing()
    with setup.device.stream() as stream:
        for setup.empty_write_count in range(_ASYNC_WRITES_MAX):
            pending_write = handle.write_async(stream, setup.memory)
            stream.synchronize()
            moved_bytes = pending_write.bytes()
            if moved_bytes or not setup.is_file_unchanged():
                return moved_bytes, setup.is_file_written(FILE_BYTES)
    return 0, False


def make_batch_requests(
    setup: ScenarioSetup, handle: cufile.FileHandle, opcode: cufile.Opcode, request_count: int
) -> list[cufile.BatchRequest]:
    """Return `request_count` transfers of adjacent ranges, with equal offsets in the file and in the memory."""
    return [
        cufile.BatchRequest(opcode, handle, cufile.BufferRange(setup.memory, offset, RANGE_BYTES), offset)
        for offset in range(0, request_count * RANGE_BYTES, RANGE_BYTES)
    ]


def _submit_batch(setup: ScenarioSetup, handle: cufile.FileHandle, opcode: cufile.Opcode) -> int:
    request_count = FILE_BYTES // RANGE_BYTES
    with cufile.IoBatch(setup.driver, request_count) as batch:
        batch.submit(make_batch_requests(setup, handle, opcode, request_count))
        events: list[cufile.BatchEvent] = []
        while batch.outstanding:
            events += batch.fetch_events(count_min=1, timeout_s=10)
    for event in events:
        if event.error is not None:
            raise event.error
    return sum(event.bytes for event in events)


def _batch_read(setup: ScenarioSetup, handle: cufile.FileHandle) -> tuple[int, bool]:
    return _submit_batch(setup, handle, cufile.Opcode.READ), setup.has_file_data(FILE_BYTES)


def _batch_write(setup: ScenarioSetup, handle: cufile.FileHandle) -> tuple[int, bool]:
    setup.fill_memory_for_writing()
    return _submit_batch(setup, handle, cufile.Opcode.WRITE), setup.is_file_written(FILE_BYTES)


CALLS: dict[str, Callable[[ScenarioSetup, cufile.FileHandle], tuple[int, bool]]] = {
    "read": _read,
    "read_registered": _read_registered,
    "write": _write,
    "readv": _readv,
    "writev": _writev,
    "read_async": _read_async,
    "read_async_registered": _read_async_registered,
    "write_async": _write_async,
    "batch_read": _batch_read,
    "batch_write": _batch_write,
}
