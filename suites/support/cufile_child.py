"""Program that runs one scenario of cuFile calls: ``python cufile_child.py SCENARIO``.

:mod:`support.cufile_scenarios` starts a new process for each scenario, for two reasons. libcufile keeps its settings,
statistics and threads until the process ends, and a libcufile call that hangs ends only with the process.

The process reads the arguments of the scenario as JSON from standard input. It writes the result of the scenario as
JSON to the file descriptor `result_fd` of the arguments.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdrkit import cuda, cufile, evidence, host, pattern, serialization
from gdrkit.cufile import parameters
from gdrkit.errors import ApiError, GdrkitError
from gdrkit.inventory.facts import identifying_libraries
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SCENARIOS", "main"]

_FILE_BYTES = 1 * MIB
_RANGE_BYTES = 64 * KIB
# libcufile 1.15 sometimes completes an asynchronous write with 0 bytes. So it is tried again, at most 5 times in all.
_ASYNC_WRITES_MAX = 5
_HOST_TREE = host.HostTree()


def _proof_json(proof: cufile.Proof) -> dict[str, Any]:
    return {
        "route": proof.route.value,
        "state": proof.state.value,
        "evidence": proof.evidence,
        "moved": dict(proof.moved),
        "causes": [cause.cause.value for cause in proof.causes],
        "why": proof.why,
    }


def _error_json(error: GdrkitError) -> dict[str, Any]:
    fields: dict[str, Any] = {"kind": type(error).__name__, "reason": error.reason.value, "message": str(error)}
    if isinstance(error, ApiError):
        fields |= {"api": error.api.value, "operation": error.operation, "status": error.status, "errno": error.errno}
    return fields


class _Setup:
    """The objects of a scenario: a device with memory, an open driver with statistics, and a file of known bytes.

    Attributes
    ----------
    empty_write_count : int
        Number of asynchronous writes that completed with 0 bytes before the last one.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        for name, value in arguments.get("flags", {}).items():
            parameters.set_flag(parameters.Flag[name], value)
        self.path = Path(arguments["path"])
        self.seed = int(arguments["seed"])
        flags = os.O_RDWR | (os.O_DIRECT if arguments.get("direct", True) else 0)
        self.fd = os.open(self.path, flags)
        self.device = cuda.Device(0)
        self.memory = self.device.allocate(_FILE_BYTES)
        # The parent process has a time limit for this process.
        self.driver = cufile.Driver(timeout_s=None)
        if arguments.get("level", 3):
            self.driver.statistics.start(cufile.Level(arguments.get("level", 3)))
        self.monitor = cufile.RouteMonitor(self.driver, _HOST_TREE)
        self.empty_write_count = 0

    def close(self) -> None:
        self.driver.close()
        self.memory.close()
        self.device.close()
        os.close(self.fd)

    def has_file_data(self, length_bytes: int, *, offset_bytes: int = 0, file_offset_bytes: int = 0) -> bool:
        """Return whether the memory holds the bytes of the file from `file_offset_bytes` on."""
        contents = self.memory.read(offset_bytes=offset_bytes, length_bytes=length_bytes)
        return contents == pattern.payload(length_bytes, seed=self.seed, offset_bytes=file_offset_bytes)

    def clear(self) -> None:
        self.memory.fill(0)

    def is_written(self, length_bytes: int) -> bool:
        """Return whether the file begins with the data of :meth:`fill_for_writing`."""
        return self.path.read_bytes()[:length_bytes] == pattern.payload(length_bytes, seed=self.seed + 1)

    def is_unchanged(self) -> bool:
        """Return whether the file has its original contents."""
        return self.path.read_bytes() == pattern.payload(_FILE_BYTES, seed=self.seed)

    def fill_for_writing(self) -> None:
        """Fill the memory with data that differs from the contents of the file."""
        self.memory.write(pattern.payload(_FILE_BYTES, seed=self.seed + 1), offset_bytes=0)

    def restore(self) -> None:
        """Write the original contents to the file."""
        self.path.write_bytes(pattern.payload(_FILE_BYTES, seed=self.seed))


# Each of these functions makes one call. It returns the number of transferred bytes, and whether the data is right.
def _read(setup: _Setup, handle: cufile.FileHandle) -> tuple[int, bool]:
    moved_bytes = handle.read(setup.memory)
    return moved_bytes, setup.has_file_data(_FILE_BYTES)


def _read_registered(setup: _Setup, handle: cufile.FileHandle) -> tuple[int, bool]:
    with cufile.RegisteredBuffer(setup.driver, setup.memory):
        return _read(setup, handle)


def _write(setup: _Setup, handle: cufile.FileHandle) -> tuple[int, bool]:
    setup.fill_for_writing()
    moved_bytes = handle.write(setup.memory)
    return moved_bytes, setup.is_written(_FILE_BYTES)


def _readv(setup: _Setup, handle: cufile.FileHandle) -> tuple[int, bool]:
    ranges = [
        cufile.BufferRange(setup.memory, _FILE_BYTES - _RANGE_BYTES, _RANGE_BYTES),
        cufile.BufferRange(setup.memory, 0, _RANGE_BYTES),
    ]
    moved_bytes = handle.readv(ranges)
    is_first_right = setup.has_file_data(_RANGE_BYTES, offset_bytes=_FILE_BYTES - _RANGE_BYTES)
    return moved_bytes, is_first_right and setup.has_file_data(_RANGE_BYTES, file_offset_bytes=_RANGE_BYTES)


def _writev(setup: _Setup, handle: cufile.FileHandle) -> tuple[int, bool]:
    setup.fill_for_writing()
    moved_bytes = handle.writev(
        [
            cufile.BufferRange(setup.memory, 0, _RANGE_BYTES),
            cufile.BufferRange(setup.memory, _RANGE_BYTES, _RANGE_BYTES),
        ]
    )
    return moved_bytes, setup.is_written(2 * _RANGE_BYTES)


def _read_async(setup: _Setup, handle: cufile.FileHandle) -> tuple[int, bool]:
    with setup.device.stream() as stream:
        pending = handle.read_async(stream, setup.memory)
        stream.synchronize()
        return pending.bytes(), setup.has_file_data(_FILE_BYTES)


def _read_async_registered(setup: _Setup, handle: cufile.FileHandle) -> tuple[int, bool]:
    with (
        setup.device.stream() as stream,
        cufile.RegisteredStream(setup.driver, stream.handle, flags=cufile.StreamFlags.ALL),
    ):
        pending = handle.read_async(stream, setup.memory)
        stream.synchronize()
        return pending.bytes(), setup.has_file_data(_FILE_BYTES)


def _write_async(setup: _Setup, handle: cufile.FileHandle) -> tuple[int, bool]:
    """Write asynchronously, and again while a write completes with 0 bytes. Count these writes in `setup`."""
    setup.fill_for_writing()
    with setup.device.stream() as stream:
        for setup.empty_write_count in range(_ASYNC_WRITES_MAX):
            pending = handle.write_async(stream, setup.memory)
            stream.synchronize()
            moved_bytes = pending.bytes()
            if moved_bytes or not setup.is_unchanged():
                return moved_bytes, setup.is_written(_FILE_BYTES)
    return 0, False


def _batch(setup: _Setup, handle: cufile.FileHandle, opcode: cufile.Opcode) -> int:
    count = _FILE_BYTES // _RANGE_BYTES
    with cufile.IoBatch(setup.driver, count) as batch:
        batch.submit(
            [
                cufile.BatchRequest(
                    opcode,
                    handle,
                    cufile.BufferRange(setup.memory, index * _RANGE_BYTES, _RANGE_BYTES),
                    index * _RANGE_BYTES,
                )
                for index in range(count)
            ]
        )
        events: list[cufile.BatchEvent] = []
        while batch.outstanding:
            events += batch.status(count_min=1, timeout_s=10)
    for event in events:
        if event.error is not None:
            raise event.error
    return sum(event.bytes for event in events)


def _batch_read(setup: _Setup, handle: cufile.FileHandle) -> tuple[int, bool]:
    return _batch(setup, handle, cufile.Opcode.READ), setup.has_file_data(_FILE_BYTES)


def _batch_write(setup: _Setup, handle: cufile.FileHandle) -> tuple[int, bool]:
    setup.fill_for_writing()
    return _batch(setup, handle, cufile.Opcode.WRITE), setup.is_written(_FILE_BYTES)


_CALLS: dict[str, Callable[[_Setup, cufile.FileHandle], tuple[int, bool]]] = {
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


def every_call(arguments: dict[str, Any]) -> dict[str, Any]:
    """Make each named call once. Return its number of bytes, whether the data is right, and the proof of its route."""
    setup = _Setup(arguments)
    results: list[dict[str, Any]] = []
    for name in arguments["calls"]:
        setup.restore()
        setup.clear()
        setup.empty_write_count = 0
        with cufile.FileHandle(setup.driver, setup.fd) as handle:
            try:
                with setup.monitor.watch(setup.fd):
                    moved_bytes, is_expected = _CALLS[name](setup, handle)
            except GdrkitError as error:
                results.append({"failure": _error_json(error)})
            else:
                proof = _proof_json(setup.monitor.proof)
                results.append(
                    {
                        "bytes": moved_bytes,
                        "is_expected": is_expected,
                        "proof": proof,
                        "empty_write_count": setup.empty_write_count,
                    }
                )
    properties = serialization.to_json_data(setup.driver.properties())
    setup.close()
    return {"calls": results, "properties": properties}


def one_read(arguments: dict[str, Any]) -> dict[str, Any]:
    """Read once. Return the proof of the route, or the error if cuFileHandleRegister or cuFileRead failed."""
    setup = _Setup(arguments)
    length_bytes = int(arguments.get("length_bytes", _FILE_BYTES))
    result: dict[str, Any] = {}
    try:
        handle = cufile.FileHandle(setup.driver, setup.fd)
    except ApiError as error:
        result = {
            "failure": _error_json(error),
            "proof": _proof_json(cufile.failed_registration_proof(_HOST_TREE, setup.fd, error)),
        }
    else:
        with handle:
            try:
                with setup.monitor.watch(setup.fd):
                    moved_bytes = handle.read(setup.memory, length_bytes=length_bytes)
                result = {
                    "bytes": moved_bytes,
                    "is_expected": setup.has_file_data(length_bytes),
                    "proof": _proof_json(setup.monitor.proof),
                }
                setup.monitor.proof.require_direct()
            except cufile.DirectPathError as error:
                result["fell_back"] = _error_json(error)
            except ApiError as error:
                result = {"failure": _error_json(error)}
    setup.close()
    return result


def _value_or_error(call: Callable[[], object]) -> dict[str, Any]:
    """Return the value of a call, or its error, as JSON data.

    If the value has a method `close`, it is closed, and the name of its type is returned instead.
    """
    try:
        value = call()
    except GdrkitError as error:
        return {"failure": _error_json(error)}
    if hasattr(value, "close"):
        value.close()
        return {"value": type(value).__name__}
    return {"value": serialization.to_json_data(value)}


def bad_input(arguments: dict[str, Any]) -> dict[str, Any]:
    """Make calls with invalid arguments, and a valid one after them."""
    setup = _Setup(arguments)
    memory, driver = setup.memory, setup.driver
    folder_fd = os.open(setup.path.parent, os.O_RDONLY)
    # No open descriptor of this process has this number.
    closed_fd = 999_999
    with cufile.FileHandle(driver, setup.fd) as handle:
        results: dict[str, dict[str, Any]] = {
            "negative_offset": _value_or_error(lambda: handle.read(memory, file_offset_bytes=-1)),
            "overflowing_offset": _value_or_error(lambda: handle.read(memory, file_offset_bytes=(1 << 63) - 1)),
            "negative_length": _value_or_error(lambda: handle.read(memory, length_bytes=-1)),
            "beyond_memory": _value_or_error(lambda: handle.read(memory, offset_bytes=1, length_bytes=_FILE_BYTES)),
            "beyond_end": _value_or_error(lambda: handle.read(memory, file_offset_bytes=2 * _FILE_BYTES)),
            "over_the_end": _value_or_error(lambda: handle.read(memory, file_offset_bytes=_FILE_BYTES - _RANGE_BYTES)),
            "nothing": _value_or_error(lambda: handle.read(memory, length_bytes=0)),
            "directory": _value_or_error(lambda: cufile.FileHandle(driver, folder_fd)),
            "closed_descriptor": _value_or_error(lambda: cufile.FileHandle(driver, closed_fd)),
            "twice": _value_or_error(lambda: cufile.FileHandle(driver, setup.fd)),
            "no_batch": _value_or_error(lambda: cufile.IoBatch(driver, 0)),
            "large_batch": _value_or_error(lambda: cufile.IoBatch(driver, 100_000)),
            "no_stream": _value_or_error(lambda: cufile.RegisteredStream(driver, 0x1234560))
            if arguments.get("twin")
            else {},
            "parameter_while_open": _value_or_error(
                lambda: parameters.set_flag(parameters.Flag.ALLOW_COMPAT_MODE, True)  # noqa: FBT003
            ),
            "level": _value_or_error(lambda: driver.statistics.start(cufile.Level.OFF)),
        }
        with cufile.RegisteredBuffer(driver, memory):
            results["registered_twice"] = _value_or_error(lambda: cufile.RegisteredBuffer(driver, memory))
        driver.statistics.start()
        results["still_works"] = _value_or_error(lambda: (handle.read(memory), setup.has_file_data(_FILE_BYTES)))
        closed_handle = handle
    results["closed_handle"] = _value_or_error(lambda: closed_handle.read(memory))
    os.close(folder_fd)
    setup.close()
    results["closed_driver"] = _value_or_error(driver.properties)
    return results


def read_only_file(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the error of a write to a file that is open for reading only."""
    setup = _Setup(arguments)
    fd = os.open(setup.path, os.O_RDONLY | os.O_DIRECT)
    with cufile.FileHandle(setup.driver, fd) as handle:
        result = _value_or_error(lambda: handle.write(setup.memory))
    os.close(fd)
    setup.close()
    return result


def staged_parameters(arguments: dict[str, Any]) -> dict[str, Any]:
    """Query and set parameters of cuFile before and after the driver is opened."""
    flags = {flag.name: _value_or_error(functools.partial(parameters.flag, flag)) for flag in parameters.Flag}
    result = {
        "flags": flags,
        "set_closed": _value_or_error(lambda: parameters.set_size(parameters.Size.IO_BATCHSIZE, 32)),
        "batch_staged": parameters.size(parameters.Size.IO_BATCHSIZE),
        "batch_limits": parameters.limits(parameters.Size.IO_BATCHSIZE),
        "negative": _value_or_error(lambda: parameters.set_size(parameters.Size.IO_BATCHSIZE, -1)),
        "log_level": _value_or_error(lambda: parameters.text(parameters.Text.LOGGING_LEVEL)),
    }
    with cufile.Driver(timeout_s=None) as driver:
        result["batch_open"] = driver.properties().max_batch_io
        result["set_open"] = _value_or_error(lambda: parameters.set_size(parameters.Size.IO_BATCHSIZE, 16))
        result["use_count"] = driver.use_count()
    return result


@dataclass(frozen=True, slots=True)
class _MemoryWithoutContext:
    """Memory whose CUDA context gdrkit does not make current before a call."""

    address: int
    length_bytes: int
    closed: bool = False

    def current(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class _StreamWithoutContext:
    """A stream whose CUDA context gdrkit does not make current before a call."""

    stream: cuda.Stream

    @property
    def handle(self) -> int:
        return self.stream.handle

    @property
    def closed(self) -> bool:
        return self.stream.closed

    def query(self) -> bool:
        return self.stream.query()

    def current(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def without_context(arguments: dict[str, Any]) -> dict[str, Any]:
    """Make calls in a thread that has no current CUDA context."""
    setup = _Setup(arguments)
    memory = _MemoryWithoutContext(setup.memory.address, setup.memory.length_bytes)

    def read_async() -> int:
        pending = handle.read_async(_StreamWithoutContext(stream), memory)
        stream.synchronize()
        return pending.bytes()

    with cufile.FileHandle(setup.driver, setup.fd) as handle, setup.device.stream() as stream:
        result = {
            "read": _value_or_error(lambda: (handle.read(memory), setup.has_file_data(_FILE_BYTES))),
            "batch": _value_or_error(lambda: _batch(setup, handle, cufile.Opcode.READ)),
            "register": _value_or_error(lambda: cufile.RegisteredBuffer(setup.driver, memory)),
            "register_stream": _value_or_error(lambda: cufile.RegisteredStream(setup.driver, stream.handle)),
            "read_async": _value_or_error(read_async),
        }
        # `setup.memory` makes its context current for the call, in this same thread.
        with cufile.RegisteredBuffer(setup.driver, setup.memory):
            result["registered"] = _value_or_error(
                lambda: (handle.read(setup.memory), setup.has_file_data(_FILE_BYTES))
            )
    setup.close()
    return result


def pending_read(arguments: dict[str, Any]) -> dict[str, Any]:
    """Query an asynchronous read before and after its stream executes it."""
    setup = _Setup(arguments)
    with cufile.FileHandle(setup.driver, setup.fd) as handle, setup.device.stream() as stream:
        pending = handle.read_async(stream, setup.memory)
        result: dict[str, Any] = {
            "done": pending.done,
            "bytes": _value_or_error(pending.bytes),
            "close": _value_or_error(handle.close),
        }
        stream.synchronize()
        result |= {
            "done_later": pending.done,
            "bytes_later": pending.bytes(),
            "is_expected": setup.has_file_data(_FILE_BYTES),
        }
    setup.close()
    return result


def driver_opens(arguments: dict[str, Any]) -> dict[str, Any]:
    """Set the flags of the arguments, and open the driver."""
    for name, value in arguments["flags"].items():
        parameters.set_flag(parameters.Flag[name], value)
    return _value_or_error(lambda: cufile.Driver(timeout_s=None))


def batch_stall(arguments: dict[str, Any]) -> dict[str, Any]:
    """Query and cancel a batch of four reads. The fault plan of the case keeps the second read from starting."""
    setup = _Setup(arguments)
    with cufile.FileHandle(setup.driver, setup.fd) as handle, cufile.IoBatch(setup.driver, 8) as batch:
        batch.submit(
            [
                cufile.BatchRequest(
                    cufile.Opcode.READ,
                    handle,
                    cufile.BufferRange(setup.memory, index * _RANGE_BYTES, _RANGE_BYTES),
                    index * _RANGE_BYTES,
                )
                for index in range(4)
            ]
        )
        first_events = batch.status(count_min=1)
        stalled_events = batch.status(count_min=1, timeout_s=0.05)
        batch.cancel()
        canceled_events = batch.status(count_min=batch.outstanding, timeout_s=5)
        result = {
            "first": [event.status.name for event in first_events],
            "stalled": [event.status.name for event in stalled_events],
            "canceled": [event.status.name for event in canceled_events],
            "outstanding": batch.outstanding,
            "is_expected": setup.has_file_data(_RANGE_BYTES),
        }
    setup.close()
    return result


def by_kvikio(arguments: dict[str, Any]) -> dict[str, Any]:
    """Read and write by kvikio in each compatibility mode of the arguments."""
    from gdrkit.cufile import _kvikio

    setup = _Setup(arguments)
    results: dict[str, Any] = {}
    for mode in arguments["modes"]:
        setup.restore()
        setup.clear()
        with _kvikio.apply_settings(_kvikio.KvikioSettings(thread_count=2, task_bytes=256 * KIB, compat_mode=mode)):
            with _kvikio.KvikioFile(setup.path) as file, setup.monitor.watch(setup.fd):
                moved_bytes = file.read(setup.memory).bytes()
            results[mode] = {
                "read": moved_bytes,
                "is_expected": setup.has_file_data(_FILE_BYTES),
                "proof": _proof_json(setup.monitor.proof),
            }
            setup.fill_for_writing()
            with _kvikio.KvikioFile(setup.path, "r+") as file:
                results[mode] |= {"write": file.write(setup.memory).bytes(), "written": setup.is_written(_FILE_BYTES)}
    results["missing"] = _value_or_error(lambda: _kvikio.KvikioFile(setup.path.parent / "missing"))
    results["version"] = _kvikio.kvikio_version()
    setup.close()
    return results


def driver_twice(arguments: dict[str, Any]) -> dict[str, Any]:
    """Open the driver twice, and close it twice."""
    with cufile.Driver(timeout_s=None) as first:
        with cufile.Driver(timeout_s=None):
            both_count = first.use_count()
        one_count = first.use_count()
    return {"while_both_open": both_count, "while_one_open": one_count, "version": cufile.library_version()}


SCENARIOS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    function.__name__: function
    for function in (
        every_call,
        one_read,
        bad_input,
        read_only_file,
        staged_parameters,
        without_context,
        pending_read,
        driver_opens,
        batch_stall,
        by_kvikio,
        driver_twice,
    )
}


def main() -> None:
    """Run the scenario that the command line names."""
    arguments = json.load(sys.stdin)
    result = SCENARIOS[sys.argv[1]](arguments)
    result["libraries"] = serialization.to_json_data(identifying_libraries(evidence.libraries()))
    with os.fdopen(arguments["result_fd"], "w", encoding="utf-8") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
